"""The accounts that heartbeats carry, and the sentences that follow from them. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Sequence

from paceline.consistency.stats import bin_of
from paceline.membership.effects import Action, MemberKey, Warn
from paceline.observe.account import FIGURES, Steps, parts_of
from paceline.observe.detector import WARM_UP, Detector
from paceline.observe.verdicts import Verdict, sentence, summary
from paceline.wire import messages as m
from paceline.wire.limits import MAX_AMOUNT, MAX_NUMEL

#: Windows of a member that the status shows together.
_SHOWN = 15

#: Changes that the status still shows.
_KEPT = 50


def why_damaged(role: str, account: m.AccountReport, num_workers: int) -> str:
    """Return why an account cannot be read; empty: it can."""
    parts = len(parts_of(role))
    for one in account.windows:
        if len(one.parts) != parts:
            return f"the account of a {role} has {parts} parts, not {len(one.parts)}"
    if len(account.host) not in (0, len(FIGURES)):
        return f"the account of a host has {len(FIGURES)} figures, not {len(account.host)}"
    unknown = [rank for rank, _, _ in account.late if not 0 <= rank < num_workers]
    return f"the account tells of worker {unknown[0]}, and this job has {num_workers} workers" if unknown else ""


class _Told:
    """The account that a member has told: all of it, and its last windows. Sums of microseconds are exact."""

    def __init__(self) -> None:
        self._last: deque[m.Window] = deque(maxlen=_SHOWN)
        self._whole: m.Window | None = None

    def add(self, windows: Sequence[m.Window], begun: int) -> None:
        """Add the windows of a heartbeat; those that began before this round are not shown as the last ones."""
        if windows:
            self._whole = _joined([self._whole, *windows] if self._whole is not None else windows)
        self._last += [one for one in windows if one.round >= begun and one.rounds]

    def forget_last(self) -> None:
        """Show no last windows: the member has left."""
        self._last.clear()

    @property
    def whole(self) -> list[m.Window]:
        """All of it in one window; none where it is nothing."""
        return [_bounded(self._whole)] if self._whole is not None else []

    @property
    def recent(self) -> list[m.Window]:
        """The last windows in one; none where there are none."""
        return [_bounded(_joined(self._last))] if self._last else []


def _joined(windows: Collection[m.Window]) -> m.Window:
    """Return the account of all windows together; there is at least one."""
    first, *_ = windows
    parts = list(map(sum, zip(*[one.parts for one in windows], strict=True)))
    rounds, samples = sum([one.rounds for one in windows]), sum([one.samples for one in windows])
    return m.Window(first.round, rounds, samples, parts, sum([one.way for one in windows]))


def _bounded(one: m.Window) -> m.Window:
    """Return an account whose numbers a message can carry."""
    parts = [min(part, MAX_AMOUNT) for part in one.parts]
    return m.Window(
        one.round, min(one.rounds, MAX_NUMEL), min(one.samples, MAX_AMOUNT), parts, min(one.way, MAX_AMOUNT)
    )


class Verdicts:
    """Says once per change which worker is slow, and why."""

    def __init__(self) -> None:
        self._detector = Detector()
        self._told: deque[tuple[float, Verdict]] = deque(maxlen=_KEPT)
        self._accounts: defaultdict[MemberKey, _Told] = defaultdict(_Told)
        self._late: dict[int, tuple[int, int]] = {}
        self._held: dict[int, tuple[int, int]] = {}
        self._staleness: Counter[int] = Counter()
        self.cohorts = 0
        """Cohorts of several workers that servers have merged."""

    def note(
        self, member: m.Member, account: m.AccountReport, groups: Sequence[Sequence[int]], now: float
    ) -> list[Action]:
        """Take the account of a heartbeat; returns a line for each change. Without groups a worker says its own."""
        is_worker = member.role == "worker"
        self._accounts[member.role, member.rank].add(account.windows, 1 + WARM_UP if is_worker else 0)
        changes = self._of_worker(member, account, groups) if is_worker else self._of_server(member, account)
        self._told += [(now, one) for one in changes]
        return [Warn(sentence(one)) for one in changes]

    def _of_server(self, member: m.Member, account: m.AccountReport) -> list[Verdict]:
        self._count(member.rank, account)
        self._detector.note_late([(rank, times, 1e-6 * late) for rank, times, late in account.late])
        parts = [[1e-6 * part for part in one.parts] for one in account.windows]
        return self._detector.note_server(member.rank, member.host, parts, account.host)

    def _of_worker(self, member: m.Member, account: m.AccountReport, groups: Sequence[Sequence[int]]) -> list[Verdict]:
        group = next((index for index, one in enumerate(groups, 1) if member.rank in one), account.group)
        windows = [
            Steps(one.round, one.rounds, one.samples, [1e-6 * part for part in one.parts], 1e-6 * one.way)
            for one in account.windows
        ]
        return self._detector.note_worker(
            member.rank, member.host, windows, account.host, group, account.is_ddp, account.is_shared, account.is_local
        )

    def _count(self, server: int, account: m.AccountReport) -> None:
        if any(account.held):  # stores close before the job ends
            self._held[server] = account.held
        for rank, times, late in account.late:
            before = self._late.get(rank, (0, 0))
            self._late[rank] = min(before[0] + times, MAX_NUMEL), min(before[1] + late, MAX_AMOUNT)
            self.cohorts = min(self.cohorts + times, MAX_NUMEL)
        for staleness, updates in account.staleness:
            place = bin_of(staleness)
            self._staleness[place] = min(self._staleness[place] + updates, MAX_NUMEL)

    def leave(self, member: m.Member) -> None:
        """Forget a member that has left."""
        if member.role == "worker":
            self._detector.leave(member.rank)
            self._accounts[member.role, member.rank].forget_last()

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
        return self._accounts[key].recent

    def whole(self, key: MemberKey) -> list[m.Window]:
        """Return the account of all that a member has told in one window; none where it has said nothing."""
        return self._accounts[key].whole

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
