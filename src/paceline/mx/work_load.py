"""Plans the split of batches over devices of unequal speed, from measured times. Pure: times are arguments."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

_WARM_UP = 1
_WINDOW = 5
_WORTH_IT = 0.03


def shares_to_sizes(batch_size: int, shares: Sequence[float]) -> list[int]:
    """Split a batch by largest remainders, with at least one sample for every device.

    Args:
        batch_size: samples in the batch.
        shares: numbers above 0; only their ratios matter.

    Raises:
        ValueError: fewer samples than devices.
    """
    if batch_size < len(shares):
        raise ValueError(
            f"a batch of {batch_size} samples cannot feed {len(shares)} devices, each needs at least one; "
            "use a larger batch or fewer devices (or drop_last=True in the loader)"
        )
    spare, total = batch_size - len(shares), sum(shares)
    # Every device gets one sample; the rest is split by the shares.
    wanted = [max(0.0, batch_size * one / total - 1) for one in shares]
    scale = spare / sum(wanted) if sum(wanted) else 0.0
    exact = [one * scale for one in wanted]
    sizes = [int(one) for one in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (sizes[i] - exact[i], i))
    for i in by_remainder[: spare - sum(sizes)]:
        sizes[i] += 1
    return [1 + one for one in sizes]


class WorkLoadPlanner:
    """Splits batches so that all devices finish together, and keeps adjusting.

    The speed of a device is the median of its last few measurements of samples per second, so a single slow batch
    changes nothing. A share in proportion to speed has its fixed point where all devices take equally long, even if
    every batch has a fixed cost beside the cost per sample. The split changes only when that makes a batch noticeably
    shorter, because batches of constant shape are faster. (LB-BSP, Chen et al. 2020, balances workers the same way.)

    Args:
        num_devices: number of devices.
    """

    def __init__(self, num_devices: int) -> None:
        if num_devices < 1:
            raise ValueError(f"num_devices is {num_devices}; it must be at least 1")
        self._speeds: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in range(num_devices)]
        self._shares = [1.0 / num_devices] * num_devices
        self._observed = 0

    @property
    def shares(self) -> tuple[float, ...]:
        """The current share of each device; they sum to 1."""
        return tuple(self._shares)

    def sizes(self, batch_size: int) -> list[int]:
        """Return samples per device for a batch.

        Raises:
            ValueError: fewer samples than devices.
        """
        return shares_to_sizes(batch_size, self._shares)

    def observe(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Record the times of one batch.

        Args:
            sizes: samples per device.
            seconds: time that each device computed. The first batch is not used: its time includes allocations.

        Raises:
            ValueError: a number per device is missing, or one is not above 0.
        """
        if not len(sizes) == len(seconds) == len(self._speeds):
            raise ValueError(f"{len(sizes)} sizes and {len(seconds)} times for {len(self._speeds)} devices")
        if min(sizes) < 1 or not all(0 < one < float("inf") for one in seconds):
            raise ValueError(f"sizes {list(sizes)} and seconds {list(seconds)} must be above 0")
        self._observed += 1
        if self._observed <= _WARM_UP:
            return
        for speeds, size, duration in zip(self._speeds, sizes, seconds, strict=True):
            speeds.append(size / duration)
        self._adjust()

    def _adjust(self) -> None:
        speeds = [statistics.median(one) for one in self._speeds]
        best = [one / sum(speeds) for one in speeds]
        now = max(share / speed for share, speed in zip(self._shares, speeds, strict=True))
        then = 1.0 / sum(speeds)
        if then < now * (1 - _WORTH_IT):
            self._shares = best
