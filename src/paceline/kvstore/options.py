"""Options of the optimizer that a store runs, and their schedules: MXNet's ``lr_scheduler``, in the worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.kvstore.base import OptimizerLike
from paceline.layout.keys import Key, Keys, checked_table
from paceline.updaters import Options, UpdaterSpec, defaults_of
from paceline.updaters.classes import SIMPLE, find_class


def plain_keys(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``set_optimizer`` with plain keys in ``keys``."""
    result = dict(options)
    if result.get("keys"):
        result["keys"] = checked_table(result["keys"])
    return result


def no_optimizer(store: str, verb: str) -> ValueError:
    """Return the error about a store that runs no optimizer; the verb is the refused use of its state or options."""
    return ValueError(
        f"the {store} store has no optimizer, so it has no state or options to {verb}; call set_optimizer. If a "
        'DistributedOptimizer or a Trainer steps in the workers (update="worker"), the state is theirs: '
        "paceline.save and paceline.load"
    )


def refuse_changes(spec: UpdaterSpec, groups: Sequence[Options]) -> None:
    """Raise if an updater has no options.

    Raises:
        ValueError: the store replaces stored values by pushes, or adds pushes to them.
    """
    if groups and spec.name in SIMPLE:
        raise ValueError(f"updater {spec.name!r} has no options to change; call set_optimizer")


def in_force(groups: Sequence[Options], cls: type[torch.optim.Optimizer] | None) -> list[Options]:
    """Return the options of every param group; those not given have the class's defaults, where the class is known."""
    defaults = {} if cls is None else defaults_of(cls)  # type: ignore[arg-type]  # mypy thinks classes not hashable
    return [{**defaults, **group} for group in groups or [{}]]


def own_class(spec: UpdaterSpec, optimizer: OptimizerLike = "") -> type[torch.optim.Optimizer]:
    """Return the class that a spec names. That of the optimizer behind the spec, if given, need not be importable.

    Raises:
        ValueError: the name is not that of an optimizer class.
    """
    if ":" in spec.name and not isinstance(optimizer, str):
        return optimizer if isinstance(optimizer, type) else type(optimizer)
    return find_class(spec.name, allowed=[spec.name])


# ---- schedules -------------------------------------------------------------------------------------------------------

Scheduler = Callable[[int], float]


class Schedule:
    """Computes the learning rate of the next push.

    As in MXNet the function gets ``num_update``: the number of pushes of the key that was pushed most often, this push
    included, so it starts at 1. A worker counts its own pushes: with ``dist_sync`` these are all updates, with the
    other types the updates that the worker made itself. ``begin_num_update`` are the pushes of an earlier run.

    Raises:
        TypeError: the scheduler is not a function of a number.
    """

    def __init__(self, scheduler: Scheduler, begin_num_update: int = 0) -> None:
        if isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
            raise TypeError(
                f"lr_scheduler is torch's {type(scheduler).__name__}, which changes the rates of an optimizer in this "
                "process; a store needs a function num_update -> rate. Give it one, for example "
                "lr_scheduler=lambda num_update: 0.1 * 0.5 ** (num_update // 1000), or use torch's with "
                "paceline.DistributedOptimizer"
            )
        if not callable(scheduler):
            raise TypeError(f"lr_scheduler is {scheduler!r}, not a function num_update -> rate")
        self._scheduler = scheduler
        self._pushes: Counter[Key] = Counter()
        self._begin = self.num_update = begin_num_update

    def groups(self, key: Keys, groups: Sequence[Options]) -> list[Options]:
        """Count a push of keys; returns options per param group with the rate of the push."""
        rate = self.rate(key)
        return [group | {"lr": rate} for group in groups]

    def rate(self, key: Keys) -> float:
        """Count a push of keys; returns its rate.

        Raises:
            ValueError: the function did not return a valid rate.
        """
        keys: set[Any] = {key} if isinstance(key, int | str | np.integer) else set(key)
        for one in keys:
            self._pushes[one] += 1
            self.num_update = max(self.num_update, self._begin + self._pushes[one])
        rate = float(self._scheduler(self.num_update))
        if not 0 <= rate < float("inf"):
            raise ValueError(f"lr_scheduler returned {rate} for update {self.num_update}, which is not a learning rate")
        return rate


def schedule_of(options: dict[str, Any]) -> Schedule | None:
    """Remove ``lr_scheduler`` and ``begin_num_update`` from the options of an optimizer; returns their schedule.

    Raises:
        TypeError: the scheduler is not a function.
    """
    scheduler, begin = options.pop("lr_scheduler", None), int(options.pop("begin_num_update", 0))
    if scheduler is None:
        return None
    start_at(scheduler, options)
    return Schedule(scheduler, begin)


def start_at(scheduler: Scheduler, options: Mapping[str, Any]) -> None:
    """Set the ``base_lr`` of MXNet's schedulers to the optimizer's learning rate, as MXNet does."""
    rate = options.get("lr", options.get("learning_rate"))
    if rate is not None and hasattr(scheduler, "base_lr"):
        scheduler.base_lr = float(rate)
