"""Key-value stores: one interface, several ways of synchronising."""

from paceline.kvstore.base import KVStore, KVStoreBase
from paceline.kvstore.factory import create, store_types

__all__ = ["KVStore", "KVStoreBase", "create", "store_types"]
