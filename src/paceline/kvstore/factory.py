"""Creates a store from its type."""

from __future__ import annotations

import itertools
from typing import Any

from paceline.kvstore.base import KVStoreBase
from paceline.naming import suggestion

_ALIASES = {
    "local": "local",
    "local_update_cpu": "local",
    "local_allreduce_cpu": "local",
    "device": "device",
    "local_allreduce_device": "device",
}

_DIST = ("dist_sync", "dist_async", "dist_ssync", "dist_gsync", "dist_ksync", "dist_auto")

_DIST_ALIASES = {"dist": "dist_sync", "dist_device": "dist_sync"}
for _name in _DIST:
    _, _, _how = _name.partition("_")
    _DIST_ALIASES |= {_name: _name, f"{_name}_device": _name, f"dist_device_{_how}": _name}

#: Stores without servers.
_ALLREDUCE = ("horovod", "allreduce")

_numbers = itertools.count()


def store_types() -> list[str]:
    """Return every type that :func:`create` knows."""
    return [*_ALIASES, *_DIST_ALIASES, *_ALLREDUCE, *KVStoreBase.registry]


def is_in_process(name: str) -> bool:
    """Return whether a type names a store inside one process."""
    return name.lower() in _ALIASES


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

    Raises:
        TypeError: the name is not a string, or the type does not have an option.
        ValueError: unknown type; the nearest is suggested. Or the namespace contains ``#``.
        ConfigError: a distributed type outside of a job.
    """
    if not isinstance(name, str):
        raise TypeError(f"a store type is a string, not {type(name).__name__}")
    kind = name.lower()
    if kind in KVStoreBase.registry:
        return KVStoreBase.registry[kind](**options)
    if kind in _ALIASES:
        return _create_local(kind, options)
    if kind in _DIST_ALIASES:
        return _create_dist(_DIST_ALIASES[kind], kind, options)
    if kind in _ALLREDUCE:
        return _create_allreduce(kind, options)
    raise ValueError(f"unknown store type {name!r}{suggestion(kind, store_types())}")


def _create_allreduce(kind: str, options: dict[str, Any]) -> KVStoreBase:
    from paceline.kvstore.allreduce import AllReduceStore

    if options:
        raise TypeError(f"a {kind} store has no option {', '.join(sorted(options))}")
    return AllReduceStore(kind)


def _create_local(kind: str, options: dict[str, Any]) -> KVStoreBase:
    from paceline.kvstore.inprocess.device import DeviceStore
    from paceline.kvstore.inprocess.local import LocalStore

    if options:
        raise TypeError(f"a {kind} store has no option {', '.join(sorted(options))}")
    return LocalStore(kind) if _ALIASES[kind] == "local" else DeviceStore(kind)


def _create_dist(store_type: str, alias: str, options: dict[str, Any]) -> KVStoreBase:
    from paceline.kvstore.dist import DistStore
    from paceline.kvstore.dist.policy import OPTIONS, resolve_policy
    from paceline.worker.current import current_session

    known = OPTIONS[store_type]
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"a {alias} store has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    session = current_session()
    policy = resolve_policy(store_type, session, options)
    namespace = options.get("namespace")
    if namespace and "#" in namespace:
        raise ValueError(f"namespace {namespace!r} contains '#'; choose a name without it")
    session.lock_step |= policy.merge == "all"
    if store_type == "dist_auto" and not session.auto:
        session.auto = "fixed"
    name = session.stores.name_for(namespace) if namespace else f"kv{next(_numbers)}"
    return DistStore(alias, session, policy, name, bool(options.get("mean")))
