"""Networks for small images: digits and CIFAR."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .blocks import conv_bn, conv_bn_relu


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


def three_conv(num_classes: int = 10, image_size: int = 28) -> nn.Sequential:
    """MXNet-G's network of three convolutions for images [N, 3, 28, 28] or of another size."""
    side = image_size
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return nn.Sequential(
        conv_bn_relu(3, 32, 5, bias=True), nn.MaxPool2d(3, 2),
        conv_bn_relu(32, 32, 5, bias=True), nn.AvgPool2d(3, 2),
        conv_bn_relu(32, 64, 5, bias=True), nn.AvgPool2d(3, 2),
        nn.Flatten(), nn.Linear(64 * side * side, 64), nn.ReLU(), nn.Linear(64, num_classes),
    )  # fmt: skip


class Residual(nn.Module):
    """The basic block of He et al. 2015; a 1x1 convolution replaces the identity where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_bn(inputs, outputs, 3, stride), nn.ReLU(), conv_bn(outputs, outputs, 3))
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv_bn(inputs, outputs, 1, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(images) + self.shortcut(images))


def cifar_resnet18(num_classes: int = 10, width: int = 64) -> nn.Sequential:
    """ResNet-18 (He et al. 2015) for images [N, 3, 32, 32]: a 3x3 stem without pooling; 11,173,962 parameters."""
    layers: list[nn.Module] = [conv_bn(3, width, 3), nn.ReLU()]
    channels = width
    for stage in range(4):
        outputs = width * 2**stage
        layers += [Residual(channels, outputs, stride=1 if stage == 0 else 2), Residual(outputs, outputs, stride=1)]
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
