"""A running job, as ``status``, ``top``, ``trace`` and ``up`` see it: its record, and its scheduler's answers."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from paceline.cli.options import Option
from paceline.config import Settings, check, variable
from paceline.errors import LaunchError
from paceline.launch import runtime
from paceline.observe.job_view import JobView
from paceline.wire import messages as m

#: For commands that may ask a scheduler whose launcher runs on another machine.
SCHEDULER = Option(("--scheduler",), "address of a scheduler on another machine; needs PACELINE_JOB_KEY", "ADDRESS")

_TIMEOUT_S = 30.0


def find(job: str, scheduler: str | None) -> runtime.JobRecord:
    """Return a job of this machine by its name, or one of another machine by the address of its scheduler.

    Raises:
        LaunchError: there is no such job, or more than one.
    """
    if not scheduler:
        return runtime.find(job)
    key = os.environ.get(variable("job_key"), "")
    return runtime.JobRecord(scheduler, 0, "", time.time(), "", (), 0, 0, scheduler, key)


def ask(record: runtime.JobRecord) -> JobView:
    """Ask the scheduler of a job how it does.

    Raises:
        LaunchError: there is none yet, or it does not answer in time.
    """
    if not record.scheduler:
        raise LaunchError(f"job {record.id} has no scheduler (yet); only its launcher knows how it does")
    with asking(record, "the status") as ask_scheduler:
        status = ask_scheduler(m.AskStatus())
    assert isinstance(status, m.Status)
    return JobView(status, record.workers, record.servers)


@contextlib.contextmanager
def asking(record: runtime.JobRecord, what: str) -> Iterator[Callable[[m.Request], m.Body]]:
    """Connect to the scheduler of a job; yields a function that asks it for ``what``, as messages name it.

    Raises:
        ConfigError: the address or the key cannot be one.
        LaunchError: it does not run any more, is of another version, or does not answer in time.
    """
    from paceline.net import Security
    from paceline.net.client import Client
    from paceline.net.sockets import SocketHub

    settings = Settings(scheduler=record.scheduler, job_key=record.key, insecure=not record.key)
    check(settings)
    who = f"the scheduler of job {record.id} at {record.scheduler}"
    hub = SocketHub(Security.of(settings))

    def check_scheduler() -> None:
        if hub.is_deserted(channel):
            raise LaunchError(f"no process listens where {who} was: the job has ended, or ends")
        if client.damaged.count:
            raise LaunchError(f"{who} answers with what this paceline cannot read: use the version of the job")

    client = Client(hub, check=check_scheduler)
    try:
        channel = client.connect(record.scheduler, "worker", "scheduler", f"at {record.scheduler}")

        def ask_scheduler(body: m.Request) -> m.Body:
            call = client.ask(channel, body, f"asking for {what}")
            if client.wait([call], _TIMEOUT_S) is not None:
                raise LaunchError(f"{who} was asked for {what} and did not answer within {_TIMEOUT_S:g} s")
            assert call.body is not None
            return call.body

        yield ask_scheduler
    finally:
        client.close()
