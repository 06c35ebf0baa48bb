"""The networks of the examples and benchmarks, in plain PyTorch. ``torch.manual_seed`` decides their first weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F


def mlp(num_classes: int = 10) -> nn.Sequential:
    """MXNet's multi-layer perceptron for images [N, 1, 28, 28]: 128, 64, classes."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, num_classes)
    )  # fmt: skip


def lenet(num_classes: int = 10) -> nn.Sequential:
    """MXNet's LeNet for images [N, 1, 28, 28] (LeCun et al. 1998, with its tanh): 431,080 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.Tanh(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.Tanh(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 500), nn.Tanh(), nn.Linear(500, num_classes),
    )  # fmt: skip


class Residual(nn.Module):
    """The basic block of He et al. 2015; a 1x1 convolution replaces the identity where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv(inputs, outputs, 3, stride), nn.ReLU(), _conv(outputs, outputs, 3, 1))
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _conv(inputs, outputs, 1, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(images) + self.shortcut(images))


def _conv(inputs: int, outputs: int, size: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


def resnet18(num_classes: int = 10, width: int = 64) -> nn.Sequential:
    """ResNet-18 (He et al. 2015) for images [N, 3, 32, 32]: a 3x3 stem without pooling; 11,173,962 parameters."""
    layers: list[nn.Module] = [_conv(3, width, 3, 1), nn.ReLU()]
    channels = width
    for stage in range(4):
        outputs = width * 2**stage
        layers += [Residual(channels, outputs, stride=1 if stage == 0 else 2), Residual(outputs, outputs, stride=1)]
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {"mlp": mlp, "lenet": lenet, "resnet18": resnet18}
