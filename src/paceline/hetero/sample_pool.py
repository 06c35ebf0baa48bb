"""One queue of samples for all workers: each index is trained on once per epoch, also if workers die.

All workers walk through the pool together, once per iteration of their samplers. Walks are numbered; the start of
a walk (:class:`WalkStart`) comes with the requests, and is the same on all workers. A position of the epoch's order is
*free*, *held* by a worker, *done*, or of a later walk::

    state   event                                     becomes   answers
    free    a worker takes samples                    held      Given, with the lowest free positions
    held    its worker takes again, or says done      done      none
    held    its worker says that a push followed      done      none
    held    its worker gives it back                  free      Given to a worker that waits
    held    its worker leaves or dies, and a push     done      none
            that followed has arrived at a server
    held    its worker leaves or dies otherwise       free      Given to a worker that waits
    (none   free, none held)                          -         the next walk begins for all that wait
    (all workers wait for the next walk)              -         the next walk begins without free positions

and a worker that takes from walk w gets, depending on the pool's walk p::

    w       positions                    answer
    p       some are free                Given
    p       all are held or done         Wait; later Given (a holder has died), or Over (all are done)
    < p     -                            Over
    p + 1   all are done                 Given: the walk of the pool becomes p + 1
    p + 1   some are not done            Wait, until they are
    > p+1   -                            Refused
    p, p+1  the walk differs from that   Refused
            of the others

A worker holds its samples until it says that it has trained on them: with its next request (``done`` is the number of
its last request that it has trained on), or by the number of its last push (:meth:`Pool.pushed`). Requests are
numbered, so one that arrives twice is answered twice and counts once.

With each request a worker says the last round that it has pushed. So when it leaves, dies or comes to a barrier, it is
known whether a push followed the samples that it holds: one round more has arrived at a server.

The guarantee does not hold with a worker that pushes twice for one batch, or once for several, and dies
in between.

A worker that waits here must not keep others waiting: its stores are away until the next walk begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from paceline.layout.ranges import Ranges, cut, everything, joined, others, without


@dataclass(frozen=True)
class WalkStart:
    """The samples that a walk hands out; all workers say the same."""

    epoch: int = 0
    left: Ranges = ()
    """Positions of the epoch's order that are not trained on yet; none: all."""
    limit: int = 0
    """Samples of all workers together after which the walk is over; 0: it goes to the end of the epoch."""
    order: int = 0
    """Number of the orders: of another one, the same positions are other samples."""

    def __str__(self) -> str:
        """Return it for an error text."""
        left = f" from position {self.left[0][0]} on" if self.left else ""
        limit = f", {self.limit} samples at a time" if self.limit else ""
        return f"epoch {self.epoch}{left}{limit}, {f'seed {self.order - 1}' if self.order else 'not shuffled'}"

    def positions(self, length: int) -> Ranges:
        """Return the positions that are not trained on yet."""
        return self.left or everything(length)

    def objection(self, length: int) -> str:
        """Return the objection to it for so many samples, or an empty string."""
        is_wrong = self.left != joined(self.left) or (self.left and self.left[-1][1] > length)
        return f"positions {list(self.left)} are not ascending ranges within {length} samples" if is_wrong else ""

    def following(self, length: int) -> WalkStart:
        """Return the walk after this one: the rest of the epoch, or the whole next one."""
        _, rest = cut(self.positions(length), self.limit or length)
        return replace(self, left=rest) if rest else replace(self, epoch=self.epoch + 1, left=())


@dataclass(frozen=True)
class Given:
    """Indices that a worker now holds."""

    worker: int
    number: int
    walk: int
    ranges: Ranges


@dataclass(frozen=True)
class PoolOver:
    """The walk that the worker asked for has no more samples: all are done."""

    worker: int
    number: int
    walk: int


@dataclass(frozen=True)
class Wait:
    """All samples are held or done; the answer comes later."""

    worker: int
    number: int


@dataclass(frozen=True)
class Refused:
    """The request makes no sense, and has changed no state."""

    worker: int
    number: int
    reason: str
    error: str = "ProtocolError"
    """Type of the error."""


@dataclass(frozen=True)
class Rest:
    """The samples of an epoch that are not trained on yet."""

    walk: int
    epoch: int
    left: Ranges
    """Positions; none: all."""
    held: dict[int, Ranges]
    """Positions that other workers hold."""


Answer: TypeAlias = Given | PoolOver | Wait | Refused


@dataclass
class _Taker:
    """The samples that a worker holds, by number of the request, and its last answer."""

    held: dict[int, Ranges] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    """By number of the request, the last round that the worker had pushed before it asked."""
    last: int = 0
    answer: Answer | None = None
    waits: tuple[int, int, int, WalkStart] | None = None
    """(number, walk, count, start) of a request that waits."""

    def trained(self, round: int) -> int:
        """Return the number of the last request that a push up to a round followed; 0: none."""
        return max((number for number, before in self.rounds.items() if before < round), default=0)


class Pool:
    """The samples of an epoch as positions in its order; the order itself is not known here.

    Args:
        num_workers: ranks are 0 to ``num_workers - 1``.
        start: the first walk; by default the whole epoch 0.
    """

    def __init__(self, length: int, num_workers: int, start: WalkStart | None = None) -> None:
        self.length = length
        self._free: Ranges = ()
        self._takers = {worker: _Taker() for worker in range(num_workers)}
        self._begin(0, start or WalkStart())

    # ---- events ----------------------------------------------------------------------------------------------------

    def take(
        self, worker: int, number: int, walk: int, count: int, done: int, round: int = 0, start: WalkStart | None = None
    ) -> list[Answer]:
        """Take a request for samples; returns the answers, to this worker and to others.
        Requests are numbered from 1. The worker has trained on the samples of those up to ``done``, and has pushed
        ``round`` last. The walk has a start, by default the whole epoch of its number.
        """
        start = start or WalkStart(walk)
        taker = self._takers.get(worker)
        refused = self._objection(taker, worker, number, walk, count, start)
        if taker is None or refused is not None:
            return [refused or Refused(worker, number, f"worker {worker} has left")]
        if number == taker.last:
            return [taker.answer] if taker.answer is not None else []
        taker.last, taker.answer, taker.waits = number, None, (number, walk, count, start)
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

    def pushed(self, worker: int, round: int) -> list[Answer]:
        """Note that a worker has pushed a round: it has trained on all samples that it took before."""
        taker = self._takers.get(worker)
        return self.finish(worker, taker.trained(round)) if taker is not None else []

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

    def leave(self, worker: int, round: int = 0) -> list[Answer]:
        """Note that a worker has left or died, of which a server has this round: others get its untrained samples."""
        taker = self._takers.pop(worker, None)
        if taker is not None:
            self._finish(taker, taker.trained(round))
            self._free = joined([*self._free, *(one for held in taker.held.values() for one in held)])
        return self._settle()

    def rejoin(self, worker: int) -> None:
        """Let another process of a worker that has left take samples; its requests count from 1."""
        self._takers.setdefault(worker, _Taker())

    # ---- questions -------------------------------------------------------------------------------------------------

    def held(self) -> dict[int, Ranges]:
        """Return the positions that each worker holds."""
        return {
            worker: joined(one for ranges in taker.held.values() for one in ranges)
            for worker, taker in self._takers.items()
        }

    def rest(self, worker: int, round: int) -> Rest:
        """Return the samples of the epoch that are not trained on yet. Samples that others hold are among them.

        The worker has pushed a round, and has trained on all samples that it took before.
        """
        taker = self._takers.get(worker, _Taker())
        trained = taker.trained(round)
        held = self.held() | {worker: joined(r for number, one in taker.held.items() if number > trained for r in one)}
        left = joined([*self._free, *self._later, *(one for ranges in held.values() for one in ranges)])
        if not left:
            return Rest(self.walk, self.start.epoch + 1, (), {})
        of_others = {other: ranges for other, ranges in held.items() if ranges and other != worker}
        return Rest(self.walk, self.start.epoch, left, of_others)

    def check(self) -> None:
        """Assert that each position is free, held by one worker, done or of a later walk, and each wait has a cause.

        Raises:
            AssertionError: it is not so.
        """
        found = [*self._free, *self._later, *self.done, *(one for held in self.held().values() for one in held)]
        assert sum(stop - start for start, stop in found) == self.length, "a position is in two states, or in none"
        assert not others(joined(found), self.length), "a position is missing"
        for taker in self._takers.values():
            if taker.waits is not None:
                assert not (self._free and taker.waits[1] == self.walk), "a worker waits while there are free samples"

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _begin(self, walk: int, start: WalkStart) -> None:
        self.walk, self.start = walk, start
        left = start.positions(self.length)
        self._free, self._later = cut(left, start.limit or self.length)
        self.done = others(left, self.length)
        """Positions of the epoch that were trained on."""
        self._goal = others(self._later, self.length)

    def _objection(
        self, taker: _Taker | None, worker: int, number: int, walk: int, count: int, start: WalkStart
    ) -> Refused | None:
        if taker is None:
            return Refused(worker, number, f"worker {worker} has left")
        if number not in (taker.last, taker.last + 1):
            text = f"request {number} of worker {worker} follows its request {taker.last}; requests count from 1"
        elif number == taker.last + 1 and taker.waits is not None:
            text = f"worker {worker} asks again while its request {taker.last} waits"
        elif not 0 <= walk <= self.walk + 1:
            text = f"worker {worker} asks for walk {walk}; walk {self.walk} is not over"
        elif count < 1:
            text = f"worker {worker} asks for {count} samples"
        else:
            return self._objection_to(start, worker, number, walk)
        return Refused(worker, number, text)

    def _objection_to(self, start: WalkStart, worker: int, number: int, walk: int) -> Refused | None:
        agreed = self._agreed(walk)
        if walk < self.walk or start == agreed:
            return None
        if agreed is None:
            text = start.objection(self.length)
            return Refused(worker, number, text) if text else None
        text = (
            f"worker {worker} walks through {start}, the others through {agreed}; all workers load the same state and "
            "set the same epoch, with the same seed, and iterate equally often. A state that is the same on all "
            "workers is taken after a barrier"
        )
        return Refused(worker, number, text, "ValueError")

    def _agreed(self, walk: int) -> WalkStart | None:
        """Return the start of a walk as others have said it; None where none has yet."""
        if walk == self.walk:
            return self.start
        return next((one.waits[3] for one in self._takers.values() if one.waits and one.waits[1] == walk), None)

    def _finish(self, taker: _Taker, done: int) -> None:
        taker.rounds = {number: before for number, before in taker.rounds.items() if number > done}
        numbers = [number for number in taker.held if number <= done]
        self.done = joined([*self.done, *(one for number in numbers for one in taker.held.pop(number))])

    def _settle(self) -> list[Answer]:
        """Answer every worker that can be answered now."""
        answers: list[Answer] = []
        following = self._agreed(self.walk + 1)
        if following is not None and (self.done == self._goal or all(map(self._is_ahead, self._takers.values()))):
            answers += [self._answer(worker, taker) for worker, taker in self._waiting() if not self._is_ahead(taker)]
            self._begin(self.walk + 1, following)
        for worker, taker in self._waiting():
            is_late = taker.waits is not None and taker.waits[1] < self.walk
            if is_late or (not self._is_ahead(taker) and (self._free or self.done == self._goal)):
                answers.append(self._answer(worker, taker))
        return answers

    def _waiting(self) -> list[tuple[int, _Taker]]:
        return [(worker, taker) for worker, taker in self._takers.items() if taker.waits is not None]

    def _is_ahead(self, taker: _Taker) -> bool:
        return taker.waits is not None and taker.waits[1] > self.walk

    def _answer(self, worker: int, taker: _Taker) -> Answer:
        assert taker.waits is not None
        number, walk, count, _ = taker.waits
        taker.waits = None
        if walk < self.walk or not self._free:
            taker.answer = PoolOver(worker, number, walk)
        else:
            ranges, self._free = cut(self._free, count)
            taker.held[number] = ranges
            taker.answer = Given(worker, number, walk, ranges)
        return taker.answer


def positions(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return all positions in ranges, in order."""
    return [position for start, stop in ranges for position in range(start, stop)]
