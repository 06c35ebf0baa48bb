"""Finds what differs between the requests of different ranks. Texts begin as Horovod's and then name the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paceline.hvd.negotiation.words import OPS, Request

#: Kinds whose tensors have the same shape on all ranks.
_SAME_SHAPE = ("allreduce", "broadcast", "reducescatter")
#: Kinds whose tensors are alike in all dimensions but the first.
_SAME_REST = ("allgather", "alltoall")
_NEEDS_DIMENSIONS = ("allgather", "alltoall", "reducescatter")


def mismatch(requests: Mapping[int, Request], members: Sequence[int], joined: Iterable[int] = ()) -> str:
    """Return why requests of one name cannot run together; an empty string if they can.

    Args:
        requests: by rank.
        members: ranks of the process set.
        joined: members that have joined and sent no request.
    """
    ranks = sorted(requests)
    first = requests[ranks[0]]
    found = _difference(requests, ranks) or _unusable(first, members, set(joined))
    return f"{found} [{first.kind} {first.name!r}]" if found else ""


def _difference(requests: Mapping[int, Request], ranks: Sequence[int]) -> str:
    first_rank, first = ranks[0], requests[ranks[0]]
    for rank in ranks[1:]:
        other = requests[rank]
        if other == first:
            continue
        for what, verb, value in _TRAITS:
            ours, theirs = value(first), value(other)
            if ours != theirs:
                return (
                    f"Mismatched {what}: One rank had {verb} {_text(ours)}, but another rank had {verb} "
                    f"{_text(theirs)}. (rank {first_rank}: {_text(ours)}, rank {rank}: {_text(theirs)})"
                )
    return ""


def _unusable(first: Request, members: Sequence[int], joined: set[int]) -> str:
    if first.kind in _NEEDS_DIMENSIONS and any(not shape for shape in first.shapes):
        return f"Rank zero tried to {first.kind} a rank-zero tensor: it has no first dimension"
    if first.kind in ("broadcast", "broadcast_object"):
        if first.root not in members:
            return f"root rank {first.root} is not in the process set of ranks {list(members)}"
        if first.root in joined:
            return f"{first.kind} from rank {first.root}, which has joined, is not supported with Join"
    if joined and first.kind in ("allgather_object", "add_process_set", "remove_process_set"):
        return f"{first.kind} is not supported with Join: rank {min(joined)} has joined"
    return ""


def _rest(request: Request) -> Any:
    return [shape[1:] for shape in request.shapes] if request.kind in _SAME_REST else None


#: What, how the text says it, and its value where it must be the same.
_TRAITS: tuple[tuple[str, str, Callable[[Request], Any]], ...] = (
    ("numbers of tensors", "number", lambda one: len(one.shapes)),
    ("data types", "type", lambda one: list(one.dtypes)),
    ("devices", "device", lambda one: one.device),
    ("reduce operations", "operation", lambda one: OPS[one.op] if one.kind in ("allreduce", "reducescatter") else None),
    ("numbers of dimensions", "number", lambda one: [len(shape) for shape in one.shapes]),
    ("shapes", "shape", lambda one: list(one.shapes) if one.kind in _SAME_SHAPE else None),
    ("shapes beyond the first dimension", "shape", _rest),
    ("root ranks", "root rank", lambda one: one.root),
    ("prescale factors", "factor", lambda one: one.prescale),
    ("postscale factors", "factor", lambda one: one.postscale),
    ("process sets", "ranks", lambda one: list(one.ranks)),
    ("fusion settings", "alone", lambda one: one.alone),
)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) if len(value) == 1 else f"[{', '.join(map(_text, value))}]"
    return str(value)
