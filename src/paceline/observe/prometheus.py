"""The figures of a job as Prometheus's text (format 0.0.4). Pure.

Names follow Prometheus's rules: base units (seconds, bytes), ``_total`` for counters, no unit twice. Sums over all
labels of a counter are those of the job. Rates are left to Prometheus:
``sum(rate(paceline_worker_samples_total[1m]))``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from paceline.observe.account import parts_of
from paceline.observe.job_view import JobView, MemberView
from paceline.observe.verdicts import Verdict

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Kind and meaning of each metric, in the order in which they are shown.
METRICS: Mapping[str, tuple[str, str]] = {
    "paceline_build_info": ("gauge", "Version of paceline, and id of the job."),
    "paceline_members": ("gauge", "Processes of the job, by role and state."),
    "paceline_deaths_total": ("counter", "Processes that have died, by role."),
    "paceline_worker_rounds_total": ("counter", "Rounds that a worker has pushed."),
    "paceline_worker_samples_total": ("counter", "Samples behind the pushes of a worker."),
    "paceline_worker_step_seconds_total": ("counter", "Time of a worker, by part of its steps."),
    "paceline_server_updates_total": ("counter", "Updates that a server has applied."),
    "paceline_server_seconds_total": ("counter", "Time of a server, by part."),
    "paceline_network_transmit_bytes_total": ("counter", "Bytes that a process has sent."),
    "paceline_network_receive_bytes_total": ("counter", "Bytes that a process has received."),
    "paceline_resident_memory_bytes": ("gauge", "Resident memory of a process."),
    "paceline_last_heartbeat_timestamp_seconds": ("gauge", "When a process was last heard."),
    "paceline_slowdown_ratio": ("gauge", "Time of a slow process as a multiple of the others', by cause."),
    "paceline_reported": ("gauge", "Last figure that scripts report: the mean of the workers, weighted by samples."),
    "paceline_worker_reported": ("gauge", "Last figure that the script of a worker reports."),
}

_Labels: TypeAlias = Mapping[str, str]
_Sample: TypeAlias = tuple[str, _Labels, float]


def text(job: JobView, slow: Sequence[Verdict], name: str, version: str, now: float) -> str:
    """Return the figures of a job as text; its status was taken ``now``, in seconds since 1970."""
    found: dict[str, list[str]] = {metric: [] for metric in METRICS}
    for metric, labels, value in _samples(job, slow, name, version, now):
        inner = ",".join(f'{key}="{_escaped(one)}"' for key, one in labels.items())
        found[metric].append(f"{metric}{{{inner}}} {value!r}")
    lines = []
    for metric, (kind, meaning) in METRICS.items():
        lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} {kind}", *found[metric]] if found[metric] else []
    return "\n".join(lines) + "\n"


def _samples(job: JobView, slow: Sequence[Verdict], name: str, version: str, now: float) -> Iterable[_Sample]:
    yield "paceline_build_info", {"version": version, "job": name}, 1
    counts = Counter((one.member.role, one.state.phase) for one in job.members)
    for (role, phase), count in sorted(counts.items()):
        yield "paceline_members", {"role": role, "state": phase}, count
    for role in ("worker", "server"):
        yield "paceline_deaths_total", {"role": role}, sum(one.role == role for one in job.status.deaths)
    for member in job.members:
        yield from _of_member(member, now)
    for one in slow:
        labels = {"role": one.role, "rank": str(one.rank), "host": one.host, "cause": one.cause}
        yield "paceline_slowdown_ratio", labels, one.ratio
    for figure, (_, value) in job.status.figures.items():
        yield "paceline_reported", {"name": figure}, value


def _of_member(one: MemberView, now: float) -> Iterable[_Sample]:
    member, state, whole = one.member, one.state, one.whole
    own = {"rank": str(member.rank), "host": member.host}
    if one.is_worker:
        yield "paceline_worker_rounds_total", own, state.round
        yield "paceline_worker_samples_total", own, whole.samples
        for name, (_, value) in state.figures.items():
            yield "paceline_worker_reported", {**own, "name": name}, value
    else:
        yield "paceline_server_updates_total", own, whole.samples
    seconds = "paceline_worker_step_seconds_total" if one.is_worker else "paceline_server_seconds_total"
    for part, spent in zip(parts_of(member.role), whole.parts, strict=True):
        yield seconds, {**own, "part": part}, spent / 1e6
    each = {"role": member.role, **own}
    yield "paceline_network_transmit_bytes_total", each, state.sent
    yield "paceline_network_receive_bytes_total", each, state.received
    yield "paceline_resident_memory_bytes", each, state.memory
    yield "paceline_last_heartbeat_timestamp_seconds", each, round(now - state.silent_s, 3)


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
