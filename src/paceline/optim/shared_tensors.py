"""The tensors of models that all workers have from rank 0: which they are, and their way through a store at once.

A buffer follows rank 0's as long as its shape on both workers is that of the start. Others (cached masks, positions,
statistics that grow) are each worker's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch

from paceline.kvstore.base import KVStoreBase
from paceline.layout.tensors import as_floats, real_view, set_from_floats
from paceline.naming import listed

logger = logging.getLogger(__name__)

BUFFER = "buffer "
"""Begin of the keys of buffers: no parameter has such a name."""

OWN = "own buffers"
"""Key of a vector that has a 1 for each buffer that does not follow rank 0's any more."""

#: Models, each with all its copies on the devices of this worker.
Models: TypeAlias = Sequence[Sequence[torch.nn.Module]]
#: By name, the tensors of all copies of a model.
Copies: TypeAlias = Mapping[str, Sequence[torch.Tensor]]
#: By name, the tensors of all copies of a model with torch's counts of their changes.
Snapshot: TypeAlias = Mapping[str, Sequence[tuple[torch.Tensor | None, int]]]

_T = TypeVar("_T")


def buffers_of(models: Models) -> dict[str, list[torch.Tensor]]:
    """Return the current buffers of models that have elements, complex ones as pairs, by names of no parameter."""
    found = by_name(
        models, lambda model: {name: real_view(one.detach()) for name, one in model.named_buffers() if one.numel()}
    )
    return {f"{BUFFER}{name}": copies for name, copies in found.items()}


def shared_of(models: Models, trained: Iterable[torch.nn.Parameter]) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of models that all workers have from rank 0: buffers, and parameters that are not trained."""
    known = list(trained)
    # Through ``data``: another optimizer that has a parameter may look at torch's count of its changes.
    rest = by_name(
        models, lambda model: {name: real_view(one.data) for name, one in untrained_of(model, known).items()}
    )
    return rest | buffers_of(models)


def untrained_of(model: torch.nn.Module, trained: Iterable[torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a model that an optimizer does not have, by name."""
    known = {id(param) for param in trained}
    return {name: one for name, one in model.named_parameters() if one.numel() and id(one) not in known}


def by_name(models: Models, found_in: Callable[[torch.nn.Module], Mapping[str, _T]]) -> dict[str, list[_T]]:
    """Return what is found in the copies of models by name; that of a second model has its number, too."""
    found: dict[str, list[_T]] = {}
    for number, model in enumerate(models):
        tables = [found_in(copy) for copy in model]
        found |= {f"{number} {name}" if number else name: [one[name] for one in tables] for name in tables[0]}
    return found


def mean_of(copies: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of the copies of a buffer, on the first one's device; of integers the first one."""
    first, *others = copies
    if not (others and (first.is_floating_point() or first.is_complex())):
        return first
    return torch.stack([first, *(one.to(first.device) for one in others)]).mean(0)


def means_of(tensors: Copies) -> dict[str, torch.Tensor]:
    """Return one tensor per name; see :func:`mean_of`."""
    return {name: mean_of(copies) for name, copies in tensors.items()}


@torch.no_grad()
def set_all(tensors: Copies, values: Mapping[str, torch.Tensor]) -> None:
    """Set all copies to values in dtypes that stores hold."""
    for name, copies in tensors.items():
        for one in copies:
            if one is not values[name]:
                set_from_floats(one, values[name])


def broadcast(store: KVStoreBase, tensors: Copies) -> None:
    """Set tensors to rank 0's, through a store that does not have these keys. Every worker calls it."""
    values = {name: as_floats(one) for name, one in means_of(tensors).items()}
    if values:
        store.broadcast(list(values), list(values.values()), list(values.values()))
        set_all(tensors, values)


def addends(store: KVStoreBase, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what this worker adds to a sum that is rank 0's values: these, or zeros."""
    found = {name: as_floats(one) for name, one in values.items()}
    return {name: one.clone() if store.rank == 0 else torch.zeros_like(one) for name, one in found.items()}


class FollowingBuffers:
    """The buffers of models that follow rank 0's.

    Args:
        models: the networks.
        rank: rank of this worker.
    """

    def __init__(self, models: Models, rank: int) -> None:
        self._models, self._rank = models, rank
        self._first = {name: copies[0].shape for name, copies in buffers_of(models).items()}
        self._kinds = {name: copies[0].new_empty(0) for name, copies in buffers_of(models).items()}
        """By name, a tensor of the dtype and on the device of the buffer."""
        self._own: set[str] = set()
        self._has_said = False

    @property
    def names(self) -> Sequence[str]:
        """Names of the buffers at the start."""
        return list(self._first)

    def current(self) -> dict[str, list[torch.Tensor]]:
        """Return the buffers that follow, as they are now: a module may have replaced a tensor."""
        now = buffers_of(self._models)
        shapes = {name: {one.shape for one in copies} for name, copies in now.items()}
        self._note_own(
            name
            for name in {**self._first, **now}
            if name not in self._own and (name not in self._first or shapes.get(name) != {self._first[name]})
        )
        return {name: now[name] for name in self._first if name not in self._own}

    def told(self) -> dict[str, torch.Tensor]:
        """Return values for the other workers, of the same names and shapes on all workers, and which do not count."""
        current = means_of(self.current())
        values = {
            name: current[name] if name in current else self._kinds[name].new_zeros(shape)
            for name, shape in self._first.items()
        }
        own = [float(name in self._own) for name in values]
        return values | ({OWN: torch.tensor(own, dtype=torch.float64, device="cpu")} if values else {})

    def followed(self, values: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        """Return the buffers that follow, given what rank 0 has told."""
        if OWN in values:
            self._note_own(name for name, own in zip(self._first, values[OWN].tolist(), strict=True) if own)
        return self.current()

    def _note_own(self, names: Iterable[str]) -> None:
        new = [name for name in names if name not in self._own]
        self._own.update(new)
        if new and not self._has_said:
            self._has_said = True
            logger.warning(
                "worker %d: buffer %s is each worker's own from now on: a forward pass has made it, or has changed its "
                "shape, as that of a cache",
                self._rank, listed(repr(name.removeprefix(BUFFER)) for name in new),
            )  # fmt: skip


class Places:
    """Finds buffers that have changed, in place or for another tensor.

    Args:
        models: the networks.
        names: names of the buffers, as :func:`buffers_of` gives them.
    """

    def __init__(self, models: Models, names: Iterable[str]) -> None:
        tables = by_name(models, _tables_of)
        self._tables = {name: tables[name.removeprefix(BUFFER)] for name in names}

    def snapshot(self) -> Snapshot:
        """Return the present buffers and torch's counts of their changes."""
        return {name: [_with_version(*one) for one in places] for name, places in self._tables.items()}

    def changed_since(self, before: Snapshot) -> set[str]:
        """Return the names of buffers that have changed since a snapshot."""
        return {
            name
            for name, places in self.snapshot().items()
            for (one, version), (other, its_version) in zip(places, before[name], strict=True)
            if one is not other or version != its_version
        }


def _tables_of(model: torch.nn.Module) -> dict[str, tuple[dict[str, torch.Tensor | None], str]]:
    """Return, by the name of a buffer, its module's table and the name there."""
    found: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {}
    for prefix, module in model.named_modules():
        found |= {f"{prefix}.{name}" if prefix else name: (module._buffers, name) for name in module._buffers}
    return found


def _with_version(table: Mapping[str, torch.Tensor | None], name: str) -> tuple[torch.Tensor | None, int]:
    tensor = table.get(name)
    return tensor, 0 if tensor is None or tensor.is_inference() else tensor._version
