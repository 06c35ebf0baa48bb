"""Meetings of workers, by which process groups of torch.distributed move data, and the board where they start.

A meeting has a group, members and a number. Each member brings frames for the others; when the last one has come, each
is answered with the frames for it. The server computes nothing and looks at no frame. Broadcast, gather, all-to-all,
send and receive are meetings in which fewer frames are given, and a barrier is one without any.

| event | effect |
|---|---|
| a member comes, others are absent | its request waits |
| the last member comes | all are answered, the meeting is forgotten |
| a member names another operation than the first one | all members get an error, as they come |
| a member has left the job, or has died | all members get an error, as they come |
| a member gives up: its deadline has passed | all members of its meetings of that group get an error, as they come |
| a worker takes from any other | the oldest meeting of two of that group to which only the sender has come |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from paceline.errors import DeadlineError, PacelineError, PeerDiedError, ProtocolError
from paceline.net.base import Frames
from paceline.server.members import Asker
from paceline.wire import messages as m
from paceline.wire.limits import MAX_GATHER_BYTES

#: Meetings that have failed and are remembered, for members that come later.
MAX_FAILED = 4096

#: Bytes of all names and values on a board, and requests of one worker that wait there.
MAX_BOARD_BYTES, MAX_BOARD_WAITS = 64 * 2**20, 64


@dataclass
class _Came:
    asker: Asker
    to: Sequence[int]
    frames: Frames

    def give(self, rank: int) -> list[object]:
        """Return the frames for a member."""
        return [frame for one, frame in zip(self.to, self.frames, strict=True) if one in (-1, rank)]


@dataclass
class _Meeting:
    what: str
    members: frozenset[int]
    came: dict[int, _Came] = field(default_factory=dict)
    error: PacelineError | None = None

    @property
    def is_over(self) -> bool:
        return len(self.came) == len(self.members)

    def fail(self, error: PacelineError) -> None:
        """Give all members an error, those that come later too."""
        self.error = self.error or error
        for one in self.came.values():
            one.asker.fail(self.error)  # of answers to one request only the first is sent
        self.came = {rank: _Came(one.asker, (), ()) for rank, one in self.came.items()}  # the frames are free

    def answer(self) -> None:
        """Give every member the frames for it."""
        for rank, one in self.came.items():
            others = [other for other in sorted(self.came) if other != rank]
            given = [(other, frame) for other in others for frame in self.came[other].give(rank)]
            frames = [frame for _, frame in given]
            one.asker.answer(m.Met([other for other, _ in given]), partial(list, frames))


_Place = tuple[tuple[int, ...], int]


class Meetings:
    """The open meetings of a server.

    Args:
        num_workers: workers of the job.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._failed: deque[tuple[str, _Place]] = deque()
        """Meetings that have failed, the oldest first; some may be forgotten since."""
        self._groups: dict[str, dict[_Place, _Meeting]] = {}
        self._takers: dict[str, list[Asker]] = {}
        self._gone: set[int] = set()

    def meet(self, asker: Asker, body: m.Meet, frames: Frames) -> None:
        """Let a member come.

        Raises:
            ProtocolError: the asker is no member, members are no workers, or there are not as many frames as receivers.
        """
        members = set(body.members)
        are_workers = len(members) == len(body.members) and all(0 <= one < self._num_workers for one in members)
        if asker.rank not in members or not are_workers or len(body.to) != len(frames):
            raise ProtocolError(f"worker {asker.rank} cannot meet {body.members} with {len(frames)} frames")
        self._come(body.group, (tuple(body.members), body.number), body.what, _Came(asker, body.to, frames))
        for taker in self._takers.pop(body.group, []):
            self.take_any(taker, m.TakeAny(body.group))

    def take_any(self, asker: Asker, body: m.TakeAny) -> None:
        """Let a worker join the oldest meeting to which only another one has come, or wait for one."""
        for place, meeting in self._groups.get(body.group, {}).items():
            if asker.rank in place[0] and asker.rank not in meeting.came and meeting.error is None:
                self._come(body.group, place, meeting.what, _Came(asker, (), ()))
                return
        self._takers.setdefault(body.group, []).append(asker)

    def _come(self, group: str, place: _Place, what: str, came: _Came) -> None:
        meetings = self._groups.setdefault(group, {})
        meeting = meetings.setdefault(place, _Meeting(what, frozenset(place[0])))
        meeting.came[came.asker.rank] = came
        if what != meeting.what:
            others = " and ".join(f"worker {rank}" for rank in meeting.came if rank != came.asker.rank)
            meeting.fail(ProtocolError(f"worker {came.asker.rank} called {what}, but {others} called {meeting.what}"))
        self._check_gone(meeting)
        if meeting.error is not None:
            meeting.fail(meeting.error)
            self._remember(group, place)
        elif meeting.is_over:
            meeting.answer()
        if meeting.is_over:
            self._forget(group, place)

    def _forget(self, group: str, place: _Place) -> None:
        meetings = self._groups.get(group, {})
        meetings.pop(place, None)
        if not meetings:
            self._groups.pop(group, None)

    def _remember(self, group: str, place: _Place) -> None:
        """Remember a meeting that has failed; the oldest of too many is forgotten."""
        self._failed.append((group, place))
        if len(self._failed) > MAX_FAILED:
            self._forget(*self._failed.popleft())

    def give_up(self, asker: Asker, body: m.GiveUp) -> m.Done:
        """Let a worker wait no more in a group: its deadline has passed."""
        for place, meeting in list(self._groups.get(body.group, {}).items()):
            if asker.rank in meeting.came and meeting.error is None:
                absent = ", ".join(f"worker {rank}" for rank in sorted(meeting.members - set(meeting.came)))
                text = f"worker {asker.rank} waits no more in {meeting.what} of group {body.group!r}"
                meeting.fail(DeadlineError(f"{text}: its deadline passed before {absent} came"))
                self._remember(body.group, place)
        takers = self._takers.pop(body.group, [])
        for taker in [one for one in takers if one.rank == asker.rank]:
            taker.fail(DeadlineError(f"worker {asker.rank} waits no more for messages of group {body.group!r}"))
        if rest := [one for one in takers if one.rank != asker.rank]:
            self._takers[body.group] = rest
        return m.Done()

    def rejoin(self, worker: int) -> None:
        """Let another process of a worker that was gone come."""
        self._gone.discard(worker)

    def take_out(self, workers: Iterable[int]) -> None:
        """Wait no more for workers that are gone."""
        self._gone.update(workers)
        for meetings in self._groups.values():
            for meeting in meetings.values():
                self._check_gone(meeting)

    def _check_gone(self, meeting: _Meeting) -> None:
        gone = sorted(self._gone & meeting.members - set(meeting.came))
        if gone and meeting.error is None:
            whom = ", ".join(f"worker {rank}" for rank in gone)
            meeting.fail(
                PeerDiedError(f"{whom} left the job before {meeting.what}, in which all of the group take part")
            )

    def absent(self, body: m.AskNotMet) -> m.Missing:
        """Return the members that have not come to a meeting."""
        meeting = self._groups.get(body.group, {}).get((tuple(body.members), body.number))
        return m.Missing([] if meeting is None else sorted(meeting.members - set(meeting.came)))


class Board:
    """Texts by name."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._waiting: list[tuple[Asker, Sequence[str]]] = []

    def use(self, asker: Asker, body: m.UseBoard) -> m.BoardIs | None:
        """Carry out a request; None: it is answered when all names exist.

        Raises:
            ProtocolError: there is no such verb, it has too few names or values, a value is no number, or too large.
        """
        known, names = self._values, body.names
        match body.verb, body.values:
            case "get", []:
                return self._get(asker, names)
            case "forget", []:
                self._give_up(asker, names)
                return m.BoardIs([])
            case "set", values if len(values) == len(names):
                self._put(dict(zip(names, values, strict=True)))
                return m.BoardIs([])
            case "add", [amount] if len(names) == 1:
                number = _number(known.get(names[0], b"0")) + _number(amount)
                self._put({names[0]: str(number).encode()})
                return m.BoardIs([], number)
            case "swap", [expected, wanted] if len(names) == 1:
                return m.BoardIs([self._swap(names[0], expected, wanted)])
            case "check", []:
                return m.BoardIs([], int(all(name in known for name in names)))
            case "delete", []:
                return m.BoardIs([], sum(self._delete(name) for name in names))
            case "count", []:
                return m.BoardIs([], len(known))
        raise ProtocolError(f"a board has no {body.verb!r} with {len(body.values)} values for {len(names)} names")

    def _swap(self, name: str, expected: bytes, wanted: bytes) -> bytes:
        """Set a value if it is as expected, or if there is none and none is expected; returns the value after it."""
        found = self._values.get(name)
        if found == expected or (found is None and not expected):
            self._put({name: wanted})
            return wanted
        return expected if found is None else found

    def _put(self, values: Mapping[str, bytes]) -> None:
        """Set values, and answer who waits for them."""
        more = sum(_size(name, value) - _size(name, self._values.get(name)) for name, value in values.items())
        if self._bytes + more > MAX_BOARD_BYTES:
            raise ProtocolError(
                f"{more} bytes more for the board of torch.distributed, which has {self._bytes} already; it holds at "
                f"most {MAX_BOARD_BYTES}. Delete keys that nobody needs any more"
            )
        self._bytes += more
        self._values.update(values)
        waiting, self._waiting = self._waiting, []
        for asker, names in waiting:
            try:
                found = self._get(asker, names)
            except ProtocolError as error:
                asker.fail(error)
            else:
                if found is not None:
                    asker.answer(found)

    def _delete(self, name: str) -> bool:
        self._bytes -= _size(name, self._values.get(name))
        return self._values.pop(name, None) is not None

    def _get(self, asker: Asker, names: Sequence[str]) -> m.BoardIs | None:
        """Return values; None: the asker waits until all names exist.

        Raises:
            ProtocolError: the values are too large for one answer, or too many requests of the asker wait.
        """
        if all(name in self._values for name in names):
            size = sum(len(self._values[name]) for name in names)
            if size > MAX_GATHER_BYTES:
                raise ProtocolError(f"{size} bytes in one answer of a board; at most {MAX_GATHER_BYTES} are possible")
            return m.BoardIs([self._values[name] for name in names])
        waits = sum(one.rank == asker.rank for one, _ in self._waiting)
        if waits >= MAX_BOARD_WAITS:
            raise ProtocolError(f"{waits} requests of worker {asker.rank} wait at the board; more are not possible")
        self._waiting.append((asker, names))
        return None

    def _give_up(self, asker: Asker, names: Sequence[str]) -> None:
        """Let a worker wait no more for names: its deadline has passed."""
        waiting, self._waiting = self._waiting, []
        for one, its in waiting:
            if one.rank == asker.rank and its == names:
                one.fail(DeadlineError(f"worker {asker.rank} waits no more for {len(names)} names on the board"))
            else:
                self._waiting.append((one, its))


def _size(name: str, value: bytes | None) -> int:
    """Return the bytes that a name with its value takes; without a value it is not there."""
    return 0 if value is None else len(name) + len(value)


def _number(value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        raise ProtocolError(f"a board adds integers, and {value[:40]!r} is none") from None
