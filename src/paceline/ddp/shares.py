"""``paceline launch --ddp --shares measured``: an unchanged DDP script whose workers get samples by measured speed.

The global batches stay those of the script: batch k of all ranks together, in the order of its ``DistributedSampler``,
with the same repeated samples and the same rules of ``drop_last``. Only the cut of each global batch among the workers
changes. Each rank's gradient, a mean over its own n samples, counts n / N in the sum of all ranks, N being the size of
the global batch: the sum is the gradient of one process with the joined batch. Shares follow speeds as in
:class:`paceline.data.SharedBatchSampler`.

| plug point | does |
|---|---|
| ``BatchSampler.__iter__``, over a ``DistributedSampler`` that shuffles | deals the parts of this worker |
| the forward pass of a DDP model | notes the part that it computes, and checks that it is all of it |
| the backward pass from its outputs | weights the gradients that it adds like that part |
| ``torch.autograd.backward`` | has the loss: a warning says once that it grows with the batch, as a sum does |
| DDP's hook for communication | weights gradients; with some, exchanges speeds and places |

Every exchange says which batch of which walk over the loader a worker has computed, and how many it has dealt. So all
workers must be at the same one, and new shares hold from the first batch that no worker has dealt yet. Samplers that do
not shuffle, and loops in ``torch.no_grad``, get equal parts as always: evaluation gathers tensors of equal sizes.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DistributedSampler

from paceline.data import dealt
from paceline.data.fetching import Dealing
from paceline.errors import ConfigError, PacelineError
from paceline.hetero import Shares, Speed, SpeedMeter
from paceline.hetero.batch_shares import columns_of
from paceline.membership.loss_growth import LossGrowth
from paceline.optim.samples import hides_tensors, sizes_of, tensors_in
from paceline.torch_hooks.losses import HeardLosses
from paceline.worker.session import Session

logger = logging.getLogger(__name__)

#: Places and speeds are exchanged at each of the first exchanges of gradients, then at every second one.
_FIRST, _INTERVAL = 8, 2

#: Samples that a worker needs for batch normalisation: of one alone, the variance is not known.
_LEAST_TO_NORMALISE = 2

_OUT = "; leave out --shares measured"

_register_comm_hook = DistributedDataParallel.register_comm_hook


class _Walk:
    """One walk of this worker over a loader.

    Attributes:
        number: among the walks that were trained on, which all workers number alike; -1: this one was not yet.
        dealt: batches that were dealt.
        follows: its shares follow speeds.
    """

    def __init__(self, shares: Shares, follows: bool) -> None:
        self.shares, self.follows, self.number, self.dealt = shares, follows, -1, 0
        self._plan = [(0, dict(shares.samples))]

    def follow(self, first: int) -> None:
        """Take the present shares from a batch on."""
        self._plan.append((first, dict(self.shares.samples)))

    def samples(self) -> dict[int, int]:
        """Return the samples of each worker in the batch that is dealt next."""
        return next(samples for first, samples in reversed(self._plan) if first <= self.dealt)


class _Part(int):
    """A number of samples: the part of a global batch that this worker gets, and its place."""

    whole: int
    walk: _Walk
    index: int

    @property
    def weight(self) -> float:
        """The weight of the mean over these samples in the mean over the global batch."""
        return self / self.whole


class _Model:
    """A DDP model.

    Attributes:
        computed: the part of the last forward pass; or why that is not certain.
        part: the part whose weight its gradients have; None: none were computed since the last exchange.
        task: the backward pass that has computed them.
        exchanges: exchanges of all its gradients so far.
    """

    def __init__(self) -> None:
        self.computed: _Part | str = ""
        self.part: _Part | None = None
        self.task, self.exchanges = -1, 0


class MeasuredShares:
    """Deals samples by measured speed, and weights gradients by samples."""

    def __init__(self, session: Session) -> None:
        self._session, self._size = session, len(session.workers)
        session.trains(has_measured_shares=True)
        self._meter, self._measured = SpeedMeter(), 0
        self._samples = 0
        """Samples whose gradients were computed since the last round."""
        self._step = (0.0, 0.0)
        """Samples and seconds of the rounds on the last batches: several optimizers may step on one."""
        self._models: WeakKeyDictionary[DistributedDataParallel, _Model] = WeakKeyDictionary()
        self._shares: WeakKeyDictionary[BatchSampler, Shares] = WeakKeyDictionary()
        self._last: Shares | None = None
        """The shares of the loader that was trained on last."""
        self._walks = self._exchanges = 0
        self._batch: dealt.DealtBatch | None = None
        self._counted: _Part | None = None
        """The last part that was counted."""
        self._losses, self._growth, self._has_grown = HeardLosses(), LossGrowth(), False
        self._notes: tuple[Any, list[torch.Tensor], _Part] | None = None
        """The exchange of notes that is under way."""
        self._least = 1
        """Samples that each worker gets, if there are as many."""

    def install(self) -> None:
        """Let the plug points of PyTorch call this object, in place of an earlier one."""
        global _current
        if _current is None:
            BatchSampler.__iter__ = _dealing(BatchSampler.__iter__)  # type: ignore[method-assign]
            for name in ("register_comm_hook", "_register_builtin_comm_hook"):
                setattr(DistributedDataParallel, name, _refused(getattr(DistributedDataParallel, name)))
        _current = self

    # ---- models ----------------------------------------------------------------------------------------------------

    def check(self, module: torch.nn.Module) -> None:
        """Check a module before DDP takes it.

        Raises:
            ConfigError: its gradients cannot be exact.
        """
        kinds = {type(one) for one in module.modules()}
        if any(issubclass(one, torch.nn.SyncBatchNorm) for one in kinds):
            raise ConfigError(
                "--shares measured cannot be exact with SyncBatchNorm, whose backward pass takes batches of all ranks "
                f"for equally large; use BatchNorm or GroupNorm{_OUT}"
            )
        if any(issubclass(one, _BatchNorm) for one in kinds) and self._least < _LEAST_TO_NORMALISE:
            self._least = _LEAST_TO_NORMALISE
            logger.warning("BatchNorm normalises by each worker's own batch, as under DDP; these have unlike sizes now")

    def take_model(self, model: DistributedDataParallel) -> _Model:
        """Weight the gradients of a model; returns its state.

        Raises:
            ConfigError: not all workers train it.
        """
        if dist.get_world_size(model.process_group) != self._size:
            raise ConfigError(f"--shares measured needs DDP over all {self._size} workers, not a part of them{_OUT}")
        found = self._models[model] = _Model()
        _register_comm_hook(model, model, _exchanged)
        return found

    def before_forward(self, model: DistributedDataParallel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the batch that a forward pass computes.

        Raises:
            ConfigError: the model trains, and it is not certain how many of the samples of the job these are.
        """
        # A copy, as that of a moving average, has no hook, and was never taken.
        state = self._models.get(model) or self.take_model(model)
        state.computed = self._part_of(args, kwargs)
        if isinstance(state.computed, str) and model.module.training:
            raise ConfigError(state.computed)

    def _part_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Part | str:
        """Return the part that inputs are; or why that is not certain."""
        newest = 0 if self._batch is None else self._batch.number
        batch = dealt.newest(newest, self._batch)
        if batch is None or not isinstance(batch.samples, _Part):
            return (
                "--shares measured has not dealt the batch that this forward pass computes: the loader needs a "
                "DistributedSampler of torch with shuffle=True, and batch_size; batches of one loader at a time. "
                f"With another loader, take paceline.data.SharedBatchSampler and paceline.DistributedOptimizer{_OUT}"
            )
        part, self._batch = batch.samples, batch
        rows = sizes_of((*args, *kwargs.values()))
        if int(part) not in rows:
            return (
                f"this worker's part of the batch is {int(part)} samples, and its model was called with inputs of "
                f"{sorted(rows)} rows: --shares measured needs whole batches in each forward pass, samples along the "
                f"first dimension, and a loop that reads no batches ahead{_OUT}"
            )
        return part

    def after_forward(self, model: DistributedDataParallel, outputs: Any) -> None:
        """Be told when a backward pass comes to the outputs of a forward pass, where autograd is on."""
        state = self._models[model]
        part = state.computed
        nodes = {one.grad_fn for one in tensors_in(outputs) if one.grad_fn is not None}
        passes: list[tuple[int, int]] = []
        for node in nodes:
            node.register_prehook(lambda *_: self._begin(model, state, part, passes))
        if not nodes and hides_tensors(outputs) and isinstance(part, _Part):
            self._begin(model, state, part, passes)

    def _begin(self, model: torch.nn.Module, state: _Model, part: _Part | str, passes: list[tuple[int, int]]) -> None:
        """Note that the gradients of a part are computed from now on.

        ``passes`` becomes the first backward pass through that forward pass, and the exchanges before it.

        Raises:
            ConfigError: they could not be weighted.
        """
        if isinstance(part, str):
            raise ConfigError(part)
        task = torch._C._current_graph_task_id()
        if not passes:
            passes.append((task, state.exchanges))
        elif passes[0][0] != task and passes[0][1] != state.exchanges:
            raise ConfigError(
                "a second backward pass goes through a forward pass whose gradients are exchanged already, and DDP "
                "does not exchange them again: ranks would step unlike. Add up the losses, and call backward() once"
            )
        if state.part is not None and state.part is not part:
            if task == state.task >= 0:
                raise ConfigError(
                    "one backward pass computes the gradients of two batches, whose parts weigh unlike; with --shares "
                    f"measured call backward() for each, all but the last with no_sync() around both passes{_OUT}"
                )
            _rescale(model, state.part.weight / part.weight)
        state.part, state.task = part, task
        if part.walk.number < 0:
            self._walks += 1
            part.walk.number = self._walks
            self._last = part.walk.shares if part.walk.follows else self._last
        self._count(part)

    def _count(self, part: _Part) -> None:
        if part is self._counted:
            return
        self._counted, self._samples = part, self._samples + part
        if self._step[0]:  # all optimizers have stepped on the last batch
            self._meter.add(*self._step)
        self._step = (0.0, 0.0)

    # ---- exchanges -------------------------------------------------------------------------------------------------

    def exchange(self, model: DistributedDataParallel, bucket: Any) -> Any:
        """Sum the weighted gradients of all ranks.

        Raises:
            ConfigError: the weight is not known.
        """
        state, gradients, group = self._models[model], bucket.buffer(), model.process_group
        part = state.part
        if part is None:
            raise ConfigError(
                "--shares measured has seen no forward pass of the DDP model before this backward pass; with "
                f"torch.compile, wrap the compiled model: DistributedDataParallel(torch.compile(model)){_OUT}"
            )
        if bucket.index() == 0:
            self._exchanges += 1
            if self._exchanges <= _FIRST or self._exchanges % _INTERVAL == 0:
                self._tell(group, part)
            self._losses.forget()
        if bucket.is_last():
            state.part, state.exchanges = None, state.exchanges + 1
        work = dist.all_reduce(gradients.mul_(part.weight), group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def _tell(self, group: Any, part: _Part) -> None:
        self._take_notes()
        own = self._meter.speed() or Speed(0.0, 0.0)
        walk = part.walk
        loss = self._losses.take(part)
        told = math.nan if loss is None else loss
        note = [walk.number, part.index, part.whole, int(part), walk.dealt, own.fixed_s, own.per_sample_s, told]
        mine = torch.tensor(note, dtype=torch.float64, device="cpu")
        table = [torch.empty_like(mine) for _ in range(self._size)]
        self._notes = dist.all_gather(table, mine, group=group, async_op=True), table, part

    def _take_notes(self) -> None:
        """Follow the speeds of the last exchange.

        Raises:
            PacelineError: the workers are not at the same batch.
        """
        if self._notes is None:
            return
        (work, table, part), self._notes = self._notes, None
        work.wait()
        notes = [one.tolist() for one in table]
        if len({tuple(note[:3]) for note in notes}) > 1 or sum(note[3] for note in notes) != part.whole:
            told = "; ".join(f"rank {rank}: {n:g} samples of batch {index:g} of walk {walk:g}"
                             for rank, (walk, index, _, n, *_) in enumerate(notes))  # fmt: skip
            raise PacelineError(
                f"the workers train on parts of unlike batches ({told}), and --shares measured weights parts of one: "
                f"every worker must walk the loader alike{_OUT}"
            )
        self._compare_losses({rank: (note[3], note[7]) for rank, note in enumerate(notes) if note[7] == note[7]})
        speeds = {rank: Speed(*note[5:7]) for rank, note in enumerate(notes) if note[6] > 0}
        if part.walk.follows and part.walk.shares.revise(speeds):
            part.walk.follow(round(max(note[4] for note in notes)))

    def _compare_losses(self, batches: Mapping[int, tuple[float, float]]) -> None:
        """Let rank 0 say, once, that losses grow with the parts: gradients are weighted as those of means."""
        grows = "" if self._has_grown or self._session.rank else self._growth.note(batches)
        if grows:
            self._has_grown = True
            logger.warning(
                "losses grow with the batch, as sums over samples do: %s. --shares measured weights gradients as those "
                "of means: take reduction='mean', or divide the sum by the samples of the batch (len(x))%s",
                grows,
                _OUT,
            )

    def end_round(self, rounds: int) -> None:
        """Note the time of a round; one without samples is a further step on the batches of the one before."""
        samples, self._samples = self._samples, 0
        self._session.note_round(rounds, float(samples) or 1.0)
        pace = self._session.pace
        if pace.rounds > self._measured:
            self._measured = pace.rounds
            self._step = (self._step[0] + samples, self._step[1] + pace.steps[-1].seconds)

    # ---- loaders ---------------------------------------------------------------------------------------------------

    def deals(self, batches: BatchSampler) -> bool:
        """Tell whether the batches of a loader are cut by speed."""
        one = batches.sampler
        if not isinstance(one, DistributedSampler) or type(one).__iter__ is not DistributedSampler.__iter__:
            return False
        return one.shuffle and one.num_replicas == self._size and torch.is_grad_enabled()

    def walk(self, batches: BatchSampler) -> Iterator[list[int]]:
        """Deal this worker's part of every global batch."""
        self._take_notes()
        trains = any(model.module.training for model in self._models)
        walk = _Walk(self._shares_of(batches, trains), trains)
        order, whole = _order(batches.sampler), walk.shares.global_batch
        stop = len(order) - (len(order) % whole if batches.drop_last else 0)
        with Dealing(batches) as dealing:
            for first in range(0, stop, whole):
                self._take_notes()
                samples, left = walk.samples(), min(whole, stop - first)
                begin, end = columns_of(samples, left, self._least)[self._session.rank]
                part = _Part(end - begin)
                part.whole, part.walk, part.index = left, walk, walk.dealt
                walk.dealt += 1
                dealing.deal(part)
                yield order[first + begin : first + end]

    def _shares_of(self, batches: BatchSampler, trains: bool) -> Shares:
        """Return the shares of a loader: of a new one, those of the loader that was trained on last."""
        whole, equal = batches.batch_size * self._size, [1] * self._size
        if not trains:
            return Shares(whole, equal)
        if batches not in self._shares:
            self._shares[batches] = Shares(whole, equal if self._last is None else list(self._last.samples.values()))
        return self._shares[batches]


def _exchanged(model, bucket):  # type: ignore[no-untyped-def] # PyTorch refuses annotations that are text
    """Sum weighted gradients: DDP's hook, which a model that is copied or pickled takes along."""
    assert _current is not None
    return _current.exchange(model, bucket)


def _rescale(model: torch.nn.Module, factor: float) -> None:
    """Let the gradients of earlier passes count as if the weight of the next one were theirs."""
    for one in model.parameters():
        if one.grad is not None and factor != 1:
            one.grad.mul_(factor)


def _order(sampler: Any) -> list[int]:
    """Return the indices of all ranks, in the order of the global batches."""
    whole = copy.copy(sampler)
    whole.rank, whole.num_replicas, whole.num_samples = 0, 1, sampler.total_size
    return list(DistributedSampler.__iter__(whole))


_current: MeasuredShares | None = None


def _dealing(original: Callable[[BatchSampler], Iterator[list[int]]]) -> Callable[[BatchSampler], Iterator[list[int]]]:
    @functools.wraps(original)
    def batches(self: BatchSampler) -> Iterator[list[int]]:
        is_ours = _current is not None and _current.deals(self)
        return _current.walk(self) if _current is not None and is_ours else original(self)

    return batches


def _refused(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def register(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            "--shares measured has a communication hook of its own, which weights gradients by samples, and DDP takes "
            "one; leave out the script's hook, or --shares measured"
        )

    return register
