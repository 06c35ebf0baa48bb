"""Chooses where a trainer's optimizer runs.

| store             | the store runs the optimizer | every device runs it    |
|-------------------|------------------------------|-------------------------|
| none              |                              | :class:`DeviceUpdates`  |
| of one process    | :class:`InProcessUpdates`    | :class:`DeviceUpdates`  |
| distributed       | :class:`ServerUpdates`       | :class:`WorkerUpdates`  |
| a third party's   | :class:`StoreUpdates`        | :class:`DeviceUpdates`  |
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.context import Context
from paceline.gluon.clip import GradientClip
from paceline.gluon.device_updates import DeviceUpdates, WorkerUpdates
from paceline.gluon.optimizer_plan import OptimizerPlan
from paceline.gluon.store_choice import is_distributed
from paceline.gluon.store_updates import InProcessUpdates, ServerUpdates, StoreUpdates
from paceline.gluon.updates import Updates
from paceline.kvstore.base import KVStore, KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.kvstore.inprocess import InProcessStore


def choose_updates(
    on_store: bool,
    plan: OptimizerPlan,
    store: KVStoreBase | None,
    contexts: Sequence[Context],
    clip: GradientClip,
    prefix: str,
) -> Updates:
    """Return the object that updates the values.

    Args:
        on_store: the store runs the optimizer.
        plan: the optimizer.
        store: the trainer's store, or None.
        contexts: the devices.
        clip: bounds of the gradients.
        prefix: prefix of the keys in a third party's store.
    """
    return _in_store(plan, store, clip) if on_store else _on_devices(plan, store, contexts, clip, prefix)


def _in_store(plan: OptimizerPlan, store: KVStoreBase | None, clip: GradientClip) -> Updates:
    if isinstance(store, InProcessStore):
        return InProcessUpdates(plan, store, clip)
    if isinstance(store, DistStore):
        return ServerUpdates(plan, store, clip)
    assert isinstance(store, KVStore), "only a KVStore is capable of an optimizer"
    assert not clip, "refused before"
    return StoreUpdates(plan, store)


def _on_devices(
    plan: OptimizerPlan, store: KVStoreBase | None, contexts: Sequence[Context], clip: GradientClip, prefix: str
) -> Updates:
    if isinstance(store, KVStore) and is_distributed(store):
        return WorkerUpdates(plan, contexts, clip, store)
    return DeviceUpdates(plan, contexts, clip, store, prefix, takes_rows=isinstance(store, InProcessStore))
