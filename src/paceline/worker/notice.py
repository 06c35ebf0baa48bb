"""A worker under notice: it ends its step and leaves the job, while the others go on.

| state   | event                                                   | action                              | next    |
|---------|---------------------------------------------------------|-------------------------------------|---------|
| trains  | SIGTERM, for which the script has no handler of its own | ask the scheduler                   | asks    |
| trains  | ``paceline.notice()``                                   | ask the scheduler, and wait         | asks    |
| trains  | news: ``paceline drain`` has named this worker          | ``store.leaving`` becomes True      | leaving |
| asks    | the scheduler agrees                                    | the same                            | leaving |
| asks    | it does not: nobody would go on, or the whole job ends  | ``notice`` raises; the signal acts  | trains  |
| leaving | the loop asks for its next batch (:meth:`Notice.batch`) | say goodbye, ``SystemExit(0)``      | left    |
| leaving | a step ends in another loop (:meth:`Notice.step`)       | the same, and a line about samples  | left    |
| leaving | the script ends by itself                               | say goodbye, as always              | left    |
| leaving | SIGTERM again                                           | the signal acts, as always          | dead    |

A loop is another one if it has not asked a sampler of ours for a batch since the last steps: more of them than it ever
made between two batches. Only the main thread leaves. A signal that acts ends the process at once, also in a long call.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from paceline.errors import PacelineError
from paceline.host import forks
from paceline.host.plain_text import plain
from paceline.wire import messages as m
from paceline.wire.limits import MAX_TEXT

logger = logging.getLogger(__name__)

#: Time after which a line says that no end of a step was seen since the notice.
_QUIET_S = 30.0

#: Steps between two batches of a loop, at most, for which an end is waited for.
_MOST_STEPS = 4

_WAY_OUT = "let the loop end where store.leaving is True, or give it batches of a sampler of paceline.data"


class Leaver(Protocol):
    """The worker's session, as far as a notice needs it."""

    @property
    def rank(self) -> int:
        """This worker's rank."""

    @property
    def round(self) -> int:
        """The last round that it has pushed."""

    @property
    def failure(self) -> PacelineError | None:
        """The error with which the job has failed."""

    def call_scheduler(self, body: m.Request, what: str) -> m.Body:
        """Ask the scheduler, and wait."""

    def close(self) -> None:
        """Leave the job."""


class Notice:
    """The notice of one worker.

    Args:
        session: the worker's session.
        ask: has the scheduler asked whether it may leave, for a reason; :meth:`heard` follows.

    Attributes:
        why: why the worker is to leave; empty: it is not.
    """

    def __init__(self, session: Leaver, ask: Callable[[str], None]) -> None:
        self._session, self._ask, self.why = session, ask, ""
        self._signals = 0
        self._is_listening = False
        self._givers: dict[str, weakref.WeakMethod[Callable[[], m.GiveBack]]] = {}
        """By sampler, what tells the samples that it has dealt and this worker has not trained on."""
        self._steps = self._most = 0
        """Steps since the last batch, and the most between two batches."""

    # ---- notice ----------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Take SIGTERM as a notice, unless the script handles it. Idempotent; only the main thread can."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._is_listening or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._is_listening = True
        signal.signal(signal.SIGTERM, self._on_signal)
        forks.in_children(self, Notice._stop_listening)

    def _stop_listening(self) -> None:
        if self._is_listening:
            self._is_listening = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _on_signal(self, signum: int, frame: object) -> None:
        """Ask for leave. It takes no lock: the main thread may hold any."""
        self._signals += 1
        if self._signals > 1 or _active is not self or self._session.failure is not None:
            _act(signum)
        if not self.why:
            self._ask("SIGTERM")

    def agreed(self, why: str) -> None:
        """Note that this worker is to leave. Called by the lifeline's thread, too."""
        if not self.why:
            self.why = why
            timer = threading.Timer(_QUIET_S, self._say_waiting)
            timer.daemon = True
            timer.start()

    def heard(self, why: str, why_not: str) -> None:
        """Take the scheduler's word: why this worker is to leave, or why it may not though it has asked; or nothing."""
        if why:
            self.agreed(why)
        if why_not:
            self._refused(why_not)

    def _refused(self, why: str) -> None:
        """Let SIGTERM act: nobody would go on without this worker, or the whole job ends."""
        logger.info("worker %d: SIGTERM is no notice here: %s", self._session.rank, why)
        _act(signal.SIGTERM)

    def _say_waiting(self) -> None:
        if _active is self:
            logger.warning(
                "worker %d is to leave the job (%s), and %g s later it has come to no end of a step: if its loop makes "
                "steps without an optimizer of paceline, %s",
                self._session.rank, self.why, _QUIET_S, _WAY_OUT,
            )  # fmt: skip

    # ---- ends of steps ---------------------------------------------------------------------------------------------

    def batch(self) -> None:
        """Note that the loop asks for its next batch; leave there.

        Raises:
            SystemExit: this worker has left the job.
        """
        self._most, self._steps = min(max(1, self._most, self._steps), _MOST_STEPS), 0
        if self.why:
            self._leave()

    def step(self) -> None:
        """Note that a step has ended; leave there if the loop gets its batches from elsewhere.

        Raises:
            SystemExit: this worker has left the job.
        """
        self._steps += 1
        if self.why and self._steps > self._most:
            logger.warning(
                "worker %d leaves a loop that takes its batches from elsewhere: its other samples of this epoch are "
                "left out. To have others train on them, %s",
                self._session.rank, _WAY_OUT,
            )  # fmt: skip
            self._leave()

    def at_leave(self, sampler: str, giver: Callable[[], m.GiveBack]) -> None:
        """Have a sampler asked, when this worker leaves, for the samples that others are to train on.

        Args:
            sampler: its name, the same on all workers.
            giver: a method, whose object is not kept alive.
        """
        self._givers[sampler] = weakref.WeakMethod(giver)

    def _leave(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for giver in [method() for method in self._givers.values()]:
            if giver is not None:
                self._session.call_scheduler(giver(), "giving samples back")
        self._session.close()
        logger.info("worker %d has left after round %d: %s", self._session.rank, self._session.round, self.why)
        raise SystemExit(0)


def _act(signum: int) -> None:
    """Let a signal do what it does without a handler, from any thread and in the middle of any call."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signum, None)  # SIG_DFL; Python's own function serves the main thread only
    os.kill(os.getpid(), signum)


# ---- the notice of this process --------------------------------------------------------------------------------------

_active: Notice | None = None


def begin(one: Notice | None) -> None:
    """Note that this process has joined a job; None: it leaves."""
    global _active
    _active = one


def batch() -> None:
    """See :meth:`Notice.batch`."""
    if _active is not None:
        _active.batch()


def step() -> None:
    """See :meth:`Notice.step`."""
    if _active is not None:
        _active.step()


def notice(why: str = "its script has given notice") -> None:
    """Let this worker leave the job after its step, while the others go on: its machine will be needed, or taken away.

    It returns at once, and ``store.leaving`` is True from then on. When the loop asks a sampler of ``paceline.data``
    for its next batch, or a step of another loop ends, the worker says goodbye and the process ends with exit code 0:
    it raises ``SystemExit``. The others train on the samples that it has not trained on.

    Args:
        why: shown in the log and by ``paceline status``.

    Raises:
        paceline.errors.PacelineError: nobody would go on without this worker, or it has no store with servers.
    """
    if _active is None:
        raise PacelineError(
            "a notice does not apply here: this process is no worker with a store of servers (dist_sync, dist_async, "
            "...). Under hvd and --ddp all workers are in every step; end the job instead"
        )
    why = plain(why)[:MAX_TEXT]
    _active._session.call_scheduler(m.Notice(why), "notice")
    _active.agreed(why)
