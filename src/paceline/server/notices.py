"""Notices of workers about themselves: that they enter a barrier, go away, come back, leave or change their group.

They also ask who is missing. A worker may reach a server in two ways: directly, and through a server of its host that
forwards its pushes. It enters a barrier, goes away, or leaves, on both ways:

| notice | from | effect |
|---|---|---|
| `Pause`, `Away`, `Leave` | a worker that pushes here directly only | applied here |
| `Pause`, `Away`, `Leave` | a worker that pushes here in two ways | applied here when both have brought it |
| `Pause`, `Away`, `Leave` | a worker whose pushes are forwarded here | sent to the owners after its sums |
| `Back` | a worker, which has no push on its way | applied here, to forwarded buckets too |
| `Regroup` | a worker that pushes here directly only | applied here; refused if pushes are forwarded |
| `OnBehalf` | a server that forwards for the worker | as if the worker had said it, on the second way |
| `AskMissing` | a worker | answered here, or by the owner when all that is missing is the owner's answer |

A store that all workers have left is forgotten, on every server by itself.

Only when both ways have brought a notice has everything arrived that the worker pushed before it: each way keeps its
order, but one may be faster. That is what breaks the guarantee: a notice that overtakes pushes on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

from paceline.errors import ProtocolError
from paceline.net.base import Frames
from paceline.server.bucket_store import BucketStore
from paceline.server.hosted import HostedStore, ServerState
from paceline.server.members import Asker
from paceline.wire import messages as m

#: Notices that a worker sends on all its ways.
Notice: TypeAlias = m.Pause | m.Away | m.Leave


def notice(host: ServerState, asker: Asker, body: Notice, frames: Frames) -> None:
    """Let a worker pause, go away or leave; answered when the owners to which this server forwards know it too."""
    hosted = host.stores[body.store]
    _apply_here(hosted, asker.rank, body, direct=True)
    _forward(host, hosted, asker.rank, body, asker.answer)
    host.stores.drop_if_left(body.store)


def back(host: ServerState, asker: Asker, body: m.Back, frames: Frames) -> m.Reply:
    """Let others wait for a worker's pushes again."""
    hosted = host.stores[body.store]
    for part in hosted.parts:
        part.change(lambda rule: rule.come_back(asker.rank, body.phase))
    if hosted.forward is not None:
        hosted.forward.flush()
    return m.Done()


def regroup(host: ServerState, asker: Asker, body: m.Regroup, frames: Frames) -> m.Reply:
    """Let a worker step with another group."""
    hosted = host.stores[body.store]
    if hosted.opened.local_merge or hosted.opened.clip_norm:
        raise ProtocolError(f"store {body.store!r} merges locally or clips norms, so its groups cannot change")
    hosted.own.regroup(asker.rank, body.generation, body.groups)
    return m.Done()


def take_out(host: ServerState, workers: Iterable[int]) -> None:
    """Let workers that have left the job leave every store, as if they had said so."""
    for name, hosted in list(host.stores.items()):
        for worker in sorted(workers):
            if not hosted.notices[m.Leave, worker, True]:
                _apply_here(hosted, worker, m.Leave(name), direct=True)
                host.unconfirmed[worker] += 1
                _forward(host, hosted, worker, m.Leave(name), partial(_confirm, host, worker))
        host.stores.drop_if_left(name)


def _confirm(host: ServerState, worker: int, reply: m.Reply) -> None:
    host.unconfirmed[worker] -= 1


def _forward(
    host: ServerState, hosted: HostedStore, worker: int, body: Notice, reply: Callable[[m.Reply], None]
) -> None:
    """Send a notice to the servers to which this one forwards the worker's pushes, after those; then answer."""
    forward = hosted.forward
    owners = [] if forward is None else forward.owners_for(worker)
    if forward is None or not owners:
        reply(m.Done())
        return
    _apply(forward, worker, body)
    forward.flush()
    answers: list[m.Body] = []

    def take(answer: m.Body, frames: Frames) -> None:
        answers.append(answer)
        if len(answers) == len(owners):
            reply(next((one for one in answers if isinstance(one, m.Failed)), m.Done()))

    for owner in owners:
        host.ask(owner, m.OnBehalf(worker, body), (), take)


def ask_missing(host: ServerState, asker: Asker, body: m.AskMissing, frames: Frames) -> m.Reply | None:
    """Answer whose pushes a worker waits for, or let the owner answer."""
    hosted, worker = host.stores[body.store], asker.rank
    forward = hosted.forwards(body.entry)
    if forward is None:
        return hosted.own.missing_for(worker, body.entry)
    if not forward.waits_for_owner(worker, body.entry):
        return forward.missing_for(worker, body.entry)
    host.ask(forward.owner_of(body.entry), m.OnBehalf(worker, body), (), partial(_pass_back, asker))
    return None


def on_behalf(host: ServerState, asker: Asker, body: m.OnBehalf, frames: Frames) -> m.Reply:
    """Take a notice of a worker that a server of its host brings."""
    hosted, notice = host.stores[body.body.store], body.body
    hosted.check_forwarder(asker.rank, body.worker)
    if isinstance(notice, m.AskMissing):
        return hosted.own.missing_for(body.worker, notice.entry)
    _apply_here(hosted, body.worker, notice, direct=False)
    host.stores.drop_if_left(notice.store)
    return m.Done()


def _apply_here(hosted: HostedStore, worker: int, body: Notice, direct: bool) -> None:
    """Carry out a worker's notice in this server's own buckets, once it came on all its ways: ``direct`` is one."""
    hosted.notices[type(body), worker, direct] += 1
    two_ways = hosted.local_merge.via(worker, hosted.server) != hosted.server
    if two_ways and hosted.notices[type(body), worker, not direct] < hosted.notices[type(body), worker, direct]:
        return
    _apply(hosted.own, worker, body)


def _apply(store: BucketStore, worker: int, body: Notice) -> None:
    match body:
        case m.Pause():
            store.change(lambda rule: rule.pause(worker))
        case m.Away():
            store.change(lambda rule: rule.go_away(worker))
        case m.Leave():
            store.leave(worker)


def _pass_back(asker: Asker, answer: m.Body, frames: Frames) -> None:
    assert isinstance(answer, m.Missing | m.Failed)
    asker.answer(answer)
