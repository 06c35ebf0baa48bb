"""Verdicts about slow workers as sentences: who, how slow, why, since when, at what cost, and the way out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.observe.detector import Loss, Verdict

#: By cause: the subject that explains a slow worker, and what to do. Subjects of parts of steps are told with a share.
CAUSES: Mapping[str, tuple[str, str]] = {
    "data": ("its data loader", "raise num_workers of the loader, or put the data on a faster disk"),
    "compute": ("computation", "give it a smaller share of the samples (shares='measured'), or a group of its own"),
    "device": ("waiting for its accelerator", "give it a smaller share of the samples (shares='measured')"),
    "encode": ("encoding gradients", "take a cheaper codec, or none on this worker's host"),
    "send": ("sending gradients", "look at its network and at the load of its host"),
    "copy": ("copying new weights", "look at the load of its memory and of its host"),
    "update": ("its optimizer", "let the servers step (update='server'), or give it a smaller share of the samples"),
    "other": (
        "the script between two steps (loaders of its own, logging, evaluation)",
        "move that work out of the loop, or do it less often",
    ),
    "gc": (
        "Python's garbage collection",
        "call gc.freeze() before the loop, and gc.disable() with gc.collect() where all workers wait anyway",
    ),
    "batch": ("a larger batch than the others'", "give it a smaller share of the samples"),
    "throttled": ("the CPU quota of its cgroup", "raise the quota (cpu.max), or give it a smaller share"),
    "memory": ("reclaiming memory and reading it back from disk", "raise its memory limit, or use smaller batches"),
    "busy": ("other processes on its processors", "end them, or give it processors of its own (taskset, cpusets)"),
    "stolen": ("other guests on the host of its virtual machine", "move it to another host"),
    "stopped": ("stops of the whole process", "look for SIGSTOP, a debugger, or a freezer of its cgroup"),
    "link": ("its network", "look at the link and at the traffic of its host; a codec sends less"),
}

_WHOLE = frozenset({"batch", "throttled", "memory", "busy", "stolen", "stopped", "link"})


def sentence(one: Verdict) -> str:
    """Return a verdict as one sentence."""
    who = f"worker {one.rank} on {one.host}"
    if not one.cause:
        return f"{who} is as quick as {'before' if one.alone else 'the others'} again, from round {one.round:,} on"
    than = "as long as before" if one.alone else "as long as the others"
    subject, advice = CAUSES[one.cause]
    share = f"the reason is {subject}" if one.cause in _WHOLE else f"{one.share:.0%} of its step is {subject}"
    cost = f"; it costs the job {_samples(one.lost)}" if one.lost > 0 else ""
    return f"{who} takes {one.ratio:.1f} times {than} since round {one.round:,}: {share}{cost}. To do: {advice}"


def summary(losses: Sequence[Loss]) -> str:
    """Return one line about the workers that were slow, for the end of a job; empty where there were none."""
    told = []
    for one in losses:
        causes = " and ".join(CAUSES[cause][0] for cause in one.causes)
        told.append(f"worker {one.rank} on {one.host} ({causes}): {one.seconds:.1f} s")
    return f"slow workers of this job, and the time that they cost: {'; '.join(told)}" if told else ""


def _samples(rate: float) -> str:
    return f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.2g} samples/s"
