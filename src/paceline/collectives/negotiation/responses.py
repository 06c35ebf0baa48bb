"""The response to all ranks' requests of an operation: a result, or an error where they differ; and warnings of stalls.

Texts of errors begin as Horovod's and then name the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline.collectives.negotiation.messages import OPS, UNLIKE, Key, NegotiationSettings, OperationRequest, Response

#: Kinds whose tensors have the same shape on all ranks.
_SAME_SHAPE = ("allreduce", "broadcast", "reducescatter")
#: Kinds whose tensors are alike in all dimensions but the first.
_SAME_REST = ("allgather", "alltoall")
_NEEDS_DIMENSIONS = ("allgather", "alltoall", "reducescatter")


_MOST_NAMES = 6


@dataclass
class Pending:
    """Requests of one key, until all ranks that it needs have sent theirs."""

    since: float
    requests: dict[int, OperationRequest] = field(default_factory=dict)


# ---- response --------------------------------------------------------------------------------------------------------


def answer(requests: Mapping[int, OperationRequest], members: Sequence[int], index: int) -> Response:
    """Return the response to checked requests by rank. Members without one have joined and bring nothing."""
    first = requests[min(requests)]
    if any(one.device != first.device for one in requests.values()):
        first = msgspec.structs.replace(first, device=UNLIKE)
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


def _bare(request: OperationRequest) -> OperationRequest:
    return OperationRequest(request.kind, request.name, request.process_set, root=request.root)


# ---- differences -----------------------------------------------------------------------------------------------------


def mismatch(requests: Mapping[int, OperationRequest], members: Sequence[int], joined: Iterable[int] = ()) -> str:
    """Return why requests of one name cannot run together; an empty string if they can."""
    ranks = sorted(requests)
    first = requests[ranks[0]]
    found = _difference(requests, ranks) or _unusable(first, members, set(joined))
    return f"{found} [{first.kind} {first.name!r}]" if found else ""


def _difference(requests: Mapping[int, OperationRequest], ranks: Sequence[int]) -> str:
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


def _unusable(first: OperationRequest, members: Sequence[int], joined: set[int]) -> str:
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


def _rest(request: OperationRequest) -> Any:
    return [shape[1:] for shape in request.shapes] if request.kind in _SAME_REST else None


#: What, how the text says it, and its value where it must be the same.
_TRAITS: tuple[tuple[str, str, Callable[[OperationRequest], Any]], ...] = (
    ("numbers of tensors", "number", lambda one: len(one.shapes)),
    ("data types", "type", lambda one: list(one.dtypes)),
    ("reduce operations", "operation", lambda one: OPS[one.op] if one.kind in ("allreduce", "reducescatter") else None),
    ("numbers of dimensions", "number", lambda one: [len(shape) for shape in one.shapes]),
    ("shapes", "shape", lambda one: list(one.shapes) if one.kind in _SAME_SHAPE else None),
    ("shapes of sparse tensors", "shape", lambda one: one.sparse_shape),
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


# ---- missing requests ------------------------------------------------------------------------------------------------


def stalled(
    pending: Mapping[Key, Pending],
    warned: set[Key],
    missing: Callable[[Key, Iterable[int]], list[int]],
    now: float,
    options: NegotiationSettings,
) -> tuple[str, str]:
    """Return a warning, and why everything must end; each may be empty. Operations that it names join ``warned``."""
    if not options.stall_warning_s:
        return "", ""
    old = {key: one for key, one in pending.items() if now - one.since >= options.stall_warning_s}
    warning = ""
    if not old.keys() <= warned:
        warning = _stall_text(old, missing, options.stall_warning_s)
        warned.update(old)
    limit = options.stall_shutdown_s
    is_fatal = limit and any(now - one.since >= limit for one in pending.values())
    # Operations that began later are named, too: rank 0 waits in one, rank 1 in another.
    return warning, _stall_text(pending, missing, limit) if is_fatal else ""


def _stall_text(old: Mapping[Key, Pending], missing: Callable[[Key, Iterable[int]], list[int]], age_s: float) -> str:
    by_rank: dict[int, list[str]] = {}
    for key, one in old.items():
        for rank in missing(key, one.requests):
            by_rank.setdefault(rank, []).append(f"{key[1]}.{key[2]}")
    lines = [f"{rank}: [{_names(names)}]" for rank, names in sorted(by_rank.items())]
    return (
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
        f"waiting for remainder of ranks for more than {age_s:g} seconds. Missing ranks:\n" + "\n".join(lines)
    )


def _names(names: list[str]) -> str:
    more = f", ... ({len(names) - _MOST_NAMES} more)" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def conflicts(pending: Mapping[Key, Pending], now: float, age_s: float) -> Iterator[tuple[Key, str]]:
    """Yield operations of the same name and different kinds that wait on different ranks, with an error."""
    by_name: dict[tuple[int, str], list[Key]] = {}
    for key, one in pending.items():
        if now - one.since >= age_s:
            by_name.setdefault((key[0], key[2]), []).append(key)
    for (_, name), keys in by_name.items():
        ranks = [set(pending[key].requests) for key in keys]
        if len(keys) > 1 and not set.intersection(*ranks):
            pairs = zip(keys, ranks, strict=True)
            who = "; ".join(f"{key[1]}: rank {', '.join(map(str, sorted(some)))}" for key, some in pairs)
            text = f"Mismatched operations: ranks asked for different operations under the name {name!r} ({who})"
            yield from [(key, text) for key in keys]
