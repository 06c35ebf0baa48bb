"""What workers say to a server about others: passed on through the server that passes on what they push."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from paceline.errors import ProtocolError
from paceline.local_merge import LocalMerge
from paceline.server.forward.store import AskFn, RelayStore
from paceline.server.store import ServerStore
from paceline.transport.base import Frames
from paceline.wire import messages as m

ReplyFn: TypeAlias = Callable[[m.Reply], None]


class Opened(NamedTuple):
    """A store that is open on a server."""

    body: m.OpenStore
    """As the first worker opened it."""
    store: ServerStore
    relays: LocalMerge
    relay: RelayStore | None
    """Its buckets of other servers, where this one passes on pushes."""
    heard: Counter[tuple[type, int, bool]]
    """How often a worker has entered a barrier or left, here and through its relay."""

    def holder(self, block: int, bucket: int) -> ServerStore:
        """Return what takes the pushes of a bucket here."""
        return self.relay if self.relay is not None and self.relay.has(block, bucket) else self.store


def heed(opened: Opened, rank: int, worker: int, body: m.Pause | m.Leave, direct: bool) -> None:
    """Carry out that a worker pauses or leaves.

    Where it pushes to this server in two ways, directly and through a relay, it says so in both, and that counts when
    both have brought it: only then has everything arrived that it pushed before.
    """
    opened.heard[type(body), worker, direct] += 1
    both_ways = opened.relays.via(worker, rank) != rank
    if both_ways and opened.heard[type(body), worker, not direct] < opened.heard[type(body), worker, direct]:
        return
    if isinstance(body, m.Pause):
        opened.store.pause(worker)
    else:
        opened.store.leave(worker)


def pass_on(opened: Opened, ask: AskFn, worker: int, body: m.Pause | m.Leave, reply: ReplyFn) -> None:
    """Tell the servers to which this one passes on the pushes of a worker, after those; then reply."""
    relay = opened.relay
    owners = [] if relay is None else relay.owners_for(worker)
    if relay is None or not owners:
        reply(m.Done())
        return
    if isinstance(body, m.Pause):
        relay.pause(worker)
    else:
        relay.leave(worker)
    relay.flush()
    heard: list[m.Body] = []

    def take(answer: m.Body, frames: Frames) -> None:
        heard.append(answer)
        if len(heard) == len(owners):
            reply(next((one for one in heard if isinstance(one, m.Failed)), m.Done()))

    for owner in owners:
        ask(owner, m.OnBehalf(worker, body), (), take)


def missing(opened: Opened, ask: AskFn, worker: int, body: m.AskMissing, reply: ReplyFn) -> None:
    """Say whom an unanswered push waits for: workers here, or those whom the owner of the bucket names."""
    entry, relay = body.entry, opened.relay
    holder = opened.holder(entry.block, entry.bucket)
    if holder is relay and relay.is_under_way(worker, entry):
        owner = relay.owner_of(entry)
        ask(owner, m.OnBehalf(worker, body), (), lambda answer, frames: _pass_back(answer, reply))
    else:
        reply(m.Missing(holder.missing_for(worker, entry)))


def _pass_back(answer: m.Body, reply: ReplyFn) -> None:
    assert isinstance(answer, m.Missing | m.Failed)
    reply(answer)


def check_speaker(opened: Opened, rank: int, server: int, worker: int) -> None:
    """Refuse that a server speaks for a worker that does not push through it.

    Raises:
        ProtocolError: it does not.
    """
    known = 0 <= worker < len(opened.relays.workers)
    if not known or opened.relays.via(worker, rank) != server:
        raise ProtocolError(f"server {server} does not speak for worker {worker}")


def on_behalf(opened: Opened, rank: int, server: int, body: m.OnBehalf) -> m.Reply:
    """Carry out what a server passes on."""
    check_speaker(opened, rank, server, body.worker)
    said = body.body
    if isinstance(said, m.AskMissing):
        return m.Missing(opened.store.missing_for(body.worker, said.entry))
    heed(opened, rank, body.worker, said, direct=False)
    return m.Done()


def no_upstream(owner: int, body: m.Request, frames: Frames, on_answer: object) -> None:
    """Stand for connections to other servers where there are none."""
    raise ProtocolError(f"this server has no connection to server {owner}")
