"""Buffers of a model (running means of BatchNorm): all workers have rank 0's, as with DDP.

The output of a training model does not depend on running means. So they are not sent with every forward pass: rank 0
sends changed buffers before it pushes, and holds back the last push of the round until the servers have them. The other
workers have the answers of the round after that. Before buffers are read, they pull those of the last round whose
answers they have. Workers that are not in lock step pull the newest.

Other buffers (codebooks, queues) may be read in training, where each worker has its own. Where these have become others
than rank 0's, one line says so.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch

from paceline.kvstore.dist import DistStore
from paceline.layout.tensors import as_floats, small_to_host
from paceline.naming import listed
from paceline.optim.publications import (
    FIRST,
    HELD,
    NUMBERS,
    Number,
    Publication,
    Published,
    Rounds,
    decoded,
    encoded,
    key_of,
)
from paceline.optim.shared_tensors import (
    BUFFER,
    OWN,
    FollowingBuffers,
    Models,
    Places,
    Snapshot,
    broadcast,
    by_name,
    means_of,
    set_all,
    shared_of,
)

logger = logging.getLogger(__name__)


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
        self._models, self._rank = models, store.rank
        self._following = FollowingBuffers(models, store.rank)
        self._lifecycle, self._in_lock_step = store.lifecycle, store.policy.merge == "all"
        self._store = store.sibling("rest")
        self._rounds, self._places = Rounds(), Places(models, self._following.names)
        self._is_old = self._is_open = self._is_kept = False
        self._taken: tuple[Number, Snapshot] | None = None
        """Number of the publication that was taken last, and the buffers after that."""
        self._at_push: Snapshot | None = None
        """The buffers as the last round was pushed; None: training forward passes may have changed them since."""
        self._sees_forward = False
        """Whether a training forward pass of this round was noted. Those of parts of a model are not."""
        self._set_by_loop: set[str] = set()
        """Buffers that the loop has set since the last push, as rank 0's loop has after its publication."""
        self._own = _kept_apart(models) if self._in_lock_step else frozenset()
        """Floating-point buffers that training may read; of which nothing was said yet."""
        self._published: Published | None = None
        broadcast(self._store, shared)
        if self._following.names and store.num_workers > 1:
            self._begin()

    def _begin(self) -> None:
        """Let the servers hold the first publication, as often as they hold any. Every worker calls it."""
        first = small_to_host(self._following.told())
        values = {name: as_floats(one) for name, one in first.items()}
        keys = [key_of(slot, name) for slot in range(1, HELD) for name in values]
        self._store.init([*keys, OWN, NUMBERS], [*values.values()] * (HELD - 1) + [values[OWN], encoded(FIRST)])
        if self._rank == 0:
            self._published = Published({name: one.detach().clone() for name, one in first.items()})

    def counts(self) -> Any:
        """Return how far this worker has counted the rounds."""
        return self._rounds.counts()

    def stand(self, counts: Any) -> None:
        """Be where the others are: this worker's buffers are older than rank 0's."""
        self._rounds.stand(counts)
        self._is_old = True

    # ---- a round ---------------------------------------------------------------------------------------------------

    def publish(self) -> Publication | None:
        """Begin a round; rank 0 begins to send its changed buffers to the servers, if there are any."""
        self._is_open, self._is_kept = True, False
        number = self._rounds.open(self._lifecycle.section)
        if self._published is None:
            return None
        return Publication(self._store, self._following.told(), self._published, number)

    def pushed(self) -> None:
        """Note that all of the round is pushed: until the next training forward pass, only the loop changes buffers."""
        self._set_by_loop = set()
        self._at_push = self._places.snapshot() if self._sees_forward and self._rank != 0 else None
        self._sees_forward = False

    def settled(self) -> None:
        """End the round, whose answers are here: this worker's buffers are old, unless they were set meanwhile."""
        self._rounds.settle()
        self._is_open, self._is_old = False, self._is_old or not self._is_kept

    def forward_begins(self) -> bool:
        """Note that a forward pass begins; returns whether it reads old buffers: a part of a model evaluates.

        One that trains without gradients (``update_bn``) computes buffers anew.
        """
        if any(copies[0].training for copies in self._models):
            self._note_set()
            self._sees_forward = True
            self._is_old = self._is_old and torch.is_grad_enabled()
        return self._are_read()

    def _note_set(self) -> None:
        """Note which buffers have changed since the push, if no training forward pass can have done it."""
        if self._at_push is not None:
            self._set_by_loop = self._places.changed_since(self._at_push)
            self._at_push = None

    # ---- reading ---------------------------------------------------------------------------------------------------

    def take(self, is_asked: bool = False) -> None:
        """Pull rank 0's buffers of this worker's last step, unless this worker has them.

        Where the script has asked for rank 0's, other ones here are no surprise.
        """
        if self._is_open and self._rank != 0:
            self._store.session.check()  # this worker's own are read, which is said where the job has failed
        if not self.are_old:
            return
        self._note_set()
        kept = () if is_asked else self._set_by_loop
        if self._following.current().keys() - kept:
            slot, number = self._find()
            if self._taken is None or self._taken[0] != number or self._places.changed_since(self._taken[1]):
                self._set(slot, kept, is_asked)
                self._taken = number, self._places.snapshot()
        self._is_old = False

    def _find(self) -> tuple[int, Number]:
        """Return which publication is that of this worker's last step, and its number."""
        told = encoded(FIRST)
        self._store.pull(NUMBERS, told)
        numbers = decoded(told)
        last = self._rounds.last(self._lifecycle.section) if self._in_lock_step else max(numbers)
        number = max((one for one in numbers if one <= last), default=min(numbers))
        return numbers.index(number), number

    def _set(self, slot: int, kept: Container[str], is_asked: bool) -> None:
        values = {name: _travelling(one) for name, one in small_to_host(self._following.told()).items()}
        self._store.pull([key_of(slot, name) for name in values], list(values.values()))
        current = {name: copies for name, copies in self._following.followed(values).items() if name not in kept}
        if not is_asked:
            own = {name: one for name, one in means_of(current).items() if name in self._own}
            self._say_apart([name for name, one in own.items() if not _alike(one, values[name])])
        set_all(current, values)

    def keep(self) -> None:
        """Keep this worker's buffers until rank 0's next step: the loop has set them all."""
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
                listed(repr(name.removeprefix(BUFFER)) for name in names), self._rank,
            )  # fmt: skip

    def close(self) -> None:
        """Leave the buffers' store."""
        self._store.close()

    @property
    def are_old(self) -> bool:
        """Whether this worker may not have rank 0's buffers of its last step."""
        return self._is_old and self._rank != 0

    def _are_read(self) -> bool:
        """Return whether old buffers would be read: a module that has buffers is in evaluation mode."""
        modules = (module for copies in self._models for module in copies[0].modules())
        return self.are_old and any(not module.training and module._buffers for module in modules)


def _kept_apart(models: Models) -> frozenset[str]:
    """Return the floating-point buffers that are not those of a layer whose training does not read them."""

    def read(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        layers = [one for one in model.modules() if isinstance(one, torch.nn.modules.batchnorm._NormBase)]
        means = {id(buffer) for layer in layers for buffer in layer.buffers()}
        return {name: one for name, one in model.named_buffers() if one.is_floating_point() and id(one) not in means}

    return frozenset(f"{BUFFER}{name}" for name in by_name(models, read))


def _alike(own: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether a buffer is about rank 0's, which may be a step older or newer."""
    return torch.allclose(own.cpu().to(value.dtype), value, rtol=0.05, atol=1e-3, equal_nan=True)


def _travelling(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in CPU memory with a dtype that servers hold."""
    values = as_floats(tensor)
    return values if values is not tensor else values.detach().cpu().clone()
