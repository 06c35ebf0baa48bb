"""The text of ``paceline up``, no wider than 80 columns where names allow it. Pure."""

from __future__ import annotations

import dataclasses
import shlex
import textwrap
from collections.abc import Sequence
from typing import Any

from paceline.cli.doctor import cells
from paceline.host.plain_text import plain
from paceline.launch import Host
from paceline.launch.remote.host_checks import Finding
from paceline.observe.table import plural, table
from paceline.sim.hosts_plan import HostPlanner, HostsPlan, PlannedJob

WIDTH = 80

#: What a script does differently for a way to synchronise, by type of store and shares.
_CHANGES = {
    ("dist_sync", "measured"): 'paceline.data.SharedBatchSampler(data, store, global_batch_size={total}, '
    'shares="measured") deals the batches',
    ("dist_async", "pool"): 'paceline.kvstore.create("dist_async") and paceline.data.PooledBatchSampler(data, store, '
    "batch_size={batch}); tune the learning rate anew",
    ("dist_ksync", "pool"): 'paceline.kvstore.create("dist_ksync", k={first}) and '
    "paceline.data.PooledBatchSampler(data, store, batch_size={batch}); tune the learning rate anew",
    ("dist_gsync", "pool"): 'paceline.kvstore.create("dist_gsync"), --groups auto and '
    "paceline.data.PooledBatchSampler(data, store, batch_size={batch}); tune the learning rate anew",
}  # fmt: skip


def shown_findings(findings: Sequence[Finding]) -> str:
    """Return the table of hosts, and the problems of each."""
    usable = [one for one in findings if not one.obstacles]
    lines = [f"hosts: {len(usable)} of {len(findings)} can be used"]
    head = ("host", "python", "torch", "cores", "address", "reaches")
    lines += _indented(table(head, [cells(one, head) for one in findings]))
    for one in findings:
        for problem in one.problems:
            lines += wrapped(plain(f"{one.host.name}: {problem}"), "  ", "    ")
    return "\n".join(lines)


def shown_measures(planner: HostPlanner, rounds: int) -> str:
    """Return the table of the measurements of each host."""
    report = planner.report
    size = f"{report.elements / 1e6:.3g} M parameters"
    lines = [f"measured: {plural(rounds, 'round', 'rounds')}, {report.store_type}, {size}, "
             f"{_rate(sum(planner.batches) / planner.measured_round_s)} samples/s"]  # fmt: skip
    rows = [_measure_cells(planner, name) for name in planner.names]
    head = ("host", "workers", "batch", "step", "samples/s alone", "link")
    return "\n".join([*lines, *_indented(table(head, rows))])


def _measure_cells(planner: HostPlanner, name: str) -> tuple[str, ...]:
    batches = [planner.batches[rank] for rank in planner.ranks_of(name)]
    link = planner.link(name)
    return (
        name, str(len(batches)), _rate(sum(batches) / len(batches)), _time(planner.step_s(name)),
        _rate(planner.alone(name)), f"{link / 1e6:.3g} MB/s" if link < float("inf") else "",
    )  # fmt: skip


def shown_plan(plan: HostsPlan, planner: HostPlanner) -> str:
    """Return the plan: hosts, servers, mode, rate, and what each host adds."""
    job, lines = plan.job, ["plan:"]
    lines += wrapped(_processes(job, planner), "  ", "  ")
    lines += wrapped(_expected(job), "  ", "  ")
    if len(planner.names) > 1:
        rows = [
            (name, _signed(plan.adds[name]), "not worth having" if name in plan.left_out else "")
            for name in planner.names
        ]
        lines += _indented(table(("host", "adds samples/s", ""), rows))
    if plan.left_out:
        them = "it" if len(plan.left_out) == 1 else "them"
        lines += wrapped(
            f"{', '.join(plan.left_out)} left out: the job is as fast or faster without {them}. --all-hosts keeps "
            f"{them}.", "  ", "  ",
        )  # fmt: skip
    if plan.better is not None:
        lines += wrapped(_advice(plan, planner), "  ", "  ")
    if (local := planner.local(job)) is not None:
        script = f"paceline.DistributedOptimizer(..., {local.arguments})"
        lines += wrapped(f"local steps, at some loss: {local}, if the script says {script}", "  ", "  ")
    return "\n".join(lines)


def _processes(job: PlannedJob, planner: HostPlanner) -> str:
    workers = sum(len(planner.ranks_of(name)) for name in job.hosts)
    where = f"on {', '.join(job.hosts[: job.servers])}"
    shares = "unlike batches, as measured" if planner.is_uneven else "equal batches"
    mode = f"{planner.report.store_type} as the script says, {job.words or shares}"
    return f"{plural(workers, 'worker', 'workers')}, {plural(job.servers, 'server', 'servers')} {where}; {mode}"


def _expected(job: PlannedJob) -> str:
    text = f"expected: {_rate(job.samples_per_s)} samples/s"
    if not job.round_s:
        return f"{text}; no worker waits for another one"
    return (
        f"{text}; a round takes {_time(job.round_s)}, of which {_time(job.compute_s)} are computation of the slowest "
        f"worker, on {job.slowest}"
    )


def _advice(plan: HostsPlan, planner: HostPlanner) -> str:
    assert plan.better is not None
    better = plan.better
    batches = [planner.batches[rank] for name in plan.job.hosts for rank in planner.ranks_of(name)]
    change = _CHANGES.get((better.store_type, better.shares), f"{better.store_type}, shares {better.shares}")
    first = better.policy.first
    change = change.format(total=round(sum(batches)), batch=round(sum(batches) / len(batches)), first=first)
    stale = f" (a stale one counts {better.worth:.2g})" if better.worth < 1 else ""
    return f"faster: {_rate(better.samples_per_s)} samples/s{stale}, if the script is changed: {change}"


def shown_command(words: Sequence[str]) -> str:
    """Return the command line, in lines that a shell takes as one."""
    lines = ["command:"]
    line = "  paceline launch"
    for word in map(shlex.quote, words):
        if len(line) + len(word) + 3 > WIDTH:
            lines.append(f"{line} \\")
            line = "   "
        line += f" {word}"
    return "\n".join([*lines, line])


def host_list(hosts: Sequence[Host], slots: Sequence[int]) -> str:
    """Return hosts as one word of ``-H``, with their workers where they differ."""
    differ = len(set(slots)) > 1
    texts = [_host_text(host, count if differ else None) for host, count in zip(hosts, slots, strict=True)]
    return ",".join(texts) + ("," if len(texts) == 1 else "")


def _host_text(host: Host, slots: int | None) -> str:
    user, at, name = host.name.rpartition("@")
    text = f"{user}{at}[{name}]" if ":" in name else host.name
    text += f":{host.port}" if host.port else ""
    text += f" slots={slots}" if slots is not None else ""
    text += f" weight={host.weight:g}" if host.weight != 1 else ""
    return text + (f" iface={host.interface}" if host.interface else "")


def as_json(findings: Sequence[Finding], planner: HostPlanner, plan: HostsPlan, words: Sequence[str]) -> dict[str, Any]:
    """Return everything as tables for ``--json``."""
    job = plan.job
    return {
        "hosts": [
            {"host": one.host.name, "usable": not one.obstacles, "problems": one.problems, "about": one.about}
            for one in findings
        ],
        "measured": [
            {
                "host": name,
                "workers": len(planner.ranks_of(name)),
                "step_s": planner.step_s(name),
                "samples_per_s_alone": planner.alone(name),
                "link_bytes_per_s": planner.link(name) if planner.link(name) < float("inf") else None,
                "adds_samples_per_s": plan.adds[name],
                "left_out": name in plan.left_out,
            }
            for name in planner.names
        ],
        "measured_samples_per_s": sum(planner.batches) / planner.measured_round_s,
        "store": planner.report.store_type,
        "plan": {
            "hosts": job.hosts, "servers": job.servers, "samples_per_s": job.samples_per_s, "round_s": job.round_s,
            "slowest": job.slowest, "advice": _advice(plan, planner) if plan.better else "",
            "local": None if (local := planner.local(job)) is None else dataclasses.asdict(local),
        },
        "command": ["paceline", "launch", *words],
    }  # fmt: skip


def wrapped(text: str, first: str, rest: str) -> list[str]:
    """Return a text in lines of at most :data:`WIDTH` columns."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:.0f}" if samples_per_s >= 1000 else f"{samples_per_s:.3g}"


def _signed(samples_per_s: float) -> str:
    return f"{'-' if samples_per_s < 0 else '+'}{_rate(abs(samples_per_s))}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
