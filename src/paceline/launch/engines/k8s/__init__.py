"""Jobs on Kubernetes: manifests from a job spec, and kubectl to apply, follow and delete them."""
