"""Learning rates by schedule: MXNet's ``lr_scheduler``, in the worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.keys import Key, Keys
from paceline.updaters import Options

Scheduler = Callable[[int], float]


class Schedule:
    """Says which learning rate the next push has.

    As in MXNet the function gets ``num_update``: how often the key that was pushed most often has been pushed, this
    time included, so it is 1 at first. A worker counts its own pushes: with ``dist_sync`` these are the updates, with
    the other types the updates that it made itself.

    Args:
        scheduler: function of ``num_update``.
        begin_num_update: pushes that were made before, by an earlier run.

    Raises:
        TypeError: not a function of a number.
    """

    def __init__(self, scheduler: Scheduler, begin_num_update: int = 0) -> None:
        if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise TypeError(
                f"lr_scheduler is torch's {type(scheduler).__name__}, which changes the rates of an optimizer in this "
                "process; a store wants a function num_update -> rate. Give it one, for example "
                "lr_scheduler=lambda num_update: 0.1 * 0.5 ** (num_update // 1000), or use torch's with "
                "paceline.DistributedOptimizer"
            )
        if not callable(scheduler):
            raise TypeError(f"lr_scheduler is {scheduler!r}, not a function num_update -> rate")
        self._scheduler = scheduler
        self._pushes: Counter[Key] = Counter()
        self._begin = self.num_update = begin_num_update

    def start_at(self, rate: float) -> None:
        """Start MXNet's schedulers, which have a ``base_lr``, at the rate of the optimizer, as MXNet does."""
        if hasattr(self._scheduler, "base_lr"):
            self._scheduler.base_lr = rate

    def groups(self, key: Keys, groups: Sequence[Options]) -> list[Options]:
        """Count a push of keys; returns options per param group with the rate that it has."""
        rate = self.rate(key)
        return [group | {"lr": rate} for group in groups]

    def rate(self, key: Keys) -> float:
        """Count a push of keys; returns its rate.

        Raises:
            ValueError: the function returned something that is no rate.
        """
        keys: set[Any] = set(key) if isinstance(key, list | tuple) else {key}
        for one in keys:
            self._pushes[one] += 1
            self.num_update = max(self.num_update, self._begin + self._pushes[one])
        rate = float(self._scheduler(self.num_update))
        if not 0 <= rate < float("inf"):
            raise ValueError(f"lr_scheduler returned {rate} for update {self.num_update}, which is no learning rate")
        return rate


def schedule_of(options: dict[str, Any]) -> Schedule | None:
    """Take ``lr_scheduler`` and ``begin_num_update`` out of the options of an optimizer.

    Raises:
        TypeError: not a function.
    """
    scheduler, begin = options.pop("lr_scheduler", None), int(options.pop("begin_num_update", 0))
    if scheduler is None:
        return None
    schedule = Schedule(scheduler, begin)
    rate = options.get("lr", options.get("learning_rate"))
    if rate is not None:
        schedule.start_at(float(rate))
    return schedule
