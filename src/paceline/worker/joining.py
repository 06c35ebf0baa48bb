"""A process that takes the rank of a worker that has died joins a job that trains.

Its script runs from its first line. What it sets up has been set up before, so what it would tell the others is not
told: until it counts, gathers and barriers are its own, and requests that would change the servers are answered here.
Its loop asks the sampler where the job is: there it is let in, and gets the state of a living worker.

| state   | event                                          | action                                       | next    |
|---------|------------------------------------------------|----------------------------------------------|---------|
| sets up | a gather or a barrier                          | it opens at once                             | sets up |
| sets up | ``Init``, ``SetUpdater`` and the like          | nothing                                      | sets up |
| sets up | a push                                         | ``PacelineError`` that names the loop's form | sets up |
| sets up | :meth:`Joining.join`                           | ask the scheduler; take the state            | counts  |
| counts  | a gather lets others in, and this one gives    | give the state of all its :class:`Part`      | counts  |

State goes through a server, as frames of meetings of the two workers.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from paceline.errors import PacelineError, PeerDiedError
from paceline.layout.plain import Packer, unpack
from paceline.layout.tensors import from_frame, to_frame
from paceline.net.base import Frames
from paceline.net.call import Call
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

#: Requests of a script's set-up that change servers: they have got the same before.
_SET_UP = (
    m.Init, m.SetUpdater, m.SetCompression, m.SetValues, m.SetState, m.Pause, m.Away, m.Back, m.Leave, m.Regroup,
)  # fmt: skip

#: Bytes that one meeting moves, about.
_PART_BYTES = 64 << 20

#: The form of a loop that another process can join.
FORM = (
    "write it as 'for epoch in range(sampler.epoch, epochs)', with a paceline.data.SharedBatchSampler of measured "
    "shares in lock step, or a PooledBatchSampler elsewhere (docs/elastic.md)"
)


class Part(NamedTuple):
    """A part of the state that a worker gives to one that joins.

    Attributes:
        give: a method that returns plain data with tensors.
        take: a method that takes them; None: nobody gives, because servers have what there is to know.
    """

    give: Callable[[], Any]
    take: Callable[[Any | None], None]


class Host(Protocol):
    """The session, as far as joining needs it."""

    @property
    def rank(self) -> int:
        """This worker's rank."""

    def call_scheduler(self, body: m.Request, what: str) -> m.Body:
        """Ask the scheduler, and wait."""

    def ask_server(
        self,
        server: int,
        body: m.Request,
        what: str,
        frames: Frames = (),
        on_answer: Callable[[m.Body, Frames], None] | None = None,
    ) -> Call:
        """Ask a server."""

    def check(self) -> None:
        """Raise where the job has failed."""

    def wait(self, calls: Sequence[Call]) -> None:
        """Wait for answers."""


class Joining:
    """Whether this worker joins, and the parts of its state.

    Attributes:
        is_on: it joins, and does not count yet.
        round: the job's last round before this worker counted: its own are counted from there.
        phase: the phase in which it counts; 0: it was there from the start.
    """

    def __init__(self, host: Host, is_on: bool) -> None:
        self._host, self.is_on = host, is_on
        self.round = self.phase = 0
        self._parts: dict[str, tuple[weakref.WeakMethod[Callable[[], Any]], weakref.WeakMethod[Callable[[Any], None]]]]
        self._parts = {}
        self._arrived: dict[str, Any] = {}

    # ---- the state -------------------------------------------------------------------------------------------------

    def add(self, name: str, part: Part) -> None:
        """Note a part of the state, whose name is the same on all workers; take it, if it has arrived before.

        Its methods' object is not kept alive.
        """
        self._parts = {one: methods for one, methods in self._parts.items() if methods[0]() is not None}
        self._parts[name] = weakref.WeakMethod(part.give), weakref.WeakMethod(part.take)
        if name in self._arrived:
            part.take(self._arrived.pop(name))

    def give(self, workers: Sequence[int], phase: int) -> None:
        """Give the state to workers that count from now on."""
        packer = Packer()
        gives = {name: give() for name, (give, _) in self._parts.items()}
        state = {name: packer.pack(give(), name) for name, give in gives.items() if give is not None}
        about = [[name, str(one.dtype), list(one.shape)] for name, one in packer.tensors.items()]
        head = json.dumps({"state": state, "tensors": about}).encode()
        frames = [to_frame(one.detach().cpu().contiguous().view(-1)) for one in packer.tensors.values()]
        for worker in workers:
            try:
                for number, part in enumerate([[head], *_cut(frames)]):
                    self._meet(self._host.rank, worker, phase, number, part)
            except PeerDiedError as error:
                self._host.check()  # if the job goes on, so does this worker
                logger.warning("worker %d has not got its state: %s", worker, error)

    def _take_from(self, giver: int, phase: int) -> None:
        (head,) = self._meet(giver, self._host.rank, phase, 0, ())
        said = json.loads(bytes(memoryview(head)))
        frames: list[Any] = []
        number = 0
        while len(frames) < len(said["tensors"]):
            number += 1
            frames += self._meet(giver, self._host.rank, phase, number, ())
        tensors = {}
        for (name, dtype, shape), frame in zip(said["tensors"], frames, strict=True):
            kind, numel = getattr(torch, dtype.removeprefix("torch.")), torch.Size(shape).numel()
            tensors[name] = from_frame(frame, kind, numel).clone().view(shape)
        for name, state in said["state"].items():
            self._arrived[name] = unpack(state, tensors)

    def _meet(self, giver: int, taker: int, phase: int, number: int, frames: Sequence[Any]) -> list[Any]:
        got: list[Any] = []
        body = m.Meet(f"join {taker}/{phase}", number, sorted((giver, taker)), "joining", [taker] * len(frames))
        call = self._host.ask_server(0, body, "state of a worker", frames, lambda body, found: got.extend(found))
        self._host.wait([call])
        return got

    # ---- joining ---------------------------------------------------------------------------------------------------

    def join(self, can_be_let_in: bool = True) -> None:
        """Count from now on, if this worker does not yet: wait until it is let in, and take the state.

        Raises:
            PacelineError: nobody lets it in.
        """
        if not self.is_on:
            return
        if not can_be_let_in:
            self.check_joined()
        answer = self._host.call_scheduler(m.Join(), "being let in")
        assert isinstance(answer, m.Joined)
        self.is_on, self.round, self.phase = False, answer.round, answer.phase
        why = self._why_not_taken(answer)
        if why:  # the giver's death is not the reason of this worker's end: it may be replaced, too
            raise PacelineError(f"worker {self._host.rank} could not take the state of worker {answer.giver}: {why}")
        for name, (_, method) in list(self._parts.items()):
            if (take := method()) is not None:
                take(self._arrived.pop(name, None))
        logger.warning("worker %d has joined after round %d", self._host.rank, answer.round)

    def check_joined(self) -> None:
        """Raise where a loop goes on that has not asked where the job is.

        Raises:
            PacelineError: names the form of a loop that can be joined.
        """
        if self.is_on:
            raise PacelineError(
                f"worker {self._host.rank} takes over from a process that has died, and its loop trains without having "
                f"joined the others: {FORM}"
            )

    def _why_not_taken(self, answer: m.Joined) -> str:
        try:
            if answer.giver >= 0:
                self._take_from(answer.giver, answer.phase)
        except PeerDiedError as error:
            return str(error)
        return ""

    def answered_here(self, body: m.Request, whom: str, what: str) -> Call | None:
        """Return the call of a request that servers got before; None: it is to be sent.

        Raises:
            PacelineError: it is a push.
        """
        if not self.is_on:
            return None
        if isinstance(body, m.Push | m.AskNorm):
            self.check_joined()
        if not isinstance(body, _SET_UP):
            return None
        call = Call(whom, what, body, (), None)
        call.complete(m.Done(), ())
        return call


def _cut(frames: Sequence[Any]) -> list[list[Any]]:
    """Return frames in parts of about as many bytes."""
    parts: list[list[Any]] = []
    size = _PART_BYTES
    for frame in frames:
        if size >= _PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(frame)
        size += memoryview(frame).nbytes
    return parts
