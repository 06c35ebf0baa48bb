"""Residual networks: v1 (He et al. 2015) and v2, with pre-activation (He et al. 2016), for ImageNet and for CIFAR."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from .blocks import conv_bn, conv_bn_relu

#: Layers -> (blocks per stage, bottlenecks), for images of 224 pixels.
_STAGES = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}


class BlockV1(nn.Module):
    """Convolutions with batch normalisation, added to the block's input before the last ReLU.

    A bottleneck's stride is in its 3x3 convolution. ``padded``: a shortcut to more channels adds zeros instead of a
    1x1 convolution (option A of the paper, for CIFAR).
    """

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool, padded: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            body = [conv_bn_relu(inputs, width, 1), conv_bn_relu(width, width, 3, stride), conv_bn(width, outputs, 1)]
        else:
            body = [conv_bn_relu(inputs, width, 3, stride), conv_bn(width, width, 3)]
        self.body = nn.Sequential(*body)
        self.shortcut: nn.Module = nn.Identity()
        if (inputs, stride) != (outputs, 1):
            self.shortcut = ZeroPadding(outputs - inputs, stride) if padded else conv_bn(inputs, outputs, 1, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(images) + self.shortcut(images))


class ZeroPadding(nn.Module):
    """Takes every ``stride``-th pixel and adds channels of zeros."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.channels, self.stride = channels, stride

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.pad(images[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.channels))


class BlockV2(nn.Module):
    """Batch normalisation and ReLU come before each convolution; what is added passes nothing."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        self.first = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(inplace=True))
        if bottleneck:
            middle = [conv_bn_relu(inputs, width, 1), conv_bn_relu(width, width, 3, stride)]
            self.body = nn.Sequential(*middle, nn.Conv2d(width, outputs, 1, bias=False))
        else:
            last = nn.Conv2d(width, width, 3, padding=1, bias=False)
            self.body = nn.Sequential(conv_bn_relu(inputs, width, 3, stride), last)
        same = (inputs, stride) == (outputs, 1)
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        activated = self.first(images)
        return self.body(activated) + (images if self.shortcut is None else self.shortcut(activated))


def resnet(num_classes: int = 1000, num_layers: int = 50, image_size: int = 224) -> nn.Module:
    """ResNet with pre-activation (v2), as MXNet's ``resnet``; for images below 64 pixels that of the papers for CIFAR.

    Args:
        num_layers: 18, 34, 50, 101 or 152; for CIFAR 6n + 2, from 164 on 9n + 2 with bottlenecks. CIFAR networks of
            fewer than 164 layers are those of the first paper (v1).

    Raises:
        ValueError: there is no ResNet of this depth.
    """
    if image_size < 64:
        return _cifar(num_classes, num_layers)
    blocks, bottleneck = _known(num_layers)
    stem = [nn.BatchNorm2d(3, affine=False), conv_bn_relu(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    stages, channels = _stages_v2(64, blocks, (64, 128, 256, 512), bottleneck)
    return nn.Sequential(*stem, *stages, *_head(channels, num_classes, activate=True))


def resnet_v1(num_classes: int = 1000, num_layers: int = 50, image_size: int = 224) -> nn.Module:
    """ResNet as first published (v1), for images of 224 pixels or of CIFAR.

    Raises:
        ValueError: there is no ResNet of this depth.
    """
    if image_size < 64:
        return _cifar(num_classes, num_layers)
    blocks, bottleneck = _known(num_layers)
    stem = [conv_bn_relu(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    stages, channels = _stages_v1(64, blocks, (64, 128, 256, 512), bottleneck, padded=False)
    return nn.Sequential(*stem, *stages, *_head(channels, num_classes))


def _cifar(num_classes: int, num_layers: int) -> nn.Module:
    depth, rest = divmod(num_layers - 2, 9 if num_layers >= 164 else 6)
    if rest or depth < 1:
        raise ValueError(f"CIFAR's ResNets have 6n + 2 layers, or 9n + 2 from 164 on; num_layers is {num_layers}")
    if num_layers < 164:
        stages, channels = _stages_v1(16, (depth,) * 3, (16, 32, 64), bottleneck=False, padded=True)
        return nn.Sequential(conv_bn_relu(3, 16, 3), *stages, *_head(channels, num_classes))
    stages, channels = _stages_v2(16, (depth,) * 3, (16, 32, 64), bottleneck=True)
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    return nn.Sequential(stem, *stages, *_head(channels, num_classes, activate=True))


def _known(num_layers: int) -> tuple[tuple[int, ...], bool]:
    if num_layers not in _STAGES:
        known = ", ".join(map(str, _STAGES))
        raise ValueError(f"there are ResNets of {known} layers for images of 224 pixels; num_layers is {num_layers}")
    return _STAGES[num_layers]


def _stages_v1(
    channels: int, blocks: Sequence[int], widths: Sequence[int], bottleneck: bool, padded: bool
) -> tuple[list[nn.Module], int]:
    stages: list[nn.Module] = []
    for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
        for block in range(count):
            stride = 2 if stage and not block else 1
            stages.append(BlockV1(channels, width, stride, bottleneck=bottleneck, padded=padded))
            channels = 4 * width if bottleneck else width
    return stages, channels


def _stages_v2(
    channels: int, blocks: Sequence[int], widths: Sequence[int], bottleneck: bool
) -> tuple[list[nn.Module], int]:
    stages: list[nn.Module] = []
    for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
        for block in range(count):
            stages.append(BlockV2(channels, width, 2 if stage and not block else 1, bottleneck=bottleneck))
            channels = 4 * width if bottleneck else width
    return stages, channels


def _head(channels: int, num_classes: int, activate: bool = False) -> list[nn.Module]:
    first = [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)] if activate else []
    return [*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
