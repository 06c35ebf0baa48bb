"""The members of a job, by role and rank and by their connections. Pure."""

from __future__ import annotations

import hmac
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from paceline.config import Settings
from paceline.membership.effects import MemberKey, describe_all
from paceline.wire import messages as m


@dataclass
class MemberRecord:
    """A member, its figures, and signs of its life. Times are seconds on the machine's clock."""

    member: m.Member
    peer: bytes
    heard: float
    seq: int
    round: int = 0
    pace: float = 0.0
    """Rounds per second, of late."""
    step_s: float = 0.0
    """Seconds that a worker computes in a step."""
    usual_s: float = 0.0
    """Median of that over its last rounds."""
    usual_samples: float = 1.0
    """Samples of such a step."""
    spread: m.Spread = field(default_factory=m.Spread)
    """How much its steps vary."""
    moved: float = 0.0
    """When the round changed."""
    work: int = 0
    """Its steps and the parts of tensors that it has sent or received."""
    got_on: float = -math.inf
    """When its work or its round has changed."""
    memory: int = 0
    sent: int = 0
    received: int = 0
    closed_since: float | None = None
    left: bool = False
    dead: bool = False
    gone: bool = False
    """It is a worker that has died, and no server waits for it."""
    goodbye_since: float | None = None
    """When it said goodbye, where its exit code is still to come."""
    code: int | None = None
    """Its exit code, where the launcher has told it."""
    host_silent_s: float | None = None
    """For how long the kernel of its host was not heard; None: not known."""
    progress: m.StepsLeft | None = None
    """How far its script is, where that has told the total of its steps."""
    state: str = ""
    """Letter of its process in /proc, as last seen."""
    state_at: float = -math.inf
    """When it was seen."""
    cpu_s: float = 0.0
    """CPU time that it had used then, in seconds."""
    starved_s: float = 0.0
    """Time of its present silence in which it was ready to run, and its host did not run it."""
    sightings: int = 0
    """How often its process was seen in its present silence."""
    ready: int = 0
    """How often it was ready to run then."""
    held_at: float = -math.inf
    """When a debugger was last seen to hold it."""
    warned: bool = False
    """The log and the status name it as silent."""
    joining: bool = False
    """It is a replacement that does not count yet."""
    notice: str = ""
    """Why it is to leave, or has left, while the others go on."""

    @property
    def live(self) -> bool:
        """Whether it has neither left nor died."""
        return not self.left and not self.dead

    @property
    def counts(self) -> bool:
        """Whether it is live, and no replacement that is still to be let in."""
        return self.live and not self.joining

    def beat(self, beat: m.Heartbeat, now: float) -> None:
        """Take in a heartbeat."""
        if beat.round > self.round or beat.work != self.work:
            self.work, self.got_on = beat.work, now
        if beat.round > self.round:
            rate = (beat.round - self.round) / max(now - self.moved, 1e-3)
            self.pace = rate if self.pace == 0 else 0.7 * self.pace + 0.3 * rate
            self.moved = now
        self.round, self.memory, self.sent, self.received = beat.round, beat.memory, beat.sent, beat.received
        self.step_s, self.usual_s, self.usual_samples = beat.step_s, beat.usual_s, beat.usual_samples
        self.spread, self.progress = beat.spread, beat.progress

    def counts_as_left(self, is_supervised: bool, grace_s: float, now: float) -> bool:
        """Tell whether a member that has said goodbye has left.

        Only its exit code tells whether it left in peace. Where the code is to come, it is waited for; not for long,
        because a process may take its time to end. Of one that is to leave the goodbye alone tells.
        """
        if not is_supervised or self.member.role != "worker" or self.code is not None or self.notice:
            return True
        return self.goodbye_since is not None and now - self.goodbye_since > grace_s

    def __str__(self) -> str:
        return f"{self.member.role} {self.member.rank} on {self.member.host} (pid {self.member.pid})"


#: Seconds for which the fastest worker is not looked for again: a job may have thousands.
_FASTEST_S = 0.25


def member_of(hello: m.Hello, rank: int, token: bytes) -> m.Member:
    """Return the member that a process becomes."""
    return m.Member(
        hello.role, rank, hello.local_rank, hello.host, hello.host_id, hello.pid, hello.address, token, hello.speed,
        hello.incarnation,
    )  # fmt: skip


class Roster(Mapping[MemberKey, MemberRecord]):
    """The members of a job by role and rank, in the order in which they joined."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._by_key: dict[MemberKey, MemberRecord] = {}
        self._by_peer: dict[bytes, MemberKey] = {}
        self._further: dict[MemberKey, bytes] = {}
        """The connection that a member has beside its lifeline."""
        self._by_role: dict[str, list[MemberRecord]] = {}
        self._by_host: dict[str, list[MemberRecord]] = {}
        # Asked for at every newcomer or all the time: in a job of thousands nothing is looked through.
        wanted = (("server", settings.num_servers), ("worker", settings.num_workers))
        self._missing: dict[MemberKey, None] = {(role, rank): None for role, number in wanted for rank in range(number)}
        self._public: list[tuple[MemberKey, m.Member]] = []
        self.former: dict[bytes, m.Member] = {}
        """Members whose ranks other processes have now, by their connections."""
        self._fastest_s, self._fastest_until = 0.0, -math.inf

    def __getitem__(self, key: MemberKey) -> MemberRecord:
        """Return a member that has joined."""
        return self._by_key[key]

    def __iter__(self) -> Iterator[MemberKey]:
        """Iterate over roles and ranks."""
        return iter(self._by_key)

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._by_key)

    def add(self, record: MemberRecord) -> None:
        """Take in a member with its lifeline."""
        key = (record.member.role, record.member.rank)
        self._by_key[key] = record
        self._by_peer[record.peer] = key
        self._by_role.setdefault(key[0], []).append(record)
        self._by_host.setdefault(record.member.host_id, []).append(record)
        self._missing.pop(key, None)
        self._public = []

    def replace(self, record: MemberRecord) -> None:
        """Take in another process of a member that is gone; connections of the former one are refused from now on."""
        key = (record.member.role, record.member.rank)
        old = self._by_key[key]
        self._by_role[key[0]].remove(old)
        self._by_host[old.member.host_id].remove(old)
        for peer in [peer for peer, one in self._by_peer.items() if one == key]:
            del self._by_peer[peer]
            self.former[peer] = old.member
        self.add(record)

    # ---- connections -------------------------------------------------------------------------------------------------

    def of(self, peer: bytes) -> MemberKey | None:
        """Return the member that a connection belongs to; None where it belongs to none."""
        return self._by_peer.get(peer)

    def of_member(self, peer: bytes) -> MemberRecord:
        """Return the member that a connection is known to belong to."""
        return self._by_key[self._by_peer[peer]]

    def claim(self, peer: bytes, claim: m.Claim) -> bool:
        """Note the further connection of a member, in place of the last one; False where the token is wrong."""
        record = self.get((claim.role, claim.rank))
        if record is None or not hmac.compare_digest(record.member.token, claim.token):
            return False
        key = (claim.role, claim.rank)
        if peer != record.peer:  # its lifeline is no further connection
            last = self._further.get(key, peer)
            if self._by_peer.get(last) == key:
                del self._by_peer[last]
            self._further[key] = peer
        self._by_peer[peer] = key
        return True

    # ---- present and missing -----------------------------------------------------------------------------------------

    def missing(self) -> list[MemberKey]:
        """Return the members that have not joined yet, servers first."""
        return list(self._missing)

    @property
    def complete(self) -> bool:
        """Whether all members have joined."""
        return not self._missing

    def live(self) -> list[MemberRecord]:
        """Return the members that have neither left nor died."""
        return [record for record in self.values() if record.live]

    def of_role(self, role: str) -> Sequence[MemberRecord]:
        """Return the members of a role."""
        return self._by_role.get(role, ())

    def on_host(self, host_id: str) -> Sequence[MemberRecord]:
        """Return the members on a host."""
        return self._by_host.get(host_id, ())

    def fastest_step_s(self, now: float) -> float:
        """Return the seconds of a step of the fastest live worker; 0: not known."""
        if now >= self._fastest_until:
            times = [one.step_s for one in self.of_role("worker") if one.live and one.step_s > 0]
            self._fastest_s, self._fastest_until = min(times, default=0.0), now + _FASTEST_S
        return self._fastest_s

    def expected(self) -> set[MemberKey]:
        """Return the workers that a barrier waits for."""
        workers = [one for one in self.of_role("worker") if not (one.left or one.gone or one.joining)]
        return {("worker", record.member.rank) for record in workers}

    # ---- newcomers ---------------------------------------------------------------------------------------------------

    def objection(self, hello: m.Hello, is_ending: bool, deaths: Sequence[m.Death]) -> str:
        """Return why a process cannot join, or an empty string."""
        who = f"{hello.role} {hello.rank} on {hello.host} (pid {hello.pid})"
        sizes = (self._settings.num_workers, self._settings.num_servers)
        if hello.job_id != self._settings.job_id:
            return f"{who} belongs to job {hello.job_id!r}, this is job {self._settings.job_id!r}"
        if is_ending:
            return f"{who} came when the job was ending{'; ' if deaths else ''}{describe_all(deaths)}"
        if (hello.num_workers, hello.num_servers) != sizes:
            return f"{who} expects {hello.num_workers} workers and {hello.num_servers} servers, this job has {sizes}"
        size, record = self._size(hello.role), self.get((hello.role, hello.rank))
        if hello.rank >= size:
            return f"{who}: this job has {size} {hello.role}s, ranks 0 to {size - 1}"
        if record is not None and not self.takes_over(hello):
            return f"{who}: this rank is taken by {record}; start every process with its own rank"
        if hello.rank < 0 and self.free_rank(hello.role) < 0:
            return f"{who}: all {size} {hello.role}s of this job are there already"
        return ""

    def takes_over(self, hello: m.Hello) -> bool:
        """Tell whether a process takes the rank of a worker that has died, as is known or soon will be."""
        record = self.get((hello.role, hello.rank))
        is_later = record is not None and not record.left and hello.incarnation > record.member.incarnation
        return is_later and hello.role == "worker"

    def free_rank(self, role: str) -> int:
        """Return the lowest free rank of a role; -1 if there is none."""
        return next((rank for missing, rank in self._missing if missing == role), -1)

    def _size(self, role: str) -> int:
        return {"worker": self._settings.num_workers, "server": self._settings.num_servers}.get(role, 0)

    # ---- for others --------------------------------------------------------------------------------------------------

    def known_to(self, key: MemberKey) -> list[m.Member]:
        """Return all members as one of them may know them: servers learn every token, workers only their own."""
        if key[0] == "server":
            return [record.member for _, record in sorted(self._by_key.items())]
        self._public = self._public or [(one, without_token(self[one].member)) for one in sorted(self)]
        return [self[key].member if key == other else member for other, member in self._public]

    def check(self) -> None:
        """Assert the invariants."""
        assert len({record.peer for record in self.values()}) == len(self), "two members share a lifeline"
        for (role, rank), record in self.items():
            assert (record.member.role, record.member.rank) == (role, rank)


def without_token(one: m.Member) -> m.Member:
    """Return the member without its secret."""
    return msgspec.structs.replace(one, token=b"")
