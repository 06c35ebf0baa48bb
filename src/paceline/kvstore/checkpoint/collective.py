"""A checkpoint of several workers: a common file by one of them, and one file per other worker for its own state.

The one is worker 0, or once that is gone the next one that is there; "worker 0" below stands for it.

1. Every worker but 0 writes its own state to ``<path>.rank<r>.<digest>``. The digest in the name keeps the files of the
   previous checkpoint.
2. All workers exchange their results. If one has failed, all raise, and the previous checkpoint is unchanged.
3. Worker 0 writes ``<path>``, with its own state. The manifest lists the other files with their digests, so files of
   different saves are never mixed. This file makes the checkpoint valid.
4. All workers exchange their results again, and remove files of this path that no checkpoint in the folder lists: those
   of the previous checkpoint, and of saves that were killed between 1 and 3.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline.errors import CheckpointError, CheckpointNotFoundError
from paceline.host.plain_text import described
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.checkpoint import tensor_file
from paceline.kvstore.checkpoint.tensor_file import TensorFile

#: Longest wait for another worker's disk, in seconds. A dead worker is noticed at once.
DISK_TIMEOUT_S = 3600.0
#: Prefix of the names of worker 0's own tensors in the common file.
OWN = "rank0/"

#: End of the names of the other workers' files, behind the name of the common file.
_END = r"\.rank(\d+)\.[0-9a-f]{8}"


@dataclass(frozen=True)
class Content:
    """Tensors by name, and plain data for the manifest."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """The files that a worker has read.

    Attributes:
        common: the common file; None on workers that do not read it.
        own: this worker's own state; None if this rank saved none.
        told: what all workers know of the common file's manifest: how many ``workers`` saved, after which ``step``, and
            the name (``optimizer``) and the options (``groups``) of the optimizer, where it has them.
    """

    common: TensorFile | None
    own: TensorFile | None
    told: Mapping[str, Any]


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
        store: store whose workers save; None: this process is the only one.
        path: path of the common file.
        kind: kind of file.
        common: returns the content of the common file; called on worker 0.
        own: returns this worker's own content, or None.
        step: number of steps so far, if the caller counts them.

    Raises:
        CheckpointError: on all workers: one of them could not write, or they are at different steps.
    """
    rank, lead = _rank_and_lead(store)
    before = _listed(path, kind)
    mine: dict[str, Any] = {"before": sorted(before), "step": step}
    with _Telling(store, "files of workers", mine) as telling:
        content = own()
        if rank != lead and content is not None:
            beside = Path(f"{os.path.realpath(path)}.rank{rank}")
            manifest = {**content.manifest, "step": step, "rank": rank}
            file = tensor_file.write(beside, _own_kind(kind), content.tensors, manifest, name_by_digest=True)
            mine |= {"file": file.path.name, "digest": file.digest}
    try:
        results = telling.answers()
        steps = sorted({one["step"] for one in results if one}) if step is not None else []
        if len(steps) > 1:
            raise CheckpointError(
                f"the workers are at different steps: {', '.join(map(str, steps))}; save at the same one"
            )
        before |= set(results[lead]["before"])
        listed = {
            str(other): {"file": one["file"], "digest": one["digest"]}
            for other, one in enumerate(results)
            if "file" in one
        }
        with _Telling(store, "the common file", {}) as done:
            if rank == lead:
                write_common(store, path, kind, common(), step, content, listed)
        done.answers()
    except _AbsentError:  # if it is worker 0, it may have written the common file
        raise
    except CheckpointError:  # after any other error, too
        _remove(path, {mine["file"]} - before if "file" in mine else set())
        raise
    names = {one["file"] for one in listed.values()}
    with contextlib.suppress(OSError):  # the checkpoint is valid; the next save removes what is left
        first_beyond = None if rank != lead else 1 if store is None else store.num_workers
        _remove_leftovers(path, kind, rank, first_beyond, before, names)


def write_common(
    store: KVStoreBase | None,
    path: str | os.PathLike[str],
    kind: str,
    content: Content,
    step: int | None = None,
    own: Content | None = None,
    beside: Mapping[str, Any] | None = None,
) -> None:
    """Write the common file of a checkpoint, with worker 0's own state and a list of the others' files, if any.

    Only the calling worker writes.
    """
    tensors = dict(content.tensors)
    if own is not None:
        tensors |= {OWN + name: tensor for name, tensor in own.tensors.items()}
    session = getattr(store, "session", None)
    manifest = {
        **content.manifest,
        "workers": 1 if store is None else store.num_workers,
        "servers": len(session.servers) if session else 0,
        "step": step,
        "own": None if own is None else own.manifest,
        "beside": beside or {},
    }
    tensor_file.write(path, kind, tensors, manifest)


def load(store: KVStoreBase | None, path: str | os.PathLike[str], kind: str, everywhere: bool) -> Loaded:
    """Read a checkpoint. Every worker of the store calls it, with any number of workers; without a store, this process.

    The file has the required kind. Every worker needs the common file (``everywhere``), or only worker 0.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointError: on all workers: one of them could not read a file, or the files are of different saves.
    """
    rank, lead = _rank_and_lead(store)
    common: TensorFile | None = None
    mine: dict[str, Any] = {}
    with _Telling(store, "reading the common file", mine) as telling:
        if rank == lead or everywhere:
            common = tensor_file.read(path, kind)
            _check_parts(common)
            with tensor_file.understood(path):
                msgspec.convert(common.manifest, _Common)
            mine |= {name: common.manifest.get(name) for name in _TOLD} | {"digest": common.digest}
    results = telling.answers()
    for other, one in enumerate(results):
        if one and one["digest"] != results[lead]["digest"]:
            raise CheckpointError(
                f"the workers read different files: {os.fspath(path)} of worker {lead} is of step "
                f"{results[lead]['step']}, "
                f"that of worker {other} of step {one['step']}. They must see the same file, or copies of it"
            )
    own: TensorFile | None = None
    with _Telling(store, "reading files of workers", {}) as telling:
        if rank == 0 and common is not None:
            own = _own_of(common)
        elif str(rank) in results[lead]["beside"]:
            own = _beside(path, kind, rank, results[lead])
    telling.answers()
    return Loaded(common, own, results[lead])


def agree(store: KVStoreBase | None, what: str, check: Callable[[], None]) -> None:
    """Run a check on every worker, and raise on all if it fails on one. Messages name the check by ``what``.

    Raises:
        CheckpointError: the check failed on another worker.
        Exception: the error of this worker's check.
    """
    with _Telling(store, what, {}) as telling:
        check()
    telling.answers()


class _AbsentError(CheckpointError):
    """A worker took no part."""


class _Telling:
    """Tells all workers whether the block has failed on any of them."""

    def __init__(self, store: KVStoreBase | None, what: str, mine: Mapping[str, Any]) -> None:
        self._store, self._what, self._mine = store, what, mine
        self._lead = _rank_and_lead(store)[1]
        self._error: Exception | None = None

    def __enter__(self) -> _Telling:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._error = error if isinstance(error, Exception) else None
        return self._error is not None

    def answers(self) -> list[dict[str, Any]]:
        """Return the reports of all workers, by rank, {} of one that died; raise if the block failed on one."""
        text = None if self._error is None else described(self._error)
        session = getattr(self._store, "session", None)
        try:
            payload = json.dumps({"error": text, "mine": self._mine}).encode()
            results = session.gather(f"checkpoint: {self._what}", payload, DISK_TIMEOUT_S) if session else []
        finally:
            if self._error is not None:
                raise self._error
        # The others go on without a worker that died, or left under notice; not without the one that writes for all.
        dead = session.dead - {self._lead} if session else ()
        left = ", ".join(str(rank) for rank, one in enumerate(results) if not one and rank not in dead)
        if left:
            raise _AbsentError(
                f"worker {left} left the job and took no part in the checkpoint: call paceline.save, paceline.load and "
                "store.save_optimizer_states on every worker, not on one alone"
            )
        answers = [json.loads(one) if one else {"error": None, "mine": {}} for one in results]
        for rank, one in enumerate(answers):
            if one["error"] is not None:
                raise CheckpointError(f"worker {rank} failed at {self._what}: {one['error']}")
        return [one["mine"] for one in answers] if session else [dict(self._mine)]


def _rank_and_lead(store: KVStoreBase | None) -> tuple[int, int]:
    """Return this worker's rank, and that of the worker that writes the common file."""
    session = getattr(store, "session", None)
    return 0 if store is None else store.rank, session.lead if session else 0


def _own_kind(kind: str) -> str:
    return f"{kind} of one worker"


def _own_of(common: TensorFile) -> TensorFile | None:
    """Return worker 0's own state in the common file."""
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


class _Part(msgspec.Struct):
    """A file of another worker in the manifest of a common file."""

    file: str
    digest: str


class _Common(msgspec.Struct):
    """The manifest of a common file, as far as every kind has it."""

    beside: dict[str, Any]
    workers: int
    step: int | None
    own: dict[str, Any] | None
    optimizer: str | None = None
    groups: list[dict[str, Any]] | None = None


#: What all workers know of it.
_TOLD = ("beside", "step", "workers", "optimizer", "groups")


def _check_parts(common: TensorFile) -> dict[str, _Part]:
    """Return the files of other workers in the manifest of a common file.

    Raises:
        CheckpointError: paceline has written no such manifest.
    """
    with tensor_file.understood(common.path):
        parts = msgspec.convert(common.manifest.get("beside"), dict[str, _Part])
    for one in parts.values():
        if not re.fullmatch(f"[^/]+{_END}", one.file, re.DOTALL):
            raise CheckpointError(f"{common.path} lists {one.file!r} as the file of a worker; that is none")
    return parts


def _listed(path: str | os.PathLike[str], kind: str) -> set[str]:
    """Return the files of other workers in a checkpoint; none if it is another kind of file, or damaged."""
    with contextlib.suppress(CheckpointError):
        return {one.file for one in _check_parts(tensor_file.read(path, kind, with_tensors=False)).values()}
    return set()


def _remove(path: str | os.PathLike[str], names: set[str]) -> None:
    for name in names:
        with contextlib.suppress(OSError):
            Path(os.path.realpath(path)).with_name(name).unlink()


def _remove_leftovers(
    path: str | os.PathLike[str], kind: str, rank: int, workers: int | None, before: set[str], names: set[str]
) -> None:
    """Remove files of this path that no checkpoint in the folder lists: a copy of the common file may list some.

    They are those of the checkpoint before, and those that a killed save has left: of this rank, or of ranks beyond the
    last worker's; only the worker that writes the common file gives their number. No other process writes files of this
    rank and path meanwhile.
    """
    common = Path(os.path.realpath(path))
    form = re.compile(re.escape(common.name) + _END)
    found = {entry.name: int(match[1]) for entry in os.scandir(common.parent) if (match := form.fullmatch(entry.name))}
    ours = {name for name, other in found.items() if other == rank or (workers is not None and other >= workers)}
    left = (ours | (before & found.keys())) - names
    if left:
        others = [entry.path for entry in os.scandir(common.parent) if entry.name not in found and entry.is_file()]
        _remove(path, left.difference(*(_listed(other, kind) for other in others)))
