"""Who has sent a request, and how it is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from paceline.net.base import Frames
from paceline.net.call import failed
from paceline.server.members import Members
from paceline.wire import messages as m

#: ``answer(peer, seq, body, make_frames, urgency)``.
AnswerFn: TypeAlias = Callable[[bytes, int, m.Reply, Callable[[], Frames], int | None], None]


class Asker:
    """The member that waits for the answer to one request.

    Args:
        peer: its connection.
        seq: number of the request.
        rank: of the member in its role; -1 before it has said who it is.
        members: of the job.
        send: sends an answer.
    """

    __slots__ = ("_members", "_send", "peer", "rank", "seq")

    def __init__(self, peer: bytes, seq: int, rank: int, members: Members, send: AnswerFn) -> None:
        self.peer, self.seq, self.rank = peer, seq, rank
        self._members, self._send = members, send

    def reply(self, body: m.Reply, frames: Frames = ()) -> None:
        """Answer with a body and frames that stay as they are."""
        self._send(self.peer, self.seq, body, lambda: frames, None)

    def answer(self, body: m.Reply, make_frames: Callable[[], Frames], urgency: int | None) -> None:
        """Answer with frames that are made anew when the answer is given again.

        Args:
            body: the answer.
            make_frames: makes its frames.
            urgency: the answer may overtake waiting ones with a higher number; None: neither overtakes the other.
        """
        self._send(self.peer, self.seq, body, make_frames, urgency)

    def fail(self, error: Exception) -> None:
        """Answer with an error."""
        self.reply(failed(error))

    def network_bytes(self, frames: Frames) -> int:
        """Return how many bytes of frames cross the network between here and the member."""
        if not frames or not self._members.is_far(self.peer):
            return 0
        return sum(memoryview(frame).nbytes for frame in frames)


Result: TypeAlias = m.Reply | tuple[m.Reply, Frames] | None
"""What a handler answers at once; None: it answers by itself, perhaps later."""
Handler: TypeAlias = Callable[[Asker, Any, Frames], Result]
Handlers: TypeAlias = Mapping[type[m.Message], Handler]
