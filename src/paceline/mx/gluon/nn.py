"""Gluon's layers, as layers of torch: sizes of inputs are found at the first batch, as in Gluon.

A parameter is named by its place, as in torch (``0.dense.weight``), not by a prefix.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn
from torch.nn import Flatten

from paceline.mx.gluon.replicate import INSTEAD_OF_METHODS
from paceline.naming import absent, suggestion

__all__ = [
    "Activation",
    "AvgPool2D",
    "Conv2D",
    "Dense",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAvgPool2D",
    "GlobalMaxPool2D",
    "HybridSequential",
    "LeakyReLU",
    "MaxPool2D",
    "Sequential",
]

_Size: TypeAlias = int | tuple[int, int]
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "softrelu": nn.Softplus, "softsign": nn.Softsign,
}  # fmt: skip


def Activation(activation: str) -> nn.Module:  # noqa: N802  # Gluon's name
    """Return the layer of an activation.

    Raises:
        ValueError: unknown name.
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is unknown{suggestion(activation, _ACTIVATIONS)}")
    return _ACTIVATIONS[activation]()


class Sequential(nn.Sequential):
    """torch's ``Sequential`` with Gluon's ``add``."""

    def add(self, *layers: nn.Module) -> None:
        """Append layers."""
        for one in layers:
            self.append(one)

    def name_scope(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: parameters are named by their place."""
        return contextlib.nullcontext()

    if not TYPE_CHECKING:  # a checker knows the names above, and no others

        def __getattr__(self, name: str) -> Any:
            known = name not in INSTEAD_OF_METHODS
            return super().__getattr__(name) if known else absent("Sequential", (), INSTEAD_OF_METHODS)(name)


HybridSequential = Sequential


class Dense(nn.Sequential):
    """A fully connected layer, with Gluon's flattening of inputs and an activation.

    Args:
        units: size of the output.
        activation: its name, or None.
        use_bias: with a bias.
        flatten: all axes of the input but the first are one; otherwise only the last axis is used.
        in_units: size of the input; 0: the size of the first batch.
    """

    def __init__(
        self, units: int, activation: str | None = None, use_bias: bool = True, flatten: bool = True, in_units: int = 0
    ) -> None:
        core = nn.Linear(in_units, units, use_bias) if in_units else nn.LazyLinear(units, use_bias)
        super().__init__(OrderedDict({"flatten": Flatten()} if flatten else {}) | _with("dense", core, activation))


class Conv2D(nn.Sequential):
    """A convolution over height and width, with an activation; arguments are Gluon's, layout NCHW."""

    def __init__(
        self,
        channels: int,
        kernel_size: _Size,
        strides: _Size = 1,
        padding: _Size = 0,
        dilation: _Size = 1,
        groups: int = 1,
        use_bias: bool = True,
        in_channels: int = 0,
        activation: str | None = None,
    ) -> None:
        rest = (channels, kernel_size, strides, padding, dilation, groups, use_bias)
        core = nn.Conv2d(in_channels, *rest) if in_channels else nn.LazyConv2d(*rest)
        super().__init__(_with("conv", core, activation))


class MaxPool2D(nn.MaxPool2d):
    """Largest values of windows."""

    def __init__(
        self, pool_size: _Size = 2, strides: _Size | None = None, padding: _Size = 0, ceil_mode: bool = False
    ) -> None:
        super().__init__(pool_size, strides, padding, ceil_mode=ceil_mode)


class AvgPool2D(nn.AvgPool2d):
    """Means of windows."""

    def __init__(
        self,
        pool_size: _Size = 2,
        strides: _Size | None = None,
        padding: _Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__(pool_size, strides, padding, ceil_mode, count_include_pad)


#: The mean, and the largest value, over height and width.
GlobalAvgPool2D, GlobalMaxPool2D = partial(nn.AdaptiveAvgPool2d, 1), partial(nn.AdaptiveMaxPool2d, 1)


def Dropout(rate: float) -> nn.Module:  # noqa: N802  # Gluon's name
    """Return the layer that drops a part of its inputs in training mode."""
    return nn.Dropout(rate)


def Embedding(input_dim: int, output_dim: int, sparse_grad: bool = False) -> nn.Module:  # noqa: N802  # Gluon's name
    """Return a table of vectors; with ``sparse_grad`` only the rows of a batch have gradients."""
    return nn.Embedding(input_dim, output_dim, sparse=sparse_grad)


def LeakyReLU(alpha: float) -> nn.Module:  # noqa: N802  # Gluon's name
    """Return the activation that multiplies negative inputs by ``alpha``."""
    return nn.LeakyReLU(alpha)


def _with(name: str, core: nn.Module, activation: str | None) -> OrderedDict[str, nn.Module]:
    return OrderedDict({name: core} | ({} if activation is None else {"act": Activation(activation)}))


if not TYPE_CHECKING:  # a checker knows the names above, and no others
    _INSTEAD = {
        "BatchNorm": "torch.nn.LazyBatchNorm2d; its momentum is 1 minus Gluon's",
        "Block": "torch.nn.Module",
        "HybridBlock": "torch.nn.Module",
        "HybridLambda": "a torch.nn.Module",
        "Lambda": "a torch.nn.Module",
        "LayerNorm": "torch.nn.LayerNorm",
        "PReLU": "torch.nn.PReLU",
    } | {
        gluons: f"torch.nn.{torchs}"
        for gluons, torchs in {
            "Conv1D": "LazyConv1d", "Conv3D": "LazyConv3d", "Conv2DTranspose": "LazyConvTranspose2d",
            "MaxPool1D": "MaxPool1d", "AvgPool1D": "AvgPool1d", "ELU": "ELU", "SELU": "SELU", "GELU": "GELU",
        }.items()
    }  # fmt: skip
    __getattr__ = absent(__name__, __all__, _INSTEAD)
