"""One queue of samples for all workers: each index is trained on once per epoch, whoever dies.

An index of an epoch's order is *free*, *held* by a worker, or *done*::

    state   event                                     becomes   answers
    free    a worker takes samples                    held      Given, with the lowest free indices
    held    its worker takes again, or says done      done      none
    held    its worker gives it back                  free      Given to a worker that waits
    held    its worker leaves or dies, and a push     done      none
            that followed has arrived at a server
    held    its worker leaves or dies otherwise       free      Given to a worker that waits
    (all    done)                                     free      the next epoch begins for who waits for it

and a worker that takes from epoch e gets, depending on the pool's epoch p::

    e       indices                      answer
    p       some are free                Given
    p       all are held or done         Wait; later Given (a holder has died), or Over (all are done)
    < p     -                            Over
    p + 1   all are done                 Given: the epoch of the pool becomes p + 1
    p + 1   some are not done            Wait, until they are
    > p+1   -                            Refused

A worker holds what it took until it says that it has trained on it: with its next request (``done`` is the number of
its last request that it has trained on) or with :meth:`Pool.finish`. Requests are numbered, so one that arrives twice
is answered twice and counts once.

With each request a worker says the last round that it has pushed. So when it leaves or dies, it is known whether a push
followed what it holds: one round more has arrived at a server.

What breaks the guarantee: a worker that pushes twice for one batch, or once for several, and dies in between.

A worker that waits here must not keep others waiting: in lock step its store enters a barrier's pause while it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from paceline.ranges import Ranges, joined, without


@dataclass(frozen=True)
class Given:
    """Indices that a worker now holds."""

    worker: int
    number: int
    epoch: int
    ranges: Ranges


@dataclass(frozen=True)
class Over:
    """The epoch that the worker asked for has no more samples: all are done."""

    worker: int
    number: int
    epoch: int


@dataclass(frozen=True)
class Wait:
    """All samples are held or done; the answer comes later."""

    worker: int
    number: int


@dataclass(frozen=True)
class Refused:
    """The request makes no sense; nothing has changed."""

    worker: int
    number: int
    reason: str


Answer: TypeAlias = Given | Over | Wait | Refused


@dataclass
class _Taker:
    """What a worker holds, by number of the request, and its last answer."""

    held: dict[int, Ranges] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    """By number of the request, the last round that the worker had pushed before it asked."""
    last: int = 0
    answer: Answer | None = None
    waits: tuple[int, int, int] | None = None
    """(number, epoch, count) of a request that waits."""


class Pool:
    """The samples of an epoch as positions in its order; the order itself is not known here.

    Args:
        length: samples of an epoch.
        num_workers: ranks are 0 to ``num_workers - 1``.
        epoch: the first epoch.
        done: positions of that epoch that were done before (of a job that continues).
    """

    def __init__(self, length: int, num_workers: int, epoch: int = 0, done: Ranges = ()) -> None:
        self.length, self.epoch = length, epoch
        self._takers = {worker: _Taker() for worker in range(num_workers)}
        self._free: Ranges = ((0, length),) if length else ()
        for start, stop in done:
            self._free = without(self._free, start, stop)
        self.done: Ranges = done
        """Positions of the epoch that were trained on."""

    # ---- events ----------------------------------------------------------------------------------------------------

    def take(self, worker: int, number: int, epoch: int, count: int, done: int, round: int = 0) -> list[Answer]:
        """Take a request for samples; returns the answers, to this worker and to others.

        Args:
            worker: who asks; one that has left is refused.
            number: of the request, from 1.
            epoch: of which it wants samples.
            count: how many at most.
            done: number of the last request whose samples it has trained on; 0: none.
            round: the last that it has pushed.
        """
        taker = self._takers.get(worker)
        reason = self._objection(taker, worker, number, epoch, count)
        if taker is None or reason:
            return [Refused(worker, number, reason)]
        if number == taker.last:
            return [taker.answer] if taker.answer is not None else []
        taker.last, taker.answer, taker.waits = number, None, (number, epoch, count)
        taker.rounds[number] = round
        self._finish(taker, done)
        answers = self._settle()
        if taker.waits is not None:
            taker.answer = Wait(worker, number)
            answers.append(taker.answer)
        return answers

    def finish(self, worker: int, done: int) -> list[Answer]:
        """Note that a worker has trained on the samples of its requests up to number ``done``."""
        taker = self._takers.get(worker)
        if taker is not None:
            self._finish(taker, done)
        return self._settle()

    def give_back(self, worker: int, number: int, ranges: Ranges) -> list[Answer]:
        """Note that a worker will not train on samples of a request; those that it does not hold change nothing."""
        taker = self._takers.get(worker)
        if taker is not None and number in taker.held:
            held = kept = taker.held[number]
            for start, stop in ranges:
                kept = without(kept, start, stop)
            for start, stop in kept:
                held = without(held, start, stop)
            taker.held[number] = kept
            self._free = joined([*self._free, *held])
        return self._settle()

    def join(self, worker: int) -> None:
        """Note that a worker has joined; one that is there already changes nothing."""
        self._takers.setdefault(worker, _Taker())

    def leave(self, worker: int, round: int = 0) -> list[Answer]:
        """Note that a worker has left or died: others get what it held and has not trained on.

        Args:
            worker: who is gone.
            round: its last that a server has.
        """
        taker = self._takers.pop(worker, None)
        if taker is not None:
            self._finish(taker, max((number for number, before in taker.rounds.items() if before < round), default=0))
            self._free = joined([*self._free, *(one for held in taker.held.values() for one in held)])
        return self._settle()

    # ---- questions -------------------------------------------------------------------------------------------------

    def held(self) -> dict[int, Ranges]:
        """Return the positions that each worker holds."""
        return {
            worker: joined(one for ranges in taker.held.values() for one in ranges)
            for worker, taker in self._takers.items()
        }

    def check(self) -> None:
        """Assert that every position is free, held by one worker, or done, and that nobody waits for nothing.

        Raises:
            AssertionError: it is not so.
        """
        everything = [*self._free, *self.done, *(one for held in self.held().values() for one in held)]
        assert sum(stop - start for start, stop in everything) == self.length, "a position is in two states, or in none"
        assert joined(everything) == (((0, self.length),) if self.length else ()), "a position is missing"
        for taker in self._takers.values():
            if taker.waits is not None:
                assert not (self._free and taker.waits[1] == self.epoch), "a worker waits while there are free samples"

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _objection(self, taker: _Taker | None, worker: int, number: int, epoch: int, count: int) -> str:
        if taker is None:
            return f"worker {worker} has left"
        if number not in (taker.last, taker.last + 1):
            return f"request {number} of worker {worker} follows its request {taker.last}; requests count from 1"
        if number == taker.last + 1 and taker.waits is not None:
            return f"worker {worker} asks again while its request {taker.last} waits"
        if not 0 <= epoch <= self.epoch + 1:
            return f"worker {worker} asks for epoch {epoch}; epoch {self.epoch} is not over"
        return f"worker {worker} asks for {count} samples" if count < 1 else ""

    def _finish(self, taker: _Taker, done: int) -> None:
        taker.rounds = {number: before for number, before in taker.rounds.items() if number > done}
        numbers = [number for number in taker.held if number <= done]
        self.done = joined([*self.done, *(one for number in numbers for one in taker.held.pop(number))])

    def _settle(self) -> list[Answer]:
        """Answer everybody who can be answered now."""
        answers: list[Answer] = []
        if self._is_over() and any(one.waits and one.waits[1] > self.epoch for one in self._takers.values()):
            answers += [self._answer(worker, taker) for worker, taker in self._waiting() if not self._is_ahead(taker)]
            self.epoch, self.done = self.epoch + 1, ()
            self._free = ((0, self.length),) if self.length else ()
        for worker, taker in self._waiting():
            if not self._is_ahead(taker) and (self._free or self._is_over() or taker.waits[1] < self.epoch):  # type: ignore[index]
                answers.append(self._answer(worker, taker))
        return answers

    def _waiting(self) -> list[tuple[int, _Taker]]:
        return [(worker, taker) for worker, taker in self._takers.items() if taker.waits is not None]

    def _is_ahead(self, taker: _Taker) -> bool:
        return taker.waits is not None and taker.waits[1] > self.epoch

    def _is_over(self) -> bool:
        return self.done == (((0, self.length),) if self.length else ())

    def _answer(self, worker: int, taker: _Taker) -> Answer:
        assert taker.waits is not None
        number, epoch, count = taker.waits
        taker.waits = None
        if epoch < self.epoch or not self._free:
            taker.answer = Over(worker, number, epoch)
        else:
            ranges, self._free = cut(self._free, count)
            taker.held[number] = ranges
            taker.answer = Given(worker, number, epoch, ranges)
        return taker.answer


def cut(ranges: Ranges, count: int) -> tuple[Ranges, Ranges]:
    """Return the first positions, and the rest."""
    first: list[tuple[int, int]] = []
    rest: list[tuple[int, int]] = []
    for start, stop in ranges:
        middle = min(stop, start + count)
        first += [(start, middle)] if start < middle else []
        rest += [(middle, stop)] if middle < stop else []
        count -= middle - start
    return tuple(first), tuple(rest)


def positions(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return all positions in ranges, in order."""
    return [position for start, stop in ranges for position in range(start, stop)]
