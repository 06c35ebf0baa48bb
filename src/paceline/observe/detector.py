"""Finds the processes that slow a job down, and the parts of their steps that explain it. Pure.

Every window of rounds of a worker is compared with the others of its group, part by part, or with its own past where
it has no others. Logarithms of ratios are counted in standard deviations, which are robust (medians and median absolute
deviations), and summed up as long as they exceed :data:`DRIFT` (a cusum): a small excess needs more rounds than a large
one, and no single round is enough.

| state of a worker | event | next |
|---|---|---|
| as the others | the sum of a part exceeds :data:`ALARM`, and the excess is worth a word | slow, because of that part |
| as the others | collections or stops take :data:`RARE` of its time, in several windows | slow, because of these |
| as the others | in lock step it comes last, later than its own time explains, again and again | slow: its link |
| slow | its excess was worth no word in :data:`GOOD` windows | as the others |
| slow | another part explains most of its excess, for as long | slow, because of that part |

A worker's own time is that of its round without its waits for answers. Where servers merge no rounds of several
workers, a worker waits for no other one, and its waits count, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.observe.account import (
    FAULTS,
    FIGURES,
    GC,
    INTERVAL,
    STALLED,
    STOLEN,
    STOPPED,
    WAIT,
    WORKER_PARTS,
)  # fmt: skip
from paceline.observe.history import (
    KEPT_WAITING,
    LEAST_S,
    LONG,
    OUT_OF_QUOTA,
    PARTS,
    USUAL,
    History,
    Reference,
    Round,
    floor_of,
    mean_round,
    middle,
    of_others,
    of_past,
    rate_of,
    share_of,
)  # fmt: skip
from paceline.observe.servers import SlowServers, WaitShare
from paceline.observe.verdicts import Cost, Verdict

#: Standard deviations that a window may exceed the others without a count, most that one counts, and the alarm.
DRIFT, MOST, ALARM = 1.0, 4.2, 9.5

#: An excess worth a word: this part of a worker's round, and so many seconds; and for so long.
WORTH, WORTH_S, SHORTEST_S = 0.1, LEAST_S, 0.5

#: Part of a worker's time that rare pauses take, and windows in which they occur, before they are worth a word.
RARE, RARE_WINDOWS = 0.05, 2

#: A wait for processors, or a rate of page faults, that is this multiple of the others' is the worker's own; the first
#: one in :data:`GOOD` windows, and in fewer if it is the second multiple.
ALONE, ALONE_EARLY = 3.0, 10.0


#: Page faults in a second that explain a long part; those that do where waits for memory take this part of the time.
FAULTY, FAULTY_IF_SHORT, STALLING = 200, 8, 0.03

#: Windows after which a worker counts as quick again, or as slow for another reason.
GOOD = 8

#: Windows of others before a verdict.
FIRST = 4

#: Rounds at the start that load libraries and make memory.
WARM_UP = 3

#: Reports of servers about late workers that are counted at least; a worker with a slow link comes last in this part of
#: the cohorts; and the logarithm of the rounds in which chance alone gives that once (1e9; 1e5 if it is very late).
_REPORTS, MOSTLY_LAST, UNLIKELY = 4, 0.7, 22.0

_OWN = tuple(part for part in range(len(PARTS)) if part not in (WAIT, GC))


@dataclass
class _Worker(History):
    """A worker's history, and the present state of its verdict."""

    sums: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    onsets: list[int] = field(default_factory=lambda: [0] * len(PARTS))
    past: Reference | None = None
    """Its own usual times, of a worker that has no others to be compared with."""
    open: deque[Sequence[int]] = field(default_factory=lambda: deque(maxlen=LONG))
    """Figures of its host since the last rounds, the last ones."""
    verdict: Verdict | None = None
    good: int = 0
    """Windows in a row in which nothing was wrong."""
    other: int = 0
    """Windows in a row with another cause than that of the verdict."""
    lost_s: float = 0.0
    """Time that it has cost the others."""
    causes: tuple[str, ...] = ()
    """Of all its verdicts."""


class Detector:
    """Takes the accounts of all processes, and returns changes."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._left: list[Cost] = []
        """Costs of workers that have left."""
        self._servers = SlowServers()
        self._merges_rounds = False
        """Whether workers wait for each other."""

    # ---- accounts --------------------------------------------------------------------------------------------------

    def note_worker(
        self,
        rank: int,
        host: str,
        windows: Iterable[tuple[int, int, float, Sequence[float]]],
        figures: Sequence[int],
        group: int = 0,
    ) -> list[Verdict]:
        """Take the account of a worker.

        Args:
            rank: its rank.
            host: its host.
            windows: first round, rounds, samples and seconds by part.
            figures: figures of its host since the last call: :data:`paceline.observe.account.FIGURES`.
            group: number of its group: workers of one group are compared.

        Returns:
            A change of its state, if there is one.
        """
        worker = self._workers.setdefault(rank, _Worker(rank, host))
        worker.group = group
        if len(figures) == len(FIGURES):
            worker.open.append(tuple(figures))
            if worker.rounds:  # at the start a process reads libraries
                worker.hosts.append(tuple(figures))
        rounds = [mean_round(*one, worker.open) for one in windows if one[0] > WARM_UP and one[1] > 0]
        if not rounds:
            return []
        reference = self._reference(worker)
        for one in rounds:
            worker.rounds.append(one)
            if reference is not None:
                self._count(worker, one, reference)
        worker.open.clear()
        worker.settle()
        return [] if reference is None else self._judge(worker, reference)

    def note_late(self, late: Iterable[tuple[int, int, float]]) -> None:
        """Take a server's account of the workers that came last: rank, cohorts, seconds after the others in all."""
        found = {rank: (times, seconds) for rank, times, seconds in late}
        cohorts = sum(times for times, _ in found.values())
        if not cohorts:
            return
        self._merges_rounds = True
        for rank, worker in self._workers.items():
            times, seconds = found.get(rank, (0, 0.0))
            worker.late.append((cohorts, times, seconds))

    def leave(self, rank: int) -> None:
        """Forget a worker that has left; the time it has cost is kept."""
        worker = self._workers.pop(rank, None)
        if worker is not None:
            self._left += _costs([worker])

    @property
    def verdicts(self) -> list[Verdict]:
        """The workers that are slow now, the most expensive first."""
        found = [one.verdict for one in self._workers.values() if one.verdict is not None] + self._servers.verdicts
        return sorted(found, key=lambda one: -one.lost)

    @property
    def losses(self) -> list[Cost]:
        """The workers that were slow in this job, the most expensive first."""
        return sorted([*self._left, *_costs(self._workers.values())], key=lambda one: -one.seconds)

    def recent(self, rank: int) -> tuple[int, float, list[float]] | None:
        """Return rounds, samples and seconds by part of a worker's last windows; None where there are none."""
        worker = self._workers.get(rank)
        last = [] if worker is None else list(worker.rounds)[-USUAL:]
        if not last:
            return None
        seconds = [sum(one.seconds[part] * one.weight for one in last) for part in range(len(WORKER_PARTS))]
        return sum(one.weight for one in last), sum(one.samples * one.weight for one in last), seconds

    @property
    def rate(self) -> float:
        """Samples per second of all workers."""
        return sum(rate_of(one) for one in self._workers.values() if one.rounds)

    def note_server(
        self, rank: int, host: str, windows: Iterable[Sequence[float]], figures: Sequence[int]
    ) -> list[Verdict]:
        """Take the account of a server: seconds by part of each window; returns a change of its state."""
        workers = [one for one in self._workers.values() if one.usual]
        waited = min((one.usual[WAIT] / (one.usual[WAIT] + one.typical_s) for one in workers), default=0.0)
        round = max((one.rounds[-1].round for one in workers if one.rounds), default=0)
        return self._servers.note(rank, host, windows, figures, WaitShare(waited, round, self.rate))

    # ---- comparison ------------------------------------------------------------------------------------------------

    def _reference(self, worker: _Worker) -> Reference | None:
        group = [one for one in self._workers.values() if one.group == worker.group and one is not worker]
        others = [one for one in group if len(one.rounds) >= FIRST]
        if others:
            return of_others(others)
        past = [] if group else list(worker.rounds)[: -2 * GOOD]
        if worker.verdict is None:  # a slow worker is still compared with the time before
            worker.past = of_past(worker, past) if len(past) >= GOOD else None
        return worker.past

    def _parts(self) -> tuple[int, ...]:
        return _OWN if self._merges_rounds else (*_OWN, WAIT)

    def _count(self, worker: _Worker, one: Round, reference: Reference) -> None:
        """Add the deviations of a window to the sums of its parts."""
        floor = floor_of(reference.own_s)
        for part in self._parts():
            value, usual, before = one.parts[part], reference.usual[part], worker.sums[part]
            deviation = math.log((value + floor) / (usual + floor)) / reference.noise[part] if value > usual else 0.0
            if before == 0.0:
                worker.onsets[part] = one.round
            worker.sums[part] = min(2 * ALARM, max(0.0, before + min(deviation, MOST) - DRIFT))
        if worker.verdict is not None:
            worker.lost_s += one.weight * max(0.0, self._excess_of_all(one, reference))

    def _excess_of_all(self, one: Round, reference: Reference) -> float:
        """Return how long the others wait for a worker in a round."""
        return min(one.wall_s, one.own_s - reference.slowest_s) if self._merges_rounds else one.own_s - reference.own_s

    def _judge(self, worker: _Worker, reference: Reference) -> list[Verdict]:
        found = (
            self._slow_part(worker, reference) or self._rare_part(worker, reference) or self._late(worker, reference)
        )
        if found is None:
            return self._improve(worker, reference)
        cause, part, since, excess_s = found
        worker.good = 0
        now = worker.verdict
        if now is not None and now.cause == cause:
            worker.other = 0
            return []
        worker.other += 1
        if now is not None and worker.other < GOOD:
            return []
        worker.other = 0
        worker.verdict = self._verdict(worker, reference, cause, part, since if now is None else now.round, excess_s)
        worker.causes = tuple(dict.fromkeys((*worker.causes, cause)))
        return [worker.verdict]

    def _improve(self, worker: _Worker, reference: Reference) -> list[Verdict]:
        """Note that a worker is quick; returns the end of a verdict when it has been so for a while."""
        now = worker.verdict
        if now is None:
            return []
        worker.good += 1
        if worker.good < GOOD:
            return []
        worker.verdict, worker.good = None, 0
        return [Verdict(worker.rank, worker.host, "", -1, 1.0, 0.0, worker.rounds[-1].round, 0.0, reference.alone)]

    def _slow_part(self, worker: _Worker, reference: Reference) -> tuple[str, int, int, float] | None:
        """Return the cause, the part, its first round and the excess, if parts of its steps are much longer."""
        alarmed = [part for part in self._parts() if worker.sums[part] > (ALARM if worker.verdict is None else 0.0)]
        if not alarmed:
            return None
        since = min(worker.onsets[part] for part in alarmed)
        last = [one for one in worker.rounds if one.round >= since][-GOOD:]
        if not last or sum(one.wall_s * one.weight for one in last) < SHORTEST_S:
            return None
        excess = {part: middle([one.parts[part] for one in last]) - reference.usual[part] for part in alarmed}
        part = max(excess, key=lambda one: excess[one])
        whole = middle([one.own_s for one in last])
        if part != WAIT and whole < (1 + WORTH) * reference.own_s:
            return None  # other parts are shorter: nobody waits for it
        if excess[part] < max(WORTH * (whole + (excess[part] if part == WAIT else 0.0)), WORTH_S):
            return None
        half = reference.usual[part] + excess[part] / 2
        since = next((one.round for one in worker.rounds if one.round >= since and one.parts[part] > half), since)
        cause = self._cause(worker, part, excess[part], last, reference)
        return (cause, part, since, excess[part]) if cause else None

    def _cause(self, worker: _Worker, part: int, excess_s: float, last: Sequence[Round], reference: Reference) -> str:
        """Return why a part takes so long; empty: its excess says nothing about this worker."""
        if part == WAIT:
            return "link"
        if part == KEPT_WAITING:
            return "busy" if self._is_alone_in_queues(worker, last) else ""
        if part == OUT_OF_QUOTA:
            return "throttled"
        if excess_s < max(middle([one.parts[KEPT_WAITING] for one in last]), reference.usual[KEPT_WAITING]):
            return ""  # the others' threads and locks of this process wait for processors, too
        host = self._host_cause(worker, excess_s / (middle([one.wall_s for one in last]) or 1.0))
        if host is not None:
            return host
        samples = middle([one.samples for one in last])
        expected = reference.usual[part] * samples / reference.samples if reference.samples else 0.0
        if samples > 1.1 * reference.samples and middle([one.parts[part] for one in last]) < 1.25 * expected:
            return "batch"
        return WORKER_PARTS[part]

    def _is_alone_in_queues(self, worker: _Worker, last: Sequence[Round]) -> bool:
        """Tell whether a worker waits for processors far longer than every other one on its host, and most elsewhere.

        A host that has too much to do for all of its workers makes now this one, now that one wait longest.
        """

        def recent(one: _Worker) -> float:
            return middle([round.parts[KEPT_WAITING] for round in one.rounds][-len(last) :])

        others = [one for one in self._workers.values() if one is not worker and one.usual]
        waits = [(one.host, max(one.usual[KEPT_WAITING], recent(one))) for one in others]
        beside = [wait_s for host, wait_s in waits if host == worker.host]
        least = ALONE if len(last) >= GOOD else ALONE_EARLY
        return recent(worker) > least * max([middle([wait_s for _, wait_s in waits] or [0.0]), *beside])

    def _host_cause(self, worker: _Worker, share: float) -> str | None:
        """Return the figure of the host that explains most of an excess, which is this share of the time.

        Empty: it does, but as much for the other workers. None: no figure does.
        """
        others = [one for one in self._workers.values() if one is not worker]

        def of(one: _Worker, figure: int) -> float:
            return share_of(list(one.hosts)[-2:], figure)

        def explains(figure: int) -> bool | None:
            """Tell whether a figure of this worker only explains the excess; None: one of all workers."""
            own, usual = of(worker, figure), middle([of(one, figure) for one in others] or [0.0])
            return own - usual > 0.4 * share or (None if own > 0.4 * share else False)

        faults, usual = 1e6 * of(worker, FAULTS), 1e6 * middle([of(one, FAULTS) for one in others] or [0.0])
        is_short = of(worker, STALLED) > STALLING  # of memory, or others of its host are: its page faults tell
        if faults > ALONE * usual + (FAULTY_IF_SHORT if is_short else FAULTY):
            return "memory"
        found = {"memory": explains(STALLED), "stolen": explains(STOLEN)}
        if True in found.values():
            return next(cause for cause, is_own in found.items() if is_own)
        return "" if None in found.values() else None

    def _rare_part(self, worker: _Worker, reference: Reference) -> tuple[str, int, int, float] | None:
        """Return collections or stops that take much of a worker's time, although most rounds have none."""
        last = list(worker.rounds)[-LONG // 2 :]
        rounds = sum(one.weight for one in last)
        wall_s = sum(one.wall_s * one.weight for one in last)
        held_s = sum(one.weight * max(0.0, self._excess_of_all(one, reference)) for one in last)
        pauses = [one for one in last if one.parts[GC] > max(WORTH_S, RARE * one.wall_s)]
        lost_s = sum(one.parts[GC] * one.weight for one in pauses)
        least = RARE if worker.verdict is None else RARE / 2
        if len(pauses) >= RARE_WINDOWS and min(held_s, lost_s) > least * wall_s:
            return "gc", GC, pauses[0].round, lost_s / rounds
        spare_s = max(0.0, reference.slowest_s - worker.typical_s)  # whatever the worker does then, nobody waits for it
        stops = [held for one in worker.hosts if (held := 1e-6 * one[STOPPED] - spare_s) > 0]
        share = sum(stops) / (1e-6 * sum(one[INTERVAL] for one in worker.hosts) or 1.0)
        if len(stops) >= RARE_WINDOWS and share > least:
            return "stopped", -1, last[0].round, share * wall_s / rounds
        return None

    def _late(self, worker: _Worker, reference: Reference) -> tuple[str, int, int, float] | None:
        """Return a link that makes a worker come last, as servers see it, although its own time is as the others'."""
        if not self._merges_rounds or reference.alone or len(self._workers) < 2:
            return None
        cohorts = times = reports = 0
        late_s, wall_s = 0.0, middle([one.wall_s for one in worker.rounds])
        queued_s = max(worker.usual[KEPT_WAITING], reference.usual[KEPT_WAITING])
        for one in reversed(worker.late):
            cohorts, times, late_s, reports = cohorts + one[0], times + one[1], late_s + one[2], reports + 1
            if reports < _REPORTS or times < MOSTLY_LAST * cohorts:
                continue
            own_s = [one.own_s for one in worker.rounds][-cohorts:]
            by_itself_s = max(worker.typical_s, sum(own_s) / len(own_s)) - reference.slowest_s
            excess_s = late_s / cohorts - max(0.0, by_itself_s)
            if excess_s < max(WORTH * wall_s, WORTH_S, queued_s):
                continue
            least = UNLIKELY / 2 if excess_s > worker.typical_s / 2 else UNLIKELY
            if cohorts * _surprise(times / cohorts, 1 / min(8, len(self._workers))) >= least:
                return "link", -1, worker.rounds[max(-len(worker.rounds), -cohorts)].round, excess_s
        return None

    # ---- verdicts --------------------------------------------------------------------------------------------------

    def _verdict(
        self, worker: _Worker, reference: Reference, cause: str, part: int, since: int, excess_s: float
    ) -> Verdict:
        last = [one for one in worker.rounds if one.round >= since][-GOOD:] or list(worker.rounds)[-1:]
        own_s = sum(one.own_s for one in last) / len(last)
        wall_s = sum(one.wall_s for one in last) / len(last)
        if cause in ("link", "stopped"):  # no part of its step takes longer, or another one each time
            ratio, share = (own_s + excess_s) / own_s if own_s else 1.0, excess_s / wall_s if wall_s else 0.0
        else:
            ratio = own_s / reference.own_s if reference.own_s else 1.0
            part = part if cause == PARTS[part] else -1
            share = sum(one.parts[part] for one in last) / len(last) / own_s if part >= 0 and own_s else 0.0
        held_s = excess_s
        if self._merges_rounds and cause not in ("link", "stopped"):
            held_s = min(excess_s, max(own_s - reference.slowest_s, 0.0) or excess_s)
        together = [one for one in self._workers.values() if one.rounds] if self._merges_rounds else [worker]
        samples = sum(one.rounds[-1].samples for one in together)
        lost = samples / (wall_s - held_s) - samples / wall_s if wall_s > held_s else 0.0
        return Verdict(worker.rank, worker.host, cause, part, ratio, share, since, lost, reference.alone)


def _costs(workers: Iterable[_Worker]) -> list[Cost]:
    return [Cost(one.rank, one.host, one.causes, one.lost_s) for one in workers if one.causes]


def _surprise(share: float, usual: float) -> float:
    """Return by how much each trial makes it unlikelier that chance alone gives this share, in nats (Chernoff)."""
    rest = (1 - share) * math.log((1 - share) / (1 - usual)) if share < 1 else 0.0
    return share * math.log(share / usual) + rest
