"""The time that counts for a process that starts, on a busy host too. Pure.

A process that starts on a busy host is slow, not lost. Where its CPU time is known, this is the time that counts:

| since the last report it | counts |
|---|---|
| used CPU time, at least :data:`MOVING_SHARE` of the time that passed | the CPU time, at most the time that passed |
| used less, and is ready to run: the host has no processor for it | the CPU time |
| used less otherwise: it sleeps, waits for somebody, or is stopped | the time that passed |
"""

from __future__ import annotations

#: CPU time of a process that starts, as a share of the time that passes: less is no start.
MOVING_SHARE = 0.005


class StartClock:
    """The time that counts for one process.

    Args:
        now: seconds on the caller's clock, when the job started.
    """

    def __init__(self, now: float) -> None:
        self.cpu_s = 0.0
        self._counted, self._since = 0.0, now
        self._is_told = False

    def note(self, cpu_s: float, now: float, is_ready: bool = False) -> None:
        """Note how much CPU time the process has used since it started.

        Args:
            cpu_s: its CPU time, in seconds.
            now: seconds on the caller's clock.
            is_ready: it runs now, or waits for a processor or a disk.
        """
        passed, used = now - self._since, cpu_s - self.cpu_s
        sleeps = used < MOVING_SHARE * passed and not is_ready
        self._counted += passed if sleeps else min(used, passed)
        self.cpu_s, self._since, self._is_told = cpu_s, now, True

    def forgive(self, lost_s: float) -> None:
        """Do not count time in which the judge did not run."""
        self._since += lost_s

    def counted_s(self, now: float) -> float:
        """Return the time that counts; after a report, until the next one, no more does."""
        return self._counted if self._is_told else self._counted + now - self._since
