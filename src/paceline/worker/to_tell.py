"""What a worker tells the scheduler with its next heartbeat, beside its figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from paceline.wire import messages as m

#: Steps that wait for a heartbeat; older ones are forgotten. And words on samples that one heartbeat brings.
_MAX_STEPS, _MOST_DEALT = 24, 256


class ToTell:
    """Words on steps, and on samples that were dealt. Used by any thread.

    Args:
        beat_soon: lets a heartbeat go now.
    """

    def __init__(self, beat_soon: Callable[[], None]) -> None:
        self._beat_soon = beat_soon
        self._steps: deque[m.WorkerStep] = deque(maxlen=_MAX_STEPS)
        self._dealt: deque[m.Dealt] = deque()

    def step(self, step: m.WorkerStep) -> None:
        """Let the scheduler compare what this worker tells of a step with what the others tell."""
        self._steps.append(step)
        self._beat_soon()

    def dealt(self, one: m.Dealt) -> None:
        """Let the scheduler write down which samples were dealt."""
        self._dealt.append(one)

    def add_to(self, beat: m.Heartbeat) -> None:
        """Put it into a heartbeat."""
        beat.steps = [self._steps.popleft() for _ in range(len(self._steps))]
        beat.dealt = [self._dealt.popleft() for _ in range(min(len(self._dealt), _MOST_DEALT))]

    def flush(self) -> None:
        """Let the last heartbeat bring what waits: this worker leaves."""
        if self._dealt:
            self._beat_soon()
