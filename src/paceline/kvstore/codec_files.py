"""What codecs hold back, on disk: a file per worker, beside the one with the optimizer's state."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from paceline.kvstore import checkpoint
from paceline.kvstore.base import KVStore

logger = logging.getLogger(__name__)

FORMAT = "paceline codec states 1"


def path_of(fname: str | os.PathLike[str], rank: int) -> Path:
    """Return where a worker's residuals lie: ``<fname>.rank<r>``."""
    return Path(f"{os.fspath(fname)}.rank{rank}")


def save(store: KVStore, fname: str | os.PathLike[str]) -> None:
    """Write this worker's residuals, if its codec keeps any; the file appears whole or not at all.

    Args:
        store: whose residuals.
        fname: of the optimizer's state.
    """
    if store.keeps_residuals:
        checkpoint.save(path_of(fname, store.rank), store.codec_states(), {}, FORMAT)


def load(store: KVStore, fname: str | os.PathLike[str]) -> None:
    """Read this worker's residuals, if its codec keeps any; where nothing was saved they become 0.

    Args:
        store: whose residuals.
        fname: of the optimizer's state.

    Raises:
        DataError: the file is damaged, or something else.
        ValueError: residuals of another model. Nothing is changed then.
    """
    if not store.keeps_residuals:
        return
    path = path_of(fname, store.rank)
    if path.is_file():
        store.set_codec_states(checkpoint.load(path, FORMAT))
        return
    logger.warning("worker %d: there is no %s; its residuals start at 0", store.rank, path)
    store.set_codec_states({})
