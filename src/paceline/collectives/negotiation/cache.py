"""The response cache: an operation that was negotiated once is one bit from then on.

The coordinator keeps, for each index, the request of every rank, so that a bit means exactly what that request meant.
Each rank keeps its own request and the response.

| event | rank | coordinator |
|---|---|---|
| a response with an index | notes (request, response) | notes the requests of all ranks |
| the same request again | sends the bit | counts it; when all have, sends the bit to all |
| another request of the name | sends it whole | forgets the index, tells all; bits become requests again |
| an index is forgotten | forgets it | keeps it in ``graves`` until all ranks know |

A rank may send a bit of an index that was forgotten while the bit was under way. ``seen``, the last batch that a rank
had handled when it sent, says when no such bit can come any more; only then is an index used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from paceline.collectives.negotiation.messages import Batch, Key, OperationRequest, Response, Submission


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


class RankCache:
    """A rank's side of the cache."""

    def __init__(self) -> None:
        self._by_index: dict[int, tuple[OperationRequest | None, Response]] = {}
        self._index_of: dict[Key, int] = {}
        self._seen = 0

    def submission(self, requests: Mapping[Key, OperationRequest]) -> Submission:
        """Return what to send for requests."""
        bits, whole = 0, []
        for key, request in requests.items():
            index = self._index_of.get(key, -1)
            if index >= 0 and self._by_index[index][0] == request:
                bits |= 1 << index
            else:
                whole.append(request)
        return Submission(self._seen, to_bytes(bits), tuple(whole))

    def note(self, batch: Batch) -> None:
        """Take a batch of nothing but bits whose operations are known."""
        self._seen = batch.number

    def take(self, batch: Batch, own: Callable[[Key], OperationRequest | None]) -> list[Response]:
        """Return the operations of the next batch in the order in which all ranks run them."""
        self.note(batch)
        # Bits were ready before anything was forgotten.
        cached = [self._by_index[index][1] for index in indices(from_bytes(batch.bits))]
        for response in batch.responses:
            if response.index >= 0:
                key = response.request.key
                self._by_index[response.index] = own(key), response
                self._index_of[key] = response.index
        # An index may be given and forgotten in one batch.
        for index in batch.forgotten:
            _, response = self._by_index.pop(index)
            if self._index_of.get(response.request.key) == index:
                del self._index_of[response.request.key]
        return [*batch.responses, *cached]


@dataclass
class CachedOperation:
    """A cached operation at the coordinator."""

    index: int
    key: Key
    requests: dict[int, OperationRequest]


@dataclass
class CoordinatorCache:
    """The coordinator's side of the cache."""

    capacity: int
    entries: dict[int, CachedOperation] = field(default_factory=dict)
    by_key: dict[Key, CachedOperation] = field(default_factory=dict)
    graves: dict[int, tuple[int, CachedOperation]] = field(default_factory=dict)
    """Forgotten entries, with the number of the batch that says so."""
    masks: dict[int, int] = field(default_factory=dict)
    """Indices of the entries of each process set."""
    _recent: int = 0
    """Indices used since the last round of evictions (second chance)."""
    _lowest_free: int = 0

    def note_use(self, bits: int) -> None:
        """Note that operations ran."""
        self._recent |= bits

    def add(self, key: Key, requests: Mapping[int, OperationRequest]) -> int:
        """Add an entry; returns its index. There must be room."""
        index = self._lowest_free
        while index in self.entries or index in self.graves:
            index += 1
        self._lowest_free = index + 1
        entry = CachedOperation(index, key, dict(requests))
        self.entries[index] = self.by_key[key] = entry
        self.masks[key[0]] = self.masks.get(key[0], 0) | 1 << index
        return index

    def victim(self, busy: int) -> int:
        """Return the index to forget so that another one has room; -1: some rank waits for each of them."""
        idle = [index for index in self.entries if not busy >> index & 1]
        old = [index for index in idle if not self._recent >> index & 1]
        if idle and not old:
            self._recent, old = 0, idle
        return min(old, default=-1)

    def forget(self, index: int, batch: int) -> CachedOperation:
        """Forget an entry in the batch with this number; returns it."""
        entry = self.entries.pop(index)
        del self.by_key[entry.key]
        self.masks[entry.key[0]] &= ~(1 << index)
        self._recent &= ~(1 << index)
        self.graves[index] = batch, entry
        return entry

    def bury(self, seen: int) -> None:
        """Drop entries that were forgotten in batches that all ranks have seen."""
        for index in [index for index, (batch, _) in self.graves.items() if batch <= seen]:
            del self.graves[index]
            self._lowest_free = min(self._lowest_free, index)
