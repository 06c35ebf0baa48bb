"""How the workers of one job weigh in the mean of their gradients: a line, and a warning where that may be wrong. Pure.

| workers                                               | line                                                   |
|-------------------------------------------------------|--------------------------------------------------------|
| have all told how they weigh                          | how they weigh, and where the numbers come from        |
| weigh in another way later                            | likewise; never the same line twice                    |
| do not know their samples, and others do              | which, what that means, and the way out                |
| do not know their samples, and have unequal inputs    | once: both shapes, and the way out                     |
| have losses that grow with the batch, as sums do      | once: a small batch and a large one, and the way out   |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from paceline.membership.loss_growth import LossGrowth
from paceline.naming import workers_text
from paceline.wire import messages as m

WAY_OUT = (
    "If batches differ in size, set optimizer.samples to the size of each batch, give batch_dim=, or take the batches "
    "from a sampler of paceline.data"
)

_SUMS = (
    "Gradients are averaged over the workers, as those of means. Divide each loss by the samples of its batch, or give "
    "DistributedOptimizer reduction='sum'"
)

#: How workers weigh, by :data:`paceline.wire.messages.Way`.
_HOW = {
    "given": "by the samples that the script sets as optimizer.samples",
    "inputs": "by the samples in the inputs of the model, as batch_dim says",
    "dealt": "by the samples that a sampler of paceline deals",
    "loss": "by the number that their losses are divided by, as weigh='loss' says",
    "equal": "equally, as weigh='equal' says",
    "unknown": "equally, as with DistributedDataParallel",
    "sum": "equally: gradients are added up, as reduction='sum' says",
    "each": "equally: each push is an update by itself",
}

#: Why workers do not know their samples; the rest is told by one of them.
_NOT_KNOWN = "no sampler of paceline deals the batches, optimizer.samples is not set, and "

#: Ways of workers that know how many samples they have.
_KNOWN = ("given", "inputs", "dealt")

#: Lines that one job says at most, and optimizers that are remembered.
_MOST_LINES, _MOST_OPTIMIZERS = 8, 16


class Weighing:
    """How the workers of one job weigh.

    Attributes:
        lines: how, the newest last.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._batches: defaultdict[str, dict[int, m.StepBatch]] = defaultdict(dict)
        """The newest of each worker, by optimizer."""
        self._changed: set[str] = set()
        self._growth: dict[str, LossGrowth] = {}
        """By optimizer."""
        self._has_compared = self._has_grown = False

    def note(self, worker: int, optimizer: str, batch: m.StepBatch) -> None:
        """Take in the batch of a worker."""
        if optimizer not in self._batches and len(self._batches) == _MOST_OPTIMIZERS:
            oldest = next(iter(self._batches))
            del self._batches[oldest]
            self._changed.discard(oldest)
        batches = self._batches[optimizer]
        before = batches.get(worker)
        if before is None or batch.way not in ("", before.way):
            batches[worker] = batch
            self._changed.add(optimizer)

    def check(self, ranks: Collection[int]) -> list[str]:
        """Return lines about workers that weigh in another way than before; these ranks may still tell something."""
        lines = []
        for optimizer in sorted(self._changed):
            batches = self._batches.get(optimizer, {})
            if batches.keys() >= set(ranks):
                self._changed.remove(optimizer)
                line = _how({rank: one for rank, one in sorted(batches.items()) if one.way})
                if line and line not in self.lines and len(self.lines) < _MOST_LINES:
                    self.lines.append(line)
                    lines.append(line)
        return lines

    def compare(self, optimizer: str, step: int, found: Mapping[int, m.WorkerStep]) -> list[str]:
        """Return lines about the batches of one step, each once."""
        batches = {rank: one.batch for rank, one in sorted(found.items()) if one.batch is not None and one.batch.way}
        return [*self._compare_shapes(batches), *self._compare_losses(optimizer, step, batches)]

    def _compare_shapes(self, batches: Mapping[int, m.StepBatch]) -> list[str]:
        known = [(rank, one.shapes) for rank, one in batches.items() if one.shapes]
        other = next((one for one in known if one[1] != known[0][1]), None)
        if other is None or self._has_compared:
            return []
        self._has_compared = True
        (rank, text), (other_rank, other_text) = known[0], other
        return [
            f"inputs are {text} on worker {rank} and {other_text} on worker {other_rank}, and workers weigh equally. "
            f"{WAY_OUT}. If equal weights are meant, give weigh='equal'"
        ]

    def _compare_losses(self, optimizer: str, step: int, batches: Mapping[int, m.StepBatch]) -> list[str]:
        sizes = {rank: (one.rows, one.loss) for rank, one in batches.items() if one.loss is not None}
        if self._has_grown or len(sizes) < 2:
            return []
        if optimizer not in self._growth and len(self._growth) == _MOST_OPTIMIZERS:
            del self._growth[next(iter(self._growth))]
        grows = self._growth.setdefault(optimizer, LossGrowth()).note(sizes)
        self._has_grown = bool(grows)
        return [f"losses grow with the batch, as sums over samples do: {grows}, in step {step}. {_SUMS}"] * bool(grows)


def _how(batches: Mapping[int, m.StepBatch]) -> str:
    """Return how workers weigh; an empty text where none has samples."""
    ranks: defaultdict[str, list[int]] = defaultdict(list)
    for rank, one in batches.items():
        ranks[one.way].append(rank)
    why = _NOT_KNOWN + next((one.why for one in batches.values() if one.way == "unknown"), "")
    known = [rank for rank, one in batches.items() if one.way in _KNOWN]
    if known and "unknown" in ranks:
        most = f"{batches[known[0]].samples:g} on worker {known[0]}"
        return f"{_who(ranks['unknown'])} 1, and {_who(known)} by samples ({most}): {why}. {WAY_OUT}, on every worker"
    told = [f"{'workers weigh' if len(ranks) == 1 else _who(found)} {_HOW[way]}" for way, found in ranks.items()]
    return "; ".join(told) + (f": {why}" if "unknown" in ranks else "")


def _who(ranks: Collection[int]) -> str:
    return f"{workers_text(ranks)} weigh{'s' if len(ranks) == 1 else ''}"
