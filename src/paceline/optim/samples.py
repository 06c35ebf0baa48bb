"""Counts the samples behind a push: the weight of a worker's gradients in the mean over all samples.

The first row that applies decides:

| how the samples of a push are known                                    | weight of the worker                  |
|------------------------------------------------------------------------|---------------------------------------|
| ``optimizer.samples`` is set                                           | that number                           |
| the model was called with empty tensors only, or a sampler has dealt   | 0                                     |
| the batch only because each worker needs one                           |                                       |
| ``batch_dim`` is given, and all inputs that have it agree on its size  | that size, summed over calls          |
| a sampler or loader of :mod:`paceline.data` has dealt the batch        | as many indices as it dealt           |
| no backward pass has reached a parameter, and no parameter has a grad  | 0                                     |
| in any other way                                                       | 1 on every worker, as in DDP          |

With ``weigh="equal"`` it is 1 wherever it is not 0. With ``weigh="loss"`` it is what the losses were divided by, unless
``optimizer.samples`` is set or the weight is 0 (:mod:`.loss_reader`).

Shapes alone never make a count certain: ``[8, 32]`` may be 8 sequences of 32 tokens, 32 sequences of 8, or 8 nodes of
one graph, and no rule tells them apart. But where all workers have inputs of the *same* shapes, they have equally many
samples, whatever dimension counts them. So shapes serve for a warning only (:mod:`paceline.membership.weighing`).

Where a push has the gradients of several passes, numbers that are set before each of them are added up, as sizes
along ``batch_dim`` are; a number that is set once, or after the passes, is that of all of them.

Calls of the model count if a backward pass goes through their outputs and reaches a parameter of the optimizer. A batch
of a sampler counts once per push, however many calls and backward passes it takes.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import WeakSet

import torch
from torch.nn.utils.rnn import PackedSequence

from paceline.data import dealt
from paceline.optim.backward import engine
from paceline.torch_hooks.untraced import untraced
from paceline.wire import messages as m

if TYPE_CHECKING:
    from paceline.optim.loss_reader import LossReader

Weigh = Literal["samples", "equal", "loss"]

#: Pushes of one step whose samples are remembered.
_MOST_PUSHES = 64

#: Autograd's number of the backward pass that runs, where none does.
_NO_PASS = -1


@dataclass(frozen=True)
class Count:
    """The samples behind a push.

    Attributes:
        samples: the weight.
        rows: how many samples there may be; for speeds, and for pushes without weights.
        way: how the weight is known.
        shapes: those of the model's inputs, where the number of samples is not known; empty: not known either.
        why: what is missing, where the number is not known.
    """

    samples: float
    rows: float
    way: m.Way = ""
    shapes: str = ""
    why: str = ""


class SampleCounter:
    """Counts the samples behind each push of one worker, unless the user gives those of every local batch.

    ``batch_dim`` is the dimension of the inputs that counts samples, if the user has said so.

    Attributes:
        last: of the last push.
        taken: samples of the passes of each push since the last step, where they are known.
        is_new: ``given`` was set since the last push, and no pass that has ended is counted by it.
    """

    def __init__(self, given: float | None, batch_dim: int | None, weigh: Weigh = "samples") -> None:
        self._numbers: list[float] = []
        """Set by the script for passes that have ended, since the last push."""
        self.give(given)
        self.is_new = False
        if weigh not in get_args(Weigh):
            raise ValueError(f"weigh is {' or '.join(map(repr, get_args(Weigh)))}, not {weigh!r}")
        self.batch_dim, self.weigh = batch_dim, weigh
        self.last: Count | None = None
        self.taken: deque[Sequence[float]] = deque(maxlen=_MOST_PUSHES)
        self._losses: LossReader | None = None
        self._rows = 1.0
        self._seen: list[Tally] = []
        """Calls of passes that have ended."""
        self._ends: list[int] = []
        """How many of these there were at the end of each pass whose gradients may still be dropped."""
        self._pending: list[Tally] = []
        """Calls of the running pass."""
        self._waiting: WeakSet[Tally] = WeakSet()
        """Calls through which no pass has gone, as long as their graph exists."""
        self._touched = False
        self._reached = self.is_reaching = False
        """Whether a pass since the last push, or the running one, has reached a parameter of the optimizer."""
        self._is_pushed = False
        """Whether a push has counted the running pass."""
        self._told: Tally | None = None
        """The batch under way, if somebody tells."""
        self._batches: list[dealt.DealtBatch] = []
        self._is_dealt = True
        """Whether the batches of all passes since the last push are known."""
        self._newest = 0
        self._batch: dealt.DealtBatch | None = None
        dealt.note_uses()

    def give(self, samples: float | None) -> None:
        """Set the samples of every local batch; None: count them.

        Raises:
            ValueError: the number is negative or not finite.
        """
        if samples is not None and not 0 <= float(samples) < math.inf:
            raise ValueError(f"samples is {samples}; it must be a finite number, 0 or more, or None")
        self.given, self.is_new = samples, samples is not None

    def read_losses(self, worker: int) -> None:
        """Weigh by what losses are divided by, if the user has said so; the worker's rank is for errors."""
        if self.weigh == "loss":
            from paceline.optim.loss_reader import LossReader  # nobody else reads graphs

            self._losses = LossReader(worker)

    # ---- calls of the model ----------------------------------------------------------------------------------------

    def see(self, inputs: Any, outputs: Any) -> None:
        """Register one call: it counts in each backward pass through its outputs.

        If the outputs are objects whose tensors cannot be found, the call counts at once.
        """
        if self.given is not None or self._told is not None:
            return
        if self._pending and torch._C._current_graph_task_id() == _NO_PASS:
            self._pending, self._touched = [], False  # of a pass that has failed
        nodes = {one.grad_fn for one in tensors_in(outputs) if one.grad_fn is not None}
        if not nodes and not (torch.is_grad_enabled() and hides_tensors(outputs)):
            return
        one, last_pass = tally(inputs, self.batch_dim), _NO_PASS

        @untraced
        def count(*_: Any) -> None:
            nonlocal last_pass
            this_pass = torch._C._current_graph_task_id()
            if this_pass != last_pass:
                last_pass = this_pass
                self._pending.append(one)
                self._waiting.discard(one)
                engine.queue_callback(self._end_pass)

        for node in nodes:
            node.register_prehook(count)
        if nodes:
            self._waiting.add(one)
        else:
            self._seen.append(one)

    @property
    def may_rise(self) -> bool:
        """Whether the running pass may yet go through a call: its samples would come too late for a push made now.

        A pass completes gradients before it has gone through all calls where a parameter is used after the model's
        outputs, as a temperature of a loss, or in one of several calls only, as the heads of several tasks.
        """
        return self.given is None and self._told is None and bool(self._waiting)

    def _end_pass(self) -> None:
        if self._touched:
            self._seen += self._pending
        self._pending, self._touched = [], False

    def see_batch(self, batch: Any) -> None:
        """Register the batch of the next backward passes, which counts instead of calls of the model."""
        if self.given is None:
            self._told = tally(batch, self.batch_dim)

    # ---- backward passes -------------------------------------------------------------------------------------------

    def touch(self) -> None:
        """Note that the running backward pass has reached a parameter of the optimizer."""
        self._touched = self.is_reaching = True
        if self._losses is not None and self.given is None:
            self._losses.touch()

    def ended(self) -> None:
        """Note that an outermost backward pass has ended."""
        dealt.note_use()
        if self.is_reaching and not self._is_pushed:
            self._note_batch()
            self._reached = True
            self._ends.append(len(self._seen))
            if self.is_new:
                self._numbers.append(float(self.given or 0))
                self.is_new = False
        self.is_reaching = self._is_pushed = False

    def forget(self) -> None:
        """Note that the gradients of all passes since the last push were dropped: their samples do not count."""
        if self._reached:
            del self._seen[: self._ends[-1]]
            self._ends, self._numbers, self._batches, self._is_dealt, self._reached = [], [], [], True, False
            if self._losses is not None:
                self._losses.forget()

    def _note_batch(self) -> None:
        """Note the batch that the loop has now."""
        if self._told is not None and self._told not in self._seen:
            self._seen.append(self._told)
        batch = dealt.newest(self._newest, self._batch)
        if batch is None:
            self._is_dealt = False
        elif batch not in self._batches:
            self._batches.append(batch)
            self._batch = batch

    # ---- a push ----------------------------------------------------------------------------------------------------

    def take(
        self, has_gradients: Callable[[], bool] = lambda: True, repeats: Callable[[], bool] = lambda: False
    ) -> Count:
        """Return the samples of the push that begins now.

        If no backward pass has reached a parameter, it asks whether any has a gradient, and whether these are those of
        the last push.
        """
        dealt.note_use()
        reached = self._reached or self.is_reaching
        if self.given is not None:
            count = self._known(self._told_number(float(self.given)), "given")
        elif not reached and self.last is not None and has_gradients() and repeats():
            count = self.last
        elif reached or has_gradients():
            if self.is_reaching or not reached:
                self._note_batch()
            count = self._count([*self._seen, *self._pending])
        else:
            count = Count(0.0, 0.0)
        self._is_pushed, self._reached = self.is_reaching, False
        self._seen, self._pending, self._ends, self._numbers, self.is_new = [], [], [], [], False
        self._newest, self._batches, self._is_dealt = dealt.count(), [], True
        self._rows, self.last = count.rows or self._rows, count
        if self._losses is not None:
            self._losses.forget()
        return count

    def _told_number(self, given: float) -> float:
        """Return the samples of a push, as the script has told them, and note those of its passes."""
        if self.is_new and self.is_reaching:
            self._numbers.append(given)
        numbers = [given] if not self._numbers or (self.is_new and not self.is_reaching) else self._numbers
        self.taken.append(numbers)
        return sum(numbers)

    def _known(self, samples: float, way: m.Way) -> Count:
        """Return the count of a push whose number of samples is certain."""
        if self.weigh == "equal":
            return Count(float(samples > 0), samples, "equal" if samples else "")
        if self._losses is not None and samples and way != "given":
            return Count(self._losses.number(), samples, "loss")
        return Count(samples, samples, way if samples else "")

    def _count(self, calls: list[Tally]) -> Count:
        certain, rows, opaque = 0.0 if calls else None, 0.0, ""
        parts: tuple[object, ...] = ()
        for one in calls:
            certain = None if certain is None or one.samples is None else certain + one.samples
            rows, opaque, parts = rows + one.rows, opaque or one.opaque, parts + one.parts
        if self._batches and self._is_dealt and certain != 0:
            number = float(sum(one.samples for one in self._batches))
            if not number or certain is None or self.batch_dim is None:
                return self._known(number, "dealt")
        if certain is not None:
            cuts = [0, *self._ends, len(calls)]
            parts_of = [calls[begin:end] for begin, end in pairwise(cuts) if end > begin]
            self.taken.append([float(sum(one.samples or 0 for one in part)) for part in parts_of])
            return self._known(certain, "inputs")
        rows = rows or self._rows
        if self._losses is not None:
            return Count(self._losses.number(), rows, "loss")
        if self.weigh == "equal":
            return Count(1.0, rows, "equal")
        if not calls:
            return Count(1.0, rows, "unknown", "", "no call of the model was seen")
        if opaque:
            why = f"the size of a {opaque} among the inputs of the model is not known"
            return Count(1.0, rows, "unknown", "", why)
        text = text_of(parts)
        dim = self.batch_dim
        why = "batch_dim is not set" if dim is None else f"inputs {text} do not agree on dimension {dim}"
        return Count(1.0, rows, "unknown", text, why)


# ---- one call of a model ------------------------------------------------------------------------------------------

#: Inputs that hold at most one sample each. Inputs of other types, without a shape, may hold any number.
_PLAIN = (
    str, bytes, int, float, complex, type(None), type, range, slice, FunctionType, Enum, torch.dtype, torch.device,
)  # fmt: skip


#: Characters of a text of shapes.
_LONGEST = 200


@dataclass(frozen=True, eq=False)
class Tally:
    """The samples in one call of a model, or in one batch.

    Attributes:
        samples: how many, where that is certain, else None.
        parts: shapes of the tensors, and types of all else.
        rows: a guess, for speeds only.
        opaque: type of an input whose size is not seen; empty: there is none.
    """

    samples: int | None
    parts: tuple[object, ...]
    rows: int
    opaque: str = ""


def tally(inputs: Any, batch_dim: int | None) -> Tally:
    """Return the tally of one call's inputs, nested or not; the user may have said which dimension counts samples."""
    leaves = _leaves(inputs)
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    own = {size for size in map(_own_size, leaves) if size is not None}
    dim = batch_dim or 0
    sizes = [one.shape[dim] for one in tensors if not one.is_nested and one.dim() > dim]
    found = set() if batch_dim is None else own | set(sizes)
    samples = found.pop() if len(found) == 1 else None
    if tensors and not own and not any(one.numel() for one in tensors):
        samples = 0  # all tensors are empty, whichever dimension counts samples
    rows = samples if samples is not None else next(iter([*own, *sizes]), 0)
    parts = tuple(map(_part, leaves))
    opaque = next((type(one).__name__ for one, part in zip(leaves, parts, strict=True) if part is None), "")
    return Tally(samples, parts, rows, opaque)


def tensors_in(inputs: Any) -> list[torch.Tensor]:
    """Return the tensors in nested lists, tuples, mappings and dataclasses, in order."""
    leaves = _leaves(inputs)
    return [one.data if isinstance(one, PackedSequence) else one for one in leaves if isinstance(one, _TENSORS)]


def sizes_of(inputs: Sequence[Any]) -> set[int]:
    """Return all numbers of samples that the inputs of a model may have: sizes of first dimensions, and of lists."""
    rows = {one.shape[0] for one in tensors_in(inputs) if one.dim()}
    own = {size for size in map(_own_size, _leaves(inputs)) if size is not None}
    return rows | own | {len(one) for one in inputs if isinstance(one, list | tuple)}


def hides_tensors(outputs: Any) -> bool:
    """Return whether there is an object that is not searched for tensors."""
    return any(not isinstance(leaf, (*_TENSORS, *_PLAIN)) for leaf in _leaves(outputs))


_TENSORS = (torch.Tensor, PackedSequence)


def _leaves(inputs: Any) -> list[Any]:
    """Return the items of nested lists, tuples, mappings and dataclasses, in order."""
    found: list[Any] = []
    _collect(inputs, found)
    return found


def _collect(one: Any, found: list[Any]) -> None:
    if isinstance(one, _TENSORS):
        found.append(one)
    elif isinstance(one, list | tuple | deque):
        for part in one:
            _collect(part, found)
    elif isinstance(one, Mapping):
        for part in one.values():
            _collect(part, found)
    elif dataclasses.is_dataclass(one) and not isinstance(one, type):
        for part in vars(one).values():
            _collect(part, found)
    else:
        found.append(one)


def _own_size(leaf: Any) -> int | None:
    """Return how many samples something has that knows it by itself."""
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    return leaf.size(0) if isinstance(leaf, torch.Tensor) and leaf.is_nested else None


def _part(leaf: Any) -> object:
    """Return the shape of an input, or its type if it has none; None: its size is not known."""
    if isinstance(leaf, PackedSequence):
        return leaf.data.shape
    if isinstance(leaf, torch.Tensor):
        return (leaf.size(0),) if leaf.is_nested else leaf.shape
    if isinstance(leaf, _PLAIN):
        return type(leaf).__name__
    shape = getattr(leaf, "shape", None)  # of an array
    return shape if isinstance(shape, tuple) else None


@lru_cache
def text_of(parts: tuple[object, ...]) -> str:
    """Return the shapes of all inputs as text: the same text if and only if workers have the same shapes."""
    texts = []
    for part, number in Counter(parts).items():
        text = str(list(part) if isinstance(part, tuple) else part)
        texts.append(text if number == 1 else f"{number} x {text}")
    text = ", ".join(texts)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... (crc {zlib.crc32(text.encode()):08x})"
