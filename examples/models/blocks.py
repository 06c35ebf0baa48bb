"""A convolution with batch normalisation, which most networks are made of."""

from __future__ import annotations

from torch import nn


def conv_bn(
    inputs: int,
    outputs: int,
    size: int | tuple[int, int],
    stride: int = 1,
    padding: int | tuple[int, int] | None = None,
    *,
    bias: bool = False,
) -> nn.Sequential:
    """Return a convolution and its batch normalisation. Without ``padding`` the image keeps its size at stride 1."""
    if padding is None:
        padding = size // 2 if isinstance(size, int) else (size[0] // 2, size[1] // 2)
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding, bias=bias)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


def conv_bn_relu(
    inputs: int,
    outputs: int,
    size: int | tuple[int, int],
    stride: int = 1,
    padding: int | tuple[int, int] | None = None,
    *,
    bias: bool = False,
) -> nn.Sequential:
    """Return a convolution, its batch normalisation and a ReLU."""
    return conv_bn(inputs, outputs, size, stride, padding, bias=bias).append(nn.ReLU(inplace=True))
