"""The session of this process: made at the first use, closed at exit, and not used in forked children."""

from __future__ import annotations

import os
import threading

from paceline.config import from_environment
from paceline.errors import ConfigError, PacelineError
from paceline.host import forks
from paceline.net import Security
from paceline.net.sockets import SocketHub
from paceline.observe import ring
from paceline.worker import guard
from paceline.worker.leaving import Exit
from paceline.worker.profile import Profile
from paceline.worker.session import Session


class _Current:
    """The session of this process, made at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exit = Exit()
        """It holds the session, which it closes."""
        self._forked_from = ""
        forks.in_children(self, _Current._forget)

    def _forget(self) -> None:
        """In a forked child: note that the job is joined already, or that another thread was joining it."""
        session = self._exit.session
        if self._lock.locked() or (session is not None and not session.has_left):
            whom = "a worker" if session is None else f"worker {session.rank}"
            self._forked_from = self._forked_from or forks.error_text(whom, os.getppid())
        self._lock = threading.Lock()
        self._exit.session = None

    def get(self) -> Session:
        """Return the session, joining the job if there is none.

        Raises:
            PacelineError: this process was forked from a worker.
        """
        with self._lock:
            if self._forked_from:
                raise PacelineError(self._forked_from)
            session = self._exit.session
            if session is None or session.has_left:
                settings = from_environment()
                if not settings.scheduler and settings.rank >= 0:
                    raise ConfigError(
                        f"a distributed store needs a scheduler and servers, and worker {settings.rank} knows none: "
                        "start the job without `-s 0`, or create the store `allreduce`, which needs none"
                    )
                if not settings.scheduler or settings.role != "worker":
                    raise ConfigError(
                        "a distributed store needs a job: start the script with `paceline launch -n 2 -- python "
                        "script.py`, or set PACELINE_SCHEDULER, PACELINE_JOB_KEY and the other PACELINE_* variables. "
                        "To train in this process alone, create the store `local`"
                    )
                guard.end_child()
                ring.start(settings)
                security = Security.of(settings)
                self._exit.install()
                session = self._exit.session = Session(settings, lambda: SocketHub(security))
                if settings.profile:
                    session.before_wait = Profile(session).check
            return session

    @property
    def joined(self) -> Session | None:
        """The session, if this process has joined and not left; no process joins by this."""
        session = self._exit.session
        return None if session is None or session.has_left or not session.is_own else session


_current = _Current()


def current_session() -> Session:
    """Return this process's session, joining the job at the first call.

    Raises:
        ConfigError: this process was not started as a worker of a job.
        PacelineError: this process was forked from a worker.
    """
    return _current.get()


def joined_session() -> Session | None:
    """Return this process's session if it has joined a job; unlike :func:`current_session` it does not join."""
    return _current.joined
