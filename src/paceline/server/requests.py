"""The handling of requests by a server: no socket, no thread, no clock.

A request is given to the handler of its type, a function ``handler(host, asker, body, frames)``. It returns the answer,
or nothing when it answers later. An error that it raises is the answer, and the request has changed nothing. That
guarantee breaks in a handler that changes something before all its checks are done.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec

from paceline.config import Settings
from paceline.errors import PacelineError, ProtocolError
from paceline.host.plain_text import described
from paceline.net.base import Frames, check_memory
from paceline.observe import ring
from paceline.observe.events import TOOK
from paceline.server import commands, notices, pulls, push, setup
from paceline.server.forward import AskFn
from paceline.server.hosted import Handlers, ServerState
from paceline.server.members import STRANGER, AnswerFn, Asker, Members, Sender
from paceline.wire import messages as m

logger = logging.getLogger(__name__)


def claim(host: ServerState, asker: Asker, body: m.Claim, frames: Frames) -> m.Reply:
    """Note which member a connection belongs to."""
    host.members.claim(asker.peer, body)
    return m.Done()


OF_WORKERS: Handlers = {
    m.OpenStore: setup.open_store,
    m.Init: setup.init,
    m.SetUpdater: setup.set_updater,
    m.SetCompression: setup.set_compression,
    m.MapArena: setup.map_arena,
    m.AskValues: setup.ask_values,
    m.ForwardBuckets: setup.forward_buckets,
    m.Push: push.push,
    m.AskNorm: push.ask_norm,
    m.Commit: push.commit,
    m.Pull: pulls.pull,
    m.PullRows: pulls.pull_rows,
    m.SetValues: pulls.set_values,
    m.GetState: commands.get_state,
    m.SetState: commands.set_state,
    m.AskStats: commands.ask_stats,
    m.Command: commands.command,
    m.Pause: notices.notice,
    m.Away: notices.notice,
    m.Back: notices.back,
    m.Leave: notices.notice,
    m.Regroup: notices.regroup,
    m.AskMissing: notices.ask_missing,
    m.Meet: lambda host, asker, body, frames: host.meetings.meet(asker, body, frames),
    m.TakeAny: lambda host, asker, body, frames: host.meetings.take_any(asker, body),
    m.GiveUp: lambda host, asker, body, frames: host.meetings.give_up(asker, body),
    m.AskNotMet: lambda host, asker, body, frames: host.meetings.absent(body),
    m.UseBoard: lambda host, asker, body, frames: host.board.use(asker, body),
}
OF_SERVERS: Handlers = {m.PushSum: push.push_sum, m.OnBehalf: notices.on_behalf}
OF_STRANGERS: Handlers = {m.Claim: claim}
#: By the role of the member that asks.
HANDLERS: Mapping[str, Handlers] = {"worker": OF_WORKERS, "server": OF_SERVERS, "": OF_STRANGERS}


class RequestHandler(ServerState):
    """The stores of one server, and the requests on them."""

    def __init__(self, settings: Settings, answer: AnswerFn, ask: AskFn, members: Members) -> None:
        super().__init__(settings, ask, members)
        self._answer = answer
        self._taken_out: tuple[frozenset[int], int] = frozenset(), 0
        """Workers, and how many stores were ever open, at the last :meth:`take_out`."""
        self._rejoined: dict[int, m.Rejoined] = {}
        """Workers that are not the first of their rank, and count."""

    def take_out(self, workers: frozenset[int]) -> None:
        """Wait no more for workers that have left the job, in any store; called again after each request."""
        workers -= self._rejoined.keys()
        if workers and self._taken_out != (workers, self.stores.opened):
            self._taken_out = workers, self.stores.opened
            notices.take_out(self, workers)
            self.meetings.take_out(workers)

    def take_in(self, came: Sequence[m.Member], rejoined: Sequence[m.Rejoined]) -> list[m.TakenIn]:
        """Take in members that are not the first of their rank, and let some of them count; returns those here."""
        for member in came:
            if self.members.admit(member):
                self._rejoined.pop(member.rank, None)
        for one in rejoined:
            if self._rejoined.get(one.rank) != one:
                self._rejoin(one)
        return [m.TakenIn(one.rank, one.incarnation, one.rank in self._rejoined) for one in came]

    def _rejoin(self, one: m.Rejoined) -> None:
        workers, opened = self._taken_out
        self._rejoined[one.rank], self._taken_out = one, (workers - {one.rank}, opened)
        self.meetings.rejoin(one.rank)
        self.unconfirmed[one.rank] = 0
        for hosted in self.stores.values():
            for key in [key for key in hosted.notices if key[1] == one.rank]:
                del hosted.notices[key]
            for part in hosted.parts:
                part.rejoin(one.rank, one.phase)

    def bury(self, worker: int) -> int | None:
        """Take a worker out that has died.

        Returns:
            Its last round here; None while servers to which this one forwards have not taken it out.
        """
        self.members.bury(worker)
        before = self._rejoined.pop(worker, None)
        self.take_out(self._taken_out[0] | {worker})
        if self.unconfirmed[worker]:
            return None
        own, base = self.stores.last_round(worker), 0 if before is None else before.round
        return base + own

    def is_newest(self, death: m.Death) -> bool:
        """Tell whether the process that died is the one which this server knows by its rank."""
        return death.incarnation == self.members.incarnation(death.rank)

    def handle(self, peer: bytes, seq: int, body: m.Request, frames: Frames) -> None:
        """Carry out one request. An error is answered to the peer, and changes nothing here."""
        sender = self.members.senders.get(peer, STRANGER)
        asker = Asker(peer, seq, sender, self._answer)
        ring.note(TOOK, seq, sender.number, m.TAGS[type(body)])
        try:
            handler = HANDLERS["" if isinstance(body, m.Claim) else sender.role].get(type(body))
            if handler is None:
                raise _refusal(body, sender)
            if frames:
                check_memory(frames, f"a {type(body).__name__}")
            result = handler(self, asker, body, frames)
            if isinstance(result, tuple):
                reply, made = result
                asker.answer(reply, lambda: made)
            elif result is not None:
                asker.answer(result)
        except (PacelineError, ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
            asker.fail(error)
        except Exception as error:
            # Process border: a defect here must not end the job of all. The peer gets the error, and the
            # log has the rest.
            logger.exception("a %s of peer %r failed", type(body).__name__, peer)
            asker.answer(m.Failed("RemoteError", described(error)))


def _refusal(body: m.Request, sender: Sender) -> ProtocolError:
    if sender is STRANGER:
        return ProtocolError("this connection belongs to no member; claim it first")
    whose = " from another server" if sender.role == "server" else ""
    return ProtocolError(f"a server does not take {type(body).__name__}{whose}")
