"""The format of all files that paceline writes: safetensors with a manifest and digests in the header.

Any reader of safetensors can read it. The header's metadata are ``paceline``, the manifest: JSON with format and
version, the kind of file, a SHA-256 digest of every tensor, and data of the kind; and ``digest``: SHA-256 of the header
itself with zeros in this place. So any change of a bit is found when the file is read, and the digest in the header
identifies the content of the whole file.

We write the files ourselves, because the library's writer needs a second copy of all tensors in memory, and its errors
hide the cause.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from paceline.errors import CheckpointError, CheckpointNotFoundError, PacelineError
from paceline.host.plain_text import described
from paceline.kvstore.checkpoint.whole_file import whole_file

#: Raised when what is written changes so that releases before cannot read it. All from OLDEST on are read.
FORMAT, VERSION, OLDEST = "paceline", 1, 1
#: The library's own limit.
MAX_HEADER_BYTES = 100_000_000
#: Text before the digest in the header.
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
    """Content of a file.

    Attributes:
        path: path of the file.
        manifest: the manifest in the header.
        tensors: tensors by name, in CPU memory of their own; empty if only the header was read.
        digest: identifies the content.
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
    """Write a file atomically.

    Args:
        path: path of the file.
        kind: kind of file.
        tensors: dense tensors by name, on any device; they may share memory.
        manifest: plain data for the manifest.
        name_by_digest: add the first eight digits of the digest to the name.

    Returns:
        Path, manifest and digest of the file.

    Raises:
        CheckpointError: the file cannot be written; an old file is unchanged.
        TypeError: a tensor's kind or dtype cannot be written, or the manifest is not plain data.
    """
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.dtype not in _DTYPES:
            raise TypeError(f"tensor {name!r} is {tensor.layout} of {tensor.dtype}; only dense tensors can be written")
    digests = dict.fromkeys(tensors, _ZEROS)
    # Tensors with large elements come first, so that all are aligned and readers can map them.
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
    """Read a file of :func:`write`, which has the required kind, and check all of it; or only the header.

    Raises:
        CheckpointNotFoundError: there is no such file.
        CheckpointError: it is another kind of file, or damaged; the text names the tensor.
    """
    path = Path(path)
    try:
        # A pipe that nobody writes to is opened at once, and refused, instead of waited for.
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path} is no regular file, but a pipe, a device or a socket")
            digest = _check_header(path, file)
            # Read the open file, even if another file replaces it meanwhile.
            with safe_open(f"/dev/fd/{file.fileno()}", framework="pt") as opened:
                manifest = _manifest(path, opened.metadata().get("paceline", ""))
                _check_kind(path, manifest, kind)
                digests = manifest["digests"] if with_tensors else {}
                tensors = {name: _checked(path, name, opened.get_tensor(name), digests[name]) for name in digests}
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no file {path}") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read, or is damaged: {error}") from error
    return TensorFile(path, manifest, tensors, digest)


@contextlib.contextmanager
def understood(path: str | os.PathLike[str]) -> Iterator[None]:
    """Use the content of a manifest inside the ``with`` block, best before anything changes.

    Raises:
        CheckpointError: it is not as paceline writes it; a digest tells damage, and not who wrote the file.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, PacelineError):
            raise
        raise CheckpointError(
            f"{os.fspath(path)} is not as a save of paceline: its manifest cannot be understood ({described(error)})"
        ) from error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


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
    """Return the bytes of a tensor; without a copy if it is contiguous in CPU memory."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _check_header(path: Path, file: BinaryIO) -> str:
    """Check the header against its digest, and return the digest."""
    length = file.read(8)
    size = int.from_bytes(length, "little")
    header = file.read(size) if size <= MAX_HEADER_BYTES else b""
    start, end = len(_START), len(_START) + len(_ZEROS)
    if len(length) < 8 or len(header) < max(size, end) or not header.startswith(_START):
        raise CheckpointError(f"{path} is not a file of paceline, or its header is damaged")
    found = hashlib.sha256(length + header[:start] + _ZEROS.encode() + header[end:]).hexdigest()
    if header[start:end] != found.encode():
        raise CheckpointError(f"{path} is damaged: its header (the manifest, names, shapes) is not what was written")
    return found


def _manifest(path: Path, text: str) -> dict[str, Any]:
    """Return the manifest of a header. Its digest was right: that tells damage, and not who wrote the file."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict) and isinstance(found.get("digests"), dict):
            return found
    raise CheckpointError(f"{path} is not a file of paceline: its header has no manifest")


def _check_kind(path: Path, manifest: Mapping[str, Any], kind: str) -> None:
    name, version, found = manifest.get("format"), manifest.get("version"), manifest.get("kind")
    if name != FORMAT or not isinstance(version, int):
        raise CheckpointError(f"{path} is of format {name!r} {version!r}, which is none of paceline's")
    if not OLDEST <= version <= VERSION:
        writer = (
            "a newer paceline wrote it: install that one" if version > VERSION else "load it with an older paceline"
        )
        raise CheckpointError(f"{path} has version {version} of the format; this reads {OLDEST} to {VERSION}; {writer}")
    if found != kind:
        raise CheckpointError(f"{path} holds {found}, not {kind}")


def _checked(path: Path, name: str, tensor: torch.Tensor, digest: str) -> torch.Tensor:
    """Return a copy of a tensor of the mapped file, after checking the copy."""
    copy = tensor.clone()
    if hashlib.sha256(_bytes(copy)).hexdigest() != digest:
        raise CheckpointError(f"{path} is damaged: tensor {name!r} is not what was written")
    return copy
