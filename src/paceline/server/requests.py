"""What a server does with requests: no socket, no thread, no clock.

A request is given to the handler of its type; which types there are says the table of each module:

| requests | module |
|---|---|
| open a store, initialise it, set its updater and codecs, map memory | `setup.py` |
| push, push a sum, ask for a norm, commit | `pushes.py` |
| pull, pull rows, set values | `pulls.py` |
| state, counters, registered commands | `commands.py` |
| pause, leave, ask who is missing, and these on behalf of a worker | `notices.py` |

A handler returns the answer, or nothing when it answers later. Whatever it raises is the answer, and the request has
changed nothing. That guarantee breaks in a handler that changes something before all its checks are done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from paceline.config import Settings
from paceline.errors import PacelineError, ProtocolError
from paceline.net.base import Frames, check_memory
from paceline.server.asker import AnswerFn, Asker, Handlers
from paceline.server.commands import Commands
from paceline.server.forward.sink import AskFn
from paceline.server.hosted import HostedStores
from paceline.server.members import Members
from paceline.server.notices import Notices
from paceline.server.pulls import Pulls
from paceline.server.pushes import Pushes
from paceline.server.setup import StoreSetup
from paceline.wire import messages as m

logger = logging.getLogger(__name__)


def no_connection(owner: int, body: m.Request, frames: Frames, on_answer: Callable[[m.Body, Frames], None]) -> None:
    """Stand for connections to other servers where there are none."""
    raise ProtocolError(f"this server has no connection to server {owner}")


class RequestHandler:
    """The stores of one server, and the requests on them.

    Args:
        settings: of the server.
        answer: sends an answer.
        ask: sends a request to another server.

    Attributes:
        stores: that are open here.
    """

    def __init__(self, settings: Settings, answer: AnswerFn, ask: AskFn = no_connection) -> None:
        self.settings = settings
        self.stores = HostedStores()
        self._answer, self._members = answer, Members()
        pushes, notices = Pushes(self.stores), Notices(self.stores, ask)
        parts = (
            StoreSetup(settings, self._members, self.stores, ask),
            pushes,
            Pulls(self.stores),
            Commands(self),
            notices,
        )
        self._notices = notices
        self._taken_out: tuple[frozenset[int], int] = frozenset(), 0
        """Workers, and how many stores were ever open, at the last :meth:`take_out`."""
        self._of_workers: Handlers = {kind: handler for part in parts for kind, handler in part.of_workers.items()}
        self._of_servers: Handlers = {**pushes.of_servers, **notices.of_servers}
        self._of_strangers: Handlers = {m.Claim: self._claim}

    def admit(self, members: Sequence[m.Member], host_id: str = "", rank: int = 0) -> None:
        """Learn who the members of the job are, and which of them this server is."""
        self._members.admit(members, host_id, rank)

    def take_out(self, workers: frozenset[int]) -> None:
        """Wait no more for workers that have left the job, in any store; called again after each request."""
        if workers and self._taken_out != (workers, self.stores.opened):
            self._taken_out = workers, self.stores.opened
            self._notices.take_out(workers)

    def bury(self, worker: int) -> int | None:
        """Take a worker out that has died.

        Returns:
            Its last round here; None while servers to which this one forwards have not taken it out.
        """
        self._members.bury(worker)
        self.take_out(self._taken_out[0] | {worker})
        return self.stores.last_round(worker) if self._notices.is_out(worker) else None

    def is_member(self, peer: bytes) -> bool:
        """Tell whether a connection belongs to a member."""
        return peer in self._members

    def handle(self, peer: bytes, seq: int, body: m.Request, frames: Frames) -> None:
        """Carry out one request. An error is answered to the peer, and changes nothing here."""
        workers, servers = self._members.workers, self._members.servers
        rank, handlers = workers.get(peer, -1), self._of_workers
        if rank < 0:
            rank, handlers = servers.get(peer, -1), self._of_servers
        if rank < 0 or isinstance(body, m.Claim):
            handlers = self._of_strangers
        asker = Asker(peer, seq, rank, self._members, self._answer)
        try:
            handler = handlers.get(type(body))
            if handler is None:
                raise _refusal(body, handlers is self._of_servers, rank)
            check_memory(frames, f"a {type(body).__name__}")
            result = handler(asker, body, frames)
            if isinstance(result, tuple):
                asker.reply(*result)
            elif result is not None:
                asker.reply(result)
        except (PacelineError, ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
            asker.fail(error)
        except Exception as error:
            # Process border: a defect here must not end the job of all. The peer gets the error, and the
            # log has the rest.
            logger.exception("a %s of peer %r failed", type(body).__name__, peer)
            asker.reply(m.Failed("RemoteError", f"{type(error).__name__}: {error}"[:4000]))

    def _claim(self, asker: Asker, body: m.Claim, frames: Frames) -> m.Reply:
        self._members.claim(asker.peer, body)
        return m.Done()


def _refusal(body: m.Request, is_server: bool, rank: int) -> ProtocolError:
    if rank < 0:
        return ProtocolError("this connection belongs to no member; claim it first")
    whose = " from another server" if is_server else ""
    return ProtocolError(f"a server does not take {type(body).__name__}{whose}")
