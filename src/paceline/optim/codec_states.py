"""States of codecs in the ``state_dict`` of an optimizer, as the entry ``codec_states``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.kvstore.base import KVStoreBase

_ENTRY = "codec_states"


def codec_entry(store: KVStoreBase, unsent: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the entry; an empty dict when codecs keep no state.

    Args:
        store: the store that has the codecs.
        unsent: residuals of this worker's pulls, by key.
    """
    if not (store.keeps_residuals or unsent):
        return {}
    return {_ENTRY: {"rank": store.rank, "pushes": store.codec_states(), "unsent": unsent}}


def set_residuals(store: KVStoreBase, saved: Mapping[str, Any]) -> None:
    """Set the residuals of this worker's pushes; if the entry is another worker's, they become 0.

    Args:
        store: the store that has the codecs.
        saved: a ``state_dict``.
    """
    entry = saved.get(_ENTRY, {})
    if store.keeps_residuals:
        store.set_codec_states(entry["pushes"] if entry.get("rank") == store.rank else {})


def unsent_in(saved: Mapping[str, Any]) -> Mapping[Any, Any]:
    """Return the residuals of pulls, by key."""
    unsent: Mapping[Any, Any] = saved.get(_ENTRY, {}).get("unsent", {})
    return unsent
