"""A convolution with batch normalisation, which most networks are made of."""

from __future__ import annotations

import functools

from torch import nn


def conv_bn(
    inputs: int,
    outputs: int,
    size: int | tuple[int, int],
    stride: int = 1,
    padding: int | tuple[int, int] | None = None,
    *,
    bias: bool = False,
    relu: bool = False,
) -> nn.Sequential:
    """Return a convolution and its batch normalisation. Without ``padding`` the image keeps its size at stride 1."""
    if padding is None:
        padding = size // 2 if isinstance(size, int) else (size[0] // 2, size[1] // 2)
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding, bias=bias)
    block = nn.Sequential(convolution, nn.BatchNorm2d(outputs))
    return block.append(nn.ReLU(inplace=True)) if relu else block


#: The same, with a ReLU behind it.
conv_bn_relu = functools.partial(conv_bn, relu=True)
