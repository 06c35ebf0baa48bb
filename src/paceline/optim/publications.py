"""Rank 0's buffers on the servers: as they were in its last rounds, each under keys of its own.

| worker 0                                  | the servers hold    | a worker that has the answers of round r reads |
|-------------------------------------------|---------------------|------------------------------------------------|
| publishes round r + 1, pushes             | r - 1, r, r + 1     | those of r                                     |
| publishes r + 2: all have pushed r + 1    | r, r + 1, r + 2     | those of r, if it has not settled r + 1        |
| publishes r + 3: all have settled r + 1   | r + 1, r + 2, r + 3 | nothing: it has the answers of r + 1           |

So three publications are held, and a tensor has the numbers of their rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch

from paceline.kvstore.dist import DistStore
from paceline.layout.tensors import as_floats, host_buffer, small_to_host, to_host
from paceline.net.call import Call
from paceline.observe import meter
from paceline.observe.account import DEVICE
from paceline.optim.binding import known, unlike
from paceline.optim.device import SideStream, all_copied, side_stream, wait_for_copies

#: Number of a round: of its section of the job (two numbers), and in that.
Number: TypeAlias = tuple[int, int, int]

NUMBERS = "numbers of buffers"
"""Key of the numbers of the publications that are held."""

HELD = 3
"""Publications that the servers hold."""

FIRST: Sequence[Number] = ((0, 0, 0), *[(-1, 0, 0)] * (HELD - 1))
"""Numbers of the publications at the start: those under the other keys are never read."""


def encoded(numbers: Sequence[Number]) -> torch.Tensor:
    """Return numbers of publications as servers hold them."""
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def decoded(told: torch.Tensor) -> list[Number]:
    """Return the numbers of which :func:`encoded` made a tensor."""
    return [(int(one), int(two), int(three)) for one, two, three in told.tolist()]


def key_of(slot: int, name: str) -> str:
    """Return the key of a buffer in one of the publications that are held; in the first one it is the name."""
    return f"{slot} {name}" if slot else name


class Rounds:
    """Numbers the rounds of workers in lock step, alike on all of them, so that later ones have larger numbers. Pure.

    In each section of the job (:attr:`~paceline.kvstore.dist.StoreLifecycle.section`) all count anew: in the one before
    some may have made fewer rounds than others.
    """

    def __init__(self) -> None:
        self._opened: Number = (0, 0, 0)
        self._settled: Number = (0, 0, 0)

    def open(self, section: tuple[int, int]) -> Number:
        """Begin a round in a section; returns its number."""
        *before, count = self._opened
        self._opened = (*section, count + 1 if tuple(before) == section else 1)
        return self._opened

    def counts(self) -> list[Number]:
        """Return the numbers of the last rounds, for :meth:`stand` of another worker."""
        return [self._opened, self._settled]

    def stand(self, counts: Sequence[Sequence[int]]) -> None:
        """Go on where another worker stands between two rounds."""
        opened, settled = (tuple(one) for one in counts)
        self._opened, self._settled = opened, settled  # type: ignore[assignment]

    def settle(self) -> None:
        """Note that the answers of the round are here."""
        self._settled = self._opened

    def last(self, section: tuple[int, int]) -> Number:
        """Return the largest number that the last round whose answers are here may have had on another worker."""
        return max(self._settled, (*section, 0))


class Published:
    """What the servers hold of rank 0's buffers; the publications share what has not changed between them.

    Args:
        first: the buffers at the start; they must not change.
    """

    def __init__(self, first: Mapping[str, torch.Tensor]) -> None:
        self._held = [dict(first) for _ in range(HELD)]
        self._numbers, self._last = list(FIRST), 0

    def add(self, current: Mapping[str, torch.Tensor], number: Number) -> dict[str, torch.Tensor]:
        """Add the buffers of a round, if any has changed; returns what the servers must get, by key."""
        last = self._held[self._last]
        found = known([unlike(one, last[name]) for name, one in current.items()])
        changed = {name: one for (name, one), is_new in zip(current.items(), found, strict=True) if is_new}
        if not changed:
            return {}
        self._last = (self._last + 1) % HELD
        before = self._held[self._last]
        now = self._held[self._last] = last | {name: one.detach().clone() for name, one in changed.items()}
        self._numbers[self._last] = number
        sent = {key_of(self._last, name): as_floats(one) for name, one in now.items() if one is not before[name]}
        return sent | {NUMBERS: encoded(self._numbers)}


class Publication:
    """Rank 0's buffers of one round on their way to the servers; a hook of a backward pass begins it without waiting.

    Those on a CUDA device are copied beside the computation, and sent when the copies have ended.
    """

    def __init__(
        self, store: DistStore, current: Mapping[str, torch.Tensor], published: Published, number: Number
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
