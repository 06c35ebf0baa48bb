"""The operations of a process group: their order, and the handle of each.

torch.distributed calls operations of one group in the same order on all ranks, and waits for them when it needs their
results. So each group has a thread for those that run beside the script. An operation that fails breaks its group,
because ranks no longer agree on the next one: later ones fail, too, with the reason.
"""

from __future__ import annotations

import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch._C import _distributed_c10d as c10d

from paceline.errors import DeadlineError, PacelineError
from paceline.host import forks
from paceline.observe import meter
from paceline.observe.account import WAIT
from paceline.torch_hooks.untraced import untraced


@untraced
class Work(c10d.Work):
    """The handle of an operation.

    Args:
        what: the operation, for errors.
        result: tensors that it fills, or lists of them; its future holds them like that.

    Attributes:
        tensors: the tensors that it fills.
        number: its place in the group's order, the same on all ranks; 0 before it has one.
        may_call: callbacks of its future may call operations of the group.
        device_s: seconds for which it waited for the devices that compute its tensors.
    """

    def __init__(self, what: str, result: Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]) -> None:
        super().__init__()
        self.what, self.number, self._sender, self._pid = what, 0, -1, os.getpid()
        self._result: list[Any] = [one if isinstance(one, torch.Tensor) else list(one) for one in result]
        self.tensors: list[torch.Tensor] = []
        for one in self._result:
            self.tensors += [one] if isinstance(one, torch.Tensor) else one
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._running = threading.Lock()
        """Held until the end. An event would do, and costs five objects."""
        self._running.acquire()
        self._is_over = False
        self._base: torch.futures.Future[Any] | None = None
        self._exchange: meter.ExchangeTime | None = None
        self.device_s, self.may_call = 0.0, False

    def is_apart(self, other: Work) -> bool:
        """Return whether this operation and another one that is under way fill no memory in common, for sure."""
        if other._is_over:
            return True
        both = [*self.tensors, *other.tensors]
        if any(one.layout != torch.strided for one in both):
            return False
        mine, theirs = ({one.untyped_storage().data_ptr() for one in work.tensors} for work in (self, other))
        return mine.isdisjoint(theirs)

    def end(self, error: BaseException | None = None, source: int = -1) -> None:
        """Note that the operation is over."""
        self._error, self._sender = error, source
        with self._lock:
            self._is_over = True
            base = self._base
        if self._exchange is not None:
            meter.active.end_exchange(self._exchange, self.device_s)
        self._running.release()
        if base is not None:
            base.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end.

        Raises:
            PacelineError: the operation failed.
            DeadlineError: it has not ended within ``timeout``, and goes on.
        """
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._is_over:
            if os.getpid() != self._pid:
                raise PacelineError(forks.error_text(f"the process that has called {self.what}", self._pid))
            before = meter.active.enter(WAIT)
            try:
                is_over = self._running.acquire(timeout=seconds if seconds > 0 else -1)
            finally:
                meter.active.leave(before)
            if not is_over:
                raise DeadlineError(f"{self.what} did not end within {seconds:g} s; it goes on, and you can wait again")
            self._running.release()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait for the end: tensors are complete then, on devices too."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation is over."""
        return self._is_over

    def is_success(self) -> bool:
        """Return whether it is over without an error."""
        return self._is_over and self._error is None

    def exception(self) -> BaseException | None:
        """Return its error."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that it fills."""
        self.wait()
        return self.tensors

    def source_rank(self) -> int:
        """Return the sender of a received tensor."""
        return self._sender

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors: DDP waits for it at the end of a backward pass."""
        self.may_call |= not _is_ddp(sys._getframe().f_back)
        devices = {one.device for one in self.tensors if one.device.type not in ("cpu", "meta")}
        with self._lock:
            if self._base is None:
                self._base = torch.futures.Future(devices=sorted(devices, key=str))
                self._exchange = meter.active.begin_exchange()
                if self._is_over:
                    meter.active.end_exchange(self._exchange)
                    self._base.set_result(None)
            # Only an error in a callback becomes one of the future in C++, where DDP waits for it.
            return self._base.then(self._value)

    def _value(self, base: object) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._result


#: Modules whose hooks of DDP add no callback that calls an operation.
_HOOKS = ("torch.distributed.algorithms.ddp_comm_hooks.default_hooks", "paceline.")


def _is_ddp(frame: FrameType | None) -> bool:
    """Return whether DDP has called, in C++ in a backward pass, or a hook of :data:`_HOOKS` that no other one wraps."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_HOOKS):
        frame = frame.f_back
    return frame is None or frame.f_globals.get("__name__") == "torch.autograd.graph"


#: An operation; returns the place of the sender, if it is a receive.
Job: TypeAlias = Callable[[], int | None]


class Operations:
    """Carries out operations, until one of them fails. Thread-safe."""

    def __init__(self) -> None:
        self._failed: tuple[str, BaseException] | None = None

    @property
    def are_sound(self) -> bool:
        """Whether none has failed so far."""
        return self._failed is None

    def carry_out(self, work: Work, job: Job) -> None:
        """Run an operation, and end its handle; if one has failed before, end it with that error."""
        try:
            if self._failed is not None:
                what, why = self._failed
                raise PacelineError(
                    f"{work.what} was not started, because an operation before this one has failed ({what}), and ranks "
                    "no longer agree on their order; end the script, or open the group again on all ranks "
                    f"(destroy_process_group, init_process_group). The failure: {why}"
                ) from why
            source = job()
        except BaseException as error:  # noqa: BLE001 - thread border: the thread that waits raises it
            self._failed = self._failed or (work.what, error)
            work.end(error)
        else:
            work.end(source=-1 if source is None else source)


def _fail(error: Exception) -> None:
    raise error


class Runner:
    """Runs operations one at a time, in the order of the calls.

    | who calls | operations are left | none is left |
    |---|---|---|
    | a caller that waits for it | the thread runs it | the caller's thread runs it, without a hand-over |
    | another one | the thread runs it | the thread runs it |
    | a callback of an operation, in the thread | runs at once: it comes next, on all ranks | the same |

    Operations are numbered in the order in which they run. One has its number at its call if that is certain: those
    before it have theirs, and no callback of these can come in between. A callback that is added to the future of an
    operation that is over runs in the caller's thread, on some ranks only; its operations come next, too.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Work, Job] | None] = queue.SimpleQueue()
        self._operations = Operations()
        self._order = threading.Lock()
        """Guards the numbers, and the operations that are not over."""
        self._left: list[Work] = []
        self._numbers = itertools.count(1)
        self._turn = threading.RLock()
        """Held by the thread that runs an operation."""
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(
        self, work: Work, job: Job, *, is_awaited: bool = False, begin: Callable[[], None] | None = None
    ) -> Work:  # fmt: skip
        """Run an operation after those before it; it may be over at the return if the caller waits for it anyway.

        Args:
            work: its handle.
            job: does it, all of it unless ``begin`` was called.
            is_awaited: the caller waits for it.
            begin: the part of it that need not wait for those before, unless they fill the same tensors. It is called
                in the caller's thread, if at all.
        """
        if threading.current_thread() is self._thread:
            work.number = next(self._numbers)
            self._operations.carry_out(work, job)
            return work
        with self._order:
            is_next = is_awaited and not self._left
            if all(one.number and not one.may_call for one in self._left):
                work.number = next(self._numbers)
            may_begin = begin is not None and work.number and all(map(work.is_apart, self._left))
            self._left.append(work)
            if is_next:
                self._turn.acquire()  # it is free, and later operations wait for it
            else:
                self._queue.put((work, self._begun(begin, job) if begin is not None and may_begin else job))
        if is_next:
            before = meter.active.enter(WAIT)
            try:
                self._operations.carry_out(work, job)
            finally:
                meter.active.leave(before)
                self._turn.release()
                self._note_end(work)
        return work

    def _begun(self, begin: Callable[[], None], job: Job) -> Job:
        """Begin an operation; returns the rest of it."""
        try:
            if self._operations.are_sound:
                begin()
        except Exception as error:  # noqa: BLE001 - thread border: the thread that waits for the operation raises it
            return partial(_fail, error)
        return job

    def _note_end(self, work: Work) -> None:
        with self._order:
            self._left.remove(work)

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            with self._turn:
                item[0].number = item[0].number or next(self._numbers)
                self._operations.carry_out(*item)
            self._note_end(item[0])
            del item  # it holds tensors

    def close(self, timeout_s: float) -> bool:
        """End the thread after the operations so far; returns whether it has ended in time."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
