"""Buffers of a model (running means of BatchNorm): all workers have rank 0's, as with DDP.

The output of a training model does not depend on running means. So they are not sent with every forward pass: rank 0
sends changed buffers before it pushes, and holds back the last push of the round until the servers have them. The other
workers have the answers of the round after that, and pull the buffers before they are read.

| worker 0                                  | the servers hold    | a worker that has the answers of round r reads |
|-------------------------------------------|---------------------|------------------------------------------------|
| publishes round r + 1, pushes             | r - 1, r, r + 1     | those of r                                     |
| publishes r + 2: all have pushed r + 1    | r, r + 1, r + 2     | those of r, if it has not settled r + 1        |
| publishes r + 3: all have settled r + 1   | r + 1, r + 2, r + 3 | nothing: it has the answers of r + 1           |

So three publications are held, under keys of their own, and each has the number of its round. Workers that are not in
lock step read the newest one.

Other buffers (codebooks, queues) may be read in training, where each worker has its own. Where these have become others
than rank 0's, one line says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch

from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.layout.tensors import as_floats, host_buffer, real_view, set_from_floats, small_to_host, to_host
from paceline.naming import listed
from paceline.net.call import Call
from paceline.observe import meter
from paceline.observe.account import DEVICE
from paceline.optim.binding import known, unlike
from paceline.optim.device import SideStream, all_copied, side_stream, wait_for_copies

logger = logging.getLogger(__name__)

_PREFIX = "buffer "
"""Of the keys of buffers: no parameter has such a name."""

_NUMBERS = "numbers of buffers"
"""Key of the numbers of the publications that are held."""

_HELD = 3
"""Publications that the servers hold."""

_MOST_ROUNDS = 2**24
"""Rounds between two meetings of the workers, at most; the number of a round is exact in a float64."""

#: Models, each with all its copies on the devices of this worker.
Models: TypeAlias = Sequence[Sequence[torch.nn.Module]]
#: By name, the tensors of all copies of a model.
Copies: TypeAlias = Mapping[str, Sequence[torch.Tensor]]


def buffers_of(models: Models) -> dict[str, list[torch.Tensor]]:
    """Return the current buffers of models that have elements, complex ones as pairs, by names of no parameter."""
    found = _by_name(
        models, lambda model: {name: real_view(one.detach()) for name, one in model.named_buffers() if one.numel()}
    )
    return {f"{_PREFIX}{name}": copies for name, copies in found.items()}


def shared_of(models: Models, trained: Iterable[torch.nn.Parameter]) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of models that all workers have from rank 0: buffers, and parameters that are not trained."""
    known = list(trained)
    # Through ``data``: another optimizer that has a parameter may look at torch's count of its changes.
    rest = _by_name(
        models, lambda model: {name: real_view(one.data) for name, one in untrained_of(model, known).items()}
    )
    return rest | buffers_of(models)


def untrained_of(model: torch.nn.Module, trained: Iterable[torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a model that an optimizer does not have, by name."""
    known = {id(param) for param in trained}
    return {name: one for name, one in model.named_parameters() if one.numel() and id(one) not in known}


def _by_name(
    models: Models, tensors_of: Callable[[torch.nn.Module], Mapping[str, torch.Tensor]]
) -> dict[str, list[torch.Tensor]]:
    """Return tensors of models by name; those of a second model have its number, too."""
    found: dict[str, list[torch.Tensor]] = {}
    for number, model in enumerate(models):
        tables = [tensors_of(copy) for copy in model]
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


def addends(store: KVStoreBase, tensors: Copies) -> dict[str, torch.Tensor]:
    """Return what this worker adds to a sum that is rank 0's values: these, or zeros."""
    values = {name: as_floats(one) for name, one in means_of(tensors).items()}
    return {name: one.clone() if store.rank == 0 else torch.zeros_like(one) for name, one in values.items()}


class Rounds:
    """Numbers the rounds of workers in lock step, alike on all of them, so that later ones have larger numbers. Pure.

    At a meeting servers do not wait for those that have come to it, so some workers may have made fewer rounds than
    others. All count anew from there.
    """

    def __init__(self) -> None:
        self._meetings = self._count = self._opened = 0
        self._settled = 0

    def open(self, meetings: int) -> int:
        """Begin a round after so many meetings; returns its number."""
        self._count = self._count + 1 if meetings == self._meetings else 1
        self._meetings = meetings
        self._opened = meetings * _MOST_ROUNDS + self._count
        return self._opened

    def settle(self) -> None:
        """Note that the answers of the round are here."""
        self._settled = self._opened

    def last(self, meetings: int) -> int:
        """Return the largest number that the last round whose answers are here may have had on another worker."""
        return max(self._settled, meetings * _MOST_ROUNDS)


class Buffers:
    """Shares the buffers of models, and their parameters that no optimizer has.

    Collective: every worker creates it. A worker's buffers are *old* from the answers of a round until they are taken,
    or kept.

    Args:
        store: the store to which gradients are pushed; the buffers get a store of their own beside it.
        models: the networks; :func:`shared_of` is not empty.
        trained: parameters that an optimizer has; they are not shared here.
    """

    def __init__(self, store: DistStore, models: Models, trained: Iterable[torch.nn.Parameter]) -> None:
        shared = shared_of(models, trained)
        self._models, self._rank, self._names = models, store.rank, buffers_of(models).keys()
        self._lifecycle, self._in_lock_step = store.lifecycle, store.policy.merge == "all"
        self._store = store.sibling("rest")
        self._rounds = Rounds()
        self._is_old = self._is_open = self._is_kept = False
        self._taken: tuple[float, list[object]] = (0.0, [])
        """Number of the publication that was taken last, and the buffers' versions after that."""
        self._own = _kept_apart(models) if self._in_lock_step else frozenset()
        """Floating-point buffers that training may read; of which nothing was said yet."""
        self._published: Published | None = None
        broadcast(self._store, shared)
        if self._names and store.num_workers > 1:
            self._begin()

    def _begin(self) -> None:
        """Let the servers hold the first publication, as often as they hold any. Every worker calls it."""
        values = {name: as_floats(one) for name, one in means_of(self._current()).items()}
        keys = [_key(slot, name) for slot in range(1, _HELD) for name in values]
        numbers = torch.tensor(_FIRST, dtype=torch.float64, device="cpu")
        self._store.init([*keys, _NUMBERS], [*values.values()] * (_HELD - 1) + [numbers])
        if self._rank == 0:
            first = small_to_host(means_of(self._current()))
            self._published = Published({name: one.detach().clone() for name, one in first.items()})

    def _current(self) -> dict[str, list[torch.Tensor]]:
        """Return the current buffers: a module may have replaced a tensor."""
        return {name: copies for name, copies in buffers_of(self._models).items() if name in self._names}

    # ---- a round ---------------------------------------------------------------------------------------------------

    def publish(self) -> Publication | None:
        """Begin a round; rank 0 begins to send its changed buffers to the servers, if there are any."""
        self._is_open, self._is_kept = True, False
        number = self._rounds.open(self._lifecycle.pauses)
        if self._published is None:
            return None
        return Publication(self._store, means_of(self._current()), self._published, number)

    def settled(self) -> None:
        """End the round, whose answers are here: this worker's buffers are old, unless they were set meanwhile."""
        self._rounds.settle()
        self._is_open, self._is_old = False, self._is_old or not self._is_kept

    # ---- reading ---------------------------------------------------------------------------------------------------

    def take(self, is_asked: bool = False) -> None:
        """Pull rank 0's buffers of this worker's last step, unless this worker has them.

        Where the script has asked for rank 0's, other ones here are no surprise.
        """
        if self._is_open and self._rank != 0:
            self._store.session.check()  # this worker's own are read, which is said where the job has failed
        if not self.are_old:
            return
        current = self._current()
        if current:
            slot, number = self._find()
            if self._taken != (number, _versions(current)):
                self._set(current, slot, is_asked)
                self._taken = number, _versions(current)
        self._is_old = False

    def _find(self) -> tuple[int, float]:
        """Return which publication is that of this worker's last step, and its number."""
        told = torch.empty(_HELD, dtype=torch.float64, device="cpu")
        self._store.pull(_NUMBERS, told)
        numbers = told.tolist()
        last = self._rounds.last(self._lifecycle.pauses) if self._in_lock_step else math.inf
        number = max((one for one in numbers if one <= last), default=min(numbers))
        return numbers.index(number), number

    def _set(self, current: Copies, slot: int, is_asked: bool) -> None:
        own = means_of(current)
        values = {name: _travelling(one) for name, one in small_to_host(own).items()}
        self._store.pull([_key(slot, name) for name in values], list(values.values()))
        if not is_asked:
            self._say_apart([name for name in own if name in self._own and not _alike(own[name], values[name])])
        set_all(current, values)

    def keep(self) -> None:
        """Keep this worker's buffers until rank 0's next step: the loop has set them, or computes them anew."""
        self._is_old, self._is_kept = False, self._is_open

    def _say_apart(self, names: Sequence[str]) -> None:
        """Say once which buffers this worker has trained with that are not rank 0's."""
        if names:
            self._own = frozenset()
            logger.warning(
                "buffer %s of worker %d has become another than worker 0's. Only evaluation and state_dict use worker "
                "0's; forward passes of training have used this worker's own. If they read it (codebooks, queues), "
                'take kvstore="allreduce": there all buffers are worker 0\'s in each step, as with '
                "DistributedDataParallel",
                listed(repr(name.removeprefix(_PREFIX)) for name in names), self._rank,
            )  # fmt: skip

    def close(self) -> None:
        """Leave the buffers' store."""
        self._store.close()

    @property
    def are_old(self) -> bool:
        """Whether this worker may not have rank 0's buffers of its last step."""
        return self._is_old and self._rank != 0

    @property
    def are_read(self) -> bool:
        """Whether old buffers would be read: a module that has buffers is in evaluation mode."""
        modules = (module for copies in self._models for module in copies[0].modules())
        return self.are_old and any(not module.training and module._buffers for module in modules)


class Published:
    """What the servers hold of rank 0's buffers; the publications share what has not changed between them.

    Args:
        first: the buffers at the start; they must not change.
    """

    def __init__(self, first: Mapping[str, torch.Tensor]) -> None:
        self._held = [dict(first) for _ in range(_HELD)]
        self._numbers, self._last = list(_FIRST), 0

    def add(self, current: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
        """Add the buffers of a round, if any has changed; returns what the servers must get, by key."""
        last = self._held[self._last]
        found = known([unlike(one, last[name]) for name, one in current.items()])
        changed = {name: one for (name, one), is_new in zip(current.items(), found, strict=True) if is_new}
        if not changed:
            return {}
        self._last = (self._last + 1) % _HELD
        before = self._held[self._last]
        now = self._held[self._last] = last | {name: one.detach().clone() for name, one in changed.items()}
        self._numbers[self._last] = float(number)
        sent = {_key(self._last, name): as_floats(one) for name, one in now.items() if one is not before[name]}
        return sent | {_NUMBERS: torch.tensor(self._numbers, dtype=torch.float64, device="cpu")}


class Publication:
    """Rank 0's buffers of one round, on their way to the servers; a hook of a backward pass begins it, and never waits.

    Those on a CUDA device are copied beside the computation, and sent when the copies have ended.
    """

    def __init__(
        self, store: DistStore, current: Mapping[str, torch.Tensor], published: Published, number: int
    ) -> None:
        self._store, self._published, self._number = store, published, number
        self._sides: set[SideStream] = set()
        self._current = small_to_host(current, self._fetched)
        self._marks = [side.mark() for side in self._sides]
        self._calls: Sequence[Call] | None = None
        """The requests that send changed ones; None: copies have not ended yet."""
        self.advance()

    def _fetched(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in host memory, which is complete at the next mark of the side stream."""
        side = side_stream(tensor)
        if side is None:
            return to_host(tensor)
        self._sides.add(side)
        copy = host_buffer(tensor)
        side.fetch(tensor, copy)
        return copy

    def advance(self) -> bool:
        """Send the buffers once they are copied; returns whether the servers have them. Does not wait."""
        if self._calls is None and all_copied(self._marks):
            self._calls = self._send()
        return self._calls is not None and all(call.done for call in self._calls)

    def wait(self) -> None:
        """Wait until the servers have the buffers."""
        if self.advance():
            return
        session = self._store.session
        if self._calls is None:
            before = meter.active.enter(DEVICE)
            try:
                wait_for_copies(partial(all_copied, self._marks), session.settings.timeout_s, "worker 0: its buffers")
            finally:
                meter.active.leave(before)
            self._calls = self._send()
        session.wait(self._calls)

    def _send(self) -> Sequence[Call]:
        sent = self._published.add(self._current, self._number)
        return self._store.send_values(list(sent), list(sent.values())) if sent else ()


_FIRST = (0.0, *[-1.0] * (_HELD - 1))
"""Numbers of the publications at the start: those under the other keys are never read."""


def _key(slot: int, name: str) -> str:
    """Return the key of a buffer in one of the publications that are held; in the first one it is the name."""
    return f"{slot} {name}" if slot else name


def _versions(tensors: Copies) -> list[object]:
    """Return a list that is another one after a change of a tensor in place, or of which tensor it is."""
    found: list[object] = []
    for one in (one for copies in tensors.values() for one in copies):
        found += [object()] if one.is_inference() else [one.data_ptr(), one._version]
    return found


def _kept_apart(models: Models) -> frozenset[str]:
    """Return the floating-point buffers that are not those of a layer whose training does not read them."""

    def read(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        layers = [one for one in model.modules() if isinstance(one, torch.nn.modules.batchnorm._NormBase)]
        means = {id(buffer) for layer in layers for buffer in layer.buffers()}
        return {name: one for name, one in model.named_buffers() if one.is_floating_point() and id(one) not in means}

    return frozenset(f"{_PREFIX}{name}" for name in _by_name(models, read))


def _alike(own: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether a buffer is about rank 0's, which may be a step older or newer."""
    return torch.allclose(own.cpu().to(value.dtype), value, rtol=0.05, atol=1e-3, equal_nan=True)


def _travelling(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in CPU memory with a dtype that servers hold."""
    values = as_floats(tensor)
    return values if values is not tensor else values.detach().cpu().clone()
