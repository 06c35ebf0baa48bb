"""The end of a job: the deaths that end it, or the goodbye of the last worker; and the scheduler's exit code. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.host.exitcodes import PEER_FAILED, WORKER_LOST
from paceline.membership.effects import Action, Answer, MemberKey, Waiting, describe_all
from paceline.wire import messages as m

#: How long the scheduler waits for the others to leave before it exits: after a success, and after a failure.
LEAVE_TIMEOUT_S, FAILED_TIMEOUT_S = 60.0, 5.0


class Ending:
    """When and why a job ends.

    Attributes:
        deaths: the members whose death has ended the job, and those that died after that.
        cause: the member that failed first, and how.
        began: when the end began; None: it has not.
    """

    def __init__(self) -> None:
        self.deaths: list[m.Death] = []
        self.cause: m.Death | None = None
        self.began: float | None = None
        self._code = 0

    @property
    def has_succeeded(self) -> bool:
        """Whether all workers have left, or died while the others went on; no other member has died."""
        return self.began is not None and not self.deaths

    @property
    def is_under_way(self) -> bool:
        """Whether the job has failed, or all workers have left."""
        return self.began is not None or bool(self.deaths)

    def fail(self, death: m.Death, now: float) -> None:
        """Note a death that ends the job, or comes after one."""
        self.deaths.append(death)
        self.cause = self.cause or death
        self.began = now if self.began is None else self.began
        # Members that exit after a failed start do not change the exit code.
        self._code = self._code or PEER_FAILED

    def nobody_came(self, missing: Sequence[MemberKey], text: str, now: float) -> None:
        """Note that members have not joined in time."""
        self.began, self._code = now, 1
        self.deaths.append(m.Death("scheduler", 0, "", text))
        self.cause = self.cause or m.Death(*missing[0], "", text)

    def failures_for(self, waiting: Iterable[Waiting]) -> list[Action]:
        """Return the answers to requests that a death has made vain; none while no member has died."""
        if not self.deaths:
            return []
        text = describe_all(self.deaths)
        return [Answer(one.peer, one.seq, m.Failed("PeerDiedError", text)) for one in waiting]

    def exit_code(self, are_all_gone: bool, has_lost: bool, now: float) -> int | None:
        """Return the scheduler's exit code when the job is over; None: it is not.

        Args:
            are_all_gone: all members that have neither left nor died have closed their connections.
            has_lost: workers have died, and the others went on.
            now: seconds on the machine's clock.
        """
        if self.began is None:
            return None
        limit_s = LEAVE_TIMEOUT_S if self.has_succeeded else FAILED_TIMEOUT_S
        if not are_all_gone and now - self.began <= limit_s:
            return None
        return self._code or (WORKER_LOST if has_lost else 0)
