"""The stores that are open on a server."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.errors import KeyMismatchError, ProtocolError
from paceline.local_merge import LocalMerge
from paceline.server.forward.store import ForwardStore
from paceline.server.own import OwnStore
from paceline.wire import messages as m


@dataclass(frozen=True)
class HostedStore:
    """A store that is open on a server."""

    opened: m.OpenStore
    """As the first worker opened it."""
    server: int
    """Rank of this server."""
    own: OwnStore
    forward: ForwardStore | None
    """Its buckets of other servers, where this one forwards pushes."""
    local_merge: LocalMerge
    notices: Counter[tuple[type, int, bool]] = field(default_factory=Counter)
    """By (kind, worker, whether directly): how often a worker has said here that it pauses or leaves."""

    def holder(self, push: m.Push) -> OwnStore | ForwardStore:
        """Return what takes a push here."""
        if self.forward is not None and push.entries and self.is_forwarded(push.entries[0]):
            return self.forward
        return self.own

    def is_forwarded(self, entry: m.Entry) -> bool:
        """Tell whether pushes of an entry are forwarded from here."""
        return self.forward is not None and (entry.block, entry.bucket) in self.forward.store.buckets

    @property
    def is_left(self) -> bool:
        """Whether all workers have left: nobody can use the store any more."""
        parts = [self.own.store] + ([] if self.forward is None else [self.forward.store])
        return not any(part.presence.present for part in parts)

    def close(self) -> None:
        """Release shared memory."""
        for part in (self.own, self.forward):
            if part is not None:
                part.store.buckets.close()

    def check_forwarder(self, server: int, worker: int) -> None:
        """Refuse that a server forwards for a worker that does not push through it.

        Raises:
            ProtocolError: it does not.
        """
        is_known = 0 <= worker < len(self.local_merge.workers)
        if not is_known or self.local_merge.via(worker, self.server) != server:
            raise ProtocolError(f"server {server} does not forward for worker {worker}")


class HostedStores(dict[str, HostedStore]):
    """The open stores of a server, by name.

    Attributes:
        opened: how many were ever opened.
    """

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0

    def open(self, name: str, hosted: HostedStore) -> None:
        """Add a store."""
        self[name] = hosted
        self.opened += 1

    def drop_if_left(self, name: str) -> None:
        """Forget a store that all workers have left."""
        hosted = self.get(name)
        if hosted is not None and hosted.is_left:
            del self[name]
            hosted.close()

    def last_round(self, worker: int) -> int:
        """Return the last round of a worker that has arrived here, in any store; 0: none."""
        parts = [part.store for one in self.values() for part in (one.own, one.forward) if part is not None]
        slots = [slot for store in parts for bucket in store.buckets for slot in bucket.slots]
        return max((slot.rule.pushed[worker] for slot in slots), default=0)

    def __missing__(self, name: str) -> HostedStore:
        raise KeyMismatchError(f"store {name!r} was not opened on this server")
