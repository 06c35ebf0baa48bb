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

A worker's own time is that of its round without its waits for answers. Waits count, too, as long as no server tells of
workers that wait for each other. :mod:`paceline.observe.causes` has how a part becomes a cause.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.observe.account import FIGURES, GC, INTERVAL, STOPPED, WAIT, WORKER_PARTS, Steps
from paceline.observe.causes import (
    WORTH,
    WORTH_S,
    Cause,
    is_usual_excess,
    main_of,
    of_lost_share,
    of_own_time,
    of_waits,
    of_way,
    past_of,
    surprise,
    surprise_of,
)  # fmt: skip
from paceline.observe.history import (
    KEPT_WAITING,
    LONG,
    ON_WAY,
    OUT_OF_QUOTA,
    PARTS,
    History,
    HostShares,
    LateReport,
    Means,
    Ranking,
    Reference,
    Round,
    floor_of,
    gain_of,
    mean_round,
    middle,
    of_past,
)  # fmt: skip
from paceline.observe.servers import SlowServers, WaitShare
from paceline.observe.verdicts import BY_SAMPLES, Cost, Verdict

#: Standard deviations that a window may exceed the others without a count, beside the doubt about the others' times,
#: the most that one counts, and the alarm.
DRIFT, MOST, ALARM = 1.15, 3.25, 9.5

#: Windows for which those of a heartbeat count where figures of the host are compared, and the factor of the doubt.
OF_HEARTBEAT = 2

#: Seconds for which a worker is slow before a verdict.
SHORTEST_S = 0.5

#: Part of a worker's time that rare pauses take, and windows in which they occur, before they are worth a word.
RARE, RARE_WINDOWS = 0.05, 2

#: Windows after which a worker counts as quick again, or as slow for another reason.
GOOD = 8

#: Windows of others before a verdict.
FIRST = 4

#: Rounds at the start that load libraries and make memory.
WARM_UP = 3

#: Reports of servers about late workers that are counted at least; a worker with a slow link comes last in this part of
#: the cohorts; and the logarithm of the rounds in which chance alone gives that once (1e9).
_REPORTS, MOSTLY_LAST, UNLIKELY = 2, 0.7, 22.0

#: Windows that tell how long a worker waits for answers of late.
_ANSWERED = 3

_OWN = tuple(part for part in range(len(PARTS)) if part not in (WAIT, GC))


@dataclass
class _Worker(History):
    """A worker's history, and the present state of its verdict."""

    sums: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))
    onsets: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)] * len(PARTS))
    """Round and number of the heartbeat in which the sum of each part left zero."""
    past: Reference | None = None
    """Its own usual times, of a worker that has no others to be compared with."""
    before: Means | None = None
    """Its times while it had its share of the samples, where shares follow speeds."""
    open: deque[Sequence[int]] = field(default_factory=lambda: deque(maxlen=LONG))
    """Figures of its host since the last rounds, the last ones."""
    heard: int = 0
    """Number of its last heartbeat, among those of all workers."""
    verdict: Verdict | None = None
    good: int = 0
    """Windows in a row in which nothing was wrong."""
    other: int = 0
    """Windows in a row with another cause than that of the verdict."""
    lost_s: float = 0.0
    """Time that it has cost the others."""
    causes: tuple[str, ...] = ()
    """Of all its verdicts."""
    gain: float = 0.0
    """Of its last verdict."""


class Detector:
    """Takes the accounts of all processes, and returns changes."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}
        self._rankings: dict[int, Ranking] = {}
        """Of each group, the workers that have told enough."""
        self._left: dict[int, Cost] = {}
        """Costs of workers that have left, by rank."""
        self._servers = SlowServers()
        self._heartbeats = 0
        self._in_step = False
        """Whether workers wait for each other."""
        self._is_ddp = self._is_shared = self._is_local = False

    # ---- accounts --------------------------------------------------------------------------------------------------

    def note_worker(
        self,
        rank: int,
        host: str,
        windows: Iterable[Steps],
        figures: Sequence[int],
        group: int = 0,
        is_ddp: bool = False,
        is_shared: bool = False,
        is_local: bool = False,
    ) -> list[Verdict]:
        """Take the account of a worker since the last call; returns a change of its state, if there is one.

        ``figures`` are those of its host: :data:`paceline.observe.account.FIGURES`. Workers of one group are compared.
        Rounds of a DDP script are those of workers that wait for each other. Where the job is shared, samples go to
        workers by their speed already. ``is_local``: rounds are periods of local steps.
        """
        worker = self._workers.get(rank)
        if worker is None:
            worker = self._workers[rank] = _Worker(rank, host)
        if worker.group != group:
            worker.group = group
            self._compare(worker)
        self._is_ddp |= is_ddp
        self._is_shared |= is_shared
        self._is_local |= is_local
        self._in_step |= is_ddp
        if len(figures) == len(FIGURES):
            worker.open.append(tuple(figures))
            if worker.rounds:  # at the start a process reads libraries
                worker.hosts.append(tuple(figures))
        self._heartbeats += 1
        worker.heard = self._heartbeats
        shares = HostShares.of(worker.open)
        rounds = [
            mean_round(one, shares, worker.heard)
            for one in windows
            if one.round > WARM_UP and one.rounds > 0 and one.wall_s > 0
        ]
        if not rounds:
            return []
        worker.open.clear()
        reference = self._reference(worker)
        worker.add(rounds)
        if worker.ranking is None:
            self._compare(worker)
        if reference is None:
            return []
        for one in rounds:
            self._count(worker, one, reference, min(1.0, OF_HEARTBEAT / len(rounds)))
        return self._judge(worker, reference)

    def note_late(self, late: Iterable[tuple[int, int, float]]) -> None:
        """Take a server's account of the workers that came last: rank, cohorts, seconds after the others in all."""
        found = {rank: (times, seconds) for rank, times, seconds in late}
        sums: dict[int, tuple[int, float]] = {}
        for rank in found.keys() & self._workers.keys():
            group = self._workers[rank].group
            cohorts, group_s = sums.get(group, (0, 0.0))
            sums[group] = cohorts + found[rank][0], group_s + found[rank][1]
        self._in_step |= bool(sums)
        for rank, worker in self._workers.items():
            cohorts, group_s = sums.get(worker.group, (0, 0.0))
            if cohorts:
                times, seconds = found.get(rank, (0, 0.0))
                worker.punctual = 0 if times else worker.punctual + 1
                worker.late.append(LateReport(cohorts, times, seconds, group_s, worker.windows))

    def leave(self, rank: int) -> None:
        """Forget a worker that has left; the time it has cost is kept."""
        worker = self._workers.pop(rank, None)
        if worker is not None:
            self._unrank(worker)
            for cost in self._costs([worker]):
                self._left[rank] = cost.joined(self._left.get(rank))

    @property
    def verdicts(self) -> list[Verdict]:
        """The workers that are slow now, the most expensive first."""
        found = [one.verdict for one in self._workers.values() if one.verdict is not None] + self._servers.verdicts
        return sorted(found, key=lambda one: -one.lost)

    @property
    def losses(self) -> list[Cost]:
        """The workers that were slow in this job, the most expensive first."""
        return sorted([*self._left.values(), *self._costs(self._workers.values())], key=lambda one: -one.seconds)

    @property
    def rate(self) -> float:
        """Samples per second of all workers."""
        return sum(one.rate for one in self._workers.values() if one.rounds)

    def note_server(
        self, rank: int, host: str, windows: Iterable[Sequence[float]], figures: Sequence[int]
    ) -> list[Verdict]:
        """Take the account of a server: seconds by part of each window; returns a change of its state."""
        self._heartbeats += 1
        return self._servers.note(rank, host, windows, figures, self._waits, self._heartbeats)

    def _waits(self) -> WaitShare:
        workers = [one for one in self._workers.values() if one.usual]
        last = [list(one.rounds)[-_ANSWERED:] for one in workers]
        waited = min((middle([one.seconds[WAIT] / one.wall_s for one in rounds]) for rounds in last), default=0.0)
        round = max((one.rounds[-1].round for one in workers if one.rounds), default=0)
        return WaitShare(waited, round, self.rate)

    # ---- comparison ------------------------------------------------------------------------------------------------

    def _compare(self, worker: _Worker) -> None:
        """Rank a worker with those of its group, if it has told enough."""
        self._unrank(worker)
        if len(worker.rounds) >= FIRST:
            self._rankings.setdefault(worker.group, Ranking()).add(worker)

    def _unrank(self, worker: _Worker) -> None:
        """Rank a worker no more, and keep no ranking of nobody."""
        if worker.ranking is not None:
            worker.ranking.remove(worker)
            self._rankings = {group: one for group, one in self._rankings.items() if not one.is_empty}

    def _reference(self, worker: _Worker) -> Reference | None:
        ranking = self._rankings.get(worker.group)
        if ranking is not None and ranking.has_others(worker):
            return ranking.reference(worker)
        others = any(one.group == worker.group and one is not worker for one in self._workers.values())
        past = [] if others else list(worker.rounds)[: -2 * GOOD]
        if worker.verdict is None:  # a slow worker is still compared with the time before
            worker.past = of_past(worker, past) if len(past) >= GOOD else None
        return worker.past

    def _known(self, worker: _Worker) -> int:
        """Return the number of the heartbeat since which most others have told, too, what their rounds take."""
        others = [one.heard for one in self._workers.values() if one.group == worker.group and one is not worker]
        return sorted(others)[(len(others) - 1) // 2] if others else self._heartbeats

    def _parts(self) -> tuple[int, ...]:
        return _OWN if self._in_step else (*_OWN, WAIT)

    def _count(self, worker: _Worker, one: Round, reference: Reference, of_host: float) -> None:
        """Add the deviations of a window to the sums of its parts; of figures of the host, this part of them."""
        floor, onset = floor_of(reference.own_s), (one.round, worker.heard)
        for part in self._parts():
            value, usual, before = one.parts[part], reference.usual[part], worker.sums[part]
            if before == 0.0:
                worker.onsets[part] = onset
                if value <= usual:
                    continue
            deviation = math.log((value + floor) / (usual + floor)) / reference.noise(part) if value > usual else 0.0
            doubt, counts = (OF_HEARTBEAT, of_host) if part in (KEPT_WAITING, OUT_OF_QUOTA) else (1, 1.0)
            counted = counts * min(deviation - DRIFT - doubt * reference.doubt, MOST)
            worker.sums[part] = min(2 * ALARM, max(0.0, before + counted))
        if worker.verdict is not None:
            worker.lost_s += one.weight * max(0.0, self._excess_of_all(one, reference))

    def _excess_of_all(self, one: Round, reference: Reference) -> float:
        """Return how long the others wait for a worker in a round."""
        return min(one.wall_s, one.own_s - reference.slowest_s) if self._in_step else one.own_s - reference.own_s

    def _judge(self, worker: _Worker, reference: Reference) -> list[Verdict]:
        found = [self._long_part(worker, reference), self._rare_part(worker, reference)]
        cause = main_of(found) or self._late(worker, reference) or self._lost_share(worker, reference)
        if cause is None:
            return self._improve(worker, reference)
        worker.good = 0
        now = worker.verdict
        if now is not None and now.cause == cause.name:
            worker.other = 0
            return []
        worker.other += 1
        if now is not None and worker.other < GOOD:
            return []
        worker.other = 0
        worker.verdict = self._verdict(worker, reference, cause, cause.since if now is None else now.round)
        worker.causes = tuple(dict.fromkeys((*worker.causes, cause.name)))
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

    def _long_part(self, worker: _Worker, reference: Reference) -> Cause | None:
        """Return why parts of a worker's steps are much longer than the others', again and again."""
        least = ALARM if worker.verdict is None else 0.0
        alarmed = [part for part in self._parts() if worker.sums[part] > least]
        known = self._known(worker) if alarmed else 0
        alarmed = [part for part in alarmed if worker.onsets[part][1] <= known]
        since = min((worker.onsets[part] for part in alarmed), default=(0, 0))[0]
        last = [one for one in worker.rounds if one.round >= since][-GOOD:] if alarmed else []
        spent_s = sum(one.wall_s * one.weight for one in last)
        if spent_s < SHORTEST_S:
            return None
        usual = reference.means(spent_s)
        others = [one for one in self._workers.values() if one is not worker]
        # Waits of more computation count for the part that has grown.
        grown = [part for part in self._parts() if worker.sums[part] > 0.0] if KEPT_WAITING in alarmed else []
        long = {*alarmed, *(part for part in grown if is_usual_excess(last, part, usual))}
        found = [of_own_time(worker, others, last, usual, long)]
        is_far = not self._servers.are_all_on(worker.host)
        if is_far and ON_WAY in alarmed and self._servers.are_quick(worker.onsets[ON_WAY][1]):
            found.append(of_way(last, usual, reference.slowest_s if self._in_step else usual.own_s))
        if is_far and WAIT in alarmed:
            found.append(of_waits(last, reference.means_after(worker.onsets[WAIT][1])))
        return main_of(found)

    def _rare_part(self, worker: _Worker, reference: Reference) -> Cause | None:
        """Return collections or stops that take much of a worker's time, although most rounds have none."""
        last = list(worker.rounds)[-LONG // 2 :]
        pauses = [one for one in last if one.parts[GC] > WORTH_S and one.parts[GC] > RARE * one.wall_s]
        spare_s = max(0.0, reference.slowest_s - worker.typical_s)  # whatever the worker does then, nobody waits for it
        stops = [held for one in worker.hosts if (held := 1e-6 * one[STOPPED] - spare_s) > 0]
        if max(len(pauses), len(stops)) < RARE_WINDOWS:
            return None
        rounds = sum(one.weight for one in last)
        wall_s = sum(one.wall_s * one.weight for one in last)
        held_s = sum(one.weight * max(0.0, self._excess_of_all(one, reference)) for one in last)
        lost_s = sum(one.parts[GC] * one.weight for one in pauses)
        least = RARE if worker.verdict is None else RARE / 2
        if len(pauses) >= RARE_WINDOWS and min(held_s, lost_s) > least * wall_s:
            return Cause("gc", GC, pauses[0].round, lost_s / rounds)
        share = sum(stops) / (1e-6 * sum(one[INTERVAL] for one in worker.hosts) or 1.0)
        if len(stops) >= RARE_WINDOWS and share > least:
            return Cause("stopped", -1, last[0].round, share * wall_s / rounds)
        return None

    def _late(self, worker: _Worker, reference: Reference) -> Cause | None:
        """Return a link that makes a worker come last, as servers see it, although its own time is as the others'."""
        if not self._in_step or reference.alone or worker.punctual >= len(worker.late):
            return None
        team = sum([one.group == worker.group for one in self._workers.values()])
        if team < 2 or self._servers.are_all_on(worker.host):
            return None
        cohorts = times = reports = 0
        late_s, wall_s = 0.0, middle([one.wall_s for one in worker.rounds])
        queued_s = max(worker.usual[KEPT_WAITING], worker.recent[KEPT_WAITING], reference.usual[KEPT_WAITING])
        told = [one for one in reversed(worker.late) if one.windows < worker.windows]  # what it did then is known
        for one in told:
            cohorts, times, late_s = cohorts + one.cohorts, times + one.times, late_s + one.seconds
            reports += 1
            if reports < _REPORTS or times < MOSTLY_LAST * cohorts:
                continue
            own_s = [one.own_s for one in worker.rounds]
            spans = own_s[-cohorts:], own_s[one.windows - worker.windows :]
            by_itself_s = max(worker.typical_s, *(sum(span) / len(span) for span in spans)) - reference.slowest_s
            excess_s = late_s / cohorts - max(0.0, by_itself_s)
            if excess_s < max(WORTH * wall_s, WORTH_S, queued_s):
                continue
            chance = surprise(times / cohorts, 1 / min(8, team)) + surprise_of(excess_s, told[reports:])
            if cohorts * chance >= UNLIKELY:
                return Cause("link", -1, worker.rounds[max(-len(worker.rounds), -cohorts)].round, excess_s)
        return None

    def _lost_share(self, worker: _Worker, reference: Reference) -> Cause | None:
        """Return why a worker has far fewer samples than before, as shares follow its speed."""
        rounds = list(worker.rounds)
        if worker.verdict is None and self._is_shared:
            worker.before = past_of(rounds)
        known = None if reference.alone else worker.before
        return None if known is None else of_lost_share(known, rounds, reference.means(SHORTEST_S))

    # ---- verdicts --------------------------------------------------------------------------------------------------

    def _verdict(self, worker: _Worker, reference: Reference, why: Cause, since: int) -> Verdict:
        cause, part, excess_s = why.name, why.part, why.excess_s
        last = [one for one in worker.rounds if one.round >= since][-GOOD:] or list(worker.rounds)[-1:]
        own_s = sum(one.own_s for one in last) / len(last)
        wall_s = sum(one.wall_s for one in last) / len(last)
        if cause in ("link", "stopped"):  # no part of its step takes longer, or another one each time
            ratio, share = (own_s + excess_s) / own_s if own_s else 1.0, excess_s / wall_s if wall_s else 0.0
        else:
            usual_s = why.sample_s * sum(one.samples for one in last) / len(last) or reference.own_s
            ratio = own_s / usual_s if usual_s else 1.0
            part = part if cause in WORKER_PARTS else -1
            share = sum(one.seconds[part] for one in last) / len(last) / own_s if part >= 0 and own_s else 0.0
        held_s = excess_s
        waited_for = self._in_step and not (self._is_shared and cause in BY_SAMPLES)  # its share follows, or will
        if waited_for and cause not in ("link", "stopped"):
            held_s = min(excess_s, max(own_s - reference.slowest_s, 0.0) or excess_s)
        together = [one for one in self._workers.values() if one.rounds] if waited_for else [worker]
        samples = sum(one.rounds[-1].samples for one in together)
        lost = samples / (wall_s - held_s) - samples / wall_s if wall_s > held_s else 0.0
        team = [one for one in self._workers.values() if one.group == worker.group]
        may_gain = self._in_step and not self._is_shared and cause in BY_SAMPLES
        worker.gain = gain_of(worker, own_s, team) if may_gain else 0.0
        return Verdict(
            worker.rank, worker.host, cause, part, ratio, share, since, lost, reference.alone,
            gain=worker.gain, is_ddp=self._is_ddp, is_shared=self._is_shared, has_lost_share=why.sample_s > 0,
            is_local=self._is_local,
        )  # fmt: skip

    def _costs(self, workers: Iterable[_Worker]) -> list[Cost]:
        return [
            Cost(one.rank, one.host, one.causes, one.lost_s, one.gain, self._is_ddp, self._is_local)
            for one in workers
            if one.causes
        ]
