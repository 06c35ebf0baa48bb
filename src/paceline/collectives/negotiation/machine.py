"""The coordinator's machine: requests of all ranks in, one order of responses for all ranks out.

| state | event | next |
|---|---|---|
| up | a submission completes operations | up; a :class:`Batch` for all ranks |
| up | ranks differ in a request | up; a response with the error for all ranks |
| up | a rank shuts down, is lost, breaks the protocol, or a stall is too old | down; :class:`Down` for all ranks |
| down | anything | down; nothing |

One operation, named by (process set, kind, name):

| state | event | next |
|---|---|---|
| unknown | a rank's request | pending |
| pending | requests of all members that have not joined | answered: forgotten or cached |
| cached | a bit of every member | answered, still cached |
| cached | a request that differs, or a rank joins | pending; the index is forgotten |
| pending | a rank waits for the same name with another kind (``conflict_s``) | failed |
| failed | requests of the members that were missing | answered with the error, one by one |

``stall_shutdown_s`` must exceed ``stall_warning_s``, so that the warning comes first. Batches must reach every rank in
order; then all ranks run all operations of overlapping process sets in one order, and none waits for another in a
circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.collectives.negotiation.cache import CoordinatorCache, from_bytes, indices, to_bytes
from paceline.collectives.negotiation.messages import (
    GLOBAL_SET,
    KINDS,
    SET_KINDS,
    TENSOR_KINDS,
    Action,
    Batch,
    Down,
    Key,
    NegotiationSettings,
    OperationRequest,
    Response,
    Submission,
)
from paceline.collectives.negotiation.responses import Pending, answer, conflicts, mismatch, stalled


class ProcessSets:
    """The process sets of a job, by id; those that it begins with have the ids 1, 2, ...

    Raises:
        ValueError: a set is empty, is there twice, or has ranks that do not exist.
    """

    def __init__(self, size: int, sets: Iterable[Sequence[int]] = ()) -> None:
        self.size = size
        self._members: dict[int, tuple[int, ...]] = {GLOBAL_SET: tuple(range(size))}
        self._next = GLOBAL_SET + 1
        for ranks in sets:
            _, error = self.add(ranks)
            if error:
                raise ValueError(error)

    def members(self, set_id: int) -> tuple[int, ...]:
        """Return the ranks of a set, ascending; none if there is no such set."""
        return self._members.get(set_id, ())

    def find(self, ranks: Iterable[int]) -> int:
        """Return the id of the set with these ranks; -1: there is none."""
        wanted = tuple(sorted(ranks))
        return next((set_id for set_id, members in self._members.items() if members == wanted), -1)

    def add(self, ranks: Iterable[int]) -> tuple[int, str]:
        """Add a set; returns its id and an error, which is empty if all is well."""
        wanted = tuple(sorted(ranks))
        if not wanted or len(set(wanted)) != len(wanted) or wanted[0] < 0 or wanted[-1] >= self.size:
            return -1, f"a process set of ranks {list(wanted)}; it needs different ranks from 0 to {self.size - 1}"
        if self.find(wanted) >= 0:
            return -1, f"a process set of ranks {list(wanted)} exists already"
        set_id, self._next = self._next, self._next + 1
        self._members[set_id] = wanted
        return set_id, ""

    def remove(self, ranks: Iterable[int], busy: Iterable[int] = ()) -> tuple[int, str]:
        """Remove a set; returns its id (-1: none was removed) and an error."""
        found = self.find(ranks)
        if found <= GLOBAL_SET:
            return -1, ""
        if found in set(busy):
            return -1, f"the process set of ranks {list(self._members[found])} still has pending operations"
        del self._members[found]
        return found, ""


class Negotiation:
    """Decides what runs, and in which order."""

    def __init__(self, size: int, options: NegotiationSettings, sets: Sequence[Sequence[int]] = ()) -> None:
        self.size, self.options = size, options
        self.sets = ProcessSets(size, sets)
        self._cache = CoordinatorCache(options.cache_capacity)
        self._waiting = [0] * size
        self._bit_since: dict[int, float] = {}
        self._pending: dict[Key, Pending] = {}
        self._failed: dict[Key, tuple[str, set[int]]] = {}
        self._warned: set[Key] = set()
        self._joined: dict[int, None] = {}
        self._seen = [0] * size
        self._number = 0
        self._forgotten: list[int] = []
        self._is_down = False

    # ---- events ----------------------------------------------------------------------------------------------------

    def submit(self, rank: int, submission: Submission, now: float) -> list[Action]:
        """Take the operations for which a rank has become ready."""
        if self._is_down:
            return []
        self._seen[rank] = max(self._seen[rank], submission.seen)
        if self._cache.graves:
            self._cache.bury(min(self._seen))
        bits = from_bytes(submission.bits)
        try:
            touched = self._take_bits(rank, bits, now)
            for request in submission.requests:
                touched.append(self._take(rank, request, now))
        except ValueError as error:
            return self.lose(rank, f"it broke the protocol: {error}")
        return self._batch(self._complete(touched))

    def keys_of(self, submission: Submission) -> list[Key]:
        """Return the keys of a submission, as far as they are known now."""
        known = [self._cache.entries.get(index) for index in indices(from_bytes(submission.bits))]
        return [entry.key for entry in known if entry is not None] + [one.key for one in submission.requests]

    def lose(self, rank: int, reason: str, failed: bool = True) -> list[Action]:
        """End everything, because a rank failed or shut down."""
        if self._is_down:
            return []
        self._is_down = True
        return [Down(rank, reason, failed)]

    def tick(self, now: float) -> list[Action]:
        """Look for stalls. Called about once per second."""
        if self._is_down:
            return []
        everything = self._all_pending(now)
        self._warned &= set(everything)
        warning, fatal = stalled(everything, self._warned, self._missing, now, self.options)
        failed = [self._fail(key, text, now) for key, text in conflicts(everything, now, self.options.conflict_s)]
        actions = self._batch(failed)
        if warning:
            actions.append(warning)
        if fatal:
            actions += self.lose(-1, fatal)
        return actions

    @property
    def is_idle(self) -> bool:
        """Whether no rank waits for another."""
        return not self._pending and not any(self._waiting) and not self._joined

    # ---- requests --------------------------------------------------------------------------------------------------

    def _take_bits(self, rank: int, bits: int, now: float) -> list[Key]:
        """Note a rank's bits; returns the keys of those that had to become requests again."""
        touched: list[Key] = []
        live = bits & self._cached_for(rank) if not self._joined else 0
        for index in indices(bits & ~live):
            entry = self._cache.entries.get(index)
            if entry is None and index in self._cache.graves:
                entry = self._cache.graves[index][1]
            if entry is None or rank not in entry.requests:
                raise ValueError(f"it has no operation with index {index} in the cache")
            touched.append(self._take(rank, entry.requests[rank], now))
        if live & self._waiting[rank]:
            raise ValueError("a cached operation was submitted twice")
        self._waiting[rank] |= live
        return touched

    def _cached_for(self, rank: int) -> int:
        """Return the indices of all cached operations of a rank's process sets."""
        found = 0
        for set_id, mask in self._cache.masks.items():
            if rank in self.sets.members(set_id):
                found |= mask
        return found

    def _take(self, rank: int, request: OperationRequest, now: float) -> Key:
        key = request.key
        if request.kind not in KINDS:
            raise ValueError(f"{request.kind!r} is no kind of operation")
        if request.kind == "join":
            self._join(rank, now)
            return key
        if rank not in self.sets.members(request.process_set):
            raise ValueError(f"it is not in process set {request.process_set}")
        if rank in self._joined:
            raise ValueError(f"it submitted {request.kind} {request.name!r} although it has joined")
        if key in self._failed:
            self._failed[key][1].discard(rank)
            return key
        if key in self._cache.by_key:
            self._forget(self._cache.by_key[key].index, now)
        pending = self._pending.setdefault(key, Pending(now))
        if rank in pending.requests:
            raise ValueError(f"{request.kind} {request.name!r} was submitted twice")
        pending.requests[rank] = request
        return key

    def _join(self, rank: int, now: float) -> None:
        if rank in self._joined:
            raise ValueError("it has joined already")
        self._joined[rank] = None
        # What others wait for may be complete without this rank; its response must then say all.
        for index in list(self._cache.entries):
            if self._busy() >> index & 1:
                self._forget(index, now)

    def _forget(self, index: int, now: float) -> None:
        """Forget a cached operation; bits of it become requests again."""
        entry = self._cache.forget(index, self._number + 1)
        self._forgotten.append(index)
        waiting = [rank for rank in range(self.size) if self._waiting[rank] >> index & 1]
        since = self._bit_since.pop(index, now)
        if waiting:
            pending = self._pending.setdefault(entry.key, Pending(since))
            for rank in waiting:
                self._waiting[rank] &= ~(1 << index)
                pending.requests[rank] = entry.requests[rank]

    # ---- responses -------------------------------------------------------------------------------------------------

    def _complete(self, touched: Iterable[Key]) -> list[Response]:
        if self._joined:
            touched = list(self._pending) + [key for key in touched if key in self._failed]
        found = [self._respond(key) for key in dict.fromkeys(touched)]
        if len(self._joined) == self.size:
            found.append(Response(OperationRequest("join", ""), value=list(self._joined)[-1]))
            self._joined.clear()
        return [one for one in found if one is not None]

    def _respond(self, key: Key) -> Response | None:
        if key in self._failed:
            text, missing = self._failed[key]
            if not missing:
                del self._failed[key]
            return Response(OperationRequest(key[1], key[2], key[0]), error=text)
        pending = self._pending.get(key)
        if pending is None or self._missing(key, pending.requests):
            return None
        del self._pending[key]
        members = self.sets.members(key[0])
        joined = [rank for rank in members if rank not in pending.requests]
        error = mismatch(pending.requests, members, joined)
        if error:
            return Response(pending.requests[min(pending.requests)], error=error)
        if key[1] in SET_KINDS:
            return self._change_sets(pending.requests[min(pending.requests)])
        index = -1 if joined else self._index_for(key, pending)
        return answer(pending.requests, members, index)

    def _change_sets(self, request: OperationRequest) -> Response:
        if request.kind == "add_process_set":
            value, error = self.sets.add(request.ranks)
        else:
            busy = self._busy()
            cached = {one for one, mask in self._cache.masks.items() if mask & busy}
            value, error = self.sets.remove(request.ranks, cached | {key[0] for key in self._pending})
            for index in indices(self._cache.masks.get(value, 0)):
                self._forget(index, 0.0)
            self._cache.masks.pop(value, None)
        return Response(request, error=error, value=value)

    def _index_for(self, key: Key, pending: Pending) -> int:
        """Return an index of the cache for an operation; -1 if it is not cached."""
        if key[1] not in TENSOR_KINDS or not all(one.cached for one in pending.requests.values()):
            return -1
        cache = self._cache
        if len(cache.entries) >= cache.capacity:
            victim = cache.victim(self._busy()) if cache.capacity else -1
            if victim < 0:
                return -1
            self._forget(victim, 0.0)
        return cache.add(key, pending.requests)

    def _batch(self, responses: Sequence[Response]) -> list[Action]:
        ready = self._ready_bits()
        if not responses and not ready and not self._forgotten:
            return []
        self._number += 1
        if ready:
            self._cache.note_use(ready)
            for rank in range(self.size):
                self._waiting[rank] &= ~ready
            for index in [index for index in self._bit_since if ready >> index & 1]:
                del self._bit_since[index]
        batch = Batch(self._number, tuple(self._forgotten), tuple(responses), to_bytes(ready))
        self._forgotten = []
        return [batch]

    def _ready_bits(self) -> int:
        ready = 0
        for set_id, mask in self._cache.masks.items():
            common = mask
            for rank in self.sets.members(set_id):
                common &= self._waiting[rank]
            ready |= common
        return ready

    def _busy(self) -> int:
        busy = 0
        for bits in self._waiting:
            busy |= bits
        return busy

    # ---- stalls ----------------------------------------------------------------------------------------------------

    def _missing(self, key: Key, requests: Iterable[int]) -> list[int]:
        have = set(requests)
        return [rank for rank in self.sets.members(key[0]) if rank not in have and rank not in self._joined]

    def _all_pending(self, now: float) -> dict[Key, Pending]:
        """Return pending operations, cached ones included."""
        found = dict(self._pending)
        busy = self._busy()
        self._bit_since = {index: self._bit_since.get(index, now) for index in indices(busy)}
        for index, since in self._bit_since.items():
            entry = self._cache.entries[index]
            waiting = {rank: entry.requests[rank] for rank in entry.requests if self._waiting[rank] >> index & 1}
            found[entry.key] = Pending(since, waiting)
        return found

    def _fail(self, key: Key, text: str, now: float) -> Response:
        """Fail an operation that some ranks have not asked for; they get the error when they do."""
        if key in self._cache.by_key:
            self._forget(self._cache.by_key[key].index, now)
        pending = self._pending.pop(key)
        self._failed[key] = text, set(self._missing(key, pending.requests))
        return Response(pending.requests[min(pending.requests)], error=text)
