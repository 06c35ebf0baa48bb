"""The members of a job as a server knows them: their connections, hosts and memory, and how each is answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from paceline.errors import ProtocolError
from paceline.local_merge import LocalMerge
from paceline.net.base import Frames
from paceline.net.call import failed
from paceline.observe import events, ring
from paceline.wire import messages as m

#: ``answer(peer, seq, body, make_frames, urgency)``.
AnswerFn: TypeAlias = Callable[[bytes, int, m.Reply, Callable[[], Frames], int | None], None]


class Members:
    """The members of the job as one server sees them, and the connections that they have claimed.

    Attributes:
        workers: rank by connection.
        servers: rank by connection.
        rank: rank of this server.
        worker_hosts: host ids of the workers, by rank.
    """

    def __init__(self) -> None:
        self.workers: dict[bytes, int] = {}
        self.servers: dict[bytes, int] = {}
        self.rank = 0
        self.worker_hosts: list[str] = []
        self._members: dict[tuple[str, int], m.Member] = {}
        """By role and rank, in the order of ranks."""
        self._host_id = ""
        self._dead: set[int] = set()

    def admit(self, members: Sequence[m.Member], host_id: str, rank: int) -> None:
        """Learn who the members of the job are, and which of them this server is."""
        self._host_id, self.rank = host_id, rank
        self._members = {(one.role, one.rank): one for one in sorted(members, key=lambda one: one.rank)}
        self.worker_hosts = self._hosts("worker")

    def _hosts(self, role: str) -> list[str]:
        return [one.host_id for one in self._members.values() if one.role == role]

    def claim(self, peer: bytes, claim: m.Claim) -> None:
        """Note which member a connection belongs to.

        Raises:
            ProtocolError: wrong token.
        """
        of_role = {"worker": self.workers, "server": self.servers}.get(claim.role)
        member = self._members.get((claim.role, claim.rank))
        if claim.role == "worker" and claim.rank in self._dead:
            raise ProtocolError(f"worker {claim.rank} was taken for dead; the others have gone on without it")
        if of_role is None or member is None or member.token != claim.token or not claim.token:
            raise ProtocolError(f"the claim to be {claim.role} {claim.rank} has the wrong token")
        # A member has one connection: a new one replaces the last, so that no member can open many.
        for other in [other for other, rank in of_role.items() if rank == claim.rank]:
            del of_role[other]
        of_role[peer] = claim.rank

    def bury(self, worker: int) -> None:
        """Take no more requests of a worker that is dead, nor those that are still on their way."""
        self._dead.add(worker)
        for peer in [peer for peer, rank in self.workers.items() if rank == worker]:
            del self.workers[peer]

    def knows(self, peer: bytes) -> bool:
        """Tell whether a connection belongs to a member."""
        return peer in self.workers or peer in self.servers

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

    def is_far(self, peer: bytes) -> bool:
        """Tell whether a member's messages cross the network."""
        return peer in self.servers or self.worker_hosts[self.workers[peer]] != self._host_id

    def local_merge(self, units: Sequence[int]) -> LocalMerge:
        """Return where local merge takes place for workers of these units."""
        return LocalMerge(self.worker_hosts, self._hosts("server"), units)


class Asker:
    """The member that waits for the answer to one request, and gets one: later ones are not sent.

    Args:
        peer: the member's connection.
        seq: number of the request.
        rank: rank of the member in its role; -1 before it has said who it is.
        members: members of the job.
        send: function that sends an answer.

    Attributes:
        is_answered: an answer was given; it may be the error of a request that could be carried out only in part.
    """

    __slots__ = ("_members", "_send", "is_answered", "peer", "rank", "seq")

    def __init__(self, peer: bytes, seq: int, rank: int, members: Members, send: AnswerFn) -> None:
        self.peer, self.seq, self.rank = peer, seq, rank
        self._members, self._send = members, send
        self.is_answered = False

    def answer(self, body: m.Reply, make_frames: Callable[[], Frames] = tuple, urgency: int | None = None) -> None:
        """Answer, unless an answer was given.

        Args:
            body: the answer.
            make_frames: function that makes its frames, anew when the answer is given again.
            urgency: the answer may overtake waiting ones with a higher number; None: neither overtakes the other.
        """
        if not self.is_answered:
            self.is_answered = True
            ring.note_message(events.ANSWERED, self.seq, self, body)
            self._send(self.peer, self.seq, body, make_frames, urgency)

    def __index__(self) -> int:
        """Return the number that stands for the member in events."""
        return events.member("worker" if self.peer in self._members.workers else "server", self.rank)

    def fail(self, error: Exception) -> None:
        """Answer with an error."""
        self.answer(failed(error))

    def network_bytes(self, frames: Frames) -> int:
        """Return how many bytes of frames cross the network between here and the member."""
        if not frames or not self._members.is_far(self.peer):
            return 0
        return sum(memoryview(frame).nbytes for frame in frames)
