"""The coordinator: a thread in rank 0 that feeds the negotiation machine with the messages of the ranks.

It has a listener of its own with the job's key, instead of being a service of the scheduler: so it is there under
torchrun and mpirun too, where no scheduler runs, and one of the ranks reaches it without a message. It outlives
``shutdown``: the next ``init`` is a new *generation* on the same connections.

| state of a generation | event | next |
|---|---|---|
| entering | all ranks have sent ``Enter`` | running; ``Entered`` to all |
| entering, running | a rank's connection closes, a rank leaves | ended; ``Down`` to all |
| ended | ``Enter`` of the next generation | entering |

Messages of other generations than the present one are ignored.
"""

from __future__ import annotations

import logging
import queue
import threading
import time

from paceline.collectives.environment import HvdSettings, ProcessPlace
from paceline.collectives.negotiation.machine import Negotiation
from paceline.collectives.negotiation.messages import (
    Action,
    Alive,
    Batch,
    Down,
    Entered,
    RankEntered,
    RankLeft,
    RankStep,
    Submission,
    ToCoordinator,
    ToRank,
    decode,
    encode,
)
from paceline.collectives.rendezvous import CoordinatorAddress, withdraw
from paceline.collectives.timeline import Timeline
from paceline.errors import ProtocolError
from paceline.host.descriptors import raise_limit
from paceline.membership.told_steps import ToldSteps
from paceline.net.claims import Bounds
from paceline.net.hosts import is_gone
from paceline.net.security import Security
from paceline.net.sockets import SocketListener

logger = logging.getLogger(__name__)

#: Interval at which stalls are looked for, and at which ranks that wait hear of the coordinator. A stall's warning must
#: exceed it.
TICK_S = 0.5

#: How long a busy machine may let the thread wait for a processor at the end, before its sockets are closed.
_END_S = 10.0


def identity(rank: int) -> bytes:
    """Return the identity of a rank's connection."""
    return f"hvd-{rank}".encode()


def coordinator_name(job: str) -> str:
    """Return the name by which ranks mean the coordinator of their job, and no other one with the same key."""
    return f"hvd rank 0 of {job}"


class Coordinator:
    """Answers all ranks, and is rank 0's link to itself. Its machine is used under a lock, by its thread and by rank 0.

    Attributes:
        meeting: the address that the other ranks need.
        settings: used from the next generation on.
    """

    is_open = True

    def __init__(
        self, place: ProcessPlace, addresses: list[str], security: Security, settings: HvdSettings, timeline: Timeline
    ) -> None:
        self._place, self._timeline = place, timeline
        self.size, self.settings, self.security = place.size, settings, security
        self._inbox: queue.SimpleQueue[ToRank | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._generation = 0
        self._entered: dict[int, RankEntered] = {}
        self._told_steps: dict[tuple[int, ...], ToldSteps] = {}
        """By the ranks that train the weights."""
        self._machine: Negotiation | None = None
        self._is_ended = False
        self._closed = False
        raise_limit()
        bounds = Bounds.of_job(self.size)
        self._listener = SocketListener(addresses, security, coordinator_name(place.job), watch=True, bounds=bounds)
        for rank in range(1, self.size):  # their names say who they are
            self._listener.claimed(identity(rank))
        self.meeting = CoordinatorAddress("".join(self._listener.addresses[:1]), security)
        self._thread = threading.Thread(target=self._run, name="paceline-hvd-coordinator", daemon=True)
        self._thread.start()

    # ---- what ranks send -------------------------------------------------------------------------------------------

    def take(self, rank: int, message: ToCoordinator) -> None:
        """Take a message of a rank."""
        body = message.body
        with self._lock:
            if isinstance(body, RankEntered):
                self._enter(rank, message.generation, body)
            elif message.generation == self._generation and isinstance(body, RankLeft):
                self._end(rank, body.reason, body.failed)
            elif message.generation == self._generation and isinstance(body, RankStep):
                self._compare(rank, body)
            elif message.generation == self._generation and self._machine is not None:
                assert isinstance(body, Submission)
                if self._timeline.is_on:
                    self._timeline.reported(rank, self._machine.keys_of(body))
                self._carry_out(self._machine.submit(rank, body, time.monotonic()))

    def _enter(self, rank: int, generation: int, body: RankEntered) -> None:
        if generation > self._generation:
            self._generation, self._entered, self._machine, self._is_ended = generation, {}, None, False
            self._told_steps = {}
        if generation < self._generation or self._is_ended:
            self._send(rank, generation, Down(-1, "other ranks have joined again, or could not join"))
            return
        self._entered[rank] = body
        if len(self._entered) < self.size:
            return
        members = tuple(self._entered[one] for one in range(self.size))
        error = _difference(members)
        if error:
            self._end(-1, error, True)
            return
        self._machine = Negotiation(self.size, self.settings.options, members[0].sets)
        self._send_all(Entered(members, self.settings.fusion_threshold_bytes))

    def _end(self, rank: int, reason: str, failed: bool) -> None:
        if self._is_ended or not self._generation:
            return
        self._is_ended = True
        if self._machine is None:
            self._send_all(Down(rank, reason, failed))
        else:
            self._carry_out(self._machine.lose(rank, reason, failed))

    def _compare(self, rank: int, body: RankStep) -> None:
        ranks = body.ranks or range(self.size)
        call = self.settings.interface.equalise
        way_out = f"Load weights on every rank, or call {call} on every rank after it; and step alike on every rank"
        told = self._told_steps.setdefault(body.ranks, ToldSteps(way_out))
        told.note(rank, [body.step])
        for line in told.check(lambda: set(ranks)):
            logger.warning("%s", line)

    def missing(self) -> str:
        """Return the ranks that have not called ``init`` yet."""
        with self._lock:
            return ", ".join(str(rank) for rank in range(self.size) if rank not in self._entered)

    # ---- what ranks are sent ---------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, str):
                logger.warning("%s", action)
                continue
            self._is_ended |= isinstance(action, Down)
            self._send_all(action)

    def _send_all(self, body: Entered | Batch | Down | Alive) -> None:
        message = ToRank(self._generation, body)
        raw = encode(message)
        for rank in range(1, self.size):
            self._listener.send(identity(rank), [raw])
        self._inbox.put(message)

    def _send(self, rank: int, generation: int, body: Down) -> None:
        message = ToRank(generation, body)
        if rank:
            self._listener.send(identity(rank), [encode(message)])
        else:
            self._inbox.put(message)

    # ---- rank 0 ----------------------------------------------------------------------------------------------------

    def send(self, message: ToCoordinator) -> None:
        """Take a message of rank 0, in this thread."""
        self.take(0, message)

    def receive(self, timeout_s: float) -> list[ToRank]:
        """Return messages for rank 0, after waiting at most ``timeout_s`` for the first."""
        found = []
        try:
            one = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
            while True:
                if one is not None:
                    found.append(one)
                one = self._inbox.get_nowait()
        except queue.Empty:
            return found

    def wake(self) -> None:
        """Make :meth:`receive` return now."""
        self._inbox.put(None)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ticked = time.monotonic()
        while not self._closed:
            for peer, frames in self._listener.receive(TICK_S):
                self._take_frames(peer, frames[0])
            for peer in self._listener.lost():
                rank = _rank_of(peer, self.size)
                with self._lock:
                    if rank in self._entered:
                        self._end(rank, f"{self._described(rank)} ended, or lost its connection", True)
            now = time.monotonic()
            if now - ticked >= TICK_S:
                ticked = now
                with self._lock:
                    self._tick(now)

    def _tick(self, now: float) -> None:
        if self._machine is None:
            return
        self._carry_out(self._machine.tick(now))
        if not self._machine.is_idle and not self._is_ended:
            self._send_all(Alive())
            self._look_at_neighbours()

    def _look_at_neighbours(self) -> None:
        """End where a rank of this host has ended: a child that C code has forked keeps its connection open."""
        here = self._entered[0].host_id
        for rank, member in self._entered.items():
            if rank and member.host_id == here and is_gone(member.pid):
                self._end(rank, f"{self._described(rank)} ended", True)
                return

    def _described(self, rank: int) -> str:
        member = self._entered[rank]
        return f"rank {rank} (pid {member.pid} on {member.host})"

    def _take_frames(self, peer: bytes, raw: object) -> None:
        rank = _rank_of(peer, self.size)
        try:
            if rank < 1:
                raise ProtocolError(f"{peer!r} is no rank of this job")
            self.take(rank, decode(ToCoordinator, raw))
        except Exception as error:  # noqa: BLE001 - thread border: without this thread all ranks would wait
            logger.warning("refused a message: %s: %s", type(error).__name__, error)
            with self._lock:
                self._end(rank, f"rank {rank} sent what is no message: {error}", True)

    def close(self, linger_s: float = 1.0) -> None:
        """Stop; messages under way have ``linger_s`` to be sent."""
        self._closed = True
        self._listener.wake()
        self._thread.join(_END_S)
        self._listener.close(linger_s)
        if self.size > 1 and self._place.on_one_host:
            withdraw(self._place, self.meeting)


def _rank_of(peer: bytes, size: int) -> int:
    number = peer.removeprefix(b"hvd-")
    return int(number) if number.isdigit() and len(number) < 8 and int(number) < size else -1


def _difference(members: tuple[RankEntered, ...]) -> str:
    """Return what ranks gave ``init`` that is not alike; an empty string if nothing."""
    for rank, one in enumerate(members):
        if one.version != members[0].version:
            return f"rank {rank} runs another version of paceline than rank 0"
        if one.sets != members[0].sets:
            return f"hvd.init: rank 0 gave process sets {members[0].sets}, rank {rank} gave {one.sets}"
    return ""
