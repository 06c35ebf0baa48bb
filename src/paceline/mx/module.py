"""MXNet's ``Module``: a training loop over several devices in one call."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional
from torch import nn

from paceline.kvstore.base import KVStore, KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.layout.tensors import as_tensor
from paceline.mx.batch import BatchResult, BatchRunner, Loss, Slicer, WorkLoad, size_of, total_loss
from paceline.mx.context import ContextLike, cpu
from paceline.mx.gluon.optimizer_plan import OptimizerLike
from paceline.mx.gluon.replicate import replicate
from paceline.mx.gluon.trainer import Trainer
from paceline.mx.init import Initializer
from paceline.mx.io import as_pair, data_of
from paceline.mx.metric import CompositeEvalMetric, EvalMetric, MetricLike
from paceline.mx.model_files import load_model, model_path, save_model, states_path

if TYPE_CHECKING:
    from paceline.compression import Compression

logger = logging.getLogger(__name__)

Batches = Iterable[Any]

#: Key of the number of samples.
_SAMPLES = "samples of the batch"


@dataclass(frozen=True)
class BatchEnd:
    """Argument of batch callbacks."""

    epoch: int
    nbatch: int
    """Number of the batch in its epoch, from 0."""
    batch_size: int
    eval_metric: CompositeEvalMetric
    module: Module


@dataclass(frozen=True)
class EpochEnd:
    """Argument of epoch callbacks; ``fit`` returns one per epoch."""

    epoch: int
    seconds: float
    """Time spent on training, without evaluation."""
    train: dict[str, float]
    """Metrics over the training batches."""
    evaluation: dict[str, float]
    """Metrics over ``eval_data``, if there is any."""
    module: Module = field(repr=False)


BatchCallback: TypeAlias = Callable[[BatchEnd], None]
EpochCallback: TypeAlias = Callable[[EpochEnd], None]


def cross_entropy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of every sample: the default loss of a ``Module``."""
    return torch.nn.functional.cross_entropy(output, label, reduction="none")


class Module:
    """A model, its devices and its training loop.

    Batches are tuples ``(data, label)`` from any iterable, such as a ``DataLoader``, or from :mod:`paceline.mx.io`;
    data may be a tuple of inputs.

    Args:
        net: any module, also a lazy one; it becomes the replica of the first device.
        context: one device or several.
        work_load_list: how to split batches over the devices: weights (``[3, 1]``); ``"auto"`` to measure the devices
            from the first batches on and keep adjusting; or None for equal parts.
        loss: ``loss(output, label)``: one value per sample, or a scalar that is the mean over samples.
        fixed_param_names: names, or regular expressions of names, of parameters that are not trained.
        compression_params: gradient compression, see :class:`Trainer`.

    Raises:
        ValueError: a device or name does not exist, or the weights do not match the devices.
    """

    def __init__(
        self,
        net: nn.Module,
        context: ContextLike | Sequence[ContextLike] = cpu(),  # noqa: B008  # immutable
        work_load_list: WorkLoad = None,
        loss: Loss = cross_entropy,
        fixed_param_names: Sequence[str] | None = None,
        compression_params: Compression | None = None,
    ) -> None:
        self.net = replicate(net, context)
        self._slicer = Slicer(self.net.contexts, work_load_list)
        self._loss = loss
        self._compression = compression_params
        self._runner = BatchRunner(self.net, loss, self._slicer)
        self._trainer: Trainer | None = None
        self._given: tuple[OptimizerLike, Mapping[str, Any] | None] = "", None
        self._states_to_load: str | None = None
        self._last: BatchResult | None = None
        self._fix(fixed_param_names or ())

    @property
    def shares(self) -> tuple[float, ...] | None:
        """The current share of each device with ``work_load_list="auto"``, else None."""
        return None if self._slicer.planner is None else self._slicer.planner.shares

    @property
    def trainer(self) -> Trainer:
        """The trainer.

        Raises:
            ValueError: ``init_optimizer`` has not been called.
        """
        if self._trainer is None:
            raise ValueError("the module has no optimizer yet; call init_optimizer or fit")
        return self._trainer

    @property
    def rank(self) -> int:
        """This worker's rank in a distributed store, else 0."""
        store = self._trainer.kvstore if self._trainer is not None else None
        return 0 if store is None else store.rank

    def init_optimizer(
        self,
        kvstore: str | KVStoreBase | None = "local",
        optimizer: OptimizerLike = "sgd",
        optimizer_params: Mapping[str, Any] | None = None,
        force_init: bool = False,
    ) -> None:
        """Choose store and optimizer. Does nothing the second time unless ``force_init``, and says so if they differ.

        Args:
            kvstore: a store type, a store, or None.
            optimizer: a name, a class, or an instance made from the parameters of the net.
            optimizer_params: options; by default a learning rate of 0.01 for names and classes.
            force_init: replace an existing store and optimizer.
        """
        given = isinstance(optimizer, torch.optim.Optimizer)
        options = optimizer_params if optimizer_params is not None or given else {"learning_rate": 0.01}
        if self._trainer is not None and not force_init:
            if self._given != (optimizer, options):
                logger.warning(
                    "the module goes on with the optimizer that it has, %r with %r: force_init=True makes %r with %r",
                    *self._given, optimizer, options,
                )  # fmt: skip
            return
        self._given = optimizer, options
        self._trainer = _MeanTrainer(self.net, optimizer, options, kvstore, self._compression)

    def init_params(self, initializer: Initializer) -> None:
        """Set new values of all parameters; see :meth:`ParameterDict.initialize`."""
        self.net.initialize(initializer)

    def forward_backward(self, data: Any, label: Any = None) -> list[Any]:
        """Compute the gradients of one batch (data and labels, or a ``DataBatch``); returns every device's output."""
        self._last = self._runner.run(*as_pair(data if label is None else (data, label)))
        return self._last.outputs

    def update_metric(self, eval_metric: EvalMetric, labels: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Add the outputs of the last batch to a metric."""
        output = _join(self._done().outputs)
        eval_metric.update(torch.cat([as_tensor(one) for one in _as_list(labels)])[: len(output)], output)

    def update(self, batch_size: int | None = None) -> None:
        """Update the parameters from the gradients of a batch of ``batch_size`` samples, by default the last one.

        The update is the mean over the samples of all workers in lock step, whose batches may differ in size.
        """
        batch_size = self._done().batch_size if batch_size is None else batch_size
        if self._states_to_load is not None:
            self.trainer.load_states(self._states_to_load, options=False)
            self._states_to_load = None
        self.trainer.step(self._divisor(batch_size))

    def fit(
        self,
        train_data: Batches,
        eval_data: Batches | None = None,
        eval_metric: MetricLike = "accuracy",
        epoch_end_callback: EpochCallback | Sequence[EpochCallback] | None = None,
        batch_end_callback: BatchCallback | Sequence[BatchCallback] | None = None,
        kvstore: str | KVStoreBase | None = "local",
        optimizer: OptimizerLike = "sgd",
        optimizer_params: Mapping[str, Any] | None = None,
        begin_epoch: int = 0,
        num_epoch: int = 1,
        validation_metric: MetricLike | None = None,
        force_init: bool = False,
        initializer: Initializer | None = None,
    ) -> list[EpochEnd]:
        """Train.

        Args:
            train_data: batches of one epoch; iterated once per epoch.
            eval_data: batches for :meth:`score` after every epoch.
            eval_metric: metrics on the training batches (see :class:`CompositeEvalMetric`).
            epoch_end_callback: called with an :class:`EpochEnd` after every epoch.
            batch_end_callback: called with a :class:`BatchEnd` after every batch.
            kvstore: see :meth:`init_optimizer`.
            optimizer: see :meth:`init_optimizer`.
            optimizer_params: see :meth:`init_optimizer`.
            begin_epoch: number of the first epoch; above 0 when training resumes from a checkpoint.
            num_epoch: number of the last epoch, plus 1.
            validation_metric: metrics on ``eval_data``; by default new metrics with the names in ``eval_metric``.
            force_init: replace the optimizer and store of an earlier ``fit``.
            initializer: sets the parameters before the first ``fit``; None keeps the net's.

        Returns:
            One result per epoch.

        Raises:
            ValueError: a wrong argument, or a batch too small for the devices.
            PacelineError: the loss became NaN or infinite.
        """
        if not 0 <= begin_epoch <= num_epoch:
            raise ValueError(f"begin_epoch {begin_epoch} and num_epoch {num_epoch}: 0 <= begin_epoch <= num_epoch")
        metric = CompositeEvalMetric(eval_metric)
        if initializer is not None and self._trainer is None:
            self.init_params(initializer)
        self.init_optimizer(kvstore, optimizer, optimizer_params, force_init)
        history = []
        for epoch in range(begin_epoch, num_epoch):
            start = time.perf_counter()
            train = self._train_epoch(epoch, train_data, metric, _as_list(batch_end_callback))
            seconds = time.perf_counter() - start
            scores = [] if eval_data is None else self.score(eval_data, validation_metric or eval_metric)
            history.append(EpochEnd(epoch, seconds, train, dict(scores), self))
            _log(history[-1])
            for callback in _as_list(epoch_end_callback):
                callback(history[-1])
        return history

    @torch.no_grad()
    def score(
        self, eval_data: Batches, eval_metric: MetricLike = "accuracy", num_batch: int | None = None
    ) -> list[tuple[str, float]]:
        """Return metrics over batches, computed in evaluation mode by all devices.

        Args:
            eval_data: batches ``(data, label)``.
            eval_metric: see :class:`CompositeEvalMetric`.
            num_batch: stop after this many batches.
        """
        metric = CompositeEvalMetric(eval_metric)
        metric.reset()
        for data, label in map(as_pair, itertools.islice(eval_data, num_batch)):
            output = self._evaluate(data)
            target = as_tensor(label).to(output.device)
            mean = total_loss(self._loss(output, target), len(target)) / len(target)
            metric.update(target, output, mean)
        return metric.get_name_value()

    @torch.no_grad()
    def predict(self, eval_data: Batches, num_batch: int | None = None) -> torch.Tensor:
        """Return the model's outputs in evaluation mode, on the CPU.

        Args:
            eval_data: batches ``(data, ...)``, of which only data is used, or batches of data alone.
            num_batch: stop after this many batches.

        Returns:
            The outputs of all batches, concatenated.
        """
        outputs = [self._evaluate(data_of(batch)).cpu() for batch in itertools.islice(eval_data, num_batch)]
        return torch.cat(outputs) if outputs else torch.empty(0, dtype=torch.float32, device="cpu")

    def save_checkpoint(self, prefix: str | os.PathLike[str], epoch: int, save_optimizer_states: bool = False) -> None:
        """Write ``<prefix>-0007.safetensors`` (and ``.states``) for epoch 7.

        With several workers, call it on one of them. With ``save_optimizer_states`` and compressed gradients call it on
        all workers, because each holds residuals (see :meth:`Trainer.save_states`).
        """
        states = states_path(prefix, epoch) if save_optimizer_states else None
        if states is not None:
            self.trainer.save_states(states)
        save_model(model_path(prefix, epoch), self.net.state_dict(), epoch, states)

    @classmethod
    def load(
        cls,
        prefix: str | os.PathLike[str],
        epoch: int,
        net: nn.Module,
        load_optimizer_states: bool = False,
        **options: Any,
    ) -> Module:
        """Make a module from a checkpoint.

        Args:
            prefix: as given to :meth:`save_checkpoint`.
            epoch: the checkpoint's epoch.
            net: a module of the same architecture; its values are replaced.
            load_optimizer_states: load the optimizer's state too, when ``init_optimizer`` or ``fit`` is called.
            **options: the other arguments of :class:`Module`.

        Raises:
            CheckpointNotFoundError: no such checkpoint.
            CheckpointError: the file is damaged.
        """
        states = states_path(prefix, epoch) if load_optimizer_states else None
        state = load_model(model_path(prefix, epoch), states)
        module = cls(net, **options)
        module.net.load_state_dict(state)
        module._states_to_load = None if states is None else os.fspath(states)
        return module

    def _done(self) -> BatchResult:
        if self._last is None:
            raise ValueError("the module has no outputs yet; call forward_backward")
        return self._last

    def _fix(self, names: Sequence[str]) -> None:
        for name in names:
            fixed = [param for key, param in self.net.collect_params().items() if re.fullmatch(name, key)]
            if not fixed:
                raise ValueError(f"fixed_param_names: {name!r} matches none of {', '.join(self.net.collect_params())}")
            for param in fixed:
                param.grad_req = "null"

    def _divisor(self, batch_size: int) -> float:
        """Return by how much this worker's sum over samples is divided.

        Servers weigh the means of the workers by their samples. Other stores sum, so that is all workers' samples.
        """
        store = self.trainer.kvstore
        if store is None or store.num_workers == 1 or isinstance(store, DistStore):
            return batch_size
        if isinstance(store, KVStore):
            return batch_size * store.num_workers
        total = torch.tensor([batch_size], dtype=torch.float64, device="cpu")
        store.pushpull(_SAMPLES, total)
        return float(total)

    def _train_epoch(
        self, epoch: int, batches: Batches, metric: CompositeEvalMetric, callbacks: Sequence[BatchCallback]
    ) -> dict[str, float]:
        metric.reset()
        self.net.train()
        for nbatch, (data, label) in enumerate(map(as_pair, batches)):
            with _noting(f"in batch {nbatch} of epoch {epoch}"):
                done = self._runner.run(data, label)
            self.update(done.batch_size)
            output = _join(done.outputs)
            metric.update(as_tensor(label).to(output.device), output, done.mean_loss)
            for callback in callbacks:
                callback(BatchEnd(epoch, nbatch, done.batch_size, metric, self))
        return dict(metric.get_name_value())

    def _sizes(self, batch_size: int) -> list[int] | None:
        """Return samples per device, or None for a batch that is too small for all of them."""
        try:
            return self._slicer.sizes(batch_size)
        except ValueError:
            return None

    def _evaluate(self, data: Any) -> torch.Tensor:
        modes = [replica.training for replica in self.net.replicas]
        inputs = data if isinstance(data, tuple | list) else (data,)
        sizes = self._sizes(size_of(data))
        self.net.eval()
        try:
            if sizes is None:
                return self.net(*(one.to(self.net.contexts[0].device) for one in inputs))  # type: ignore[no-any-return]
            return _join(self.net(*(self._slicer.cut(one, sizes) for one in inputs)))
        finally:
            for replica, mode in zip(self.net.replicas, modes, strict=False):
                replica.train(mode)


class _MeanTrainer(Trainer):
    _averages = True


@contextlib.contextmanager
def _noting(where: str) -> Iterator[None]:
    """Add a note to errors of the user's model and loss. This is the border to code that may raise anything."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


def _join(outputs: Sequence[Any]) -> torch.Tensor:
    """Concatenate the outputs of all devices on the first device. If a model has several outputs, use the first."""
    firsts = [one[0] if isinstance(one, tuple | list) else one for one in outputs]
    return firsts[0].detach() if len(firsts) == 1 else torch.cat([one.detach().to(firsts[0].device) for one in firsts])


def _as_list(given: Any) -> list[Any]:
    """Return several things, one, or None, as a list."""
    return list(given) if isinstance(given, Sequence) else [] if given is None else [given]


def _log(end: EpochEnd) -> None:
    for kind, values in (("Train", end.train), ("Validation", end.evaluation)):
        for name, value in values.items():
            logger.info("Epoch[%d] %s-%s=%f", end.epoch, kind, name, value)
    logger.info("Epoch[%d] Time cost=%.3f", end.epoch, end.seconds)
