"""Inception with batch normalisation (Ioffe and Szegedy 2015), a small form for 28 pixels, v3 (Szegedy et al. 2015)."""

from __future__ import annotations

import torch
from torch import nn

from .blocks import conv_bn_relu


class Concat(nn.Module):
    """Branches over the same input; their channels are concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(images) for branch in self.branches], 1)


def inception_bn_small(num_classes: int = 10) -> nn.Sequential:
    """MXNet's ``inception-bn-28-small`` for CIFAR's images, cropped to [N, 3, 28, 28] or whole."""
    layers: list[nn.Module] = [conv_bn_relu(3, 96, 3)]
    channels = 96
    for one, three in (
        (32, 32),
        (32, 48),
        (0, 80),
        (112, 48),
        (96, 64),
        (80, 80),
        (48, 96),
        (0, 96),
        (176, 160),
        (176, 160),
    ):
        if one:
            layers.append(Concat(conv_bn_relu(channels, one, 1), conv_bn_relu(channels, three, 3)))
            channels = one + three
        else:
            layers.append(Concat(conv_bn_relu(channels, three, 3, 2), nn.MaxPool2d(3, 2, 1)))
            channels += three
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


def _block(
    inputs: int, one: int, three: tuple[int, int], double: tuple[int, int], pool: nn.Module, projected: int
) -> Concat:
    """Return a block of Inception-BN: 1x1; 1x1, 3x3; 1x1, 3x3, 3x3; pooling, 1x1."""

    def conv(inputs: int, outputs: int, size: int) -> nn.Module:
        return conv_bn_relu(inputs, outputs, size, bias=True)

    return Concat(
        conv(inputs, one, 1),
        nn.Sequential(conv(inputs, three[0], 1), conv(three[0], three[1], 3)),
        nn.Sequential(conv(inputs, double[0], 1), conv(double[0], double[1], 3), conv(double[1], double[1], 3)),
        nn.Sequential(pool, conv(inputs, projected, 1)),
    )


def _halving(inputs: int, three: tuple[int, int], double: tuple[int, int]) -> Concat:
    """Return a block of Inception-BN that halves height and width."""

    def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Module:
        return conv_bn_relu(inputs, outputs, size, stride, bias=True)

    return Concat(
        nn.Sequential(conv(inputs, three[0], 1), conv(three[0], three[1], 3, 2)),
        nn.Sequential(conv(inputs, double[0], 1), conv(double[0], double[1], 3), conv(double[1], double[1], 3, 2)),
        nn.MaxPool2d(3, 2, 1),
    )


def inception_bn(num_classes: int = 1000) -> nn.Sequential:
    """Inception-BN for images [N, 3, 224, 224]: 11,295,240 parameters."""
    mean, largest = nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(3, 1, 1)
    return nn.Sequential(
        conv_bn_relu(3, 64, 7, 2, bias=True), nn.MaxPool2d(3, 2, 1),
        conv_bn_relu(64, 64, 1, bias=True), conv_bn_relu(64, 192, 3, bias=True), nn.MaxPool2d(3, 2, 1),
        _block(192, 64, (64, 64), (64, 96), mean, 32),
        _block(256, 64, (64, 96), (64, 96), mean, 64),
        _halving(320, (128, 160), (64, 96)),
        _block(576, 224, (64, 96), (96, 128), mean, 128),
        _block(576, 192, (96, 128), (96, 128), mean, 128),
        _block(576, 160, (128, 160), (128, 160), mean, 128),
        _block(608, 96, (128, 192), (160, 192), mean, 128),
        _halving(608, (128, 192), (192, 256)),
        _block(1056, 352, (192, 320), (160, 224), mean, 128),
        _block(1024, 352, (192, 320), (192, 224), largest, 128),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, num_classes),
    )  # fmt: skip


def _chain(
    *convolutions: tuple[int, int, int | tuple[int, int]] | tuple[int, int, int | tuple[int, int], int],
) -> nn.Sequential:
    """Return convolutions (inputs, outputs, size[, stride]); those with a stride have no padding."""
    return nn.Sequential(*(conv_bn_relu(*one, *([0] if len(one) == 4 else [])) for one in convolutions))


def _mean_then(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv_bn_relu(inputs, outputs, 1))


def _v3_a(inputs: int, pooled: int) -> Concat:
    return Concat(
        _chain((inputs, 64, 1)),
        _chain((inputs, 48, 1), (48, 64, 5)),
        _chain((inputs, 64, 1), (64, 96, 3), (96, 96, 3)),
        _mean_then(inputs, pooled),
    )


def _v3_c(inputs: int, width: int) -> Concat:
    row, column = (1, 7), (7, 1)
    double = _chain(
        (inputs, width, 1), (width, width, column), (width, width, row), (width, width, column), (width, 192, row)
    )
    return Concat(
        _chain((inputs, 192, 1)),
        _chain((inputs, width, 1), (width, width, row), (width, 192, column)),
        double,
        _mean_then(inputs, 192),
    )


def _v3_e(inputs: int) -> Concat:
    def fork() -> Concat:
        return Concat(_chain((384, 384, (1, 3))), _chain((384, 384, (3, 1))))

    return Concat(
        _chain((inputs, 320, 1)),
        nn.Sequential(_chain((inputs, 384, 1)), fork()),
        nn.Sequential(_chain((inputs, 448, 1), (448, 384, 3)), fork()),
        _mean_then(inputs, 192),
    )


def inception_v3(num_classes: int = 1000) -> nn.Sequential:
    """Inception v3 without its auxiliary head for images [N, 3, 299, 299]: 23,834,568 parameters."""
    return nn.Sequential(
        _chain((3, 32, 3, 2), (32, 32, 3, 1), (32, 64, 3)), nn.MaxPool2d(3, 2),
        _chain((64, 80, 1), (80, 192, 3, 1)), nn.MaxPool2d(3, 2),
        _v3_a(192, 32), _v3_a(256, 64), _v3_a(288, 64),
        Concat(_chain((288, 384, 3, 2)), _chain((288, 64, 1), (64, 96, 3), (96, 96, 3, 2)), nn.MaxPool2d(3, 2)),
        _v3_c(768, 128), _v3_c(768, 160), _v3_c(768, 160), _v3_c(768, 192),
        Concat(
            _chain((768, 192, 1), (192, 320, 3, 2)),
            _chain((768, 192, 1), (192, 192, (1, 7)), (192, 192, (7, 1)), (192, 192, 3, 2)),
            nn.MaxPool2d(3, 2),
        ),
        _v3_e(1280), _v3_e(2048),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(2048, num_classes),
    )  # fmt: skip
