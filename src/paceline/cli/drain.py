"""``paceline drain``: lets a worker, or those of a host, leave a running job after their step; the others go on."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence

from paceline.cli.options import Option, Parser, UsageError
from paceline.cli.running import SCHEDULER, asking, find
from paceline.errors import LaunchError, PacelineError
from paceline.naming import workers_text
from paceline.observe.job_view import JobView
from paceline.observe.table import duration
from paceline.wire import messages as m

OPTIONS = (
    Option(("--why",), "shown in the job's log and by `paceline status`", "TEXT"),
    Option(("--timeout",), "seconds until they have left (default: 300)", "SECONDS", float, positive=True),
    SCHEDULER,
)

DESCRIPTION = """\
Let a worker, or all workers of a host, leave a running job: each ends its step, says goodbye and exits with code 0. The
others go on, and train on the samples that it has not trained on."""

_POLL_S = 0.1


def run(name: str, words: Sequence[str]) -> int:
    """Let workers leave, and wait until they have; returns 1 if the job needs another process of that host.

    Raises:
        UsageError: the command line is wrong.
        LaunchError: there is no such job, the workers cannot leave, or have not left in time.
    """
    usage = "paceline drain [JOB] RANK|HOST [options]"
    given, options = Parser(name, OPTIONS, usage, DESCRIPTION).parse_named(words)
    if not 1 <= len(given) <= 2:
        raise UsageError("name the rank of a worker, or a host; and the job before it, if several run")
    record = find(given[0] if len(given) == 2 else "", options.scheduler)
    if not record.scheduler:
        raise LaunchError(f"job {record.id} has no scheduler (yet), so no worker can leave it")
    with asking(record, "leave for workers") as ask:
        told = _drain(ask, given[-1], options.why or "paceline drain")
        _wait(ask, told.workers, options.timeout or 300.0)
    if told.stays:
        print(f"what stays: {told.stays}")
    return int(bool(told.stays))


def _drain(ask: Callable[[m.Request], m.Body], target: str, why: str) -> m.Noticed:
    status = ask(m.AskStatus())
    assert isinstance(status, m.Status)
    hosts = {one.host for one in status.members}
    if not (target.isdecimal() or target in hosts):
        with contextlib.suppress(OSError, UnicodeError):
            target = next((one[4][0] for one in socket.getaddrinfo(target, None) if one[4][0] in hosts), target)
    try:
        told = ask(m.Notice(why, target))
    except PacelineError as error:
        raise LaunchError(str(error)) from error
    assert isinstance(told, m.Noticed)
    be, whose = ("is", "its") if len(told.workers) == 1 else ("are", "their")
    print(f"{workers_text(told.workers)} {be} to leave after {whose} step", flush=True)
    return told


def _wait(ask: Callable[[m.Request], m.Body], ranks: Sequence[int], limit_s: float) -> None:
    began = time.monotonic()
    while True:
        status = ask(m.AskStatus())
        assert isinstance(status, m.Status)
        workers = [one for one in JobView(status).workers if one.member.rank in ranks and not one.is_there]
        rounds = {one.member.rank: one.state.round for one in workers}
        waited_s = time.monotonic() - began
        if rounds.keys() >= set(ranks):
            for rank, round in sorted(rounds.items()):
                print(f"worker {rank} has left after round {round}")
            return
        if waited_s > limit_s:
            missing = workers_text(set(ranks) - rounds.keys())
            raise LaunchError(
                f"{missing} has not left within {duration(limit_s)}: its step takes long, or paceline sees no end of "
                "a step in its loop; see its output"
            )
        time.sleep(_POLL_S)
