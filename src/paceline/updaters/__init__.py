"""What happens to a stored value when a merged push arrives: optimizers and simple updaters, by name and numbers."""

from paceline.updaters.flat import FlatUpdater, Piece
from paceline.updaters.registry import is_whole_tensor, known_names
from paceline.updaters.simple import AddUpdater, AssignUpdater
from paceline.updaters.spec import KeyOptions, Option, Options, StepOptions, UpdaterSpec, make_spec, option_groups
from paceline.updaters.torch_updater import TorchUpdater, make_updater

__all__ = [
    "AddUpdater",
    "AssignUpdater",
    "FlatUpdater",
    "KeyOptions",
    "Option",
    "Options",
    "Piece",
    "StepOptions",
    "TorchUpdater",
    "UpdaterSpec",
    "is_whole_tensor",
    "known_names",
    "make_spec",
    "make_updater",
    "option_groups",
]
