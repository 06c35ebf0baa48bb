"""TraceML and nvidia-resiliency-ext (NVRx) beside paceline: faults of ``tests.observe.matrix`` in plain DDP over Gloo.

``nox -s slow-peers`` installs both in a venv of their own, and adds a column for each to the table of the matrix. A
loop is written as their documents say, and their own thresholds hold:

| tool | what is asked | it can name |
|---|---|---|
| TraceML | the diagnosis of step times in its summary, at the end of the run | a rank, and input or computation |
| NVRx | ``identify_stragglers()`` after each :data:`EVERY` rounds, of sections on the CPU | ranks for each section |

Sections are those that wait for nobody, as in NVRx's callback for Lightning: with one around backward, which has the
exchange of DDP in it, the ranks that wait for the slow one are named.

NVRx is made for GPUs: it loads libcupti, which comes from PyPI here, and its reports ask for the kernels that have run
("CUPTI_ERROR_NOT_INITIALIZED" without a GPU). There are none on a machine without a GPU, so that it does not ask there.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.observe.faulty_worker import AFTER, BATCH, ONSET, SLOW, WORKERS, FaultyLoop, quota, rounds_of

TOOLS = ("TraceML", "NVRx")

#: Rounds between two reports of NVRx.
EVERY = 10

#: By fault that can come to a DDP job on one host: the names that tell the cause, TraceML's and NVRx's; none: the tool
#: has no name for it.
CAUSES: Mapping[str, tuple[str, str]] = {
    "none": ("", ""),
    "backward": ("compute", ""),
    "loader": ("input", "data"),
    "quota": ("", ""),
    "neighbour": ("", ""),
    "memory": ("", ""),
    "gc": ("", ""),
    "stops": ("", ""),
}

#: Why the others are not tried.
WHY_NOT: Mapping[str, str] = {
    "link": "- (one host)",
    "delay": "- (one host)",
    "server": "- (no servers)",
    "placement": "- (no servers)",
}

_ASKED = "PACELINE_TEST_PEER"
_START_S, _END_S = 120.0, 300.0


@dataclass(frozen=True)
class Told:
    """What a tool has told of a job: the ranks that it names, and the names of causes."""

    ranks: frozenset[int] = frozenset()
    causes: frozenset[str] = frozenset()
    error: str = ""
    """Why it has told nothing: its own words."""

    def judge(self, tool: str, fault: str) -> tuple[bool, bool]:
        """Tell whether the worker, or nobody, is right, and the cause too."""
        right = {cause for cause in (CAUSES[fault][TOOLS.index(tool)],) if cause}
        who = not self.error and self.ranks == (frozenset() if fault == "none" else {SLOW})
        return who, who and self.causes == right


def told_by_traceml(summary: Mapping[str, Any]) -> Told:
    """Return what the diagnosis of step times says, in TraceML's summary."""
    one = summary["step_time"]["diagnosis"]
    if "STRAGGLER" not in one["kind"]:
        return Told(error=one["summary"] if one["kind"].startswith("INSUFFICIENT") else "")
    return Told(frozenset(one["ranks"]), frozenset([one["evidence"]["component"]]))


def told_by_nvrx(reports: Iterable[tuple[int, Mapping[str, list[int]]]], fault: str) -> Told:
    """Return the stragglers of most reports since the fault began; of a job without a fault, since its start.

    Args:
        reports: the last round of each, and the stragglers by section.
        fault: name of the fault.
    """
    begun = EVERY if fault == "none" else ONSET + EVERY  # rounds at the start, and that of the onset, are no judge
    counted = [sections for round, sections in reports if round >= begun]
    named = Counter((section, rank) for one in counted for section, ranks in one.items() for rank in ranks)
    most = [who for who, times in named.items() if 2 * times > len(counted)]
    return Told(frozenset(rank for _, rank in most), frozenset(section for section, _ in most))


# ---- a job -----------------------------------------------------------------------------------------------------------


def run(tool: str, venv: Path, fault: str, jitter: float, folder: Path, compute_s: float) -> Told:
    """Run one job with a tool; returns what it has told."""
    from paceline.launch.supervise.crew import free_port
    from tests.observe.faults import Cgroup, limit_cpu, limit_memory, neighbours, stops

    folder.mkdir(parents=True)
    asked = {"tool": tool, "fault": fault, "jitter": jitter, "folder": str(folder), "compute": compute_s}
    libraries = ":".join(map(str, venv.glob("lib/python*/site-packages/nvidia/cuda_cupti/lib")))
    root = str(Path(__file__).parents[2])
    environment = os.environ | {
        _ASKED: json.dumps(asked), "PYTHONPATH": root, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore", "LD_LIBRARY_PATH": libraries,
    }  # fmt: skip
    here, ranks, port = str(Path(__file__).resolve()), f"--nproc-per-node={WORKERS}", f"--master-port={free_port()}"
    traceml = [venv / "bin/traceml", "run", "--mode=summary", f"--logs-dir={folder / 'logs'}", "--run-name=job"]
    torchrun = [venv / "bin/python", "-m", "torch.distributed.run"]
    command = [*traceml, f"--aggregator-port={free_port()}"] if tool == "TraceML" else torchrun
    with contextlib.ExitStack() as stack, (folder / "output").open("w+") as output:
        argv = [*map(str, command), ranks, port, here]
        process = subprocess.Popen(argv, env=environment, stdout=output, stderr=subprocess.STDOUT)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        pids = _pids(folder, process)
        if pids and fault in ("quota", "memory"):
            group = Cgroup("cpu" if fault == "quota" else "memory", pids[SLOW])
            stack.callback(group.close)
            group.enter()
        while rounds_of(folder) < ONSET and process.poll() is None:
            time.sleep(0.05)
        if pids and fault == "quota":
            limit_cpu(group, quota(compute_s))
        elif pids and fault == "memory":
            limit_memory(group, folder)
        elif pids and fault == "neighbour":
            stack.enter_context(neighbours(pids, pids[SLOW]))
        elif pids and fault == "stops":
            stack.enter_context(stops(pids[SLOW]))
        process.wait(_END_S)
        return _told(tool, fault, folder)


def _pids(folder: Path, process: subprocess.Popen[Any]) -> list[int]:
    """Return the processes of all ranks; none where the job has ended."""
    deadline = time.monotonic() + _START_S
    while process.poll() is None:
        found = [path.read_text() for path in sorted(folder.glob("pid-*"))]
        if len(found) == WORKERS and all(found):
            return [int(one) for one in found]
        if time.monotonic() > deadline:
            raise RuntimeError(f"the job has not begun within {_START_S:g} s: see {folder / 'output'}")
        time.sleep(0.05)
    return []


def _told(tool: str, fault: str, folder: Path) -> Told:
    summary, reports = folder / "logs/job/final_summary.json", folder / "reports"
    if tool == "TraceML" and summary.exists():
        return told_by_traceml(json.loads(summary.read_text()))
    if tool == "NVRx" and reports.exists():
        return told_by_nvrx(map(json.loads, reports.read_text().splitlines()), fault)
    lines = [line.strip() for line in (folder / "output").read_text().splitlines()]
    return Told(error=next((line for line in lines if "Error: " in line), "it has told nothing"))


def cell(tool: str, fault: str, told: list[Told]) -> str:
    """Return what the table says of some jobs with a fault."""
    if fault in WHY_NOT:
        return WHY_NOT[fault]
    if fault not in CAUSES:
        return "-"
    if error := next((one.error for one in told if one.error), ""):
        return f"- ({error})"
    judged = [one.judge(tool, fault) for one in told]
    who, why = (f"{sum(one)}/{len(told)}" for one in zip(*judged, strict=True))
    return f"{'nobody' if fault == 'none' else 'worker'} {who}" + (f", cause {why}" if any(CAUSES[fault]) else "")


# ---- a rank ----------------------------------------------------------------------------------------------------------


def work(tool: str, fault: str, jitter: float, folder: str, compute: float) -> None:
    """Train as a rank of a DDP job that one of the tools looks at."""
    import torch
    import torch.distributed as dist

    if tool == "TraceML":
        import traceml_ai

        traceml_ai.init()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if tool == "NVRx":
        from nvidia_resiliency_ext.straggler import Detector

        Detector.initialize(gather_on_rank0=True)
        if not torch.cuda.is_available():
            torch.cuda.synchronize = lambda device=None: None
            Detector.cupti_manager.get_results = dict
            Detector.cupti_manager.reset_results = lambda: None
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    loop = FaultyLoop(fault, jitter, rank, folder, compute)
    model = torch.nn.parallel.DistributedDataParallel(loop.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loader = torch.utils.data.DataLoader(range((ONSET + AFTER) * BATCH), BATCH, collate_fn=loop.load)

    def section(name: str) -> Any:
        return Detector.detection_section(name, profile_cuda=False) if tool == "NVRx" else contextlib.nullcontext()

    batches = iter(loader)
    for round in range(len(loader)):
        with section("data"):
            batch = next(batches)
        with traceml_ai.trace_step(model) if tool == "TraceML" else contextlib.nullcontext():
            loop.begin(batch)
            optimizer.zero_grad()
            with section("forward"):
                loss = loop.loss(model, batch)
            loss.backward()
            with section("optimizer"):
                optimizer.step()
            loop.end()
        if tool == "NVRx" and (round + 1) % EVERY == 0:
            report = Detector.generate_report()
            if rank == 0:
                found = report.identify_stragglers()["straggler_sections_relative"]
                named = {name: sorted(one.rank for one in who) for name, who in found.items()}
                with open(Path(folder, "reports"), "a") as file:
                    file.write(json.dumps([round, named]) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    work(**json.loads(os.environ[_ASKED]))
    sys.exit(0)
