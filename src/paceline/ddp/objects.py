"""Objects of scripts, which torch.distributed pickles and sends as tensors of bytes.

Who could change such bytes on the way could run code in the rank that loads them. So their frames are sealed:

| tensors | frames |
|---|---|
| of a function for objects, such as ``all_gather_object``, the sizes of objects too | sealed; refused without a key |
| others whose elements have one byte: a script or a library may have pickled | sealed |
| all others | as ``PACELINE_ENCRYPT`` says |
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

_carrying = threading.local()


@contextmanager
def carrying_objects() -> Iterator[None]:
    """Seal the operations that this thread calls in the block: they carry objects."""
    before = getattr(_carrying, "active", False)
    _carrying.active = True
    try:
        yield
    finally:
        _carrying.active = before


def may_be_objects(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether the tensors of an operation, which this thread calls, may hold pickled objects."""
    return getattr(_carrying, "active", False) or any(one.itemsize == 1 for one in tensors)
