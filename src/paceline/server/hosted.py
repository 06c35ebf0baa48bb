"""The state that all requests on a server share: its stores, the members of the job, and the way to other servers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from paceline.config import Settings
from paceline.errors import KeyMismatchError, ProtocolError
from paceline.layout.local_merge import LocalMerge
from paceline.net.base import Frames
from paceline.observe import meter
from paceline.server.forward import AskFn, ForwardStore
from paceline.server.meetings import Board, Meetings
from paceline.server.members import Asker, Members
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
        """Return the part that takes a push here."""
        return (self.forwards(push.entries[0]) if push.entries else None) or self.own

    def forwards(self, entry: m.Entry) -> ForwardStore | None:
        """Return the part that forwards pushes of an entry from here; None: they are for this server itself."""
        forward = self.forward
        return forward if forward is not None and entry.place in forward else None

    @property
    def parts(self) -> list[OwnStore | ForwardStore]:
        """The parts that take pushes here."""
        return [self.own] if self.forward is None else [self.own, self.forward]

    @property
    def is_left(self) -> bool:
        """Whether all workers have left: none can use the store any more."""
        return not any(part.unpushed.live for part in self.parts)

    def close(self) -> None:
        """Release the memory; no push comes any more."""
        own = list(self.own)
        meter.active.hold(-sum(bucket.values.numel() for bucket in own), -len(own))
        for part in self.parts:
            part.close()
        if self.forward is not None:
            del self.forward.sink  # it is its own sink, and the values are freed at once without that

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
        buckets = [bucket for one in self.values() for part in one.parts for bucket in part]
        slots = [slot for bucket in buckets for slot in bucket.slots]
        return max((slot.rule.pushed[worker] for slot in slots), default=0)

    def __missing__(self, name: str) -> HostedStore:
        raise KeyMismatchError(f"store {name!r} was not opened on this server")


@dataclass
class ServerState:
    """The state of a server that its requests share."""

    settings: Settings
    ask: AskFn
    """Sends a request to another server."""
    members: Members
    stores: HostedStores = field(default_factory=HostedStores)
    meetings: Meetings = field(init=False)
    board: Board = field(default_factory=Board)
    unconfirmed: Counter[int] = field(default_factory=Counter)
    """By worker that was taken out: owners that have not confirmed it."""

    def __post_init__(self) -> None:
        self.meetings = Meetings(len(self.members.worker_hosts))

    def end_graces(self, now: float) -> float:
        """End the times of grace that are over; returns how long the next one lasts, infinite where there is none."""
        return min((hosted.own.end_graces(now) for hosted in self.stores.values()), default=math.inf)


Result: TypeAlias = m.Reply | tuple[m.Reply, Frames] | None
"""The answer that a handler gives at once; None: it answers by itself, perhaps later."""
Handler: TypeAlias = Callable[[ServerState, Asker, Any, Frames], Result]
Handlers: TypeAlias = Mapping[type[m.Message], Handler]
