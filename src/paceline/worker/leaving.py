"""How a worker process leaves its job.

| the process | leaves the job | counts as |
|---|---|---|
| ends with exit code 0 | at exit, after all its requests are answered | left: no process waits for it any more |
| ends with an uncaught exception | at once, with the exception | failed |
| ends because another one failed | at once, without a reason | ended; its exit code is ``PEER_FAILED`` |
| cannot finish its requests at exit | at exit, with the error | failed |
| ends by ``sys.exit(3)`` | at exit, as with exit code 0 | failed, when the launcher reports the exit code |
| ends by a signal or ``os._exit`` | never | failed: its connection closes |

A process does not know its exit code while it exits. Without a launcher ``sys.exit(3)`` therefore counts as leaving.
"""

from __future__ import annotations

import atexit
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from paceline.errors import PeerDiedError
from paceline.host.exitcodes import PEER_FAILED
from paceline.host.plain_text import described
from paceline.net.sockets import close_all
from paceline.worker import alone, guard
from paceline.worker.session import Session

_PACKAGE = str(Path(__file__).parents[1])


class Exit:
    """Leaves the job when the process ends.

    Attributes:
        session: the session to close; None before the process has joined.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self._is_installed = self._has_no_guard = False

    def install(self) -> None:
        """Watch for the end of the process. Idempotent."""
        if self._is_installed:
            return
        self._is_installed = True
        guard.ended_a_child()  # of an earlier process with this id
        self._previous_hook, sys.excepthook = sys.excepthook, self._on_exception
        atexit.register(close_all)  # runs after the next one: a thread may still be joining, without a session
        atexit.register(self._at_exit)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            trace = _of_script(trace)
            error = error.with_traceback(trace)
            if error.__context__ is not None and _is_ours(error.__context__.__traceback__):
                error.__suppress_context__ = True
        self._has_no_guard = guard.ended_a_child()
        if self._has_no_guard:
            print(f"{described(error)}: {guard.SENTENCE}", file=sys.stderr)
        else:
            self._previous_hook(kind, error, trace)
        self._leave(error)  # at once, because running threads may delay the exit
        if not isinstance(error, KeyboardInterrupt) and self._is_caused_by_others(error):
            raise SystemExit(PEER_FAILED)

    def _at_exit(self) -> None:
        guard.ended_a_child()
        self._leave(getattr(sys, "last_value", None))

    def _leave(self, error: BaseException | None) -> None:
        if self.session is not None:
            if error is None:
                alone.finish()
            reason = ""
            if error is not None and not self._is_caused_by_others(error):
                reason = f"it raised {described(error)}" + (f": {guard.SENTENCE}" if self._has_no_guard else "")
            self.session.close(reason)

    def _is_caused_by_others(self, error: BaseException) -> bool:
        if self.session is not None and self.session.failure is not None:
            return True
        return any(isinstance(one, PeerDiedError) for one in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes and contexts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_ours(trace: TracebackType | None) -> bool:
    """Return whether a traceback leads through paceline's own code."""
    return any(frame.f_code.co_filename.startswith(_PACKAGE) for frame, _ in traceback.walk_tb(trace))


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback that ends before paceline's own code: after Ctrl-C there is no error in that code to show."""
    kept = []
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        kept.append(trace)
        trace = trace.tb_next
    shown = None
    for one in reversed(kept):
        shown = TracebackType(shown, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return shown
