"""Steps that end at a time: a worker computes parts of its samples until then, and pushes their gradients.

A part is begun when it would end in time, if it takes as long as parts usually do: the median of the last ones, so that
single slow parts do not count. The first part of a step is always begun, so every worker brings something. A part that
has begun is finished; so a step takes longer than ``deadline_s`` only by a part that is slower than usual.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

#: Parts whose median is the expected time of the next one.
_WINDOW = 25


class Accumulates(Protocol):
    """The methods needed of an optimizer; :class:`paceline.DistributedOptimizer` has them."""

    param_groups: list[dict[str, Any]]

    samples: float | None
    """Samples behind the next push."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate gradients."""


class Deadline:
    """The time at which a worker stops to begin parts of a step."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds, self._clock = seconds, clock
        self._begun = clock()
        self._parts: deque[float] = deque(maxlen=_WINDOW)

    def begin_step(self) -> None:
        """Note that a step begins now."""
        self._begun = self._clock()

    def has_time(self) -> bool:
        """Return whether another part would end in time."""
        expected = statistics.median(self._parts) if self._parts else 0.0
        return self._clock() - self._begun + expected <= self._seconds

    @contextlib.contextmanager
    def part(self) -> Generator[None]:
        """Return a context that measures one part."""
        begun = self._clock()
        yield
        self._parts.append(self._clock() - begun)


def check_deadline(seconds: float, max_batch: int | None) -> None:
    """Refuse a deadline that cannot be kept.

    Raises:
        ValueError: it is no time, or a step has one part only.
    """
    if not seconds > 0:
        raise ValueError(f"deadline_s is {seconds}; it is a time in seconds, more than 0")
    if max_batch is None:
        raise ValueError("deadline_s needs max_batch, the samples of a part: a worker stops between two parts")


def check_prefetch(batches: int) -> None:
    """Refuse to fetch batches ahead.

    Raises:
        ValueError: some are.
    """
    if batches:
        raise ValueError(
            f"deadline_s with {batches} batches that are fetched ahead: what a step leaves comes back in the same "
            "epoch, so give the DataLoader num_workers=0, and the sampler no prefetch"
        )


def accumulate(
    optimizer: Accumulates,
    batch: Sequence[torch.Tensor],
    sizes: Sequence[int],
    deadline: Deadline | None,
    context: Callable[[], AbstractContextManager[None]],
) -> Generator[tuple[torch.Tensor, ...], None, int]:
    """Yield the parts of a batch while there is time; then the gradients are the mean over the samples done.

    The loop that takes the parts adds each one's mean gradient to ``grad``, which must be None or zeros before. Each
    part is taken in a ``context``. Without a deadline all parts are done. Returns the samples that were done.
    """
    done = last = 0
    for size, *part in zip(sizes, *(torch.split(one, list(sizes)) for one in batch), strict=True):
        if done and deadline is not None and not deadline.has_time():
            break
        if last not in (0, size):
            _scale_gradients(optimizer, last / size)
        with context(), contextlib.nullcontext() if deadline is None else deadline.part():
            yield tuple(part)
        done, last = done + size, size
    if last != done:
        _scale_gradients(optimizer, last / done)
    return done


@torch.no_grad()
def _scale_gradients(optimizer: Accumulates, factor: float) -> None:
    """Multiply all gradients.

    Between two parts ``grad`` is the sum over all samples so far, divided by the samples of the last part: the mean of
    the next part can be added to that after a multiplication by the ratio of both sizes, which is 1 as a rule.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(factor)
