"""Noise that is a function of where and when it is needed, not of who computes it in which order."""

from __future__ import annotations

import hashlib

import torch

#: Elements that are drawn together: few calls for large tensors, little waste for small ones.
_CHUNK = 4096


def normal(seed: tuple[object, ...], start: int, length: int) -> torch.Tensor:
    """Return a range of a standard normal sequence.

    The same elements of a sequence come out however it is cut into ranges, in every process.

    Args:
        seed: numbers and strings that name the sequence.
        start: first element.
        length: elements.

    Returns:
        float32 tensor on the CPU.
    """
    out = torch.empty(length)
    position, stop = start, start + length
    while position < stop:
        chunk = position // _CHUNK
        first = chunk * _CHUNK
        last = min(stop, first + _CHUNK)
        digest = hashlib.blake2b(repr((*seed, chunk)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        out[position - start : last - start] = torch.randn(_CHUNK, generator=generator)[position - first : last - first]
        position = last
    return out
