"""Updaters: apply merged pushes to stored values. They are optimizers or simple updaters, by name and numbers."""

from paceline.updaters.classes import is_whole_tensor, known_names
from paceline.updaters.delayed_nesterov import DelayedNesterov
from paceline.updaters.flat import FlatUpdater, Piece
from paceline.updaters.keyed import KeyedOptimizer, check_state
from paceline.updaters.lamb import LAMB, LARS
from paceline.updaters.mxnet import DCASGD, NAG, SGLD, Add, Ftrl, MXNetSGD, SignSGD, Signum
from paceline.updaters.simple import AssignUpdater
from paceline.updaters.spec import (
    KeyOptions,
    Option,
    Options,
    StepOptions,
    UpdaterSpec,
    check_numbers,
    check_options,
    defaults_of,
    make_spec,
    option_groups,
    options_apart,
)
from paceline.updaters.torch_optim import TorchUpdater, make_updater

__all__ = [
    "DCASGD",
    "LAMB",
    "LARS",
    "NAG",
    "SGLD",
    "Add",
    "AssignUpdater",
    "DelayedNesterov",
    "FlatUpdater",
    "Ftrl",
    "KeyOptions",
    "KeyedOptimizer",
    "MXNetSGD",
    "Option",
    "Options",
    "Piece",
    "SignSGD",
    "Signum",
    "StepOptions",
    "TorchUpdater",
    "UpdaterSpec",
    "check_numbers",
    "check_options",
    "check_state",
    "defaults_of",
    "is_whole_tensor",
    "known_names",
    "make_spec",
    "make_updater",
    "option_groups",
    "options_apart",
]
