"""``paceline story``: the last seconds of a job on this host, from the events that its processes have left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.options import Option, Parser
from paceline.errors import LaunchError
from paceline.naming import meant
from paceline.observe import ring
from paceline.observe.event_order import EventOrder, TracedProcess, aligned
from paceline.observe.story import story

OPTIONS = (
    Option(("--seconds",), "how many (default: 5)", "SECONDS", float, positive=True),
    Option(("--start",), "of a job that was started again: which start, from 0 (default: the last)", "N", int, least=0),
)

DESCRIPTION = f"""\
Show the last seconds of a job, of one that has ended, too: the events, waits and deaths of its members. By default that
of the last job of this host. Each host keeps the events of its own processes, for its last {ring.KEPT_JOBS} jobs."""


def run(name: str, words: Sequence[str]) -> int:
    """Print the story.

    Raises:
        UsageError: more than one job is named.
        LaunchError: this host has no events of such a job.
    """
    job, options = Parser(name, OPTIONS, "paceline story [JOB] [options]", DESCRIPTION).parse_job(words)
    path, starts = find_folder(job, options.start)
    job, start = ring.start_of(path)
    name = f"{job} --start {start}" if len(starts) > 1 else job
    processes, others = [aligned(*one) for one in ring.rings(path)], ring.other_hosts(path)
    if not processes and not others:
        raise LaunchError(f"{path} has no events of job {job}")
    if processes:
        print(f"job {job}{_which(start, starts)}, its processes on this host; {_last_event(processes)}")
        print("\n".join(story(EventOrder(processes), options.seconds or 5.0)))
    for host in others:
        print(f"missing here: the events of its processes on {host}; try: ssh {host} paceline story {name}")
    return 0


def _which(start: int, starts: Sequence[int]) -> str:
    others = [f"--start {one}" for one in starts if one != start]
    return f", start {start} (others: {', '.join(others)})" if others else ""


def _last_event(processes: Sequence[TracedProcess]) -> str:
    ends = [one.source.unix - one.source.offset + one.events[-1].time for one in processes if one.events]
    if not ends:
        return "there are no events yet"
    return f"the last event was at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(max(ends)))}"


def find_folder(job: str, start: int | None = None) -> tuple[Path, list[int]]:
    """Return the folder of one start of a job, by default the last one, and the numbers of all its starts on this host.

    Raises:
        LaunchError: this host has none, or several that begin like ``job``.
    """
    found = {path: ring.start_of(path) for path in sorted(ring.jobs_folder().glob("*/"), key=ring.changed_at)}
    names = meant(job, (name for name, _ in found.values()))
    if not names:
        known = f"; there are those of {', '.join(sorted({name for name, _ in found.values()}))}" if found else ""
        raise LaunchError(f"no events of {f'job {job!r}' if job else 'any job'} are on this host{known}")
    if job and len(names) > 1:
        raise LaunchError(f"several jobs begin with {job!r}: {', '.join(names)}; name one")
    last = [name for name, _ in found.values() if name in names][-1]
    starts = sorted({number for name, number in found.values() if name == last})
    paths = [path for path, one in found.items() if one[0] == last and start in (None, one[1])]
    if not paths:
        raise LaunchError(f"no events of start {start} of job {last} are on this host; there are {starts}")
    return paths[-1], starts
