"""Which server owns which slice of which key. Pure.

Keys of one dtype are laid out in an *arena*: one flat tensor on the worker, in forward order. The arena is cut into
*buckets*: contiguous slices, each owned by one server, each either a part of one large key or a pack of whole small
keys. A bucket travels in one frame, and the server updates it in one call.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

PlacementPolicy = Literal["balanced", "layered", "hash"]

#: Buckets start at multiples of this many elements: on a page of 4 KiB with elements of 2 bytes and more, so that each
#: can be mapped by itself.
ALIGNMENT = 2048

#: Limit of the smallest buckets of a model that is larger than that, as a multiple of the bound: half a MB of float32
#: with the default of a million elements.
SMALLEST = 1 / 8

#: A model up to so many times the bound has one bucket per server, or few of the bound's size: messages then cost more
#: than uneven loads.
SMALL_MODEL = 4

#: Where servers have pieces enough, a last pack of no more than this part of the limit joins the one before it: it is
#: not worth a message.
CRUMB = 1 / 8

#: Servers are few where the share of each is more than so many times the bound.
FEW_SERVERS = 2

#: A server has at least so many buckets, if these are larger than the smallest: loads are even, and while one bucket of
#: a server travels, others are merged.
BUCKETS_PER_SERVER = 4


@dataclass(frozen=True)
class KeySize:
    """A key to place: its name, its number of elements, and a tag. Keys of different tags never share a bucket."""

    name: str | int
    numel: int
    tag: int = 0


@dataclass(frozen=True)
class Part:
    """A range of one key inside a bucket."""

    key: int
    """Index of the key in the list that was placed."""
    key_start: int
    """First element inside the flattened key."""
    start: int
    """First element inside the bucket."""
    length: int


@dataclass(frozen=True)
class Bucket:
    """A contiguous slice of the arena that one server owns."""

    server: int
    start: int
    """First element inside the arena."""
    length: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Layout:
    """Where everything is: the arena's length, its buckets in forward order, and the start of every key."""

    numel: int
    buckets: tuple[Bucket, ...]
    key_starts: tuple[int, ...]


def place(
    keys: Sequence[KeySize],
    num_servers: int,
    *,
    bound: int,
    largest: int = 0,
    whole: bool = False,
    policy: PlacementPolicy = "balanced",
    loads: Sequence[int] = (),
    speeds: Sequence[float] = (),
) -> Layout:
    """Place keys on servers.

    Args:
        keys: in forward order.
        num_servers: servers are 0 to ``num_servers - 1``.
        bound: keys of up to so many elements stay whole.
        largest: elements of the largest bucket, towards the end of a large model; at least, and by default, the bound.
        whole: never split a key (optimizers that need whole tensors).
        policy: ``balanced`` evens out the load; ``layered`` gives the lower layers to the fast servers (MXNet-G);
            ``hash`` depends on names only.
        loads: elements that each server holds already.
        speeds: relative speeds of the servers, for ``layered`` and as weights of ``balanced``.

    Raises:
        ValueError: unknown policy, or numbers that do not fit.
    """
    if policy not in get_args(PlacementPolicy):
        raise ValueError(f"unknown placement {policy!r}; known are {', '.join(get_args(PlacementPolicy))}")
    if num_servers < 1 or bound < 1:
        raise ValueError(f"placement needs at least 1 server and a bound of 1, not {num_servers} and {bound}")
    weights = list(speeds) or [1.0] * num_servers
    held = list(loads) or [0] * num_servers
    if len(weights) != num_servers or len(held) != num_servers or min(weights) <= 0:
        raise ValueError(f"placement needs one positive speed and one load for each of {num_servers} servers")
    limits = _Limits(sum(key.numel for key in keys), num_servers, bound, max(bound, largest))
    pieces = _pieces(keys, limits, bound, whole, num_servers)
    owners = {"balanced": _balanced, "layered": _layered, "hash": _hashed}[policy](pieces, keys, held, weights)
    return _layout(pieces, owners, len(keys))


_Piece = list[tuple[int, int, int]]  # (key, key_start, length) of every part


class _Limits:
    """How large a bucket may become, by where in the model it is.

    Each costs its messages, so there are to be few; but the gradients of the first layers are the last that backward
    makes, and no computation is left to hide their way. So buckets double in size from the front of the model on.
    """

    def __init__(self, total: int, num_servers: int, bound: int, largest: int) -> None:
        share = -(-total // num_servers)
        if total <= SMALL_MODEL * bound:
            self._low = self._high = max(1, min(share, bound))
            return
        least = max(int(bound * SMALLEST), ALIGNMENT if bound >= ALIGNMENT else 1)
        self._low = max(1, min(share, least))
        part = share // BUCKETS_PER_SERVER
        # With few servers another number of them cuts keys in the same places, with many the loads are even.
        self._high = min(largest, max(bound, part)) if share > FEW_SERVERS * bound else max(self._low, part)

    def at(self, position: int) -> int:
        """Return the limit where so many elements come before."""
        return min(self._high, max(self._low, position))


def _pieces(keys: Sequence[KeySize], limits: _Limits, bound: int, whole: bool, num_servers: int) -> list[_Piece]:
    """Cut large keys, pack small ones of equal tag; in forward order."""
    pieces: list[_Piece] = []
    packs: dict[int, list[_Piece]] = {}
    full: dict[int, int] = {}
    position = 0
    for index, key in enumerate(keys):
        limit = limits.at(position + key.numel)  # all of its gradient is there at once
        if key.numel > max(bound, limit) and not whole:
            pieces.extend([part] for part in _cut(index, key.numel, limit))
        else:
            of_tag = packs.setdefault(key.tag, [])
            if not of_tag or _size(of_tag[-1]) + key.numel > full[key.tag]:
                full[key.tag] = limits.at(position)
                of_tag.append([])
                pieces.append(of_tag[-1])
            of_tag[-1].append((index, 0, key.numel))
        position += key.numel
    for tag, (*_, before, last) in ((tag, of_tag) for tag, of_tag in packs.items() if len(of_tag) > 1):
        is_crumb = _size(last) <= CRUMB * full[tag] and _size(before) + _size(last) <= bound
        if is_crumb and len(pieces) > num_servers:
            pieces.remove(last)
            before.extend(last)
    return pieces


def _cut(index: int, numel: int, limit: int) -> list[tuple[int, int, int]]:
    """Cut one key into as few equal parts as the limit allows."""
    step = -(-numel // -(-numel // limit))
    if limit >= ALIGNMENT:
        step = min(-(-step // ALIGNMENT) * ALIGNMENT, limit // ALIGNMENT * ALIGNMENT)
    return [(index, start, min(step, numel - start)) for start in range(0, numel, step)]


def _size(piece: _Piece) -> int:
    return sum(length for _, _, length in piece)


def _balanced(pieces: list[_Piece], keys: Sequence[KeySize], held: list[int], weights: list[float]) -> list[int]:
    """Give each piece to the server that would finish first, the largest piece first (LPT, Graham 1969).

    Loads differ by at most one piece. Of pieces of one size those at the end of the model come first.
    """
    loads = [float(load) for load in held]
    owners = [0] * len(pieces)
    by_size = sorted(range(len(pieces)), key=lambda index: (-_size(pieces[index]), -index))
    if len(set(weights)) == 1:  # the same choice in less time, where there are thousands of servers
        order = [(load, -server) for server, load in enumerate(loads)]
        heapq.heapify(order)
        for index in by_size:
            load, negative = order[0]
            heapq.heapreplace(order, (load + _size(pieces[index]), negative))
            owners[index] = -negative
        return owners
    for index in by_size:
        size = _size(pieces[index])
        server = min(range(len(loads)), key=lambda s: ((loads[s] + size) / weights[s], -s))
        loads[server] += size
        owners[index] = server
    return owners


def _layered(pieces: list[_Piece], keys: Sequence[KeySize], held: list[int], weights: list[float]) -> list[int]:
    """Give the lower layers to the fast servers, each a run of the model in proportion to its speed."""
    fast_first = sorted(range(len(weights)), key=lambda s: (-weights[s], s))
    total = sum(_size(piece) for piece in pieces)
    ends, reached = [], 0.0
    for server in fast_first:
        reached += weights[server] / sum(weights) * total
        ends.append(reached)
    owners, position = [], 0.0
    for piece in pieces:
        middle = position + _size(piece) / 2
        place_in_order = next((i for i, end in enumerate(ends) if middle <= end), len(ends) - 1)
        owners.append(fast_first[place_in_order])
        position += _size(piece)
    return owners


def _hashed(pieces: list[_Piece], keys: Sequence[KeySize], held: list[int], weights: list[float]) -> list[int]:
    """Depend on nothing but names: the parts of a large key go round the servers."""
    part_of: dict[int, int] = {}
    owners = []
    for piece in pieces:
        key = piece[0][0]
        number = part_of[key] = part_of.get(key, -1) + 1
        owners.append((zlib.crc32(str(keys[key].name).encode()) + number) % len(weights))
    return owners


def _layout(pieces: list[_Piece], owners: list[int], num_keys: int) -> Layout:
    buckets: list[Bucket] = []
    key_starts = [0] * num_keys
    position = 0
    for piece, server in zip(pieces, owners, strict=True):
        inside_key = piece[0][1] > 0
        if not inside_key:
            position = -(-position // ALIGNMENT) * ALIGNMENT
        parts, start = [], 0
        for key, key_start, length in piece:
            if key_start == 0:
                key_starts[key] = position + start
            parts.append(Part(key, key_start, start, length))
            start += length
        buckets.append(Bucket(server, position, start, tuple(parts)))
        position += start
    return Layout(position, tuple(buckets), tuple(key_starts))
