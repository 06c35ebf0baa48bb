"""Threads that run replicas in parallel, forward and backward, and exchange of values between replicas of a call."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from paceline.errors import DeadlineError, PacelineError
from paceline.host import forks
from paceline.mx.context import Context, cpu, gpu

T = TypeVar("T")

MEETING_TIMEOUT_S = 300.0
_local = threading.local()
_graphs_joined = False


class _MeetingBrokenError(PacelineError):
    """Another replica failed, so this one stopped. The other replica's error is reported."""


class Meeting:
    """Lets the replicas of one call exchange values, as an all-gather does between processes."""

    def __init__(self, contexts: Sequence[Context], timeout_s: float = MEETING_TIMEOUT_S) -> None:
        self._contexts = contexts
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._rounds: list[dict[int, tuple[str, Any]]] = []
        self._done = [0] * len(contexts)
        self._left: set[int] = set()
        self._failed = False

    def gather(self, index: int, label: str, value: T) -> list[T]:
        """Exchange values: returns the values of all replicas, in order. Every replica calls it with the same label.

        Raises:
            DeadlineError: a replica did not call in time.
            PacelineError: the replicas are at different places, or one of them failed.
        """
        with self._changed:
            given = self._round(index)
            given[index] = (label, value)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: len(given) == len(self._contexts) or bool(self._missing(given)), self._timeout_s
            )
            self._check(index, given)
        return [given[one][1] for one in range(len(self._contexts))]

    def leave(self, index: int, failed: bool) -> None:
        """Note that a replica has ended, so that no other replica waits for it."""
        with self._changed:
            self._left.add(index)
            self._failed = self._failed or failed
            self._changed.notify_all()

    def _round(self, index: int) -> dict[int, tuple[str, Any]]:
        self._done[index] += 1
        if len(self._rounds) < self._done[index]:
            self._rounds.append({})
        return self._rounds[self._done[index] - 1]

    def _missing(self, given: Mapping[int, Any]) -> set[int]:
        return self._left - set(given)

    def _check(self, index: int, given: Mapping[int, tuple[str, Any]]) -> None:
        me, label = self._contexts[index], given[index][0]
        if self._missing(given) and self._failed:
            raise _MeetingBrokenError(f"replica {me} stopped: another replica failed")
        if self._missing(given) or any(other != label for other, _ in given.values()):
            raise PacelineError(f"replica {me} is at {label}, others are not: all must run the same layers in order")
        if len(given) < len(self._contexts):
            late = ", ".join(str(one) for i, one in enumerate(self._contexts) if i not in given)
            raise DeadlineError(f"replica {me} waited {self._timeout_s:g} s at {label} for replica {late}")


@dataclass(frozen=True)
class ReplicaCall:
    """One replica's part in a call of all replicas."""

    index: int
    context: Context
    meeting: Meeting


def current_call() -> ReplicaCall | None:
    """Return the call that this thread runs as one of several replicas, or None."""
    return getattr(_local, "call", None)


@dataclass(frozen=True)
class _Modes:
    """Autograd and autocast modes of a thread, and its streams. They are set in the threads that run its replicas."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    streams: tuple[torch.cuda.Stream, ...]

    @classmethod
    def of_this_thread(cls, contexts: Sequence[Context]) -> _Modes:
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        states = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        streams = tuple(torch.cuda.current_stream(one.device) for one in contexts if one.device_type == "gpu")
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), states, streams)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype))
            for stream in self.streams:  # also streams of other replicas, whose tensors this one may read
                stack.enter_context(torch.cuda.stream(stream))
            yield


def run_replicas(contexts: Sequence[Context], jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run one job per replica in parallel; a single job, or jobs of a replica's thread, run in the calling thread.

    Returns:
        The results in order.

    Raises:
        BaseException: the error of the first failing job, with a note that names its replica.
    """
    if len(jobs) == 1 or current_call() is not None:
        return [job() for job in jobs]
    modes, meeting = _Modes.of_this_thread(contexts), Meeting(contexts)
    calls = [ReplicaCall(index, context, meeting) for index, context in enumerate(contexts)]
    work = zip(_executors(len(jobs)), calls, jobs, strict=True)
    return _results([executor.submit(_work, call, modes, job) for executor, call, job in work])


@functools.cache
def _executors(size: int) -> list[ThreadPoolExecutor]:
    """Return one permanent thread per replica, so that each replica keeps its thread-local state of torch."""
    threads = torch.get_num_threads()
    found = [ThreadPoolExecutor(1, f"replica-{i}") for i in range(size)]
    for one in found:
        one.submit(_use_threads, max(1, threads // size)).result()
    # The call above also set the default of threads that start later.
    torch.set_num_threads(threads)
    return found


# The threads do not exist in a child: it makes threads of its own.
forks.in_children(_executors, lambda made: made.cache_clear())


def _use_threads(count: int) -> None:
    # Read first: at its first use in a thread torch sets the process's default, which would overwrite our setting.
    torch.get_num_threads()
    torch.set_num_threads(count)


def _work(call: ReplicaCall, modes: _Modes, job: Callable[[], T]) -> T:
    _local.call = call
    try:
        with modes.applied(), _device(call.context):
            result = job()
    except BaseException as error:  # thread border: the caller's thread raises it, from the future
        call.meeting.leave(call.index, failed=True)
        error.add_note(f"in replica {call.index} on {call.context}")
        raise
    else:
        call.meeting.leave(call.index, failed=False)
        return result
    finally:
        _local.call = None


def _device(context: Context) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(context.device) if context.device_type == "gpu" else contextlib.nullcontext()


def _results(futures: Sequence[Future[T]]) -> list[T]:
    errors = [error for one in futures if (error := one.exception()) is not None]
    for error in sorted(errors, key=lambda one: isinstance(one, _MeetingBrokenError)):
        raise error
    return [one.result() for one in futures]


def join_graphs() -> None:
    """Note that graphs of different replicas share nodes in this process (``SyncBatchNorm``).

    From then on :func:`backward` runs one joint pass. Two concurrent passes over shared nodes would free them twice.
    """
    global _graphs_joined
    _graphs_joined = True


def backward(losses: torch.Tensor | Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Compute the gradients of the sum of all losses, all replicas in parallel.

    The result equals ``for loss in losses: loss.backward()``, but it is faster, and it also works when the graphs
    of the replicas share nodes.

    Args:
        losses: one loss per replica; a loss that is not a scalar is summed.
        retain_graph: keep the graphs for another pass.

    Raises:
        ValueError: no losses.
    """
    listed = [losses] if isinstance(losses, torch.Tensor) else list(losses)
    if not listed:
        raise ValueError("there are no losses to go backward from")
    scalars = [one if one.dim() == 0 else one.sum() for one in listed]
    if _graphs_joined or len(scalars) == 1:
        torch.autograd.backward(scalars, retain_graph=retain_graph)
        return
    jobs = [lambda one=one: one.backward(retain_graph=retain_graph) for one in scalars]
    run_replicas([gpu(one.device.index) if one.is_cuda else cpu(i) for i, one in enumerate(scalars)], jobs)
