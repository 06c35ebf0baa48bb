"""Copies gradients and weights of parameters on accelerators, beside the computation."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from paceline.errors import DeadlineError, PacelineError
from paceline.layout.tensors import copy_stream

#: Interval of checks whether a copy has ended: a copy of a megabyte takes about as long.
COPY_CHECK_INTERVAL_S = 0.0002


#: Types of integers, by the bytes of an element.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SideStream:
    """The stream of one CUDA device that copies gradients to host memory, and weights from host memory.

    Its work runs in order. So all work before a :meth:`mark` has ended when the mark has, and host memory may be
    written again when the push that waited for the mark is answered.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, copy_stream(device)

    @contextlib.contextmanager
    def _beside(self, tensor: torch.Tensor) -> Iterator[None]:
        """Read a tensor on this stream, after the work that the script's stream has so far.

        Raises:
            PacelineError: a CUDA graph is captured; its replays would push nothing.
        """
        if torch.cuda.is_current_stream_capturing():
            raise PacelineError(
                "a CUDA graph captures a backward pass, and pushes no gradient when replayed: leave backward out of "
                "the graph, or call torch.cuda.make_graphed_callables before the model is given to DistributedOptimizer"
            )
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        tensor.record_stream(self._stream)

    def fetch(self, grad: torch.Tensor, into: torch.Tensor) -> None:
        """Copy a gradient to host memory, after its computation."""
        with self._beside(grad):
            into.copy_(grad, non_blocking=True)

    def unlike(self, tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        """Return, as an element of this stream, whether a tensor and one in host memory differ in bits.

        Does not wait. They have one dtype and shape; the host memory must not change before a later :meth:`mark`.
        """
        with self._beside(tensor):
            return other_bits(tensor, host.to(self._device, non_blocking=True))

    def bring(self, values: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copy weights from host memory, after all earlier work on the device and before all later work."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for value, target in zip(values, targets, strict=True):
                target.copy_(value, non_blocking=True)
        current.wait_stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        """Return an event behind all that this stream has to do so far."""
        return self._stream.record_event()  # type: ignore[no-any-return]

    def join(self) -> None:
        """Let the script's stream wait for all that this one has to do so far."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def side_stream(tensor: torch.Tensor) -> SideStream | None:
    """Return the side stream of a tensor's CUDA device; None for tensors elsewhere."""
    return _side_stream(tensor.device) if tensor.is_cuda else None


def side_streams(tensors: Iterable[torch.Tensor]) -> set[SideStream]:
    """Return the side streams of the devices of tensors."""
    return {side for one in tensors if (side := side_stream(one)) is not None}


@functools.cache
def _side_stream(device: torch.device) -> SideStream:
    return SideStream(device)


def other_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return, as an element of their device, whether two tensors of one dtype and shape differ in bits."""
    whole = _WHOLE.get(one.itemsize)
    if whole is None:
        one, other, whole = one.reshape(-1), other.reshape(-1), torch.uint8
    return (one.view(whole) != other.view(whole)).any()


def all_copied(marks: Sequence[torch.cuda.Event]) -> bool:
    """Return whether all copies before these marks have ended."""
    return all(mark.query() for mark in marks)  # type: ignore[no-untyped-call]


def wait_for_copies(ready: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait until copies from a device have ended: ``ready`` returns True. ``what`` names them in errors.

    Raises:
        DeadlineError: they did not end in time.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise DeadlineError(f"{what} were not copied from their device within {timeout_s:g} s")
        time.sleep(COPY_CHECK_INTERVAL_S)


class Pusher:
    """Pushes in the given order, each when its gradients are in host memory. Backward does not wait.

    A copy may take ``timeout_s`` seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._jobs: queue.Queue[tuple[Callable[[], bool], Callable[[], None], str]] = queue.Queue()
        self._idle = threading.Condition()
        self._open = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def after(self, ready: Callable[[], bool], push: Callable[[], None], what: str) -> None:
        """Call ``push`` on the pusher's thread once ``ready`` returns True; errors name ``what``."""
        with self._idle:
            self._open += 1
        self._jobs.put((ready, push, what))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-pusher", daemon=True)
            self._thread.start()

    def drain(self) -> None:
        """Wait until all pushes are done.

        Raises:
            DeadlineError: a copy did not end in time.
            Exception: the first error that a push raised.
        """
        with self._idle:
            if not self._idle.wait_for(lambda: not self._open, 2 * self._timeout_s):
                raise DeadlineError(f"{self._open} pushes wait for copies from a device for {2 * self._timeout_s:g} s")
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            ready, push, what = self._jobs.get()
            try:
                if self._error is None:
                    wait_for_copies(ready, self._timeout_s, what)
                    push()
            except BaseException as error:  # noqa: BLE001 - thread border: drain() raises it in the waiting thread
                self._error = error
            with self._idle:
                self._open -= 1
                self._idle.notify_all()
