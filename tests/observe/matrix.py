"""``python -m tests.observe.matrix``: real jobs in which one process is slow; a table of the verdicts, right and wrong.

Four workers in processes of their own, in lock step, in groups (``--store dist_gsync``) or within a bound
(``--store dist_ssync``), with equal batches or measured shares. Faults begin at round :data:`ONSET`. Root is needed for
quotas, memory limits (cgroups of version 1) and networks (namespaces); trials of faults that this machine has no means
for are left out, and told.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import runpy
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.testing import LocalJob
from tests.clusters.hosts import Hosts, HostsJob, why_no_hosts
from tests.observe import peers
from tests.observe.faults import limit_cpu, limit_memory, limited, outside, start_relay
from tests.observe.faulty_worker import AFTER, LARGE_SIDE, ONSET, SLOW, STORES, WORKERS, quota, rounds_of, train

#: By fault: causes that are right.
RIGHT: dict[str, tuple[str, ...]] = {
    "none": (),
    "crowd8": (),
    "crowd24": (),
    "backward": ("computation",),
    "loader": ("its data loader",),
    "quota": ("the CPU quota of its cgroup",),
    "neighbour": ("other processes on its processors",),
    "memory": ("reclaiming memory and reading it back from disk",),
    "gc": ("Python's garbage collection",),
    "stops": ("stops of the whole process",),
    "link": ("its network", "sending gradients"),
    "delay": ("its network", "sending gradients"),
    "server": ("the CPU quota of its cgroup is used up",),
    "placement": ("merging gradients", "the optimizer", "answering"),
}


# ---- trials ----------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The verdicts of a job."""

    said: list[tuple[int, str]] = field(default_factory=list)
    """Rounds since the onset, and the line."""
    rounds: int = 0

    def judge(self, fault: str) -> str:
        """Return ``right``, ``wrong``, ``none``; of a job without a fault ``right`` where nothing was said."""
        lines = [line for _, line in self.said if " again, from round" not in line]
        if not RIGHT[fault]:
            return "wrong" if lines else "right"
        if not lines:
            return "none"
        who = "server 0 " if fault in ("server", "placement") else f"worker {SLOW} "
        is_right = who in lines[0] and any(cause in lines[0] for cause in RIGHT[fault])
        return "right" if is_right and self.said[0][0] >= 0 else "wrong"


class _Recorded(LocalJob):
    recording: Path | None = None

    def _placed(self, role: str, rank: int, argv: Sequence[str]) -> Sequence[str]:
        argv = super()._placed(role, rank, argv)
        return recorded(argv, self.recording) if role == "scheduler" and self.recording else argv


class _RecordedHosts(HostsJob):
    recording: Path | None = None

    def _placed(self, role: str, rank: int, argv: Sequence[str]) -> Sequence[str]:
        argv = recorded(argv, self.recording) if role == "scheduler" and self.recording else argv
        return super()._placed(role, rank, argv)


def recorded(argv: Sequence[str], path: Path) -> list[str]:
    """Return the command of a scheduler that writes down all accounts."""
    return [sys.executable, "-m", "tests.observe.matrix", "--scheduler", str(path)]


def run_scheduler(path: str) -> None:
    """Be a scheduler that writes every account down, a line of JSON each."""
    from paceline.membership.accounts import Verdicts

    note, file = Verdicts.note, Path(path).open("a", buffering=1)  # noqa: SIM115 - until the end of the process

    def noted(self: Any, member: Any, account: Any, *more: Any) -> Any:
        found = note(self, member, account, *more)
        windows = [[one.round, one.rounds, one.samples, list(one.parts), one.way] for one in account.windows]
        line = [member.role, member.rank, member.host, windows, list(account.host), [list(one) for one in account.late]]
        file.write(json.dumps([*line, [one.text for one in found]]) + "\n")
        return found

    Verdicts.note = noted  # type: ignore[method-assign]
    sys.argv = ["paceline", "scheduler"]
    runpy.run_module("paceline", run_name="__main__")


def run(fault: str, jitter: float, folder: Path, options: argparse.Namespace) -> Outcome:
    """Run one job."""
    folder.mkdir(parents=True, exist_ok=True)
    outcome = Outcome()
    rounds = options.rounds or ONSET + AFTER
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(_job(fault, stack, folder, options))
        job.start_all(train, fault, jitter, rounds, str(folder), options.compute, options.store, options.shares)
        group = limited(fault, job, stack)
        while rounds_of(folder) < ONSET and not ended(job):
            _look(job, folder, fault, outcome)
        if group is not None and fault == "memory":
            limit_memory(group, folder)
        elif group is not None:
            limit_cpu(group, 0.01 if fault == "server" else quota(options.compute))
        stack.enter_context(outside(fault, job, folder))
        while not ended(job) and not (RIGHT[fault] and outcome.said):
            _look(job, folder, fault, outcome)
        outcome.rounds = rounds_of(folder)
        if any(one.code not in (None, 0) for one in job.workers):
            print(job.report())
    return outcome


def ended(job: LocalJob) -> bool:
    return any(one.code is not None for one in job.workers)


def _look(job: LocalJob, folder: Path, fault: str, outcome: Outcome) -> None:
    time.sleep(0.02)
    lines = [
        line
        for line in job.scheduler.output.splitlines()
        if re.search(r"takes [\d.]+ times|holds the|again, from", line)
    ]
    onset = 0 if fault == "placement" else ONSET
    outcome.said += [(rounds_of(folder) - onset, line) for line in lines[len(outcome.said) :]]


def _job(
    fault: str, stack: contextlib.ExitStack, folder: Path, options: argparse.Namespace
) -> _Recorded | _RecordedHosts:
    settings = {"check_rules": False, **STORES[options.store][1]}
    servers = options.servers
    if fault == "placement":
        servers, settings = 2, {**settings, "placement": "hash", "bigarray_bound": LARGE_SIDE**2}
    job: _Recorded | _RecordedHosts
    if fault in ("link", "delay"):
        hosts = stack.enter_context(Hosts(WORKERS))
        if fault == "delay":
            for host in range(WORKERS):
                (folder / f"host-{host}").mkdir()
                start_relay(hosts[host], stack, folder / f"host-{host}")
        job = _RecordedHosts(hosts, [1] * WORKERS, [options.servers, 0, 0, 0], **settings)
    else:
        job = _Recorded(WORKERS, servers, **settings)
    job.recording = folder / "accounts.jsonl" if options.record else None
    return job


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.observe.matrix", description=__doc__)
    parser.add_argument("--faults", nargs="*", default=[one for one in RIGHT if not one.startswith("crowd")])
    parser.add_argument("--jitter", nargs="*", type=float, default=[0.0, 0.1, 0.3])
    parser.add_argument("--store", choices=STORES, default="dist_sync")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--shares", action="store_true", help="measured shares of each global batch (dist_sync)")
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--compute", type=float, default=0.02)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--peers", type=Path, help="environment that has TraceML and NVRx: they are tried, too")
    options = parser.parse_args()
    done: dict[tuple[str, float], list[Outcome]] = {}
    beside: dict[tuple[str, str, float], list[peers.Told]] = {}
    for trial in range(options.trials):
        for fault in options.faults:
            if fault in ("link", "delay") and why_no_hosts():
                print(f"{fault}: {why_no_hosts()}")
                continue
            for jitter in options.jitter:
                folder = options.folder / f"{fault}-{jitter}-{trial}"
                outcome = run(fault, jitter, folder, options)
                done.setdefault((fault, jitter), []).append(outcome)
                print(fault, jitter, outcome.judge(fault), outcome.rounds, *outcome.said, sep="  ", flush=True)
                for tool in peers.TOOLS if options.peers and fault in peers.CAUSES else ():
                    told = peers.run(tool, options.peers, fault, jitter, folder / tool, options.compute)
                    beside.setdefault((tool, fault, jitter), []).append(told)
                    print(fault, jitter, tool, told, sep="  ", flush=True)
    others = peers.TOOLS if options.peers else ()
    table = Table("fault", "jitter", "trials", "right", "wrong", "nothing said", "rounds to the verdict", *others)
    for (fault, jitter), outcomes in done.items():
        found = [one.judge(fault) for one in outcomes]
        late = [one.said[0][0] for one in outcomes if RIGHT[fault] and one.judge(fault) == "right"]
        shown = f"{statistics.median(late):g} ({min(late)}-{max(late)})" if late else "-"
        counts = [str(found.count(one)) for one in ("right", "wrong", "none")]
        more = [peers.cell(tool, fault, beside.get((tool, fault, jitter), [])) for tool in others]
        table.add_row(fault, f"{jitter:.0%}", str(len(outcomes)), *counts, shown, *more)
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--scheduler"]:
        run_scheduler(sys.argv[2])
    else:
        sys.exit(main())
