"""One member of a job, as the scheduler knows it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.wire import messages as m


@dataclass
class Seat:
    """A member and what is known of its life. Times are seconds on the machine's clock."""

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
    state: str = ""
    """Letter of its process in /proc, as last seen."""
    state_at: float = -math.inf
    """When it was seen."""
    held_at: float = -math.inf
    """When a debugger was last seen to hold it."""
    warned: bool = False
    """The log and the status name it as silent."""

    @property
    def live(self) -> bool:
        """Whether it has neither left nor died."""
        return not self.left and not self.dead

    def beat(self, beat: m.Heartbeat, now: float) -> None:
        """Take in a heartbeat."""
        if beat.round > self.round:
            rate = (beat.round - self.round) / max(now - self.moved, 1e-3)
            self.pace = rate if self.pace == 0 else 0.7 * self.pace + 0.3 * rate
            self.moved = now
        self.round, self.memory, self.sent, self.received = beat.round, beat.memory, beat.sent, beat.received
        self.step_s, self.usual_s, self.usual_samples = beat.step_s, beat.usual_s, beat.usual_samples
        self.spread = beat.spread

    def report(self, waits_for: str, now: float) -> m.MemberState:
        """Return how this member does."""
        phase = "dead" if self.dead else "left" if self.left else "silent" if self.warned else "live"
        heard_s = now - self.heard
        return m.MemberState(
            self.round, self.pace, heard_s, self.memory, self.sent, self.received, phase, waits_for, self.step_s
        )

    def counts_as_left(self, is_supervised: bool, grace_s: float, now: float) -> bool:
        """Tell whether a member that has said goodbye has left.

        Only its exit code tells whether it left in peace. Where the code is to come, it is waited for; not for long,
        because a process may take its time to end.
        """
        if not is_supervised or self.member.role != "worker" or self.code is not None:
            return True
        return self.goodbye_since is not None and now - self.goodbye_since > grace_s

    def __str__(self) -> str:
        return f"{self.member.role} {self.member.rank} on {self.member.host} (pid {self.member.pid})"


def without_token(one: m.Member) -> m.Member:
    """Return the member without its secret."""
    return m.Member(one.role, one.rank, one.local_rank, one.host, one.host_id, one.pid, one.address, b"", one.speed)
