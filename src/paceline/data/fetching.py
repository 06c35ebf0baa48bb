"""The batches of a sampler in a ``DataLoader``: it fetches them ahead, and hands them to the loop."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, Sampler, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter

from paceline.data.dealt import Walk
from paceline.worker import notice

#: Calls of torch between a sampler and the loader that begins to walk it; there are five.
_DEPTH = 10

_OWN = "_paceline_dealing"

T = TypeVar("T")


def fetched_ahead() -> int:
    """Return how many batches the ``DataLoader`` that begins to walk a sampler fetches ahead; 0: none, or no loader.

    A loader with workers takes its first batches before its loop begins, so the loader is among the callers of the
    sampler's first batch. Any other caller takes a batch when it needs one.
    """
    loader = _caller(DataLoader)
    return 0 if loader is None else loader.num_workers * (loader.prefetch_factor or 0)


def is_in_loader() -> bool:
    """Return whether a ``DataLoader`` asks for the data, in this process or in one of its own."""
    return get_worker_info() is not None or _caller(_BaseDataLoaderIter, sys.getrecursionlimit()) is not None


class Dealing:
    """Tells :mod:`paceline.data.dealt` which batch of a walk the loop has. Entered in the ``__iter__`` of a sampler.

    Batches that a ``DataLoader`` fetches ahead count when the loop gets them. If something else than torch's own
    classes takes the indices, it is unknown which of them make a batch, and none is told.

    Args:
        sampler: deals single indices, or batches of them.
        singles: single indices that the sampler deals in this walk; None: it deals batches.
    """

    def __init__(self, sampler: Sampler[Any], singles: int | None = None) -> None:
        self.walk: Walk | None = None
        """What the loop has got of it; None: that is not known."""
        self._sizes: Iterator[int] | deque[int] = deque()
        """Sizes of the batches that the loop does not have yet."""
        self._is_direct = self._is_first = False
        self._singles = [singles or 0]
        iterator = _caller(_BaseDataLoaderIter)
        if iterator is None and singles is None:
            self.walk, self._is_direct = Walk(sampler), True
        elif iterator is not None and getattr(iterator, "_in_order", True):
            taker = iterator._index_sampler
            if singles is None and taker is sampler:
                self._follow(iterator, sampler)
            elif singles is not None and type(taker) is BatchSampler and taker.sampler is sampler:
                self._sizes = _cut(self._singles, taker.batch_size, taker.drop_last)
                self._follow(iterator, sampler)

    def _follow(self, iterator: Any, sampler: Sampler[Any]) -> None:
        """Be told when a loader hands a batch to the loop. The loader's iterator is not kept alive."""
        leave_former = getattr(iterator, _OWN, None)
        if leave_former is not None:  # a loader with persistent workers uses its iterator again
            leave_former()
        walk = self.walk = Walk(sampler)
        leave = weakref.finalize(iterator, walk.leave)
        leave.atexit = False
        setattr(iterator, _OWN, leave)
        sizes, itself = self._sizes, weakref.ref(iterator)

        def next_data() -> Any:
            notice.batch()
            one = itself()
            assert one is not None
            try:
                data = type(one)._next_data(one)
            except StopIteration:
                walk.end()
                raise
            except BaseException:
                if sizes or not isinstance(sizes, deque):  # else it is an error of the sampler itself
                    walk.skip(_pop(sizes))
                raise
            walk.hand_out(_pop(sizes))
            return data

        iterator._next_data = next_data
        self._is_first = iterator._num_workers == 0
        """The loader is about to get the first batch: it calls ``next_data`` only for those after it."""
        if self._is_first and not isinstance(sizes, deque):
            walk.hand_out(_pop(sizes))

    @property
    def has_only_looked(self) -> bool:
        """Whether the loop has left it without use of a batch, as far as that is known."""
        return self.walk is not None and self.walk.has_only_looked

    @property
    def loaded(self) -> Walk | None:
        """The walk, where a ``DataLoader`` takes the batches and it is known which of them the loop has got."""
        return None if self._is_direct else self.walk

    def add(self, singles: int) -> None:
        """Note that the sampler deals so many more single indices."""
        self._singles[0] += singles

    def deal(self, samples: int) -> None:
        """Note that the next batch is dealt; a worker under notice leaves instead."""
        notice.batch()
        if self.walk is None:
            return
        if self._is_direct or self._is_first:
            self._is_first = False
            self.walk.hand_out(samples)
        else:
            assert isinstance(self._sizes, deque)
            self._sizes.append(samples)

    def __enter__(self) -> Dealing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.walk is not None and self._is_direct:
            self.walk.end() if kind is None else self.walk.leave()


def _pop(sizes: Iterator[int] | deque[int]) -> int:
    return sizes.popleft() if isinstance(sizes, deque) else next(sizes)


def _cut(samples: list[int], batch_size: int, drop_last: bool) -> Iterator[int]:
    """Yield the sizes of the batches that torch makes of so many samples; their number may grow meanwhile."""
    first = 0
    while (left := samples[0] - first) > (batch_size - 1 if drop_last else 0):
        yield min(batch_size, left)
        first += batch_size


def _caller(kind: type[T], depth: int = _DEPTH) -> T | None:
    """Return the object of a class whose method is among the next callers; None: there is none."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(depth):
        if frame is None:
            break
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            return found
        frame = frame.f_back
    return None
