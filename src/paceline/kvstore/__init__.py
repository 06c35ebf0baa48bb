"""Key-value stores: one interface, several ways of synchronising."""

from paceline.kvstore.base import KVStore, KVStoreBase
from paceline.kvstore.factory import create, store_types
from paceline.server.commands import register_command

__all__ = ["KVStore", "KVStoreBase", "create", "register_command", "store_types"]
