"""Creates a store from its type."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, overload

from paceline.kvstore.base import KVStore, KVStoreBase
from paceline.kvstore.store_options import (
    OPTIONS,
    AsyncOptions,
    BoundedOptions,
    FirstKOptions,
    GroupedOptions,
    StoreOptions,
)
from paceline.naming import suggestion
from paceline.worker import alone

if TYPE_CHECKING:
    from paceline.kvstore.allreduce import AllReduceStore

_OneProcess: TypeAlias = Literal["local", "local_update_cpu", "local_allreduce_cpu", "device", "local_allreduce_device"]
_LockStep: TypeAlias = Literal[
    "dist", "dist_device", "dist_sync", "dist_sync_device", "dist_device_sync",
    "dist_auto", "dist_auto_device", "dist_device_auto",
]  # fmt: skip
_Async: TypeAlias = Literal["dist_async", "dist_async_device", "dist_device_async"]
_Bounded: TypeAlias = Literal["dist_ssync", "dist_ssync_device", "dist_device_ssync"]
_Grouped: TypeAlias = Literal["dist_gsync", "dist_gsync_device", "dist_device_gsync"]
_FirstK: TypeAlias = Literal["dist_ksync", "dist_ksync_device", "dist_device_ksync"]
_AllReduce: TypeAlias = Literal["horovod", "allreduce"]

_ALIASES = {
    "local": "local",
    "local_update_cpu": "local",
    "local_allreduce_cpu": "local",
    "device": "device",
    "local_allreduce_device": "device",
}

_DIST_ALIASES = {"dist": "dist_sync", "dist_device": "dist_sync"}
for _name in OPTIONS:
    _, _, _how = _name.partition("_")
    _DIST_ALIASES |= {_name: _name, f"{_name}_device": _name, f"dist_device_{_how}": _name}

#: Stores without servers.
_ALLREDUCE = ("horovod", "allreduce")

#: What is none, but a process group of torch.distributed.
_PROCESS_GROUPS = frozenset({"ddp", "gloo", "mpi", "nccl"})


def store_types() -> list[str]:
    """Return every type that :func:`create` knows."""
    return [*_ALIASES, *_DIST_ALIASES, *_ALLREDUCE, *KVStoreBase.registry]


def is_in_process(name: str) -> bool:
    """Return whether a type names a store inside one process."""
    return name.lower() in _ALIASES


# A checker must see the name in the call: another string gets no options, because a misspelt one would pass.
@overload
def create(name: _OneProcess = "local") -> KVStore: ...
@overload
def create(name: _LockStep, **options: Unpack[StoreOptions]) -> KVStore: ...
@overload
def create(name: _Async, **options: Unpack[AsyncOptions]) -> KVStore: ...
@overload
def create(name: _Bounded, **options: Unpack[BoundedOptions]) -> KVStore: ...
@overload
def create(name: _Grouped, **options: Unpack[GroupedOptions]) -> KVStore: ...
@overload
def create(name: _FirstK, **options: Unpack[FirstKOptions]) -> KVStore: ...
@overload
def create(name: _AllReduce) -> AllReduceStore: ...  # type: ignore[overload-overlap]  # it is no KVStore
@overload
def create(name: str) -> KVStore: ...


def create(name: str = "local", **options: Any) -> KVStoreBase:
    """Create a store.

    Args:
        name: ``local``, ``device``, ``dist_sync``, ``dist_async``, ``dist_ssync``, ``dist_gsync``, ``dist_ksync``,
            ``dist_auto`` (the one of these that was chosen for measured machines), the ``_device`` forms in both
            spellings, ``horovod`` or ``allreduce`` (without servers), or a registered class's name; upper or lower
            case.
        **options: options of distributed stores: ``staleness``, ``groups`` (lists of members, or a path),
            ``weighting``, ``lr_scale`` (``update``: every update steps by the learning rate; ``sample``: by its part of
            one batch of every worker), ``age`` (missed updates beyond which a push is dropped), ``k`` (for
            ``dist_ksync``), ``mean`` (merge to the mean over samples instead of the sum), ``namespace`` (default:
            stores of different workers match by the order in which they are created; a namespace that was closed
            starts anew).

    Returns:
        The store. A type checker takes a name that it cannot read for a type with the whole interface of ``KVStore``;
        ``horovod``, ``allreduce`` and registered classes have less.

    Raises:
        TypeError: the name is not a string, or the type does not have an option; the nearest is suggested.
        ValueError: unknown type; the nearest is suggested. Or the namespace contains ``#``.
        ConfigError: a distributed type outside of a job.
    """
    if not isinstance(name, str):
        raise TypeError(f"a store type is a string, not {type(name).__name__}")
    kind = name.lower()
    if kind in KVStoreBase.registry:
        alone.note_exchange()  # how it exchanges is its own business
        return KVStoreBase.registry[kind](**options)
    if kind in _ALIASES:
        return _create_local(kind, options)
    if kind in _DIST_ALIASES:
        return _create_dist(_DIST_ALIASES[kind], kind, options)
    if kind in _ALLREDUCE:
        from paceline.kvstore.allreduce import AllReduceStore

        _check_options(kind, options, ())
        return AllReduceStore(kind)
    if kind in _PROCESS_GROUPS:
        raise ValueError(
            f"{name!r} is no type of store: a script that trains by DistributedDataParallel makes none, and is started "
            "by `paceline launch --ddp`. A store that reduces likewise, without servers, is allreduce"
        )
    raise ValueError(f"unknown store type {name!r}{suggestion(kind, store_types())}")


def _check_options(kind: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise TypeError if a type of store does not have an option; the nearest that it has is suggested."""
    for option in sorted(set(given) - set(known)):
        raise TypeError(
            f"a {kind} store has no option {option!r}{suggestion(option, known) if known else '; it has none'}"
        )


def _create_local(kind: str, options: Mapping[str, Any]) -> KVStoreBase:
    from paceline.kvstore.inprocess import DeviceStore, LocalStore

    _check_options(kind, options, ())
    alone.note_store(kind)
    return LocalStore(kind) if _ALIASES[kind] == "local" else DeviceStore(kind)


def _create_dist(store_type: str, alias: str, options: Mapping[str, Any]) -> KVStoreBase:
    from paceline.kvstore.dist import DistStore
    from paceline.kvstore.dist.store_policy import resolve_policy
    from paceline.worker.current import current_session

    _check_options(alias, options, OPTIONS[store_type])
    session = current_session()
    policy = resolve_policy(store_type, session, options)
    namespace = options.get("namespace")
    if namespace and "#" in namespace:
        raise ValueError(f"namespace {namespace!r} contains '#'; choose a name without it")
    session.trains(store_type=store_type, lock_step=session.kind.lock_step or policy.merge == "all")
    if policy.merge == "groups":
        session.trains(group=1 + policy.unit_of(len(session.workers))[session.rank])
    alone.note_store(store_type)
    if store_type == "dist_auto" and not session.kind.auto:
        session.trains(auto="fixed")
    return DistStore(alias, session, policy, session.stores.name_for(namespace), bool(options.get("mean")))
