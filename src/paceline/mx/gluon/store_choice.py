"""Chooses the store of a trainer, and where its optimizer runs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from paceline.errors import ConfigError
from paceline.kvstore.base import KVStore, KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.kvstore.factory import create, is_in_process
from paceline.kvstore.inprocess import InProcessStore, LocalStore
from paceline.mx.context import Context
from paceline.mx.gluon.clip import GradientClip
from paceline.mx.gluon.device_updates import DeviceUpdates, WorkerUpdates
from paceline.mx.gluon.optimizer_plan import OptimizerPlan
from paceline.mx.gluon.store_updates import InProcessUpdates, ServerUpdates, StoreUpdates
from paceline.worker import alone

if TYPE_CHECKING:
    from paceline.compression import Compression

#: If a key of a ``local`` store has more elements, updating it on the devices is cheaper (MXNet's bound).
LOCAL_BOUND = 16 * 1024 * 1024

_NEED_OPTIMIZER = {"async", "ssync", "gsync", "ksync"}
_VARIABLES = ("PACELINE_UPDATE_ON_KVSTORE", "MXNET_UPDATE_ON_KVSTORE")

#: Turns gradients of all devices and workers into new values.
Updates: TypeAlias = DeviceUpdates | StoreUpdates

#: Number of trainers of each store that cannot create further stores of its kind.
_trainers: weakref.WeakKeyDictionary[KVStoreBase, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Traits:
    """Properties of a trainer's parameters and options that matter for its store.

    Attributes:
        largest: elements of the largest parameter; 0 while shapes are unknown.
        sparse_weights: a parameter is kept as rows in the store.
        sparse_gradients: a parameter gets row-sparse gradients.
        clips: gradients are clipped before the update.
    """

    largest: int = 0
    sparse_weights: bool = False
    sparse_gradients: bool = False
    clips: bool = False

    @property
    def rows(self) -> bool:
        """Whether a parameter is kept as rows, or gets row-sparse gradients."""
        return self.sparse_weights or self.sparse_gradients


def choose_store(
    kvstore: str | KVStoreBase | None, num_devices: int, compression: Compression | None, sparse_weights: bool = False
) -> KVStoreBase | None:
    """Return the store to use; None when a single device needs no exchange of gradients, compression or rows.

    Raises:
        TypeError: ``kvstore`` has another type, or is None although rows need a store.
        ValueError: unknown store type, or an option that needs a store although there is none.
    """
    if isinstance(kvstore, KVStoreBase):
        return kvstore
    if kvstore is not None and not isinstance(kvstore, str):
        raise TypeError(f"kvstore is {type(kvstore).__name__}; give a type such as 'device', a store, or None")
    if kvstore is None and sparse_weights:
        raise TypeError("row-sparse parameters are kept in a store, and kvstore is None; use 'local' or 'device'")
    if kvstore is None and compression:
        raise ValueError("compression_params need a kvstore; gradients that are not sent cannot be compressed")
    if kvstore is None and num_devices > 1:
        raise ValueError(f"kvstore=None would let {num_devices} replicas drift apart; use 'device' or 'local'")
    if kvstore is None or (num_devices == 1 and is_in_process(kvstore) and not compression and not sparse_weights):
        alone.note_store(kvstore or "")
        return None
    return create(kvstore)


def share_of(
    store: KVStoreBase | None, clip_norm: float = 0.0, averages: bool = False
) -> tuple[KVStoreBase | None, str]:
    """Return a store for one trainer: a new store of the same kind, or the store itself and a prefix for its keys.

    Args:
        store: the store.
        clip_norm: largest norm that the servers of the new store clip to; 0: no limit.
        averages: a store whose workers go in lock step merges to the mean over samples.
    """
    if store is None:
        return None, ""
    if isinstance(store, KVStore):
        is_mean = averages and isinstance(store, DistStore) and store.policy.merge == "all"
        return store.for_optimizer(True if is_mean else None, clip_norm), ""
    number = _trainers[store] = _trainers.get(store, -1) + 1
    return store, f"trainer{number}/" if number else ""


def needs_optimizer(store_type: str) -> bool:
    """Return whether a store type applies pushes one by one: only useful with an optimizer."""
    return store_type.startswith("dist") and bool(_NEED_OPTIMIZER & set(store_type.split("_")))


def update_on_store(
    wanted: bool | None,
    store: KVStoreBase | None,
    traits: Traits = Traits(),  # immutable
    env: Mapping[str, str] | None = None,
) -> bool:
    """Decide whether the store runs the optimizer, or every replica does.

    It decides as MXNet's ``Trainer``. Rows of several workers are only merged where the optimizer runs. In
    one process the optimizers of the replicas are faster.

    Raises:
        ValueError: the choice is impossible with this store.
        ConfigError: the environment variable is neither 0 nor 1.
    """
    if store is None:
        if wanted:
            raise ValueError("update_on_kvstore=True needs a kvstore, and there is none (one device, or kvstore=None)")
        return False
    capable, kind = store.is_capable(KVStoreBase.OPTIMIZER), store.type
    if wanted and not capable:
        raise ValueError(f"update_on_kvstore=True is impossible: a {kind} store cannot run an optimizer")
    if traits.rows and not isinstance(store, KVStore):
        raise ValueError(f"a {kind} store does not support rows: use sparse=False for embeddings, or another store")
    why = _why_on_store(store, traits)
    if why and wanted is False:
        raise ValueError(f"update_on_kvstore=False is impossible: {why}")
    answer = wanted if wanted is not None else bool(why) or _by_default(store, traits, env)
    if answer and traits.clips and is_distributed(store) and not isinstance(store, DistStore):
        _refuse_clipping(kind, why)
    return answer


def is_distributed(store: KVStoreBase) -> bool:
    """Return whether a store has servers."""
    return store.type.startswith("dist")


def _why_on_store(store: KVStoreBase, traits: Traits) -> str:
    """Return why the optimizer must run in the store; an empty text if it need not."""
    if needs_optimizer(store.type):
        return f"a {store.type} store applies every push by an optimizer"
    if traits.sparse_weights:
        return "row-sparse parameters are kept, and so updated, in the store"
    if traits.sparse_gradients and is_distributed(store):
        return f"row-sparse gradients of several workers are merged where a {store.type} store updates"
    return ""


def _by_default(store: KVStoreBase, traits: Traits, env: Mapping[str, str] | None) -> bool:
    allowed = _from_environment(os.environ if env is None else env)
    if traits.sparse_gradients or (traits.clips and is_distributed(store)):
        return False
    large = isinstance(store, LocalStore) and traits.largest > LOCAL_BOUND
    return store.is_capable(KVStoreBase.OPTIMIZER) and allowed and not large


def _refuse_clipping(kind: str, why: str) -> None:
    way_out = (
        f"clip this worker's own gradients before step ({why}, so there is no merged gradient here)"
        if why
        else "let the workers update: update_on_kvstore=False"
    )
    raise ValueError(f"a {kind} store that runs the optimizer does not clip the merged gradient; {way_out}")


def _from_environment(env: Mapping[str, str]) -> bool:
    for name in _VARIABLES:
        if env.get(name):
            if env[name] not in ("0", "1"):
                raise ConfigError(f"{name}={env[name]!r} is not 0 or 1")
            return env[name] == "1"
    return True


def choose_updates(
    on_store: bool,
    plan: OptimizerPlan,
    store: KVStoreBase | None,
    contexts: Sequence[Context],
    clip: GradientClip,
    prefix: str,
) -> Updates:
    """Return the object that updates the values.

    | store             | the store runs the optimizer | every device runs it    |
    |-------------------|------------------------------|-------------------------|
    | none              |                              | :class:`DeviceUpdates`  |
    | of one process    | :class:`InProcessUpdates`    | :class:`DeviceUpdates`  |
    | distributed       | :class:`ServerUpdates`       | :class:`WorkerUpdates`  |
    | a third party's   | :class:`StoreUpdates`        | :class:`DeviceUpdates`  |
    """
    if not on_store:
        if isinstance(store, DistStore):
            return WorkerUpdates(plan, contexts, clip, store)
        return DeviceUpdates(plan, contexts, clip, store, prefix, takes_rows=isinstance(store, InProcessStore))
    if isinstance(store, InProcessStore):
        return InProcessUpdates(plan, store, clip)
    if isinstance(store, DistStore):
        return ServerUpdates(plan, store, clip)
    assert isinstance(store, KVStore), "only a KVStore is capable of an optimizer"
    assert not clip, "refused before"
    return StoreUpdates(plan, store)
