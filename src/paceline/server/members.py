"""The members of a job as a server knows them: their connections, hosts and memory, and how each is answered."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from paceline.errors import ProtocolError
from paceline.layout.local_merge import LocalMerge
from paceline.net.base import Frames
from paceline.net.call import failed
from paceline.observe import events, ring
from paceline.wire import messages as m

#: ``answer(peer, seq, body, make_frames, urgency)``.
AnswerFn: TypeAlias = Callable[[bytes, int, m.Reply, Callable[[], Frames], int | None], None]


class Sender(NamedTuple):
    """The member at the other end of a connection."""

    role: str
    """Empty: it has not said who it is."""
    rank: int
    number: int
    """The number that stands for it in events."""
    is_far: bool
    """Messages between it and here cross the network."""


STRANGER = Sender("", -1, 0, is_far=False)


class Members:
    """The members of the job as one server sees them, and the connections that they have claimed.

    Attributes:
        senders: the members by their connections; each has one.
        rank: rank of this server.
        worker_hosts: host ids of the workers, by rank.
    """

    def __init__(self, members: Sequence[m.Member], host_id: str, rank: int) -> None:
        self.senders: dict[bytes, Sender] = {}
        self._host_id, self.rank = host_id, rank
        self._members = {(one.role, one.rank): one for one in sorted(members, key=lambda one: one.rank)}
        self.worker_hosts = self._hosts("worker")
        self._dead: set[int] = set()

    def _hosts(self, role: str) -> list[str]:
        return [one.host_id for one in self._members.values() if one.role == role]

    def claim(self, peer: bytes, claim: m.Claim) -> None:
        """Note which member a connection belongs to.

        Raises:
            ProtocolError: wrong token.
        """
        member = self._members.get((claim.role, claim.rank))
        if member is not None and claim.incarnation < member.incarnation:
            raise ProtocolError(
                f"incarnation {claim.incarnation} of worker {claim.rank} was replaced by incarnation "
                f"{member.incarnation} on {member.host} (pid {member.pid})"
            )
        if claim.role == "worker" and claim.rank in self._dead:
            raise ProtocolError(f"worker {claim.rank} was taken for dead; the others have gone on without it")
        if member is None or not claim.token or not hmac.compare_digest(member.token, claim.token):
            raise ProtocolError(f"the claim to be {claim.role} {claim.rank} has the wrong token")
        # A member has one connection: a new one replaces the last, so that no member can open many.
        self._forget(claim.role, claim.rank)
        is_far = claim.role == "server" or member.host_id != self._host_id
        self.senders[peer] = Sender(claim.role, claim.rank, events.member(claim.role, claim.rank), is_far)

    def _forget(self, role: str, rank: int) -> None:
        self.senders = {peer: one for peer, one in self.senders.items() if (one.role, one.rank) != (role, rank)}

    def bury(self, worker: int) -> None:
        """Take no more requests of a worker that is dead, nor those that are still on their way."""
        self._dead.add(worker)
        self._forget("worker", worker)

    def admit(self, member: m.Member) -> bool:
        """Take in another process of a worker that is dead; returns whether it is new."""
        key = member.role, member.rank
        if self._members[key].incarnation >= member.incarnation:
            return False
        self._members[key] = member
        self._dead.discard(member.rank)
        self._forget(*key)
        return True

    def incarnation(self, worker: int) -> int:
        """Return which process of its rank a worker is."""
        return self._members["worker", worker].incarnation

    def knows(self, peer: bytes) -> bool:
        """Tell whether a connection belongs to a member."""
        return peer in self.senders

    @property
    def has_neighbours(self) -> bool:
        """Whether workers live on this host."""
        return self._host_id in self.worker_hosts

    def check_memory(self, worker: int, pid: int) -> None:
        """Refuse memory that is not a worker's own.

        Raises:
            ProtocolError: it is of another process, or the worker lives on another host.
        """
        member = self._members["worker", worker]
        if member.host_id != self._host_id or member.pid != pid:
            raise ProtocolError(f"worker {worker} offers memory of process {pid} of this host, which is not its own")

    def local_merge(self, units: Sequence[int]) -> LocalMerge:
        """Return where local merge takes place for workers of these units."""
        return LocalMerge(self.worker_hosts, self._hosts("server"), units)


class Asker:
    """The member that waits for the answer to one request, and gets one: later ones are not sent.

    Attributes:
        rank: rank of the member in its role.
        is_answered: an answer was given; it may be the error of a request that could be carried out only in part.
    """

    __slots__ = ("_send", "_sender", "is_answered", "peer", "rank", "seq")

    def __init__(self, peer: bytes, seq: int, sender: Sender, send: AnswerFn) -> None:
        self.peer, self.seq, self.rank = peer, seq, sender.rank
        self._sender, self._send = sender, send
        self.is_answered = False

    def answer(self, body: m.Reply, make_frames: Callable[[], Frames] = tuple, urgency: int | None = None) -> None:
        """Answer, unless an answer was given.

        Args:
            body: the answer.
            make_frames: function that makes its frames, anew when the answer is given again.
            urgency: the answer may overtake waiting ones with a higher number; None: neither overtakes the other.
        """
        if not self.is_answered:
            ring.note(events.ANSWERED, self.seq, self._sender.number, m.TAGS[type(body)])
            self._send(self.peer, self.seq, body, make_frames, urgency)
            self.is_answered = True  # else frames could not be made, and the error is the answer

    def fail(self, error: Exception) -> None:
        """Answer with an error."""
        self.answer(failed(error))

    def network_bytes(self, frames: Frames) -> int:
        """Return how many bytes of frames cross the network between here and the member."""
        return sum(memoryview(frame).nbytes for frame in frames) if self._sender.is_far else 0
