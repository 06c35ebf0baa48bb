"""Workers that train and exchange nothing, and workers that train on the same samples. Pure.

A worker tells in its first seconds of training how it trains (:class:`~paceline.wire.messages.Training`), whether it
has joined the job or not, and once more at its end. It tells nothing where it exchanges gradients and its samples are
divided.

| workers have told, and                               | line                                                       |
|------------------------------------------------------|------------------------------------------------------------|
| have pushed nothing and reduced nothing              | they exchange nothing; which line of the script is missing |
| their weights change without a step of the optimizer | they train on their own gradients                          |
| walk all samples of equal data sets; where the order | no sampler divides the samples                             |
| is the same, their inputs or losses are, too         |                                                            |
| had the same inputs, pass by pass                    | they train on the same samples                             |
| any of these, and the job ends                       | the same line again                                        |

A line waits until all workers have told, or :data:`WAIT_S`. Workers that tell later get a line of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.naming import workers_text
from paceline.wire import messages as m

#: How long a line waits for further workers, which begin to train later.
WAIT_S = 2.0

_WRAP = "optimizer = paceline.DistributedOptimizer(optimizer, kvstore=store, model=model)"
_SAMPLER = "sampler=paceline.data.ShardedSampler(data), which takes its part from the job"


@dataclass(frozen=True)
class _Finding:
    """A mistake of some workers: ``verb`` and ``rest`` make a line of them. ``about`` tells equal lines apart."""

    verb: str
    rest: str
    least: int = 1
    """Workers of which it is a mistake."""
    about: bytes = b""

    def line(self, ranks: set[int]) -> str:
        """Return the line about these workers."""
        return f"{workers_text(ranks)} {self.verb}{'' if len(ranks) > 1 else 's'} {self.rest}"


class Alone:
    """What the workers of one job have told."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._told: dict[int, m.Training] = {}
        self._first: float | None = None
        """When the first worker told something that is not judged yet."""
        self._said: defaultdict[_Finding, set[int]] = defaultdict(set)

    def note(self, told: m.Training, now: float) -> None:
        """Take in what a worker tells."""
        self._told[told.rank] = told
        self._first = now if self._first is None else self._first

    def check(self, rounds: Mapping[int, int], now: float) -> list[str]:
        """Return new lines; ``rounds`` are the last ones of the workers that have joined."""
        if self._first is None or (len(self._told) < self._num_workers and now - self._first < WAIT_S):
            return []
        self._first = None
        lines = []
        for finding, ranks in self._findings(rounds).items():
            if not ranks <= self._said[finding]:
                self._said[finding] |= ranks
                lines.append(finding.line(ranks))
        return lines

    def end(self, rounds: Mapping[int, int]) -> list[str]:
        """Return the lines that hold at the end of the job."""
        found = self._findings(rounds)
        for finding, ranks in found.items():
            self._said[finding] |= ranks
        return [f"the job ends, and {finding.line(ranks)}" for finding, ranks in found.items()]

    def why_alone(self, rounds: Mapping[int, int]) -> str:
        """Return the lines about workers that exchange nothing: they are why others wait for them in vain."""
        found: defaultdict[_Finding, set[int]] = defaultdict(set)
        for rank, told in self._told.items():
            if (alone := _why_alone(told, rounds.get(rank, 0))) is not None:
                found[alone].add(rank)
        return "; ".join(finding.line(ranks) for finding, ranks in found.items())

    def _findings(self, rounds: Mapping[int, int]) -> dict[_Finding, set[int]]:
        found: defaultdict[_Finding, set[int]] = defaultdict(set)
        for rank, told in sorted(self._told.items()):
            for one in (_why_alone(told, rounds.get(rank, 0)), _walks_all(told), _same_inputs(told)):
                if one is not None:
                    found[one].add(rank)
        return {
            one: ranks
            for one, ranks in found.items()
            if len(ranks) >= one.least and not (one.about and self._are_divided(ranks))
        }

    def _are_divided(self, ranks: set[int]) -> bool:
        """Return whether workers walk in the same order and have unlike inputs: their loop divides the batches.

        Where inputs are not known, losses may tell it.
        """
        seen: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
        for one in (self._told[rank] for rank in ranks):
            if one.order and (one.inputs or one.losses):
                seen[one.order].add(tuple(one.inputs or one.losses))
        return any(len(found) > 1 for found in seen.values())


def alone_line(told: m.Training) -> str:
    """Return the line about a worker by itself, for a job without a scheduler; empty: there is none."""
    finding = _why_alone(told, 0)
    return "" if finding is None else finding.line({told.rank})


def _why_alone(told: m.Training, rounds: int) -> _Finding | None:
    """Return why a worker exchanges nothing; None: it exchanges, or does not train."""
    if told.unstepped:
        return _Finding(
            "train",
            "on own gradients: weights change in each backward pass, as by hooks that update in it (LOMO), and the "
            "DistributedOptimizer makes no step. Remove these hooks, and call optimizer.step() after backward",
        )
    if told.exchanged or rounds or not (told.steps or told.passes):
        return None
    if told.group:
        return _Finding(
            "train",
            f"over {told.group} of torch.distributed, and this job has no part in it. Start it by paceline launch "
            "--ddp; or with -s 0, if paceline is to have no part",
        )
    return _Finding("train", f"alone, and no gradient is exchanged: {_reason(told)}")


def _reason(told: m.Training) -> str:
    if told.wrapped:
        return "another optimizer steps. Call step() of the DistributedOptimizer, not of another one of its parameters"
    if told.store == "ddp":
        return "the process group is open, and the model is not wrapped: model = DistributedDataParallel(model)"
    if told.store.startswith("dist_") or told.store == "allreduce":
        does = "the optimizer steps on own gradients" if told.steps else "hooks of backward change the weights"
        return f"the store {told.store} gets none, and {does}. Wrap the optimizer and call its step: {_WRAP}"
    if told.store == "hvd":
        return "hvd.init() is called, and the optimizer is not wrapped: hvd.DistributedOptimizer(optimizer)"
    what = f"the store {told.store!r} is of one process" if told.store else "the script makes no store"
    return (
        f'{what}. Make one for all workers, store = paceline.kvstore.create("dist_sync"), and {_WRAP}. If each worker '
        "is to train alone, launch with -s 0"
    )


def _walks_all(told: m.Training) -> _Finding | None:
    if not told.samples or not told.data:
        return None
    return _Finding(
        "walk",
        f"all {told.samples:,} samples each: no sampler divides them. Give the DataLoader {_SAMPLER}",
        2,
        told.data,
    )


def _same_inputs(told: m.Training) -> _Finding | None:
    """Return that a worker has these inputs; None: it walks all samples, or has the same again and again."""
    if len(told.inputs) < m.MAX_INPUTS or len(set(told.inputs)) == 1 or _walks_all(told) is not None:
        return None
    rest = (
        f"on the same samples: the inputs of their models are equal in the first {m.MAX_INPUTS} backward passes. "
        f"Divide them: {_SAMPLER}"
    )
    return _Finding("train", rest, 2, repr(told.inputs).encode())
