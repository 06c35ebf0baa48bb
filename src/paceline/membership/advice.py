"""The log's lines about a job that goes on, and its status: advice, which neither lets members live nor die. Pure.

| :class:`Advice` learns from heartbeats | and says |
|---|---|
| accounts of time (:mod:`.accounts`) | which processes are slow, and why |
| speeds (:mod:`.following`) | which groups, or which choice of ``dist_auto``, fit them now |
| rounds | which workers train fewer rounds than others |
| steps (:mod:`.told_steps`) | which workers have other weights, how workers weigh, and whose batches differ |
| words of workers on their training (:mod:`.alone`) | which exchange nothing, or have the samples of others |
| figures of the script | those of the whole job |

The servers wait neither for a worker that has left nor for one at a barrier: the others train on without it, in every
mode. That may be meant, or a loop that ended early, or a batch that raised an error which the script swallowed. So the
log says it once for each worker when it happens, and at the end how many rounds each has trained. With a pool of
samples unequal rounds are the purpose; then there is no line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from paceline.config import Settings
from paceline.membership.accounts import Verdicts
from paceline.membership.alone import Alone
from paceline.membership.effects import Action, Answer, MemberKey, Warn, refuse
from paceline.membership.following import Following
from paceline.membership.roster import MemberRecord, Roster, without_token
from paceline.membership.told_steps import ToldSteps
from paceline.membership.waits import Waits
from paceline.naming import workers_text
from paceline.observe.job_figures import JobFigures
from paceline.wire import messages as m

#: How often the figures of the job are worked out.
SETTLE_INTERVAL_S = 1.0

#: Heartbeats that are judged together at most. One after the other they take a third of the time that each takes alone:
#: code and histories are in the processor's caches then.
_TOGETHER = 256


class Advice:
    """Judges what heartbeats tell.

    Attributes:
        following: the groups that fit the speeds.
        verdicts: the slow processes, and the reasons.
        figures: those that the workers' scripts report.
        alone: workers that exchange nothing.
    """

    def __init__(self, settings: Settings, roster: Roster, waits: Waits, now: float) -> None:
        self._roster, self._waits, self._settled = roster, waits, now
        self.following, self.verdicts, self.figures = Following(settings), Verdicts(), JobFigures()
        self._rounds, self._told_steps = TrainedRounds(), ToldSteps()
        self.alone, self._num_workers = Alone(settings.num_workers), settings.num_workers
        self._heard: list[tuple[m.Member, m.Heartbeat, float]] = []
        """Heartbeats that are still to be judged."""
        self._lines: list[Action] = []

    def note(self, member: m.Member, beat: m.Heartbeat, now: float) -> None:
        """Take a member's account, weights and figures; they are judged together with those of others."""
        self._heard.append((member, beat, now))
        if len(self._heard) >= _TOGETHER:
            self._judge_all()

    def note_training(self, peer: bytes, seq: int, told: m.Training, now: float) -> Answer:
        """Take in how a worker trains, joined or not; returns the answer to it."""
        if not 0 <= told.rank < self._num_workers:
            return refuse(peer, seq, f"there is no worker {told.rank}: the job has {self._num_workers}")
        self.alone.note(told, now)
        return Answer(peer, seq, m.Done())

    def judge(self, now: float) -> list[Action]:
        """Return the lines that follow from what members have told since the last call."""
        self._judge_all()
        lines, self._lines = self._lines, []
        return [*lines, *map(Warn, self.alone.check(self._last_rounds(), now))]

    def why_alone(self) -> str:
        """Return the lines about workers that exchange nothing; empty: there are none."""
        return self.alone.why_alone(self._last_rounds())

    def _last_rounds(self) -> dict[int, int]:
        return {one.member.rank: one.round for one in self._roster.of_role("worker")}

    def _judge_all(self) -> None:
        heard, self._heard = self._heard, []
        for one in heard:
            self._lines += self._judge(*one)
        # Some of these workers may have left since.
        self._lines += map(Warn, self._told_steps.check(lambda: {rank for _, rank in self._roster.expected()}))

    def _judge(self, member: m.Member, beat: m.Heartbeat, now: float) -> list[Action]:
        try:
            told = self.verdicts.note(member, beat.account, self.following.groups[1], now)
        except Exception as error:  # noqa: BLE001 - border: a defect in the advice ends no job
            self.verdicts = Verdicts()
            who = f"{member.role} {member.rank} on {member.host}"
            told = [Warn(f"the account of {who} could not be judged, verdicts begin anew: {error!r}; please report it")]
        if member.role == "worker":
            self._told_steps.note(member.rank, beat.steps)
            left_out = self.figures.note(member.rank, beat.reports, now)
            told += [Warn(left_out)] if left_out else []
        return told

    def leave(self, member: m.Member) -> None:
        """Forget a member that has left."""
        self._judge_all()
        self.verdicts.leave(member)

    def settle(self, now: float) -> None:
        """Work out the figures of the job, if it is time."""
        if now - self._settled >= SETTLE_INTERVAL_S:
            self._settled = now
            self.figures.settle([one.member.rank for one in self._roster.of_role("worker") if one.live], now)

    def uneven(self) -> list[Action]:
        """Return lines about workers without which others train on, or have until now."""
        if self._waits.pools.exist:
            return []
        return self._rounds.check(self._roster.of_role("worker"), self._waits.barriers.entered())

    def end(self, now: float) -> list[Action]:
        """Return the lines for the end of the job: rounds that differ, slow processes, workers that trained alone."""
        workers = self._roster.of_role("worker")
        rounds = [] if self._waits.pools.exist else self._rounds.summary(workers)
        alone = list(map(Warn, self.alone.end(self._last_rounds())))
        return [*self.judge(now), *rounds, *self.verdicts.end(), *alone]

    def status(self, deaths: Sequence[m.Death], now: float) -> m.Status:
        """Return the members, their rounds, and how long each was not heard."""
        self._judge_all()
        records = sorted(self._roster.items())
        return m.Status(
            [without_token(record.member) for _, record in records],
            [self._state(key, record, now) for key, record in records],
            list(deaths),
            self.following.sentences,
            self.verdicts.sentences,
            self.verdicts.told(now),
            self.figures.of_job(),
            self.verdicts.cohorts,
            self.verdicts.staleness,
            self._told_steps.weighing.lines,
        )

    def _state(self, key: MemberKey, one: MemberRecord, now: float) -> m.MemberState:
        going = "leaving" if one.notice else "live"
        phase = "dead" if one.dead else "left" if one.left else "silent" if one.warned else going
        waits_for = " ".join(map(str, self._waits.missing_for(key)))
        figures = self.figures.of_worker(key[1]) if key[0] == "worker" else {}
        return m.MemberState(
            one.round, one.pace, now - one.heard, one.memory, one.sent, one.received, phase, waits_for, one.step_s,
            self.verdicts.recent(key), self.verdicts.whole(key), figures, *self.verdicts.late(key),
            self.verdicts.held(key), one.progress, None if one.got_on < 0 else max(0.0, now - one.got_on),
        )  # fmt: skip


class TrainedRounds:
    """Lines of the log about unequal rounds."""

    def __init__(self) -> None:
        self._said: set[int] = set()

    def check(self, workers: Sequence[MemberRecord], at_barrier: Collection[MemberKey]) -> list[Action]:
        """Return a line for each worker without which others have begun to train on."""
        training = [one for one in workers if one.live and _key(one) not in at_barrier]
        first = max(training, key=lambda one: one.round, default=None)
        others = [one for one in workers if not (one.dead or one.notice)]
        behind = [] if first is None else [one for one in others if one.round < first.round]
        found = [one for one in behind if (one.left or _key(one) in at_barrier) and one.member.rank not in self._said]
        self._said.update(one.member.rank for one in found)
        return [Warn(f"{one} {_what(one)}; the others train on without it ({_at(first)})") for one in found if first]

    def summary(self, workers: Sequence[MemberRecord]) -> list[Action]:
        """Return a line about how many rounds each worker has trained, if not all have trained as many."""
        ranks = defaultdict(list)
        for one in workers:
            ranks[one.round].append(one.member.rank)
        told = [f"{round} by {workers_text(found)}" for round, found in sorted(ranks.items(), reverse=True)]
        return [Warn(f"not all workers have trained as many rounds: {'; '.join(told)}")] if len(told) > 1 else []


def _key(one: MemberRecord) -> MemberKey:
    return one.member.role, one.member.rank


def _what(one: MemberRecord) -> str:
    return f"left the job after round {one.round}" if one.left else f"waits at a barrier after round {one.round}"


def _at(one: MemberRecord) -> str:
    return f"worker {one.member.rank} is in round {one.round}"
