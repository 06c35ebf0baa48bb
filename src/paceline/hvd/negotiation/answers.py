"""Makes the response to requests that fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.hvd.negotiation.words import Request, Response


def answer(requests: Mapping[int, Request], members: Sequence[int], index: int) -> Response:
    """Return the response to checked requests.

    Args:
        requests: by rank; members that are missing have joined and bring nothing.
        members: ranks of the process set.
        index: index in the cache; -1: none.
    """
    first = requests[min(requests)]
    if first.kind == "allgather":
        dims = tuple(
            tuple(requests[rank].shapes[number][0] if rank in requests else 0 for rank in members)
            for number in range(len(first.shapes))
        )
        return Response(first, index, dims=dims)
    if first.kind == "alltoall":
        none = (0,) * len(members)
        splits = tuple(requests[rank].splits if rank in requests else none for rank in members)
        return Response(first, index, splits=splits)
    if first.kind == "broadcast_object":
        return Response(_bare(first), payloads=(requests[first.root].payload,))
    if first.kind == "allgather_object":
        return Response(_bare(first), payloads=tuple(requests[rank].payload for rank in members))
    return Response(first, index)


def _bare(request: Request) -> Request:
    return Request(request.kind, request.name, request.process_set, root=request.root)
