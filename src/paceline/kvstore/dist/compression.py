"""Codecs of a store's two legs, set on this worker and on the servers."""

from __future__ import annotations

import msgspec

from paceline import arguments as check
from paceline import compression
from paceline.compression import Compression
from paceline.kvstore.dist.store_lifecycle import StoreLifecycle
from paceline.wire import messages as m
from paceline.worker.key_table import KeyTable
from paceline.worker.traffic import Traffic


def set_compression(
    name: str, settings: Compression, lifecycle: StoreLifecycle, table: KeyTable, traffic: Traffic
) -> None:
    """Set codecs on this worker and on all servers. Every worker calls it, before its first push.

    Args:
        name: name of the store.
        settings: settings of one leg or of both.
        lifecycle: the store's lifecycle.
        table: the store's keys.
        traffic: the store's pushes and pulls.

    Raises:
        ValueError: unknown settings, or a leg has another codec already.
        TypeError: pulls are compressed, and a key is not float32.
    """
    codecs = compression.by_leg(settings)
    for leg, codec in codecs.items():
        known = traffic.codecs.get(leg)
        if known is not None and codec.params() != known.params():
            raise ValueError(f"store {name!r} compresses its {leg} leg with {known.params()} already")
    if "pull" in codecs:
        for block in table.blocks.values():
            check.float32_for_pulls([key.name for key in block.spec.keys], [block.dtype] * len(block.spec.keys))
    for leg, codec in codecs.items():
        lifecycle.open()
        body = m.SetCompression(name, msgspec.msgpack.encode(codec.params()), leg)
        lifecycle.ask_all_servers(body, f"setting compression of the {leg} leg")
        traffic.codecs[leg] = codec
