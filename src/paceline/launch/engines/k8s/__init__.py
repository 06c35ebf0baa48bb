"""Jobs on Kubernetes: manifests from a job spec, and kubectl to apply, follow and delete them."""

from paceline.launch.engines.k8s.backend import KubernetesBackend
from paceline.launch.engines.k8s.manifests import Manifests, make_manifests

__all__ = ["KubernetesBackend", "Manifests", "make_manifests"]
