"""A checkpoint of several workers: one file by worker 0, and beside it a file of each other worker's own.

1. Every worker but 0 writes what is its own to ``<path>.rank<r>.<digest>``. With the digest in the name, the files of
   the checkpoint before stay in their places.
2. All tell each other. If one has failed, all raise, and nothing has changed.
3. Worker 0 writes ``<path>``, its own included. Its manifest lists the other files with their digests, so files of
   unlike saves are never taken for one checkpoint. With this file the checkpoint is there.
4. All tell each other again, and remove the files of the checkpoint before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.errors import CheckpointError, CheckpointNotFoundError
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.checkpoint import tensor_file
from paceline.kvstore.checkpoint.tensor_file import TensorFile
from paceline.kvstore.checkpoint.whole_file import STALE_S

#: How long to wait for another worker's disk. One that has died is noticed at once anyway.
DISK_TIMEOUT_S = 3600.0
#: Names of worker 0's own tensors in the common file begin so.
OWN = "rank0/"


@dataclass(frozen=True)
class Content:
    """Tensors by name, and plain data for the manifest."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """What a worker has read.

    Attributes:
        common: what worker 0 wrote; None on workers that were not to read it.
        own: what this worker wrote; None if it wrote nothing, or was not there.
        workers: how many there were.
    """

    common: TensorFile | None
    own: TensorFile | None
    workers: int


def save(
    store: KVStoreBase | None,
    path: str | os.PathLike[str],
    kind: str,
    common: Callable[[], Content],
    own: Callable[[], Content | None],
    step: int | None = None,
) -> None:
    """Write a checkpoint. Every worker of the store calls it.

    Args:
        store: whose workers; None: this process is alone.
        path: of the common file.
        kind: what the file is.
        common: returns what is everybody's; asked on worker 0.
        own: returns what is this worker's, or None.
        step: steps made so far, if the caller counts them.

    Raises:
        CheckpointError: on all workers: what one of them could not write, or that they are at unlike steps.
    """
    rank = 0 if store is None else store.rank
    before = {one["file"] for one in _listed(path, kind).values()}
    mine: dict[str, Any] = {"before": sorted(before), "step": step}
    with _Telling(store, "files of workers", mine) as telling:
        content = own()
        if rank and content is not None:
            beside = Path(f"{os.path.realpath(path)}.rank{rank}")
            manifest = {**content.manifest, "step": step, "rank": rank}
            file = tensor_file.write(beside, _own_kind(kind), content.tensors, manifest, name_by_digest=True)
            mine |= {"file": file.path.name, "digest": file.digest}
    try:
        told = telling.answers()
        unlike = sorted({one["step"] for one in told}) if step is not None else []
        if len(unlike) > 1:
            raise CheckpointError(
                f"the workers are at unlike steps: {', '.join(map(str, unlike))}; save at the same one"
            )
        before |= set(told[0]["before"])
        listed = {
            str(other): {"file": one["file"], "digest": one["digest"]}
            for other, one in enumerate(told)
            if "file" in one
        }
        with _Telling(store, "the common file", {}) as done:
            if rank == 0:
                _write_common(path, kind, common(), content, listed, _world(store) | {"step": step})
        done.answers()
    except CheckpointError:  # with any other error worker 0 may have written the common file
        _remove(path, {mine["file"]} - before if "file" in mine else set())
        raise
    names = {one["file"] for one in listed.values()}
    _remove(path, before - names)
    _remove_leftovers(path, rank, names)


def save_alone(store: KVStoreBase | None, path: str | os.PathLike[str], kind: str, content: Content) -> None:
    """Write a checkpoint without anything of single workers; the worker that calls this writes it.

    Args:
        store: whose workers share what is in it; None: this process is alone.
        path: of the file.
        kind: what the file is.
        content: of the file.
    """
    _write_common(path, kind, content, None, {}, _world(store) | {"step": None})


def load(store: KVStoreBase | None, path: str | os.PathLike[str], kind: str, everywhere: bool) -> Loaded:
    """Read a checkpoint. Every worker of the store calls it, with any number of workers.

    Args:
        store: whose workers; None: this process is alone.
        path: of the common file.
        kind: what it must be.
        everywhere: every worker needs what is in the common file, not worker 0 alone.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointError: on all workers: what one of them could not read, or that files do not belong together.
    """
    rank = 0 if store is None else store.rank
    common: TensorFile | None = None
    mine: dict[str, Any] = {}
    with _Telling(store, "reading the common file", mine) as telling:
        if rank == 0 or everywhere:
            common = tensor_file.read(path, kind)
            mine |= {name: common.manifest[name] for name in ("beside", "step", "workers")} | {"digest": common.digest}
    told = telling.answers()
    for other, one in enumerate(told):
        if one and one["digest"] != told[0]["digest"]:
            raise CheckpointError(
                f"the workers read unlike files: {os.fspath(path)} of worker 0 is of step {told[0]['step']}, that of "
                f"worker {other} of step {one['step']}. They must see the same file, or copies of it"
            )
    own: TensorFile | None = None
    with _Telling(store, "reading files of workers", {}) as telling:
        if rank == 0 and common is not None:
            own = _own_of(common)
        elif str(rank) in told[0]["beside"]:
            own = _beside(path, kind, rank, told[0])
    telling.answers()
    return Loaded(common, own, told[0]["workers"])


def agree(store: KVStoreBase | None, what: str, check: Callable[[], None]) -> None:
    """Run a check on every worker, and raise on all if it fails on one.

    Args:
        store: whose workers; None: this process is alone.
        what: for messages: what fails.
        check: raises if something is wrong.

    Raises:
        CheckpointError: what another worker found.
        Exception: what this worker's check raised.
    """
    with _Telling(store, what, {}) as telling:
        check()
    telling.answers()


class _Telling:
    """Has all workers know whether the block went well on each."""

    def __init__(self, store: KVStoreBase | None, what: str, mine: Mapping[str, Any]) -> None:
        self._store, self._what, self._mine = store, what, mine
        self._error: Exception | None = None

    def __enter__(self) -> _Telling:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._error = error if isinstance(error, Exception) else None
        return self._error is not None

    def answers(self) -> list[dict[str, Any]]:
        """Return what every worker says, by rank; raise if the block failed on one."""
        text = None if self._error is None else f"{type(self._error).__name__}: {self._error}"
        session = getattr(self._store, "session", None)
        try:
            payload = json.dumps({"error": text, "mine": self._mine}).encode()
            told = session.gather(f"checkpoint: {self._what}", payload, DISK_TIMEOUT_S) if session else []
        finally:
            if self._error is not None:
                raise self._error
        if any(not one for one in told):
            left = ", ".join(str(rank) for rank, one in enumerate(told) if not one)
            raise CheckpointError(f"worker {left} has left the job; checkpoints need all workers")
        answers = [json.loads(one) for one in told]
        for rank, one in enumerate(answers):
            if one["error"] is not None:
                raise CheckpointError(f"worker {rank} failed at {self._what}: {one['error']}")
        return [one["mine"] for one in answers] if session else [dict(self._mine)]


def _world(store: KVStoreBase | None) -> dict[str, int | None]:
    session = getattr(store, "session", None)
    return {"workers": 1 if store is None else store.num_workers, "servers": len(session.servers) if session else 0}


def _own_kind(kind: str) -> str:
    return f"{kind} of one worker"


def _write_common(
    path: str | os.PathLike[str],
    kind: str,
    content: Content,
    own: Content | None,
    beside: Mapping[str, Any],
    world: Mapping[str, int | None],
) -> None:
    tensors = dict(content.tensors)
    if own is not None:
        tensors |= {OWN + name: tensor for name, tensor in own.tensors.items()}
    manifest = {**content.manifest, **world, "own": None if own is None else own.manifest}
    tensor_file.write(path, kind, tensors, {**manifest, "beside": beside})


def _own_of(common: TensorFile) -> TensorFile | None:
    """Return what is worker 0's own in the common file."""
    tensors = {name.removeprefix(OWN): one for name, one in common.tensors.items() if name.startswith(OWN)}
    manifest = common.manifest["own"]
    return None if manifest is None else TensorFile(common.path, manifest, tensors, common.digest)


def _beside(path: str | os.PathLike[str], kind: str, rank: int, common: Mapping[str, Any]) -> TensorFile:
    listed = common["beside"][str(rank)]
    together = f"{os.fspath(path)} (step {common['step']}) belongs together with it; copy and keep all of {path}*"
    file = Path(os.path.realpath(path)).with_name(listed["file"])
    try:
        found = tensor_file.read(file, _own_kind(kind))
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"{error}, worker {rank}'s part of a checkpoint: {together}") from error
    if found.digest != listed["digest"]:
        raise CheckpointError(f"{file} is of another save (step {found.manifest.get('step')}): {together}")
    return found


def _listed(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """Return the files beside a checkpoint that is to be replaced; none if it is something else, or damaged."""
    with contextlib.suppress(CheckpointError, KeyError):
        return dict(tensor_file.read(path, kind, with_tensors=False).manifest["beside"])
    return {}


def _remove(path: str | os.PathLike[str], names: set[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            Path(os.path.realpath(path)).with_name(name).unlink()


def _remove_leftovers(path: str | os.PathLike[str], rank: int, names: set[str]) -> None:
    """Remove this worker's files of saves that were broken off, a day ago or more."""
    common = Path(os.path.realpath(path))
    ours = re.compile(re.escape(f"{common.name}.rank{rank}.") + "[0-9a-f]{8}")
    for entry in os.scandir(common.parent):
        if ours.fullmatch(entry.name) and entry.name not in names and time.time() - entry.stat().st_mtime > STALE_S:
            _remove(path, {entry.name})
