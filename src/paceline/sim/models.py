"""Published networks as lists of arrays: the elements of each, and the multiplications that one sample costs there.

The lists are in forward order, as PyTorch's modules have their parameters. A planner needs both numbers of each array:
elements are what travels, and multiplications say at which time of a step the gradient appears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from paceline.naming import suggestion


@dataclass(frozen=True)
class Array:
    """An array of weights."""

    numel: int
    multiplications: float = 0.0
    """Multiplications of one sample, forward."""


Arrays = list[Array]


def arrays(name: str) -> Arrays:
    """Return the arrays of a published network for ImageNet's 1000 classes, in forward order.

    Raises:
        ValueError: there is no such network; the message suggests one.
    """
    if name not in NETWORKS:
        raise ValueError(f"{name!r} is unknown{suggestion(name, NETWORKS)}")
    return NETWORKS[name]()


def even(numel: int, count: int = 32) -> Arrays:
    """Return a network of which only the size is known: equal arrays that take equal times, one per element at most."""
    count = min(count, numel)
    return [Array(numel * (one + 1) // count - numel * one // count, 1.0) for one in range(count)]


def _convolution(inputs: int, outputs: int, area: int, pixels: int) -> Arrays:
    """Return a convolution without a bias, whose output is ``pixels`` high and wide, and batch normalisation."""
    numel = inputs * outputs * area
    return [Array(numel, numel * pixels**2), Array(outputs), Array(outputs)]


def _biased(inputs: int, outputs: int, area: int = 1, pixels: int = 1) -> Arrays:
    return [*_convolution(inputs, outputs, area, pixels)[:2]]


def _resnet(blocks: Sequence[int], bottleneck: bool) -> Arrays:
    """Return a ResNet v1 (He et al. 2015) whose bottlenecks have their stride in the 3x3 convolution."""
    found, channels = _convolution(3, 64, 49, 112), 64
    for stage, count in enumerate(blocks):
        width, pixels = 64 << stage, 56 >> stage
        outputs = 4 * width if bottleneck else width
        for block in range(count):
            before = 2 * pixels if stage and not block else pixels
            if bottleneck:
                found += _convolution(channels, width, 1, before) + _convolution(width, width, 9, pixels)
                found += _convolution(width, outputs, 1, pixels)
            else:
                found += _convolution(channels, width, 9, pixels) + _convolution(width, width, 9, pixels)
            if channels != outputs:
                found += _convolution(channels, outputs, 1, pixels)
            channels = outputs
    return found + _biased(channels, 1000)


def _vgg(stages: Sequence[int]) -> Arrays:
    """Return a VGG (Simonyan and Zisserman 2014)."""
    found: Arrays = []
    channels = 3
    for stage, count in enumerate(stages):
        for _ in range(count):
            width = min(64 << stage, 512)
            found += _biased(channels, width, 9, 224 >> stage)
            channels = width
    return found + _biased(512 * 49, 4096) + _biased(4096, 4096) + _biased(4096, 1000)


def _alexnet() -> Arrays:
    """Return AlexNet in its one-column form (Krizhevsky 2014)."""
    layers = ((3, 64, 121, 55), (64, 192, 25, 27), (192, 384, 9, 13), (384, 256, 9, 13), (256, 256, 9, 13))
    dense = ((9216, 4096), (4096, 4096), (4096, 1000))
    return [*_joined(_biased(*one) for one in layers), *_joined(_biased(*one) for one in dense)]


def _inception_v3() -> Arrays:
    """Return Inception v3 without its auxiliary head (Szegedy et al. 2015)."""
    stem = ((3, 32, 9, 149), (32, 32, 9, 147), (32, 64, 9, 147), (64, 80, 1, 73), (80, 192, 9, 71))
    found = _joined(_convolution(*one) for one in stem)
    for inputs, pooled in ((192, 32), (256, 64), (288, 64)):
        double = ((inputs, 64, 1), (64, 96, 9), (96, 96, 9))
        found += _at(35, (inputs, 64, 1), (inputs, 48, 1), (48, 64, 25), *double, (inputs, pooled, 1))
    found += _at(17, (288, 384, 9)) + _at(35, (288, 64, 1), (64, 96, 9)) + _at(17, (96, 96, 9))
    for width in (128, 160, 160, 192):
        single = ((768, width, 1), (width, width, 7), (width, 192, 7))
        found += _at(17, (768, 192, 1), *single, (768, width, 1), *[(width, width, 7)] * 3, (width, 192, 7))
        found += _at(17, (768, 192, 1))
    found += _at(17, (768, 192, 1)) + _at(8, (192, 320, 9)) + _at(17, (768, 192, 1), *[(192, 192, 7)] * 2)
    found += _at(8, (192, 192, 9))
    for inputs in (1280, 2048):
        forks = ((inputs, 384, 1), *[(384, 384, 3)] * 2, (inputs, 448, 1), (448, 384, 9), *[(384, 384, 3)] * 2)
        found += _at(8, (inputs, 320, 1), *forks, (inputs, 192, 1))
    return found + _biased(2048, 1000)


def _at(pixels: int, *convolutions: tuple[int, int, int]) -> Arrays:
    return _joined(_convolution(*one, pixels) for one in convolutions)


def _joined(layers: Iterable[Arrays]) -> Arrays:
    return [one for layer in layers for one in layer]


#: By name: what builds the list.
NETWORKS: Mapping[str, Callable[[], Arrays]] = {
    "alexnet": _alexnet,
    "inception-v3": _inception_v3,
    "resnet18": partial(_resnet, (2, 2, 2, 2), False),
    "resnet34": partial(_resnet, (3, 4, 6, 3), False),
    "resnet50": partial(_resnet, (3, 4, 6, 3), True),
    "resnet101": partial(_resnet, (3, 4, 23, 3), True),
    "resnet152": partial(_resnet, (3, 8, 36, 3), True),
    "vgg11": partial(_vgg, (1, 1, 2, 2, 2)),
    "vgg13": partial(_vgg, (2, 2, 2, 2, 2)),
    "vgg16": partial(_vgg, (2, 2, 3, 3, 3)),
    "vgg19": partial(_vgg, (2, 2, 4, 4, 4)),
}
