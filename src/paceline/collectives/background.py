"""Negotiates and runs the operations of this rank: in the thread that waits for one, else in a thread of its own.

| state | event | next |
|---|---|---|
| entering | ``Entered`` | running |
| running | ``Batch`` | running; its operations run in order |
| running | this rank leaves | running until ``Down``; operations that were agreed on before are run |
| running | ``Down``, or data could not be moved | down; everything pending fails with the reason |

One thread at a time drives: it sends requests, receives answers and moves data. None drives without pending operations.
The thread of :meth:`Background.wait` drives if no other does, so that no other thread must get a processor before its
result is there, which on a busy machine takes longer than the operation. While the script computes, the thread of this
object drives. It begins ``cycle_time_s`` after the first request; after :meth:`Background.hold` not before many bytes
are collected, because it would take the interpreter's lock and a processor from backward.

| timeout | must exceed |
|---|---|
| ``timeout_s`` of a silent rank 0, and of a plane's wait | the longest pause of a process (:mod:`.silence`) |

The wait until all ranks are ready has no limit but ``HOROVOD_STALL_SHUTDOWN_TIME_SECONDS``; meanwhile rank 0 tells
every half second that it is there.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.collectives import execute
from paceline.collectives.environment import HvdSettings
from paceline.collectives.errors import CollectiveError
from paceline.collectives.execute import BatchPlans, FusedOperations, Operation
from paceline.collectives.link import CoordinatorLink
from paceline.collectives.negotiation.cache import RankCache
from paceline.collectives.negotiation.machine import ProcessSets
from paceline.collectives.negotiation.messages import (
    TENSOR_KINDS,
    Batch,
    Down,
    Entered,
    Key,
    OperationRequest,
    RankLeft,
    RankStep,
    Response,
    ToCoordinator,
    ToRank,
)
from paceline.collectives.planes.base import Plane
from paceline.collectives.silence import Silence
from paceline.collectives.timeline import Timeline
from paceline.errors import PacelineError
from paceline.host import forks
from paceline.host.plain_text import described, text_of

logger = logging.getLogger(__name__)

_IDLE_S = 1.0
#: Bytes of gradients below which moving them while backward runs brings no gain.
HOLD_BYTES = 4 * 1024 * 1024
_LEAVE_S = 5.0
#: How long a rank that failed waits for the coordinator to say which rank failed first.
_NEWS_S = 1.0
#: Least time without a message of rank 0, which sends one each half second, after which it counts as dead.
_SILENT_S = 10.0


class Background:
    """Negotiates and runs the operations of one generation. Thread-safe.

    Attributes:
        gpu: the GPU of this rank's tensors, where it is known.
        has_failed: data were being moved when an error came, so planes are not used again.
        check: raises where the job has failed; called while an operation waits for other ranks.
    """

    def __init__(
        self,
        link: CoordinatorLink,
        generation: int,
        rank: int,
        entered: Entered,
        early: Sequence[ToRank],
        hvd: HvdSettings,
        timeline: Timeline,
    ) -> None:
        self._link, self._generation, self._rank, self._hvd, self._timeline = link, generation, rank, hvd, timeline
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # operations are done, or no thread drives now
        self._work = threading.Condition(lock)  # the thread has to drive
        self._driven = False
        self._handles: dict[int, Operation] = {}
        self._next_handle = itertools.count(1)
        self._numbers: Counter[int] = Counter()
        self._operations: dict[Key, Operation] = {}
        self._queue: dict[Key, OperationRequest] = {}
        self._urgent = False
        self._due = 0.0
        self._held_bytes, self._held_since = -1, 0.0
        first = entered.members[0]
        self._silence = Silence(first.pid if rank and first.host_id == entered.members[rank].host_id else 0)
        self._leaving: RankLeft | None = None
        self._steps: list[RankStep] = []
        self._early = list(early)
        self._cache = RankCache()
        self.down: Down | None = None
        self._forked_from = ""
        self.gpu: torch.device | None = None
        self.has_failed = False
        self.check: Callable[[], None] = lambda: None
        self.sets = ProcessSets(len(entered.members), first.sets)
        self._plans = BatchPlans(rank, self.sets, entered.fusion_bytes)
        self.plane_for: Callable[[tuple[int, ...], str], Plane] | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-hvd", daemon=True)
        self._thread.start()
        forks.in_children(self, Background._forget)

    def _forget(self) -> None:
        """In a forked child: all operations fail. Those of the parent go on there."""
        lock = threading.Lock()
        self._changed, self._work, self._driven = threading.Condition(lock), threading.Condition(lock), False
        self._forked_from = forks.error_text(f"rank {self._rank}", os.getppid())
        self._fail_all(self._forked_from)

    def leave(self, reason: str, failed: bool = False) -> None:
        """End this generation for all ranks, and the thread."""
        with self._changed:
            self._leaving = RankLeft(reason, failed)
            self._work.notify()
        self._link.wake()
        self._thread.join(_LEAVE_S + self._hvd.timeout_s)  # it may be in an operation that was agreed on before

    def note_step(self, step: RankStep) -> None:
        """Let the coordinator compare what this rank tells of a step with the others. Sent before the next requests."""
        with self._changed:
            self._steps.append(step)

    # ---- operations ------------------------------------------------------------------------------------------------

    def number(self, process_set: int) -> int:
        """Return the number of the next call for a process set, by which unnamed operations of its ranks match."""
        with self._changed:
            self._numbers[process_set] += 1
            return self._numbers[process_set]

    def start(self, operation: Operation) -> int:
        """Start an operation; returns its handle.

        Raises:
            ValueError: one of this name is pending.
            CollectiveError: the job is down.
        """
        handle = next(self._next_handle)
        self._submit(operation)
        self._handles[handle] = operation
        return handle

    def call(self, request: OperationRequest) -> Any:
        """Run an operation without tensors, and return its result; raises as :meth:`start` and :meth:`wait`."""
        operation = Operation(request)
        self._submit(operation)
        return self.wait(operation)

    def poll(self, handle: int) -> bool:
        """Return whether :meth:`synchronize` would not wait."""
        found = self._handles.get(handle)
        return found is None or found.done

    def synchronize(self, handle: int) -> Any:
        """Wait for an operation, forget it and return its result; None for an unknown handle.

        Raises:
            CollectiveError: it failed.
        """
        operation = self._handles.pop(handle, None)
        return None if operation is None else self.wait(operation)

    def _submit(self, operation: Operation) -> None:
        key = operation.request.key
        with self._changed:
            error = self._forked_from or (self.down.text(self._hvd.interface) if self.down is not None else "")
            if error:
                raise CollectiveError(error)
            if key in self._operations:
                raise ValueError(
                    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor "
                    f"that is currently being processed: {key[1]} {key[2]!r}. If you want to request another "
                    "tensor, use a different tensor name"
                )
            self._operations[key] = operation
            is_first = not self._queue
            if is_first:
                self._due = time.monotonic() + self._hvd.cycle_time_s
            self._queue[key] = operation.request
            if self._held_bytes >= 0:
                self._held_bytes += sum(one.nbytes for one in operation.tensors)
                if self._held_bytes < HOLD_BYTES:
                    return
                is_first, self._held_bytes = True, -1
            if is_first:
                self._wake_driver()

    def hold(self) -> None:
        """Let the operations that are started from now on wait for :meth:`wait` or :meth:`urge`: these come soon."""
        if self._held_bytes < 0 and not self._operations:
            self._held_bytes, self._held_since = 0, time.monotonic()

    def urge(self) -> None:
        """Send the requests that were collected."""
        with self._changed:
            self._held_bytes = -1
            if not self._queue or self._urgent:
                return
            self._urgent = True
            self._wake_driver()

    def _wake_driver(self) -> None:
        (self._link.wake if self._driven else self._work.notify)()

    def wait(self, operation: Operation) -> Any:
        """Wait for an operation, driving where nobody else does, and return its result.

        Raises:
            CollectiveError: it failed.
        """
        while not operation.done:
            if self._take_over(operation):
                self._drive(lambda: operation.done)
        return operation.outcome()

    def _take_over(self, operation: Operation) -> bool:
        """Return True to drive, or False when the operation is done, or the driving thread may have ended."""
        with self._changed:
            self._held_bytes = -1
            self._urgent = bool(self._queue)
            if not self._driven and not operation.done:
                self._driven = True
                return True
            if self._urgent:
                self._link.wake()
            if not operation.done:
                self._changed.wait(_IDLE_S)
        return False

    # ---- driving ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self.down is None:
            with self._changed:
                if not self._has_work():
                    self._work.wait(_IDLE_S)
                if time.monotonic() - self._held_since > _IDLE_S:
                    self._held_bytes = -1  # backward takes long, or has failed
                if self._has_work() and not self._queue and self._leaving is None:
                    # A thread that waits for one operation after the other takes over again.
                    self._work.wait(self._hvd.cycle_time_s)
                if self._driven:
                    continue
                self._driven = True
            self._drive(lambda: not self._operations and self._leaving is None)

    def _has_work(self) -> bool:
        """Return whether this object's thread has to drive."""
        is_pending = bool(self._operations) and self._held_bytes < 0
        return not self._driven and (is_pending or bool(self._early) or self._leaving is not None)

    def _drive(self, is_enough: Callable[[], bool]) -> None:
        """Send, receive and move data until it is enough, at least once. An error ends the generation for all ranks."""
        is_moving = False
        try:
            while self.down is None:
                is_moving = False
                messages = self._receive()
                is_moving = True
                self._handle(messages)
                if self.down is None and not self._patience_s():
                    self._send()
                if is_enough():
                    break
        except BaseException as error:
            # Thread border: all ranks must know, and nobody may wait for ever. To interrupt a mere wait harms nobody.
            if is_moving or isinstance(error, Exception):
                self.has_failed = True
                self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            with self._changed:
                self._driven = False
                self._changed.notify_all()
                if self._has_work():
                    self._work.notify()

    def _receive(self) -> list[ToRank]:
        messages, self._early = self._early, []
        began, patience_s = time.monotonic(), self._patience_s()
        messages += self._link.receive(patience_s)
        if not messages and self._operations:
            self.check()
        self._silence.note(min(patience_s, time.monotonic() - began), bool(messages) or not self._operations)
        if self._silence.is_gone:
            raise CollectiveError("rank 0, where the coordinator runs, ended")
        if self._silence.counted_s > max(self._hvd.timeout_s, _SILENT_S):
            raise CollectiveError(
                f"rank 0, where the coordinator runs, has sent nothing for {self._silence.counted_s:.0f} s: it or its "
                "host hangs. A rank may pause for HOROVOD_GLOO_TIMEOUT_SECONDS"
            )
        return messages

    def _fail(self, error: BaseException) -> None:
        text = text_of(error) if isinstance(error, PacelineError) else described(error)
        if not isinstance(error, PacelineError):
            logger.exception("rank %d", self._rank)
        self._wait_for_down(_NEWS_S, (Down,))  # who failed first is known better there
        if self.down is not None:
            return
        reason = f"rank {self._rank}: {text}"
        self._link.send(ToCoordinator(self._generation, RankLeft(reason, True)))
        self._go_down(Down(self._rank, reason))

    def _patience_s(self) -> float:
        """Return how long to wait for messages until there is something to send."""
        if self._leaving is not None or not self._operations:
            return 0.0
        if not self._queue:
            return _IDLE_S
        return 0.0 if self._urgent else max(0.0, self._due - time.monotonic())

    def _send(self) -> None:
        with self._changed:
            requests, self._queue = self._queue, {}
            steps, self._steps = self._steps, []
            self._urgent = False
        for step in steps:
            self._link.send(ToCoordinator(self._generation, step))
        if requests:
            self._timeline.cycle()
            self._link.send(ToCoordinator(self._generation, self._cache.submission(requests)))
        if self._leaving is not None:
            self._link.send(ToCoordinator(self._generation, self._leaving))
            # The others run the operations that were agreed on before they hear of it, so this rank does, too.
            self._wait_for_down(_LEAVE_S, (Batch, Down))
            if self.down is None:
                self._go_down(Down(self._rank, "hvd.shutdown() was called; rank 0 did not answer"))

    def _wait_for_down(self, timeout_s: float, handled: tuple[type, ...]) -> None:
        """Wait for the end of this generation, and handle only messages of some types any more."""
        deadline = time.monotonic() + timeout_s
        while self.down is None and (left := deadline - time.monotonic()) > 0:
            messages = self._link.receive(min(_IDLE_S, left))
            self._handle([message for message in messages if isinstance(message.body, handled)])

    def _handle(self, messages: Sequence[ToRank]) -> None:
        for message in messages:
            if message.generation not in (0, self._generation) or self.down is not None:
                continue
            if isinstance(message.body, Down):
                self._go_down(message.body)
            elif isinstance(message.body, Batch):
                self._run_batch(message.body)

    def _go_down(self, down: Down) -> None:
        with self._changed:
            self.down = down
            self._fail_all(down.text(self._hvd.interface))
            self._changed.notify_all()

    def _fail_all(self, error: str) -> None:
        operations, self._operations = list(self._operations.values()), {}
        for operation in operations:
            operation.error = error
            operation.done = True

    # ---- running ---------------------------------------------------------------------------------------------------

    def _run_batch(self, batch: Batch) -> None:
        plan = self._plans.known(batch)
        if plan is not None:
            self._cache.note(batch)
        else:
            responses = self._cache.take(batch, lambda key: getattr(self._operations.get(key), "request", None))
            count = len(batch.responses)
            self._carry_out(responses[:count])
            plan = self._plans.make(batch, responses[count:])
        self._timeline.agreed(plan.keys)
        self._run_groups(plan.groups)

    def _carry_out(self, responses: Sequence[Response]) -> None:
        ready: list[Response] = []
        for response in responses:
            self._timeline.agreed([response.request.key])
            if response.error or response.request.kind not in TENSOR_KINDS:
                self._run_groups(self._plans.groups(ready))
                ready = []
                self._finish_plain(response)
            else:
                ready.append(response)
        self._run_groups(self._plans.groups(ready))

    def _run_groups(self, groups: Sequence[FusedOperations]) -> None:
        """Run operations, those of a group as one."""
        for group in groups:
            owns = [self._operations.get(key) for key in group.keys]
            assert self.plane_for is not None
            with execute.on_gpu_of(group, owns, self.gpu):
                plane = self.plane_for(group.members, group.request.device)
                self._timeline.began(group.responses, type(plane).__name__)
                execute.run(group, owns, plane)
            self._timeline.ended(group.responses)
            with self._changed:
                for key, own in zip(group.keys, owns, strict=True):
                    self._operations.pop(key, None)
                    if own is not None:
                        own.done = True
                self._changed.notify_all()

    def _finish_plain(self, response: Response) -> None:
        """Finish an operation that moves no tensors, or that failed."""
        request = response.request
        if not response.error and request.kind == "add_process_set":
            self.sets.add(request.ranks)
        elif not response.error and request.kind == "remove_process_set":
            self.sets.remove(request.ranks)
        with self._changed:
            operation = self._operations.pop(request.key, None)
            if operation is not None:
                operation.error = response.error
                operation.result = response.payloads if request.kind.endswith("_object") else response.value
                operation.done = True
                self._changed.notify_all()
