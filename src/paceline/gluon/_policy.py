"""Which store a trainer uses, and where the optimizer runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.device import DeviceStore
from paceline.kvstore.local import LocalStore

if TYPE_CHECKING:
    from paceline.compression import Compression

#: Above this many elements one key of a ``local`` store is cheaper to update on its devices (MXNet's bound).
LOCAL_BOUND = 16 * 1024 * 1024

_IN_PROCESS: dict[str, type[KVStoreBase]] = {"local": LocalStore, "device": DeviceStore}
_NEED_OPTIMIZER = {"async", "ssync", "gsync", "ksync"}
_VARIABLES = ("PACELINE_UPDATE_ON_KVSTORE", "MXNET_UPDATE_ON_KVSTORE")


def choose_store(
    kvstore: str | KVStoreBase | None, num_devices: int, compression: Compression | None
) -> KVStoreBase | None:
    """Return the store to use: none when a single device has nobody to exchange gradients with.

    Args:
        kvstore: a type for ``kvstore.create``, a store, or None.
        num_devices: replicas in this process.
        compression: compression settings; they need a store even on a single device.

    Raises:
        TypeError: something else was given.
        ValueError: unknown type, or a choice that needs a store without one.
    """
    if isinstance(kvstore, KVStoreBase):
        return kvstore
    if kvstore is not None and not isinstance(kvstore, str):
        raise TypeError(f"kvstore is {type(kvstore).__name__}; give a type such as 'device', a store, or None")
    if kvstore is None and compression:
        raise ValueError("compression_params need a kvstore; gradients that go nowhere cannot be compressed")
    if kvstore is None and num_devices > 1:
        raise ValueError(f"kvstore=None would let {num_devices} replicas drift apart; use 'device' or 'local'")
    if kvstore is None or (kvstore.lower() in _IN_PROCESS and num_devices == 1 and not compression):
        return None
    if kvstore.lower() in _IN_PROCESS:
        return _IN_PROCESS[kvstore.lower()]()
    # Here, because the stores of many processes bring in sockets and message schemas.
    from paceline.kvstore import create

    return create(kvstore)


def needs_optimizer(store_type: str) -> bool:
    """Tell whether a store type applies pushes one by one, which only makes sense with an optimizer."""
    return store_type.startswith("dist") and bool(_NEED_OPTIMIZER & set(store_type.split("_")))


def update_on_store(
    wanted: bool | None,
    store: KVStoreBase | None,
    largest: int,
    env: Mapping[str, str] | None = None,
) -> bool:
    """Decide whether the store runs the optimizer, or every replica does.

    Args:
        wanted: the caller's choice, or None.
        store: the store, or None.
        largest: elements of the largest parameter.
        env: the environment, ``os.environ`` by default.

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
    if needs_optimizer(kind):
        if wanted is False:
            raise ValueError(
                f"update_on_kvstore=False is impossible: a {kind} store applies every push by an optimizer"
            )
        return True
    if wanted is not None:
        return wanted
    allowed = _from_environment(os.environ if env is None else env)
    return capable and allowed and not (kind == "local" and largest > LOCAL_BOUND)


def _from_environment(env: Mapping[str, str]) -> bool:
    for name in _VARIABLES:
        if env.get(name):
            if env[name] not in ("0", "1"):
                raise ConfigError(f"{name}={env[name]!r} is not 0 or 1")
            return env[name] == "1"
    return True
