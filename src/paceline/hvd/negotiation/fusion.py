"""Which operations of a batch run as one. All members of a process set come to the same result."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.hvd.negotiation.words import Request, Response

#: Bytes of an element; every rank must count alike.
ITEM_BYTES = {"uint8": 1, "int8": 1, "bool": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor of this dtype and shape."""
    return math.prod(shape) * ITEM_BYTES.get(dtype, 8)


def size_bytes(request: Request) -> int:
    """Return the bytes of a request's tensors."""
    return sum(map(tensor_bytes, request.dtypes, request.shapes))


def fuse(responses: Sequence[Response], threshold: int) -> list[list[Response]]:
    """Arrange the responses of a batch in groups that run as one operation, in order.

    Allreduces of one process set, device, dtype, operation and pair of factors are packed until they have
    ``threshold`` bytes. A group takes the place of its first member.

    Args:
        responses: without errors.
        threshold: bytes; 0: nothing is fused.
    """
    groups: list[list[Response]] = []
    open_groups: dict[object, tuple[list[Response], int]] = {}
    for response in responses:
        request = response.request
        if not threshold or request.kind != "allreduce" or request.alone or len({*request.dtypes}) != 1:
            groups.append([response])
            continue
        alike = (
            request.process_set, request.device, request.dtypes[0], request.op, request.prescale, request.postscale
        )  # fmt: skip
        size = size_bytes(request)
        group, room = open_groups.get(alike, ([], -1))
        if size > room:
            group, room = [], threshold
            groups.append(group)
        group.append(response)
        open_groups[alike] = group, room - size
    return groups
