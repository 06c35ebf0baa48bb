"""``paceline story``: the last seconds of a job on this host, from the events that its processes have left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.options import Option, Parser
from paceline.errors import LaunchError
from paceline.naming import meant
from paceline.observe import ring
from paceline.observe.event_order import EventOrder, aligned
from paceline.observe.story import story

OPTIONS = (Option(("--seconds",), "how many (default: 5)", "SECONDS", float, positive=True),)

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
    path = find_folder(job)
    processes, others = [aligned(*one) for one in ring.rings(path)], ring.other_hosts(path)
    if not processes and not others:
        raise LaunchError(f"{path} has no events of job {path.stem}")
    if processes:
        ends = [one.source.unix - one.source.offset + one.events[-1].time for one in processes if one.events]
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(ends, default=0)))
        print(f"job {path.stem}, its processes on this host; the last event was at {when}")
        print("\n".join(story(EventOrder(processes), options.seconds or 5.0)))
    for host in others:
        print(f"missing here: the events of its processes on {host}; try: ssh {host} paceline story {path.stem}")
    return 0


def find_folder(job: str) -> Path:
    """Return the folder of a job that has run on this host, by default that of the last one.

    Raises:
        LaunchError: there is none, or more than one.
    """
    above = ring.jobs_folder()
    found = sorted(above.glob("*/"), key=ring.changed_at)
    names = meant(job, (one.stem for one in found))
    if not names:
        known = f"; there are those of {', '.join(sorted({one.stem for one in found}))}" if found else ""
        raise LaunchError(f"no events of {f'job {job!r}' if job else 'any job'} are on this host{known}")
    if job and len(names) > 1:
        raise LaunchError(f"several jobs begin with {job!r}: {', '.join(names)}; name one")
    return [one for one in found if one.stem in names][-1]
