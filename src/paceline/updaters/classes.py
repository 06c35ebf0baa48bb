"""Names of optimizers, and the list of those that need whole tensors."""

from __future__ import annotations

from collections.abc import Collection

import torch

from paceline import extensions
from paceline.updaters.delayed_nesterov import DelayedNesterov
from paceline.updaters.lamb import LAMB, LARS
from paceline.updaters.mxnet import DCASGD, NAG, SGLD, Add, Assign, Ftrl, MXNetSGD, SignSGD, Signum

Optimizer = torch.optim.Optimizer

#: Optimizers whose update of an element depends only on that element: they run on flat shards.
ELEMENTWISE: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "mxnet_sgd": MXNetSGD,
    "nag": NAG,
    "ftrl": Ftrl,
    "signum": Signum,
    "signsgd": SignSGD,
    "dcasgd": DCASGD,
    "sgld": SGLD,
    "delayed_nesterov": DelayedNesterov,
}

#: Optimizers that accept only rows: for row-sparse keys.
ROWS_ONLY: dict[str, type[Optimizer]] = {"sparseadam": torch.optim.SparseAdam}

#: Optimizers that use norms or shapes of whole tensors: their keys are never split.
WHOLE_TENSOR: dict[str, type[Optimizer]] = {
    "lamb": LAMB, "lars": LARS, "adafactor": torch.optim.Adafactor, "muon": torch.optim.Muon,
}  # fmt: skip

#: Updaters of stores that are not optimizers: they replace the value by pushes, or add them. ``test`` is MXNet's name.
SIMPLE: dict[str, type[Optimizer]] = {"assign": Assign, "add": Add, "test": Add}

_BY_NAME = ELEMENTWISE | WHOLE_TENSOR | ROWS_ONLY | SIMPLE

#: Names of optimizers in other libraries, and our nearest equivalent.
_ELSEWHERE = {
    "momentum": "'sgd' with momentum=0.9",
    "nesterov": "'sgd' with momentum=0.9, nesterov=True, or MXNet's 'nag'",
    "ccsgd": "'sgd'",
    "lbsgd": "'lars'",
    "larc": "'lars'",
    "lans": "'lamb'",
    "ftml": "'ftrl' or 'adam'",
    "groupadagrad": "'adagrad'",
    "adabelief": "'adam'",
    "bertadam": "'adamw'",
    "fusedadam": "'adam'",
    "fusedlamb": "'lamb'",
    "langevin": "'sgld'",
    "lion": "'signum'",
}


def known_names() -> list[str]:
    """Return every name that can be given without an import path."""
    return sorted({*_BY_NAME, *extensions.names("updater")})


def check_name(name: str) -> str:
    """Return the canonical form of an optimizer's name.

    Raises:
        ValueError: unknown (the nearest is suggested) or impossible on a server.
    """
    if ":" in name:
        return name
    lower = name.lower()
    if lower == "lbfgs":
        raise ValueError(
            f"optimizer {name!r} cannot run where the values are stored: it evaluates a closure, which a server cannot"
        )
    if lower in _BY_NAME:
        return lower
    own = next((one for one in extensions.names("updater") if one.lower() == lower), "")
    if own:
        return own
    if lower in _ELSEWHERE:
        raise ValueError(f"unknown optimizer {name!r}; nearest is {_ELSEWHERE[lower]}")
    extensions.find("updater", lower, others=known_names(), what="optimizer")
    return lower


def name_of_class(cls: type[Optimizer]) -> str:
    """Return the registered name of a class, or its import path ``pkg.mod:Class``."""
    named: dict[str, type[Optimizer]] = _BY_NAME | extensions.registered("updater")
    for name, known in named.items():
        if known is cls:
            return name
    if cls.__module__.startswith("torch.optim"):
        return check_name(cls.__name__)
    return f"{cls.__module__}:{cls.__qualname__}"


def is_whole_tensor(name: str) -> bool:
    """Return whether this optimizer needs whole keys.

    A class of another package is assumed to need them, unless it has a name and its attribute ``elementwise`` is true.
    """
    if name in ELEMENTWISE or name in ROWS_ONLY or name in SIMPLE:
        return False
    return name in WHOLE_TENSOR or ":" in name or not getattr(find_class(name), "elementwise", False)


def find_class(name: str, allowed: Collection[str] = ()) -> type[Optimizer]:
    """Return the class behind a registered name, or behind an import path that may be loaded here.

    Raises:
        ValueError: the name is unknown, or the path is not allowed or is not an optimizer class.
    """
    if ":" not in name:
        known = check_name(name)
        found = _BY_NAME[known] if known in _BY_NAME else extensions.find("updater", known)
    elif name in allowed:
        found = extensions.load(name)
    else:
        raise ValueError(
            f"optimizer {name!r} is not allowed on this server; start it with --allow {name} "
            "(paceline launch passes the option on)"
        )
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ValueError(f"{name!r} is not a torch.optim.Optimizer class")
    return found
