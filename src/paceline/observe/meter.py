"""The account of this process: every part of the code says here which part of a step begins and ends.

::

    before = meter.active.enter(MERGE)
    ...
    meter.active.leave(before)

Both cost less than a microsecond, and nothing where this process has no account. An error between them leaves the part
entered until the step or the server's turn ends; so code that raises in normal use (the end of a loader, a deadline)
leaves in ``finally``, and other code need not. The account is that of one thread: the one that trains. Others change
nothing. A thread whose pushes come while the account's thread does nothing for a
whole round takes it over.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident, get_native_id
from typing import Any

from paceline.consistency.stats import bin_of
from paceline.observe import ring
from paceline.observe.account import COMPUTE, DATA, DEVICE, GC, OTHER, WAIT, WORKER_PARTS, Steps, in_windows
from paceline.observe.events import PART, ROUND
from paceline.observe.host import HostFigures
from paceline.wire import messages as m

#: Rounds that are kept between two heartbeats; neighbours are joined where there are more.
_MAX_ROUNDS = 1024

#: Windows that a heartbeat carries at most.
MAX_WINDOWS = 8

#: Shortest window of a server's account.
TURN_S = 0.1

#: Returned by :meth:`Meter.enter` where nothing was entered.
NOTHING = -1

#: In place of a thread: no thread counts.
NO_THREAD = 0


@dataclass(slots=True, eq=False)
class ExchangeTime:
    """An exchange of gradients that another thread carries out.

    Attributes:
        began: when it was asked for.
        ended: when it was over; None: it is not.
        device_s: seconds in which an accelerator still computed the gradients.
    """

    began: float
    ended: float | None = None
    device_s: float = 0.0


class Meter:
    """The account of a process: a clock that is always in exactly one part, so that the parts sum up to the time.

    Args:
        parts: names of the parts.
        base: the part in which nothing else was entered.
        gc_part: the part of garbage collections.
        thread: thread that counts; None: the one that makes the meter.
    """

    def __init__(
        self,
        parts: tuple[str, ...] = WORKER_PARTS,
        base: int = COMPUTE,
        gc_part: int = GC,
        clock: Callable[[], float] = time.monotonic,
        thread: int | None = None,
    ) -> None:
        self.now = clock
        """Returns seconds on this meter's clock."""
        self._gc_part, self._before_gc = gc_part, NOTHING
        self._part, self._seconds = base, [0.0] * len(parts)
        """The present part, and the seconds of all parts since the last round ended."""
        self._since = self._begun = clock()
        """When the present part began, and the round."""
        self._thread = get_ident() if thread is None else thread
        self._native_id = get_native_id()
        self._host: HostFigures | None = None
        self._steps: list[Steps] = []
        self._asked: tuple[int, float] | None = None
        """Number and samples of a round that another thread has ended: this one ends it in the account."""
        self._waited_s, self._way_s, self._has_begun = 0.0, 0.0, False
        self._base, self._sees_forward = base, False
        self.steps = 0
        """Steps of optimizers so far."""
        self.open_steps = 0
        """Local steps of the present round."""
        self._turned, self._turns, self._updates = clock(), 0, 0
        self._late: dict[int, tuple[int, float]] = {}
        self.late_s = 0.0
        """Seconds by which workers have completed cohorts after the others, so far."""
        self._exchange: ExchangeTime | None = None
        """The last one since the optimizer's step. The thread that trains waits for it at the end of backward."""
        self._staleness: Counter[int] = Counter()
        self._held = (0, 0)
        self.last: tuple[int, float] = (0, 1.0)
        """Number and samples of the last round."""
        self.on_round: Callable[[Steps], None] | None = None
        """Called with the account of each round."""

    @property
    def host(self) -> HostFigures:
        """Figures of the host, since the first use of this."""
        # A cached_property would make a dict of all attributes, and each use of one slower.
        if self._host is None:
            self._host = HostFigures(self._native_id)
        return self._host

    # ---- parts -------------------------------------------------------------------------------------------------------

    def enter(self, part: int) -> int:
        """Begin a part; returns the one before, for :meth:`leave`."""
        if get_ident() != self._thread:
            return NOTHING
        if self._asked is not None:
            self._close(*self._asked)
        before = self._part
        self.leave(part)
        return before

    def leave(self, before: int) -> None:
        """Go on with the part before one that :meth:`enter` has begun."""
        ended = self._part
        if before != NOTHING and before != ended:
            now = self.now()
            since, self._since, self._part = self._since, now, before  # at once: a collection switches, too
            self._seconds[ended] += now - since
            ring.note(PART, before, 0, 0, now)

    def _count_up(self, now: float) -> None:
        """Count the seconds of the present part so far."""
        since, self._since = self._since, now
        self._seconds[self._part] += now - since

    def forward_begins(self) -> None:
        """Begin the computation of a step: the forward pass of a model whose gradients are exchanged."""
        if not _is_compiling() and self.enter(COMPUTE) != NOTHING:
            self._sees_forward = True

    def step_ends(self) -> None:
        """End a step of the optimizer. The time after it is ``other``, if a forward pass has ended that before."""
        self.steps += 1
        if self.enter(OTHER if self._sees_forward else self._base) != NOTHING:
            self._sees_forward = False

    def note_local_step(self) -> None:
        """Note a step within a period, at whose end an exchange comes. The first one ends the start of the script."""
        if get_ident() == self._thread:
            if self._has_begun:
                self.open_steps += 1
            else:
                self._close(*self.last)

    def note_way(self, seconds: float) -> None:
        """Note that a request or its answer was on the way for so much of a wait. The account's thread calls it."""
        self._way_s += seconds

    @property
    def waited_s(self) -> float:
        """Seconds of the part ``wait`` so far."""
        return self._waited_s + self._seconds[WAIT]

    @property
    def open_own_s(self) -> float | None:
        """Seconds of the present round, less its waits; None while it waits. Any thread may ask."""
        if self._part == WAIT:
            return None
        now, one = self.now(), self._exchange
        waited_s = 0.0 if one is None else (one.ended or now) - one.began
        return max(0.0, now - self._begun - self._seconds[WAIT] - waited_s)

    # ---- exchanges beside the thread that trains ---------------------------------------------------------------------

    def begin_exchange(self) -> ExchangeTime:
        """Note that another thread is asked to exchange gradients. Any thread may call it."""
        self._exchange = ExchangeTime(self.now())
        return self._exchange

    def end_exchange(self, one: ExchangeTime, device_s: float = 0.0) -> None:
        """Note that an exchange is over. Any thread may call it."""
        one.device_s, one.ended = device_s, self.now()

    def await_exchange(self) -> bool:
        """Count the last exchange as a wait; returns whether there was one since the last call.

        Those before it took place while the thread went on with the backward pass.
        """
        one = self._exchange
        if one is None or get_ident() != self._thread:
            return False
        self._exchange, now = None, self.now()
        whole_s = (one.ended or now) - one.began
        device_s = min(one.device_s, whole_s)
        self._count_up(now)
        for part, seconds in ((DEVICE, device_s), (WAIT, whole_s - device_s)):
            moved_s = min(seconds, self._seconds[self._part])
            self._seconds[self._part] -= moved_s
            self._seconds[part] += moved_s
        return True

    # ---- rounds ------------------------------------------------------------------------------------------------------

    def end_round(self, round: int, samples: float) -> None:
        """End a round: the first push of the next one is made."""
        ring.note(ROUND, round)
        self.last = round, samples
        if get_ident() == self._thread:
            self._close(round, samples)
        elif self._asked is None:
            self._asked = round, samples
        else:
            self._thread = get_ident()
            self._close(round, samples)

    def _close(self, round: int, samples: float) -> None:
        now, self._asked = self.now(), None
        self._count_up(now)
        steps = Steps(round, 1, samples, self._seconds, self._way_s, self.open_steps)
        self._begun, self._seconds, self._way_s, self.open_steps = now, [0.0] * len(self._seconds), 0.0, 0
        if len(steps.seconds) > WAIT:  # a server's account has no such part
            self._waited_s += steps.seconds[WAIT]
        if self._has_begun:  # the time before the first push is the start of the script, and no round
            kept = self._steps
            kept.append(steps)
            if len(kept) > _MAX_ROUNDS:
                self._steps = in_windows(kept, _MAX_ROUNDS // 2)
            if self.on_round is not None:
                self.on_round(steps)
        self._has_begun = True

    def take(self) -> list[Steps]:
        """Return the rounds since the last call, in a few windows. Any thread may call it."""
        steps, self._steps = self._steps, []
        return in_windows(steps, MAX_WINDOWS)

    # ---- servers: turns, and cohorts ---------------------------------------------------------------------------------

    def end_turn(self) -> None:
        """End a turn of a server's loop, and now and then a window of its account."""
        self.leave(self._base)
        now = self.now()
        if now - self._turned > TURN_S:
            updates, self._updates, self._turned = self._updates, 0, now
            self._close(self._turns, updates)
            self._turns += 1

    def note_update(self) -> None:
        """Count an update."""
        self._updates += 1

    def note_staleness(self, staleness: int) -> None:
        """Count the staleness of an update of values that this server owns."""
        self._staleness[bin_of(staleness)] += 1

    def hold(self, values: int, buckets: int) -> None:
        """Note that this server holds so many more values, in so many more buckets."""
        self._held = self._held[0] + values, self._held[1] + buckets

    def came_last(self, worker: int, late_s: float) -> None:
        """Note that a worker completed a cohort, so long after the others."""
        times, seconds = self._late.get(worker, (0, 0.0))
        self._late[worker] = times + 1, seconds + late_s
        self.late_s += late_s

    # ---- heartbeats --------------------------------------------------------------------------------------------------

    def report(
        self, group: int = 0, is_ddp: bool = False, is_shared: bool = False, is_local: bool = False
    ) -> m.AccountReport:
        """Return all since the last call, for a heartbeat. Called by one thread, which need not be the account's."""
        self.host.stops.start()
        late, self._late = self._late, {}
        staleness, self._staleness = self._staleness, Counter()
        windows = [
            m.Window(w.round, w.rounds, w.samples, [round(1e6 * part) for part in w.seconds], round(1e6 * w.way_s))
            for w in self.take()
        ]
        return m.AccountReport(
            windows,
            self.host.read(),
            [(worker, times, round(1e6 * seconds)) for worker, (times, seconds) in late.items()],
            group,
            list(staleness.items()),
            self._held,
            is_ddp,
            is_shared,
            is_local,
        )

    # ---- garbage collections -----------------------------------------------------------------------------------------

    def collects(self, phase: str, info: dict[str, int]) -> None:
        """Note the begin or end of a garbage collection (``gc.callbacks``)."""
        if get_ident() != self._thread:
            return
        if phase == "start":
            self._before_gc = self._part
            self.leave(self._gc_part)
        else:
            self.leave(self._before_gc)
            self._before_gc = NOTHING


# ---- the meter of this process ---------------------------------------------------------------------------------------

_IDLE = Meter(thread=NO_THREAD)

active = _IDLE
"""The account of this process; one in which nothing counts before :func:`start` and after :func:`stop`."""


def start(meter: Meter) -> None:
    """Make a meter that of this process, in place of an earlier one."""
    global active
    stop(active)
    active = meter
    meter.host  # noqa: B018 - its figures begin here
    gc.callbacks.append(meter.collects)
    watch_loaders()


def stop(meter: Meter) -> None:
    """Use a meter no more. Idempotent."""
    global active
    if meter.collects in gc.callbacks:
        gc.callbacks.remove(meter.collects)
        meter.host.stops.close()
    active = _IDLE if active is meter else active


def _is_compiling() -> bool:
    """Tell whether torch.compile reads this code instead of running it."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


# ---- data loaders ----------------------------------------------------------------------------------------------------

_MARK = "_paceline_next"


def watch_loaders() -> None:
    """Let iterators of torch's data loaders note the time in ``next``. No object of the user's is changed.

    torch's class gets a ``__next__`` that calls its own one. Where torch has no such class, loaders are not watched.
    """
    loader = sys.modules.get("torch.utils.data.dataloader")
    iterator = getattr(loader, "_BaseDataLoaderIter", None)
    if iterator is None or hasattr(iterator, _MARK):
        return
    original = iterator.__next__

    def next_batch(self: Any) -> Any:
        before = active.enter(DATA)
        try:
            return original(self)
        finally:
            active.leave(before)

    setattr(iterator, _MARK, original)
    iterator.__next__ = next_batch
