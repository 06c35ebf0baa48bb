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
| a worker takes from any other | the oldest meeting of two of that group to which only the sender has come |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from paceline.errors import PacelineError, PeerDiedError, ProtocolError
from paceline.net.base import Frames
from paceline.server.members import Asker
from paceline.wire import messages as m


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

    def answer(self) -> None:
        """Give every member the frames for it."""
        for rank, one in self.came.items():
            others = [other for other in sorted(self.came) if other != rank]
            given = [(other, frame) for other in others for frame in self.came[other].give(rank)]
            frames = [frame for _, frame in given]
            one.asker.answer(m.Met([other for other, _ in given]), partial(list, frames))


_Place = tuple[tuple[int, ...], int]


class Meetings:
    """The open meetings of a server."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[_Place, _Meeting]] = {}
        self._takers: dict[str, list[Asker]] = {}
        self._gone: set[int] = set()

    def meet(self, asker: Asker, body: m.Meet, frames: Frames) -> None:
        """Let a member come.

        Raises:
            ProtocolError: the asker is no member, or there are not as many frames as receivers.
        """
        if asker.rank not in body.members or len(body.to) != len(frames):
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
        elif meeting.is_over:
            meeting.answer()
        if meeting.is_over:
            del meetings[place]
        if not meetings:
            del self._groups[group]

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
        self._waiting: list[tuple[Asker, list[str]]] = []

    def use(self, asker: Asker, body: m.UseBoard) -> m.BoardIs | None:
        """Carry out a request; None: it is answered when all names exist.

        Raises:
            ProtocolError: there is no such verb, it has too few names or values, or a value is no number.
        """
        known, names = self._values, body.names
        match body.verb, body.values:
            case "get", []:
                if not all(name in known for name in names):
                    self._waiting.append((asker, names))
                    return None
                return m.BoardIs([known[name] for name in names])
            case "set", values if len(values) == len(names):
                known.update(zip(names, values, strict=True))
                self._answer_waiting()
                return m.BoardIs([])
            case "add", [amount] if len(names) == 1:
                number = _number(known.get(names[0], b"0")) + _number(amount)
                known[names[0]] = str(number).encode()
                self._answer_waiting()
                return m.BoardIs([], number)
            case "swap", [expected, wanted] if len(names) == 1:
                return m.BoardIs([self._swap(names[0], expected, wanted)])
            case "check", []:
                return m.BoardIs([], int(all(name in known for name in names)))
            case "delete", []:
                return m.BoardIs([], sum(known.pop(name, None) is not None for name in names))
            case "count", []:
                return m.BoardIs([], len(known))
        raise ProtocolError(f"a board has no {body.verb!r} with {len(body.values)} values for {len(names)} names")

    def _swap(self, name: str, expected: bytes, wanted: bytes) -> bytes:
        """Set a value if it is as expected, or if there is none and none is expected; returns the value after it."""
        found = self._values.get(name)
        if found == expected or (found is None and not expected):
            found = self._values[name] = wanted
            self._answer_waiting()
        return expected if found is None else found

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for asker, names in waiting:
            found = self.use(asker, m.UseBoard("get", names, []))
            if found is not None:
                asker.answer(found)


def _number(value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        raise ProtocolError(f"a board adds whole numbers, and {value[:40]!r} is none") from None
