"""MXNet's initial values: functions that fill a weight in place, for ``net.initialize`` and ``Module.init_params``.

They fill parameters of two or more dimensions; biases become 0, and others (of BatchNorm, for example) keep
torch's values. A function of ``torch.nn.init`` can stand in their place. Random numbers are torch's: ``manual_seed``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn

from paceline.naming import absent

__all__ = ["Constant", "MSRAPrelu", "Normal", "One", "Orthogonal", "Uniform", "Xavier", "Zero"]

#: Fills a tensor in place.
Initializer: TypeAlias = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Uniform:
    """Uniform in plus or minus ``scale``."""

    scale: float = 0.07

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill a weight."""
        nn.init.uniform_(weight, -self.scale, self.scale)


@dataclass(frozen=True)
class Normal:
    """Normal with mean 0 and standard deviation ``sigma``."""

    sigma: float = 0.01

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill a weight."""
        nn.init.normal_(weight, 0.0, self.sigma)


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float = 0.0

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill a weight."""
        nn.init.constant_(weight, self.value)


#: The same with these values.
Zero, One = partial(Constant, 0.0), partial(Constant, 1.0)


@dataclass(frozen=True)
class Orthogonal:
    """Orthogonal rows or columns, times ``scale`` (Saxe et al. 2013)."""

    scale: float = 1.414

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill a weight."""
        nn.init.orthogonal_(weight, self.scale)


@dataclass(frozen=True)
class Xavier:
    """Uniform in plus or minus, or normal with, sqrt(``magnitude`` / fan) (Glorot and Bengio 2010).

    Attributes:
        rnd_type: ``uniform`` or ``gaussian``.
        factor_type: the fan: ``in``, ``out`` or their mean, ``avg``.
        magnitude: factor under the root; 3 is torch's ``xavier_uniform_``.
    """

    rnd_type: Literal["uniform", "gaussian"] = "uniform"
    factor_type: Literal["in", "out", "avg"] = "avg"
    magnitude: float = 3.0

    def __post_init__(self) -> None:
        if self.rnd_type not in ("uniform", "gaussian") or self.factor_type not in ("in", "out", "avg"):
            raise ValueError(
                f"Xavier({self.rnd_type!r}, {self.factor_type!r}): 'uniform' or 'gaussian'; 'in', 'out' or 'avg'"
            )

    def __call__(self, weight: torch.Tensor) -> None:
        """Fill a weight."""
        field = math.prod(weight.shape[2:])
        fans = {"in": weight.shape[1] * field, "out": weight.shape[0] * field}
        scale = math.sqrt(self.magnitude / fans.get(self.factor_type, sum(fans.values()) / 2))
        (Uniform if self.rnd_type == "uniform" else Normal)(scale)(weight)


def MSRAPrelu(factor_type: Literal["in", "out", "avg"] = "avg", slope: float = 0.25) -> Xavier:  # noqa: N802
    """Return the initializer for layers before a PReLU (He et al. 2015)."""
    return Xavier("gaussian", factor_type, 2.0 / (1 + slope**2))


if not TYPE_CHECKING:  # a checker knows the names above, and no others
    _INSTEAD = dict.fromkeys(("Bilinear", "LSTMBias", "Load", "Mixed", "FusedRNN", "InitDesc"), "torch.nn.init")
    __getattr__ = absent(__name__, __all__, _INSTEAD)
