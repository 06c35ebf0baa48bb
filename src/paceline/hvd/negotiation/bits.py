"""Bit vectors as Python integers."""

from __future__ import annotations

from collections.abc import Iterator


def indices(bits: int) -> Iterator[int]:
    """Yield the set bits' indices, the lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def to_bytes(bits: int) -> bytes:
    """Return the little-endian bytes of a bit vector; none for an empty one."""
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def from_bytes(raw: bytes) -> int:
    """Return the bit vector of little-endian bytes."""
    return int.from_bytes(raw, "little")
