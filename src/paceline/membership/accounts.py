"""The accounts that heartbeats carry, and the sentences that follow from them. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from paceline.consistency.stats import bin_of
from paceline.membership.effects import Action, MemberKey, Warn
from paceline.observe.account import FIGURES, SERVER_PARTS, WORKER_PARTS, Steps, joined
from paceline.observe.detector import Detector
from paceline.observe.verdicts import Verdict, sentence, summary
from paceline.wire import messages as m
from paceline.wire.limits import MAX_AMOUNT, MAX_NUMEL

#: Windows of a server that the status shows together.
_SHOWN = 15

#: Changes that the status still shows.
_KEPT = 50


def why_damaged(role: str, account: m.AccountReport) -> str:
    """Return why an account cannot be read; empty: it can."""
    parts = len(SERVER_PARTS if role == "server" else WORKER_PARTS)
    for one in account.windows:
        if len(one.parts) != parts:
            return f"the account of a {role} has {parts} parts, not {len(one.parts)}"
    if len(account.host) not in (0, len(FIGURES)):
        return f"the account of a host has {len(FIGURES)} figures, not {len(account.host)}"
    return ""


class Verdicts:
    """Says once per change which worker is slow, and why."""

    def __init__(self) -> None:
        self._detector = Detector()
        self._servers: dict[int, list[Steps]] = {}
        self._told: deque[tuple[float, Verdict]] = deque(maxlen=_KEPT)
        self._whole: dict[MemberKey, Steps] = {}
        self._late: dict[int, tuple[int, int]] = {}
        self._held: dict[int, tuple[int, int]] = {}
        self._staleness: Counter[int] = Counter()
        self.cohorts = 0
        """Cohorts of several workers that servers have merged."""

    def note(
        self, member: m.Member, account: m.AccountReport, groups: Sequence[Sequence[int]], now: float
    ) -> list[Action]:
        """Take the account of a heartbeat; returns a line for each change.

        Args:
            member: the sender.
            account: its account since the last heartbeat.
            groups: the groups that fit the measured speeds; none: each worker says its own.
            now: the time.
        """
        found = [
            Steps(one.round, one.rounds, one.samples, [1e-6 * part for part in one.parts], 1e-6 * one.way)
            for one in account.windows
        ]
        if found:
            before = self._whole.get((member.role, member.rank))
            self._whole[member.role, member.rank] = joined([before, *found] if before is not None else found)
        changes = self._changes(member, account, found, groups)
        self._told += [(now, one) for one in changes]
        return [Warn(sentence(one)) for one in changes]

    def _changes(
        self, member: m.Member, account: m.AccountReport, found: Sequence[Steps], groups: Sequence[Sequence[int]]
    ) -> list[Verdict]:
        if member.role == "server":
            self._count(member.rank, account)
            self._detector.note_late([(rank, times, 1e-6 * late) for rank, times, late in account.late])
            self._servers[member.rank] = [*self._servers.get(member.rank, []), *found][-_SHOWN:]
            parts = [one.seconds for one in found]
            return self._detector.note_server(member.rank, member.host, parts, account.host)
        group = next((index for index, one in enumerate(groups, 1) if member.rank in one), account.group)
        windows = [(one.round, one.rounds, one.samples, one.seconds) for one in found]
        return self._detector.note_worker(
            member.rank, member.host, windows, account.host, group, account.is_ddp, account.is_shared,
            [one.way_s for one in found],
        )  # fmt: skip

    def _count(self, server: int, account: m.AccountReport) -> None:
        if any(account.held):  # stores close before the job ends
            self._held[server] = account.held
        for rank, times, late in account.late:
            before = self._late.get(rank, (0, 0))
            self._late[rank] = before[0] + times, before[1] + late
            self.cohorts += times
        for staleness, updates in account.staleness:
            self._staleness[bin_of(staleness)] += updates

    def leave(self, member: m.Member) -> None:
        """Forget a member that has left."""
        if member.role == "worker":
            self._detector.leave(member.rank)

    @property
    def slow(self) -> list[Verdict]:
        """The processes that are slow now."""
        return self._detector.verdicts

    @property
    def sentences(self) -> list[str]:
        """The workers that are slow now."""
        return [sentence(one) for one in self.slow]

    def told(self, now: float) -> list[m.Told]:
        """Return the last changes, the oldest first."""
        return [m.Told(one.role, one.rank, max(0.0, now - when), sentence(one)) for when, one in self._told]

    def recent(self, key: MemberKey) -> list[m.Window]:
        """Return the account of a member's last windows in one; none where it has said nothing."""
        role, rank = key
        if role == "server":
            steps = self._servers.get(rank)
            found = joined(steps) if steps else None
        else:
            last = self._detector.recent(rank)
            found = Steps(0, *last) if last else None
        return [_window(found)] if found else []

    def whole(self, key: MemberKey) -> list[m.Window]:
        """Return the account of all that a member has told in one window; none where it has said nothing."""
        return [_window(self._whole[key])] if key in self._whole else []

    def late(self, key: MemberKey) -> tuple[int, float]:
        """Return how many cohorts a worker was the last of, and how many seconds after the others in all."""
        times, late = self._late.get(key[1], (0, 0)) if key[0] == "worker" else (0, 0)
        return times, 1e-6 * late

    def held(self, key: MemberKey) -> tuple[int, int]:
        """Return how many values a server holds, or held last, and in how many buckets."""
        return self._held.get(key[1], (0, 0)) if key[0] == "server" else (0, 0)

    @property
    def staleness(self) -> list[tuple[int, int]]:
        """How many updates of servers had which staleness so far."""
        return sorted(self._staleness.items())

    def end(self) -> list[Action]:
        """Return the line for the end of the job, if workers were slow."""
        text = summary(self._detector.losses)
        return [Warn(text)] if text else []


def _window(steps: Steps) -> m.Window:
    parts = [min(round(1e6 * part), MAX_AMOUNT) for part in steps.seconds]
    way = min(round(1e6 * steps.way_s), MAX_AMOUNT)
    return m.Window(steps.round, min(steps.rounds, MAX_NUMEL), min(steps.samples, MAX_AMOUNT), parts, way)
