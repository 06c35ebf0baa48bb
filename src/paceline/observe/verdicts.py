"""Verdicts about slow workers as sentences: who, how slow, why, since when, at what cost, and the way out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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

#: The same for servers.
OF_SERVERS: Mapping[str, tuple[str, str]] = {
    "merge": ("most of that is merging gradients", "add servers (-s), or move this one to an idle host"),
    "apply": ("most of that is the optimizer", "add servers (-s), or let the workers step (update='worker')"),
    "gc": ("most of that is Python's garbage collection", "report it: a server makes no garbage"),
    "rest": ("most of that is answering", "add servers (-s), or move this one to an idle host"),
    "throttled": ("the CPU quota of its cgroup is used up", "raise the quota (cpu.max)"),
}

#: A server that is so many times as busy as the others may have too many of the keys; and the advice then.
_UNEQUAL, _FEWER_KEYS = 2.0, "let PACELINE_PLACEMENT=balanced and PACELINE_SERVER_SPEEDS=measured give it fewer keys"

#: Causes that cost less where a worker has fewer samples.
BY_SAMPLES = frozenset({"data", "compute", "device", "throttled", "busy", "stolen", "batch"})

#: How workers of a job get samples by measured speed, and of a DDP script.
_SHARES, _SHARES_OF_DDP = (
    "paceline.data.SharedBatchSampler(data, store, global_batch_size=N, shares='measured') in place of the sampler",
    "paceline launch --ddp --shares measured, for loaders with a DistributedSampler; or two lines of the script: "
    "paceline.data.SharedBatchSampler(data, store, global_batch_size=N, shares='measured') in place of the sampler, "
    "and paceline.DistributedOptimizer(optimizer, kvstore=store) in place of DistributedDataParallel",
)

#: How workers get samples by measured speed where each takes local steps.
_SHARES_OF_LOCAL = 'local_steps="32 by speed": 32 steps of the fastest worker, as many of others as fit that time'

#: By cause: the advice to a job whose workers take as many local steps each.
_ADVICE_OF_LOCAL: Mapping[str, str] = dict.fromkeys(
    ("compute", "device", "batch"), 'give it fewer of the local steps: local_steps="32 by speed"'
)

#: By cause: the advice to a job that runs a DDP script.
_ADVICE_OF_DDP: Mapping[str, str] = {
    "compute": "start the job with --ddp --shares measured",
    "device": "start the job with --ddp --shares measured",
    "batch": "start the job with --ddp --shares measured",
    "throttled": "raise the quota (cpu.max), or start the job with --ddp --shares measured",
}

#: By cause: the advice to a job whose samples go to workers by their speed already.
_ADVICE_OF_SHARED = dict.fromkeys(
    ("compute", "device", "batch"), "nothing: its share of the samples follows its speed"
) | {
    "throttled": "raise the quota (cpu.max); its share of the samples follows its speed",
    "update": "let the servers step (update='server')",
}

_WHOLE = frozenset({"batch", "throttled", "memory", "busy", "stolen", "stopped", "link"})


@dataclass(frozen=True)
class Verdict:
    """A process that is slow, or is so no more.

    Attributes:
        rank: rank of the worker.
        host: its host.
        cause: one of :data:`CAUSES`, of a server of :data:`OF_SERVERS`; empty: it is as quick as the others again.
        part: number of the part of its steps that explains it; -1: none.
        ratio: its own time as a multiple of that of the others.
        share: how much of its own time the part is.
        round: since when.
        lost: samples per second that it costs the job.
        alone: it is compared with its own past.
        role: ``worker`` or ``server``. Of a server, ``share`` is how much of the time it is busy.
        gain: the factor by which the job would be faster if all had samples by their speed; 0: none that is known.
        is_ddp: the job runs a DDP script.
        is_shared: samples go to workers by their speed already.
        has_lost_share: so it has far fewer than before, and no other waits; ``ratio`` is that of a sample's time.
        is_local: rounds are periods of local steps.
    """

    rank: int
    host: str
    cause: str
    part: int
    ratio: float
    share: float
    round: int
    lost: float
    alone: bool = False
    role: str = "worker"
    gain: float = 0.0
    is_ddp: bool = False
    is_shared: bool = False
    has_lost_share: bool = False
    is_local: bool = False


@dataclass(frozen=True)
class Cost:
    """The seconds that a worker has cost the others while it was named as slow, and the causes.

    ``gain``, ``is_ddp`` and ``is_local`` as in :class:`Verdict`.
    """

    rank: int
    host: str
    causes: tuple[str, ...]
    seconds: float
    gain: float = 0.0
    is_ddp: bool = False
    is_local: bool = False

    def joined(self, before: Cost | None) -> Cost:
        """Return it with the earlier cost of the same rank."""
        if before is None:
            return self
        causes = tuple(dict.fromkeys((*before.causes, *self.causes)))
        return replace(self, causes=causes, seconds=before.seconds + self.seconds, gain=max(before.gain, self.gain))


def sentence(one: Verdict) -> str:
    """Return a verdict as one sentence."""
    who = f"{one.role} {one.rank} on {one.host}"
    cost = f"; it costs the job {_samples(one.lost)}" if one.lost > 0 else ""
    if one.role == "server":
        return _of_server(who, cost, one)
    if not one.cause:
        return f"{who} is as quick as {'before' if one.alone else 'the others'} again, from round {one.round:,} on"
    than = "as long as before" if one.alone else "as long as the others"
    if one.has_lost_share:
        than = "as long for a sample as before, and has far fewer of them,"
    subject, advice = CAUSES[one.cause]
    share = f"the reason is {subject}" if one.cause in _WHOLE else f"{one.share:.0%} of its step is {subject}"
    by_speed = "local steps by speed" if one.is_local else "measured shares"
    gain = f"; with {by_speed} this job would run up to {one.gain:.1f} times as fast" if one.gain else ""
    if one.gain and one.is_ddp:
        advice = _ADVICE_OF_DDP.get(one.cause, advice)
    if one.is_local:
        advice = _ADVICE_OF_LOCAL.get(one.cause, advice)
    if one.is_shared:
        advice = _ADVICE_OF_SHARED.get(one.cause, advice)
    return f"{who} takes {one.ratio:.1f} times {than} since round {one.round:,}: {share}{cost}{gain}. To do: {advice}"


def _of_server(who: str, cost: str, one: Verdict) -> str:
    if not one.cause:
        return f"{who} holds the workers up no more, from round {one.round:,} on"
    subject, advice = OF_SERVERS[one.cause]
    more = f", {one.ratio:.1f} times as much as the others" if one.ratio > 1 else ""
    busy = f"it is busy {one.share:.0%} of the time{more}, and {subject}"
    if one.ratio >= _UNEQUAL and one.cause in ("merge", "apply", "rest"):
        advice = f"{_FEWER_KEYS}, {advice}"
    return f"{who} holds the workers up since round {one.round:,}: {busy}{cost}. To do: {advice}"


def summary(losses: Sequence[Cost]) -> str:
    """Return one line about the workers that were slow, for the end of a job; empty where there were none."""
    told = []
    for one in losses:
        causes = " and ".join(CAUSES[cause][0] for cause in one.causes)
        told.append(f"worker {one.rank} on {one.host} ({causes}): {one.seconds:.1f} s")
    if not told:
        return ""
    best = max(losses, key=lambda one: one.gain)
    way = _SHARES_OF_LOCAL if best.is_local else _SHARES_OF_DDP if best.is_ddp else _SHARES
    by_speed = "local steps by speed" if best.is_local else "measured shares"
    gain = f". With {by_speed} it would run up to {best.gain:.1f} times as fast: {way}" if best.gain else ""
    return f"slow workers of this job, and the time that they cost: {'; '.join(told)}{gain}"


def _samples(rate: float) -> str:
    return f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.2g} samples/s"
