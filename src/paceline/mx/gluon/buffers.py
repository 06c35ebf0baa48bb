"""Buffers of replicated networks (running means of BatchNorm) in a job of several workers.

The output of a network in training does not depend on them. So rank 0 publishes changed buffers before it pushes, and
the other workers pull them before they are read: when a network goes into evaluation mode, and for ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.kvstore.dist import DistStore
from paceline.mx.gluon.parameter import Replicas
from paceline.tensors import as_floats, set_from_floats


class SharedBuffers:
    """Gives all workers rank 0's buffers of some networks. Collective: every worker creates it.

    Args:
        store: a store of the job; only stores on servers can hold what rank 0 alone writes.
        nets: networks, distinct and with known shapes.
    """

    def __init__(self, store: DistStore, nets: Sequence[Replicas]) -> None:
        self._nets, self._rank, self._stale = nets, store.rank, True
        self._published = self._current()
        self._store = store.sibling("rest") if self._published else None
        if self._store is None:
            return
        self._store.init(list(self._published), list(self._published.values()))
        self.take()

    def publish(self) -> None:
        """Send rank 0's changed buffers to the servers; the other workers mark theirs as old."""
        self._stale = True
        if self._store is None or self._rank != 0:
            return
        current = self._current()
        changed = [key for key, one in current.items() if not torch.equal(one, self._published[key])]
        if changed:
            self._store.set_values(changed, [current[key] for key in changed])
        self._published = current

    @torch.no_grad()
    def take(self) -> None:
        """Pull rank 0's buffers of its last step, unless this worker has them."""
        if self._store is None or self._rank == 0 or not self._stale:
            return
        values = self._current()
        self._store.pull(list(values), list(values.values()))
        self._stale = False
        for number, net in enumerate(self._nets):
            for name, copies in net.buffers_by_name().items():
                for one in copies if copies[0].numel() else ():
                    set_from_floats(one, values[f"{number} {name}"])

    def _current(self) -> dict[str, torch.Tensor]:
        """Return the buffers as ``state_dict`` does, in dtypes that servers hold."""
        return {
            f"{number} {name}": _joined(copies)
            for number, net in enumerate(self._nets)
            for name, copies in net.buffers_by_name().items()
            if copies[0].numel()
        }


def _joined(copies: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean over devices of a floating-point buffer, else the first device's."""
    if not copies[0].is_floating_point():
        return as_floats(copies[0])
    return torch.stack([one.detach().cpu() for one in copies]).mean(0)
