"""Appliers: apply merged pushes to the values of a store in this process. There is one per device with values."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from paceline.keys import Key
from paceline.kvstore.base import Updater
from paceline.updaters import FlatUpdater, KeyOptions, Options, Piece, StepOptions, UpdaterSpec, make_updater

#: Optimizer state of one key: tensors and plain numbers by name.
State: TypeAlias = dict[str, Any]


class Applier(abc.ABC):
    """Turns merged pushes into new stored values."""

    @property
    @abc.abstractmethod
    def keys(self) -> Collection[Key]:
        """The keys that it updates."""

    @abc.abstractmethod
    def add(self, key: Key, value: torch.Tensor) -> None:
        """Add a stored value; updates change it in place."""

    @abc.abstractmethod
    def update(self, merged: Mapping[Key, torch.Tensor], scale: float) -> None:
        """Apply the merged pushes of some keys; the merged tensors may be overwritten."""

    @abc.abstractmethod
    def refresh(self, key: Key) -> None:
        """Note that the stored value was set from outside."""

    @abc.abstractmethod
    def set_options(self, groups: Sequence[Options], keys: Mapping[Key, KeyOptions] | None) -> None:
        """Set options per param group, and the groups of keys; empty and None change nothing."""

    @abc.abstractmethod
    def state(self, key: Key) -> State:
        """Return copies of the state of one key."""

    @abc.abstractmethod
    def load_state(self, key: Key, state: State) -> None:
        """Replace the state of one key."""


class _Stateless(Applier):
    """Has no state."""

    def refresh(self, key: Key) -> None:
        """Do nothing: there is no copy of the value."""

    def state(self, key: Key) -> State:
        """Return an empty dict: there is no state."""
        return {}

    def load_state(self, key: Key, state: State) -> None:
        """Do nothing: there is no state."""


class SimpleApplier(_Stateless):
    """Runs the updater without state: ``assign``."""

    def __init__(self, spec: UpdaterSpec) -> None:
        self._spec = spec
        self._updaters: dict[Key, FlatUpdater] = {}
        self._options = StepOptions()

    @property
    def keys(self) -> Collection[Key]:
        """See :class:`Applier`."""
        return self._updaters.keys()

    def add(self, key: Key, value: torch.Tensor) -> None:
        """See :class:`Applier`."""
        piece = Piece(key, 0, value.numel(), tuple(value.shape))
        self._updaters[key] = make_updater(self._spec, value.view(-1), [piece])

    def set_options(self, groups: Sequence[Options], keys: Mapping[Key, KeyOptions] | None) -> None:
        """See :class:`Applier`."""
        self._options = StepOptions(
            list(groups) or self._options.groups, self._options.keys if keys is None else {**keys}
        )

    def update(self, merged: Mapping[Key, torch.Tensor], scale: float) -> None:
        """See :class:`Applier`."""
        for key, value in merged.items():
            dense = value.to_dense() if value.is_sparse else value
            self._updaters[key].update(dense.reshape(-1), scale, self._options)


class CallableApplier(_Stateless):
    """Runs a user's ``updater(key, merged, stored)``."""

    def __init__(self, updater: Updater) -> None:
        self._updater = updater
        self._values: dict[Key, torch.Tensor] = {}

    @property
    def keys(self) -> Collection[Key]:
        """See :class:`Applier`."""
        return self._values.keys()

    def add(self, key: Key, value: torch.Tensor) -> None:
        """See :class:`Applier`."""
        self._values[key] = value

    def set_options(self, groups: Sequence[Options], keys: Mapping[Key, KeyOptions] | None) -> None:
        """Do nothing: there are no options."""

    def update(self, merged: Mapping[Key, torch.Tensor], scale: float) -> None:
        """See :class:`Applier`."""
        for key, value in merged.items():
            self._updater(key, value if scale == 1.0 else value.mul_(scale), self._values[key])
