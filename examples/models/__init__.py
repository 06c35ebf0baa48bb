"""The networks of the examples and benchmarks, in plain PyTorch, by the names that MXNet's scripts gave them.

    build("resnet", num_classes=1000, num_layers=50)     # for images [N, 3, 224, 224]
    build("resnet", num_classes=10, num_layers=20, image_size=32)

``torch.manual_seed`` decides the first weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn

from .alexnet import alexnet
from .inception import inception_bn, inception_bn_small, inception_v3
from .merge_and_run import merge_and_run
from .resnet import resnet, resnet_v1
from .small import cifar_resnet18, lenet, mlp, three_conv
from .vgg import vgg

#: For images of one channel, [N, 1, 28, 28], and for those of three.
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "lenet": lenet,
    "resnet18": cifar_resnet18,
    "3conv": three_conv,
    "inception-bn-28-small": inception_bn_small,
    "dfn-mr": merge_and_run,
    "resnet": resnet,
    "resnet-v1": resnet_v1,
    "alexnet": alexnet,
    "vgg": vgg,
    "inception-bn": inception_bn,
    "inception-v3": inception_v3,
}


def build(network: str, **options: int) -> nn.Module:
    """Return a network with new weights.

    Args:
        network: a name in :data:`NETWORKS`.
        options: ``num_classes``, ``num_layers`` (of families: resnet, resnet-v1, vgg, dfn-mr), ``image_size`` (of
            those whose form depends on it: 3conv, resnet, resnet-v1).

    Raises:
        ValueError: there is no such network, or it has no such option.
    """
    if network not in NETWORKS:
        raise ValueError(f"there is no network {network!r}; there are {', '.join(NETWORKS)}")
    accepted = inspect.signature(NETWORKS[network]).parameters
    if foreign := sorted(options.keys() - accepted.keys()):
        raise ValueError(f"network {network} has no option {', '.join(foreign)}; it has {', '.join(accepted)}")
    return NETWORKS[network](**options)
