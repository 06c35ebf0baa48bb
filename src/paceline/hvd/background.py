"""The thread of each process that negotiates and moves data, so that operations run while the script computes.

| state | event | next |
|---|---|---|
| entering | ``Entered`` | running |
| running | ``Batch`` | running; its operations run in order, on this thread |
| running | ``Down``, or data could not be moved | down; everything pending fails with the reason |

Requests are collected for ``cycle_time_s`` after the first one, or until somebody waits for a result. Until then the
thread sleeps: it would compete for the interpreter's lock with the thread that makes them. ``timeout_s`` of operations
must exceed the longest pause of a rank (a stopped process); it does not count the wait until all ranks are ready.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import JoinTimeoutError, PacelineError
from paceline.hvd import execute
from paceline.hvd.errors import HorovodInternalError
from paceline.hvd.execute import FusedOperations, Operation, fuse
from paceline.hvd.link import CoordinatorLink
from paceline.hvd.negotiation.cache import RankCache
from paceline.hvd.negotiation.machine import ProcessSets
from paceline.hvd.negotiation.messages import (
    TENSOR_KINDS,
    Batch,
    Down,
    Entered,
    Key,
    RankEntered,
    RankLeft,
    Request,
    Response,
    ToCoordinator,
    ToRank,
)
from paceline.hvd.operation import Handles
from paceline.hvd.planes.base import Plane
from paceline.hvd.timeline import Timeline

logger = logging.getLogger(__name__)

_IDLE_S = 1.0
_LEAVE_S = 5.0
#: How long a rank that failed waits for the coordinator to say which rank failed first.
_NEWS_S = 1.0
_MOST_PLANS = 64


@dataclass(frozen=True)
class BatchPlan:
    """What a batch of cached operations is: the keys of all of them, and the groups of those that this rank is in."""

    keys: Sequence[Key]
    groups: Sequence[FusedOperations]


class Background:
    """Negotiates and runs the operations of one generation.

    Args:
        link: way to the coordinator.
        generation: number of this ``init``.
        handles: wakes threads that wait.
        cycle_time_s: how long requests are collected.
        timeline: notes what runs.
    """

    def __init__(
        self, link: CoordinatorLink, generation: int, handles: Handles, cycle_time_s: float, timeline: Timeline
    ) -> None:
        self._timeline = timeline
        self._link, self._generation, self._handles = link, generation, handles
        self._cycle_time_s = cycle_time_s
        self._lock = threading.Lock()
        self._operations: dict[Key, Operation] = {}
        self._queue: dict[Key, Request] = {}
        self._urgent = False
        self._due = 0.0
        self._leaving: RankLeft | None = None
        self._cache = RankCache()
        self._plans: dict[bytes, BatchPlan] = {}
        self._fusion_bytes = 0
        self.down: Down | None = None
        self.sets = ProcessSets(1)
        self.plane_for: Callable[[tuple[int, ...], str], Plane] | None = None
        self._rank = 0
        self._thread = threading.Thread(target=self._run, name="paceline-hvd", daemon=True)

    # ---- begin and end ---------------------------------------------------------------------------------------------

    def enter(self, rank: int, size: int, enter: RankEntered, timeout_s: float) -> Sequence[RankEntered]:
        """Wait until all ranks have called ``init``, and start the thread.

        Raises:
            JoinTimeoutError: some did not in time.
            HorovodInternalError: ranks disagree, or one ended.
        """
        self._rank = rank
        self._link.send(ToCoordinator(self._generation, enter))
        deadline = time.monotonic() + timeout_s
        waiting: list[ToRank] = []
        while True:
            waiting += self._link.receive(max(0.0, min(_IDLE_S, deadline - time.monotonic())))
            while waiting:
                message = waiting.pop(0)
                if message.generation not in (0, self._generation):
                    continue
                if isinstance(message.body, Down):
                    raise HorovodInternalError(describe(message.body))
                assert isinstance(message.body, Entered)
                self._fusion_bytes = message.body.fusion_bytes
                self.sets = ProcessSets(size, enter.sets)
                self._early = waiting
                self._thread.start()
                return message.body.members
            if time.monotonic() >= deadline:
                missing = self._link.missing()
                who = f"rank {missing}" if missing else "other ranks"
                raise JoinTimeoutError(f"rank {rank}: {who} of {size} did not call hvd.init() within {timeout_s:g} s")

    def leave(self, reason: str, failed: bool = False) -> None:
        """End this generation for all ranks, and the thread."""
        self._leaving = RankLeft(reason, failed)
        self._link.wake()
        self._thread.join(_LEAVE_S)

    # ---- operations ------------------------------------------------------------------------------------------------

    def submit(self, operation: Operation) -> None:
        """Start an operation.

        Raises:
            ValueError: one of this name is pending.
            HorovodInternalError: the job is down.
        """
        key = operation.request.key
        with self._lock:
            if self.down is not None:
                raise HorovodInternalError(describe(self.down))
            if key in self._operations:
                raise ValueError(
                    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor "
                    f"that is currently being processed: {key[1]} {key[2]!r}. If you want to request another "
                    "tensor, use a different tensor name"
                )
            self._operations[key] = operation
            is_first = not self._queue
            if is_first:
                self._due = time.monotonic() + self._cycle_time_s
            self._queue[key] = operation.request
        if is_first:
            self._link.wake()

    def urge(self) -> None:
        """Send what was collected: somebody waits."""
        if self._queue and not self._urgent:
            self._urgent = True
            self._link.wake()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._handle(self._early)
            while self.down is None:
                self._handle(self._link.receive(self._patience_s()))
                if self.down is None and not self._patience_s():
                    self._send()
        except Exception as error:
            # Thread border: whatever happened here, all ranks must know, and nobody may wait for ever.
            text = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
            if not isinstance(error, PacelineError):
                logger.exception("rank %d", self._rank)
            self._wait_for_down(_NEWS_S)  # who failed first is known better there
            if self.down is not None:
                return
            reason = f"rank {self._rank}: {text}"
            self._link.send(ToCoordinator(self._generation, RankLeft(reason, True)))
            self._go_down(Down(self._rank, reason))

    def _patience_s(self) -> float:
        """Return how long to wait for messages until there is something to send."""
        if self._leaving is not None:
            return 0.0
        if not self._queue:
            return _IDLE_S
        return 0.0 if self._urgent else max(0.0, self._due - time.monotonic())

    def _send(self) -> None:
        with self._lock:
            requests, self._queue = self._queue, {}
            self._urgent = False
        if requests:
            if self._timeline.is_on:
                self._timeline.cycle()
            self._link.send(ToCoordinator(self._generation, self._cache.submission(requests)))
        if self._leaving is not None:
            self._link.send(ToCoordinator(self._generation, self._leaving))
            self._wait_for_down(_LEAVE_S)
            if self.down is None:
                self._go_down(Down(self._rank, "hvd.shutdown() was called; rank 0 did not answer"))

    def _wait_for_down(self, timeout_s: float) -> None:
        """Wait for the end of this generation, and do nothing else any more."""
        deadline = time.monotonic() + timeout_s
        while self.down is None and (left := deadline - time.monotonic()) > 0:
            messages = self._link.receive(min(_IDLE_S, left))
            self._handle([message for message in messages if isinstance(message.body, Down)])

    def _handle(self, messages: Sequence[ToRank]) -> None:
        for message in messages:
            if message.generation not in (0, self._generation) or self.down is not None:
                continue
            if isinstance(message.body, Down):
                self._go_down(message.body)
            elif isinstance(message.body, Batch):
                self._take(message.body)

    def _go_down(self, down: Down) -> None:
        with self._lock:
            self.down = down
            operations, self._operations = list(self._operations.values()), {}
        for operation in operations:
            operation.error = describe(down)
            operation.done = True
        self._handles.wake()

    # ---- running ---------------------------------------------------------------------------------------------------

    def _take(self, batch: Batch) -> None:
        if batch.responses or batch.forgotten:
            self._plans.clear()
        plan = self._plans.get(batch.bits)
        if plan is not None:
            self._cache.note(batch)
        else:
            responses = self._cache.take(batch, self._request)
            count = len(batch.responses)
            self._carry_out(responses[:count])
            if not batch.bits:
                return
            plan = self._plan(responses[count:])
            if not batch.forgotten:
                self._plans[batch.bits] = plan
        if self._timeline.is_on:
            for key in plan.keys:
                self._timeline.agreed(key)
        self._run_groups(plan.groups)

    def _request(self, key: Key) -> Request | None:
        """Return this rank's pending request."""
        operation = self._operations.get(key)
        return None if operation is None else operation.request

    def _plan(self, responses: Sequence[Response]) -> BatchPlan:
        """Return how cached operations are run; the same bits mean the same until the cache changes."""
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        keys = [response.request.key for response in responses]
        return BatchPlan(keys, self._groups([one for one in responses if self._is_in(one)]))

    def _groups(self, responses: Sequence[Response]) -> list[FusedOperations]:
        """Return the groups that run as one."""
        fused = fuse(responses, self._fusion_bytes)
        return [execute.group_of(one, self.sets.members(one[0].request.process_set)) for one in fused]

    def _is_in(self, response: Response) -> bool:
        return self._rank in self.sets.members(response.request.process_set)

    def _carry_out(self, responses: Sequence[Response]) -> None:
        ready: list[Response] = []
        for response in responses:
            if self._timeline.is_on:
                self._timeline.agreed(response.request.key)
            if response.error or response.request.kind not in TENSOR_KINDS:
                self._run_groups(self._groups(ready))
                ready = []
                self._finish_plain(response)
            elif self._is_in(response):
                ready.append(response)
        self._run_groups(self._groups(ready))

    def _run_groups(self, groups: Sequence[FusedOperations]) -> None:
        """Run operations, those of a group as one."""
        for group in groups:
            owns = [self._operations.get(key) for key in group.keys]
            assert self.plane_for is not None
            plane = self.plane_for(group.members, group.request.device)
            if self._timeline.is_on:
                self._timeline.began([response.request for response in group.responses], type(plane).__name__)
            execute.run(group, owns, plane)
            if self._timeline.is_on:
                self._timeline.ended([response.request for response in group.responses])
            with self._lock:
                for key in group.keys:
                    self._operations.pop(key, None)
            for own in owns:
                if own is not None:
                    own.done = True
            self._handles.wake()

    def _finish_plain(self, response: Response) -> None:
        """Finish an operation that moves no tensors, or that failed."""
        request = response.request
        if not response.error and request.kind == "add_process_set":
            self.sets.add(request.ranks)
        elif not response.error and request.kind == "remove_process_set":
            self.sets.remove(request.ranks)
        with self._lock:
            operation = self._operations.pop(request.key, None)
        if operation is None:
            return
        operation.error = response.error
        operation.result = response.payloads if request.kind.endswith("_object") else response.value
        operation.done = True
        self._handles.wake()


def describe(down: Down) -> str:
    """Return the error of operations after the end of a generation."""
    who = f"by rank {down.rank}" if down.rank >= 0 else "by the coordinator"
    return (
        f"Horovod has been shut down {who}: {down.reason}. Operations that were pending on any rank have failed; call "
        "hvd.shutdown() and hvd.init() on all ranks to go on"
    )
