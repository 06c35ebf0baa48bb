"""Noise that depends only on its seed and position, not on the process or the order of the computation."""

from __future__ import annotations

import hashlib

import torch

#: Number of elements that are drawn together: few calls for large tensors, little waste for small ones.
_CHUNK = 4096


def normal(seed: tuple[object, ...], start: int, length: int) -> torch.Tensor:
    """Return a range of a standard normal sequence, as float32 in CPU memory.

    The elements of the sequence that a seed names are the same in every process, and for any cut into ranges.
    """
    out = torch.empty(length, dtype=torch.float32, device="cpu")
    position, stop = start, start + length
    while position < stop:
        chunk = position // _CHUNK
        first = chunk * _CHUNK
        last = min(stop, first + _CHUNK)
        digest = hashlib.blake2b(repr((*seed, chunk)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        noise = torch.randn(_CHUNK, generator=generator, dtype=torch.float32, device="cpu")
        out[position - start : last - start] = noise[position - first : last - first]
        position = last
    return out
