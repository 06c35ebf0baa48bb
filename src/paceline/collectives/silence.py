"""For how long another rank is silent, less the time in which its host does not run it."""

from __future__ import annotations

from paceline.membership.liveness import GONE, READY
from paceline.net.hosts import ProcessState, process_state

#: Silence after which the process is looked at; before, that would cost more than it tells.
LOOK_AFTER_S = 1.0


class Silence:
    """The silence of a process that counts: while it is ready to run, only the CPU time that it uses.

    Args:
        pid: the process's pid if it is on this host; 0: unknown.

    Attributes:
        is_gone: the process has ended, for sure. What it sent before may still come.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu_s: float | None = None
        self.counted_s, self.is_gone = 0.0, False

    def note(self, waited_s: float, is_over: bool = False) -> None:
        """Note that nothing came from the process for some more time, or that the silence is over."""
        if is_over:
            self.counted_s, self._cpu_s = 0.0, None
            return
        is_new = self.counted_s < LOOK_AFTER_S or not self._pid
        now = ProcessState("") if is_new else process_state(self._pid)
        if now.letter == READY and self._cpu_s is not None:
            waited_s = min(waited_s, max(0.0, now.cpu_s - self._cpu_s))
        self.counted_s += waited_s
        self.is_gone = now.letter in GONE
        self._cpu_s = None if is_new else now.cpu_s
