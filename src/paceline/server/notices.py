"""What workers say to servers about themselves: they enter a barrier, leave, or ask who is missing.

A worker may reach a server in two ways: directly, and through a server of its host that forwards its pushes. It enters
a barrier, or leaves, on both ways:

| notice | from | effect |
|---|---|---|
| `Pause`, `Leave` | a worker that pushes here directly only | applied here |
| `Pause`, `Leave` | a worker that pushes here in two ways | applied here when both have brought it |
| `Pause`, `Leave` | a worker whose pushes are forwarded here | sent to the owners after its sums, then answered |
| `Regroup` | a worker that pushes here directly only | applied here; refused if pushes are forwarded |
| `OnBehalf` | a server that forwards for the worker | as if the worker had said it, on the second way |
| `AskMissing` | a worker | answered here, or by the owner when all that is missing is the owner's answer |

A store that all workers have left is forgotten, on every server by itself.

Only when both ways have brought a notice has everything arrived that the worker pushed before it: each way keeps its
order, but one may be faster. That is what breaks the guarantee: a notice that overtakes pushes on its way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from paceline.errors import ProtocolError
from paceline.net.base import Frames
from paceline.server.asker import Asker, Handlers
from paceline.server.forward.sink import AskFn
from paceline.server.hosted import HostedStore, HostedStores
from paceline.wire import messages as m


class Notices:
    """Handles what workers say about themselves.

    Args:
        stores: of this server.
        ask: sends a request to another server.
    """

    def __init__(self, stores: HostedStores, ask: AskFn) -> None:
        self._stores, self._ask = stores, ask
        self._unconfirmed: Counter[int] = Counter()
        """By worker that was taken out: owners that have not confirmed it."""
        self.of_workers: Handlers = {
            m.Pause: self._notice,
            m.Leave: self._notice,
            m.Regroup: self._regroup,
            m.AskMissing: self._missing,
        }
        self.of_servers: Handlers = {m.OnBehalf: self._on_behalf}

    def _notice(self, asker: Asker, body: m.Pause | m.Leave, frames: Frames) -> None:
        hosted = self._stores[body.store]
        apply_here(hosted, asker.rank, body, direct=True)
        self._forward(hosted, asker.rank, body, asker.reply)
        self._stores.drop_if_left(body.store)

    def _regroup(self, asker: Asker, body: m.Regroup, frames: Frames) -> m.Reply:
        hosted = self._stores[body.store]
        if hosted.opened.local_merge or hosted.opened.clip_norm:
            raise ProtocolError(f"store {body.store!r} merges locally or clips norms, so its groups cannot change")
        hosted.own.store.regroup(asker.rank, body.generation, body.groups)
        return m.Done()

    def take_out(self, workers: Iterable[int]) -> None:
        """Let workers that have left the job leave every store, as if they had said so."""
        for name, hosted in list(self._stores.items()):
            for worker in sorted(workers):
                if not hosted.notices[m.Leave, worker, True]:
                    apply_here(hosted, worker, m.Leave(name), direct=True)
                    self._unconfirmed[worker] += 1
                    self._forward(hosted, worker, m.Leave(name), partial(self._confirm, worker))
            self._stores.drop_if_left(name)

    def _confirm(self, worker: int, reply: m.Reply) -> None:
        self._unconfirmed[worker] -= 1

    def is_out(self, worker: int) -> bool:
        """Tell whether a worker that was taken out has left here and at all owners to which this server forwards."""
        return not self._unconfirmed[worker]

    def _forward(
        self, hosted: HostedStore, worker: int, body: m.Pause | m.Leave, reply: Callable[[m.Reply], None]
    ) -> None:
        """Send a notice to the servers to which this one forwards the worker's pushes, after those; then answer."""
        forward = hosted.forward
        owners = [] if forward is None else forward.owners_for(worker)
        if forward is None or not owners:
            reply(m.Done())
            return
        if isinstance(body, m.Pause):
            forward.pause(worker)
        else:
            forward.leave(worker)
        answers: list[m.Body] = []

        def take(answer: m.Body, frames: Frames) -> None:
            answers.append(answer)
            if len(answers) == len(owners):
                reply(next((one for one in answers if isinstance(one, m.Failed)), m.Done()))

        for owner in owners:
            self._ask(owner, m.OnBehalf(worker, body), (), take)

    def _missing(self, asker: Asker, body: m.AskMissing, frames: Frames) -> m.Reply | None:
        hosted, worker = self._stores[body.store], asker.rank
        forward = hosted.forward
        if forward is None or not hosted.is_forwarded(body.entry):
            return hosted.own.store.missing_for(worker, body.entry)
        if not forward.waits_for_owner(worker, body.entry):
            return forward.store.missing_for(worker, body.entry)
        self._ask(forward.owner_of(body.entry), m.OnBehalf(worker, body), (), partial(_pass_back, asker))
        return None

    def _on_behalf(self, asker: Asker, body: m.OnBehalf, frames: Frames) -> m.Reply:
        hosted, notice = self._stores[body.body.store], body.body
        hosted.check_forwarder(asker.rank, body.worker)
        if isinstance(notice, m.AskMissing):
            return hosted.own.store.missing_for(body.worker, notice.entry)
        apply_here(hosted, body.worker, notice, direct=False)
        self._stores.drop_if_left(notice.store)
        return m.Done()


def apply_here(hosted: HostedStore, worker: int, body: m.Pause | m.Leave, direct: bool) -> None:
    """Let a worker pause or leave in this server's own buckets, once it has said so on all its ways.

    Args:
        hosted: the store.
        worker: its rank.
        body: what it says.
        direct: it says so itself, and not through a server that forwards.
    """
    hosted.notices[type(body), worker, direct] += 1
    two_ways = hosted.local_merge.via(worker, hosted.server) != hosted.server
    if two_ways and hosted.notices[type(body), worker, not direct] < hosted.notices[type(body), worker, direct]:
        return
    if isinstance(body, m.Pause):
        hosted.own.store.pause(worker)
    else:
        hosted.own.store.leave(worker)


def _pass_back(asker: Asker, answer: m.Body, frames: Frames) -> None:
    assert isinstance(answer, m.Missing | m.Failed)
    asker.reply(answer)
