"""The one format of all files that paceline writes: safetensors whose header is a manifest with digests.

Any reader of safetensors reads it. The header's metadata are ``paceline``, the manifest: JSON with format and version,
the kind of file, a SHA-256 digest of every tensor, and what the kind adds; and ``digest``, SHA-256 of the header itself
with zeros in this place. So a file is read as it was written, to the last bit, or not at all; and the digest in the
header names the content of the whole file.

The writing is our own, because the library's wants all tensors in memory once more, and its errors hide the cause.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from paceline.errors import CheckpointError, CheckpointNotFoundError
from paceline.kvstore.checkpoint.whole_file import whole_file

FORMAT, VERSION = "paceline", 1
#: The library's own limit.
MAX_HEADER_BYTES = 100_000_000
#: Where the digest of the header begins.
_START = b'{"__metadata__":{"digest":"'
_ZEROS = "0" * 64
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class TensorFile:
    """What a file holds.

    Attributes:
        path: where it lies.
        manifest: what the header says of it.
        tensors: by name, in CPU memory of their own; empty if only the header was read.
        digest: names the content.
    """

    path: Path
    manifest: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    digest: str


def write(
    path: str | os.PathLike[str],
    kind: str,
    tensors: Mapping[str, torch.Tensor],
    manifest: Mapping[str, Any],
    name_by_digest: bool = False,
) -> TensorFile:
    """Write a file; it appears whole or not at all.

    Args:
        path: of the file.
        kind: what the file is.
        tensors: by name, dense, on any device; they may share memory.
        manifest: plain data for the manifest.
        name_by_digest: add the first eight digits of the digest to the name.

    Returns:
        What is needed to find it again: its path, manifest and digest.

    Raises:
        CheckpointError: it cannot be written there; what was there before is unchanged.
        TypeError: a tensor's kind or dtype cannot be written, or the manifest is not plain data.
    """
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.dtype not in _DTYPES:
            raise TypeError(f"tensor {name!r} is {tensor.layout} of {tensor.dtype}; only dense tensors can be written")
    digests = dict.fromkeys(tensors, _ZEROS)
    # Large elements first, so that all lie where readers may look at them in place.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    head = {"format": FORMAT, "version": VERSION, "kind": kind, **manifest, "digests": digests}
    with whole_file(path) as draft:
        draft.file.write(_header(head, tensors, _ZEROS))
        for name, tensor in tensors.items():
            data = _bytes(tensor)
            digests[name] = hashlib.sha256(data).hexdigest()
            draft.file.write(data)
        digest = hashlib.sha256(_header(head, tensors, _ZEROS)).hexdigest()
        draft.file.seek(0)
        draft.file.write(_header(head, tensors, digest))
        if name_by_digest:
            draft.path = draft.path.with_name(f"{draft.path.name}.{digest[:8]}")
    return TensorFile(draft.path, head, {}, digest)


def read(path: str | os.PathLike[str], kind: str, with_tensors: bool = True) -> TensorFile:
    """Read what :func:`write` wrote, and check all of it before anything is returned.

    Args:
        path: of the file.
        kind: what it must be.
        with_tensors: False: only the header.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointError: it is something else, or damaged; the text names the tensor.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            digest = _check_header(path, file)
            # The file that is open, even if another one is put in its place meanwhile.
            with safe_open(f"/proc/self/fd/{file.fileno()}", framework="pt") as opened:
                manifest = json.loads(opened.metadata()["paceline"])
                _check_kind(path, manifest, kind)
                digests = manifest["digests"] if with_tensors else {}
                tensors = {name: _checked(path, name, opened.get_tensor(name), digests[name]) for name in digests}
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no file {path}") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read, or is damaged: {error}") from error
    return TensorFile(path, manifest, tensors, digest)


def _header(manifest: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], digest: str) -> bytes:
    """Return the first bytes of the file: the length of the header, and the header."""
    entries: dict[str, Any] = {"__metadata__": {"digest": digest, "paceline": json.dumps(manifest)}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy where it lies in CPU memory in one piece."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _check_header(path: Path, file: BinaryIO) -> str:
    """Check the header against its digest, and return that."""
    length = file.read(8)
    size = int.from_bytes(length, "little")
    header = file.read(size) if size <= MAX_HEADER_BYTES else b""
    start, end = len(_START), len(_START) + len(_ZEROS)
    if len(length) < 8 or len(header) < max(size, end) or not header.startswith(_START):
        raise CheckpointError(f"{path} is no file of paceline, or its header is damaged")
    found = hashlib.sha256(length + header[:start] + _ZEROS.encode() + header[end:]).hexdigest()
    if header[start:end] != found.encode():
        raise CheckpointError(f"{path} is damaged: its header (the manifest, names, shapes) is not what was written")
    return found


def _check_kind(path: Path, manifest: Mapping[str, Any], kind: str) -> None:
    version, found = manifest.get("version", 0), manifest.get("kind")
    if manifest.get("format") != FORMAT or version > VERSION:
        raise CheckpointError(f"{path} is of format {manifest.get('format')!r} {version}; known is {FORMAT} {VERSION}")
    if found != kind:
        raise CheckpointError(f"{path} holds {found}, not {kind}")


def _checked(path: Path, name: str, tensor: torch.Tensor, digest: str) -> torch.Tensor:
    """Copy a tensor out of the mapped file, and check the copy."""
    copy = tensor.clone()
    if hashlib.sha256(_bytes(copy)).hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged: tensor {name!r} is not what was written")
    return copy
