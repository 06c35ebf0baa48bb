"""What a worker tells the scheduler with its next heartbeat, beside its figures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from paceline.wire import messages as m

#: Sums of weights that wait for a heartbeat; older ones are forgotten. And words on samples that one heartbeat brings.
_MAX_SUMS, _MOST_DEALT = 8, 256


class ToTell:
    """Sums of weights, and words on samples that were dealt. Used by any thread.

    Args:
        beat_soon: lets a heartbeat go now.
    """

    def __init__(self, beat_soon: Callable[[], None]) -> None:
        self._beat_soon = beat_soon
        self._weights: deque[m.WeightSums] = deque(maxlen=_MAX_SUMS)
        self._dealt: deque[m.Dealt] = deque()

    def weights(self, sums: m.WeightSums) -> None:
        """Let the scheduler compare this worker's weights with those of the others."""
        self._weights.append(sums)
        self._beat_soon()

    def dealt(self, one: m.Dealt) -> None:
        """Let the scheduler write down which samples were dealt."""
        self._dealt.append(one)

    def add_to(self, beat: m.Heartbeat) -> None:
        """Put it into a heartbeat."""
        beat.weights = [self._weights.popleft() for _ in range(len(self._weights))]
        beat.dealt = [self._dealt.popleft() for _ in range(min(len(self._dealt), _MOST_DEALT))]

    def flush(self) -> None:
        """Let the last heartbeat bring what waits: this worker leaves."""
        if self._dealt:
            self._beat_soon()
