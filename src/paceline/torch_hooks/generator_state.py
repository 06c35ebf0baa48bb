"""The bytes of a state of PyTorch's generator for CPUs, a Mersenne Twister."""

from __future__ import annotations

import torch

#: Bytes of a state, of its table's words, and places of: numbers that are left (int32), and the next one (int64).
_SIZE, _WORDS, _LEFT, _NEXT = 5056, 624, 8, 16


def stays_in_its_table(state: torch.Tensor) -> bool:
    """Return whether a generator with this state reads inside of its table; PyTorch checks each number, not their sum.

    A state of another size is one of a PyTorch that has another layout, and True.
    """
    if state.numel() != _SIZE:
        return True
    left = int(state[_LEFT : _LEFT + 4].clone().view(torch.int32))
    place = int(state[_NEXT : _NEXT + 8].clone().view(torch.int64))
    return left >= 1 and place >= 0 and left + place <= _WORDS + 1
