"""PyTorch Lightning (``lightning`` ≥ 2.5, the extra ``lightning``): ``Trainer(strategy=PacelineStrategy())``.

Lightning's loops need no change. ``paceline launch`` starts a job's workers, not Lightning.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec
import safetensors.torch as safetensors
import torch

from paceline import config
from paceline.errors import MissingExtraError, PacelineError

try:
    import lightning.pytorch as pl
except ImportError:
    raise MissingExtraError("paceline.lightning needs lightning: pip install 'paceline[lightning]'") from None
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy

from paceline.kvstore import create
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.observe import reports, tracking
from paceline.observe.job_view import JobView
from paceline.optim import DistributedOptimizer
from paceline.wire import messages as m
from paceline.worker.current import current_session

#: Modules whose parameters push. Copies of them do not push.
_trained: weakref.WeakSet[pl.LightningModule] = weakref.WeakSet()

_REDUCTIONS = {
    "mean": lambda stacked: stacked.mean(0),
    "avg": lambda stacked: stacked.mean(0),
    "sum": lambda stacked: stacked.sum(0),
    "min": lambda stacked: stacked.amin(0),
    "max": lambda stacked: stacked.amax(0),
}


class PacelineEnvironment(ClusterEnvironment):
    """Gives Lightning this process's rank and the number of workers, from the paceline job."""

    def __init__(self) -> None:
        self._settings = config.from_environment()

    @property
    def creates_processes_externally(self) -> bool:
        """True: ``paceline launch`` has started them."""
        return True

    @property
    def main_address(self) -> str:
        """Address of the rendezvous of ``torch.distributed``; paceline does not use it."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Port of :attr:`main_address`."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return whether this process is a worker of a job."""
        settings = config.from_environment()
        return bool(settings.scheduler) and settings.role == "worker"

    def world_size(self) -> int:
        """Return the number of workers; 1 outside of a job."""
        return self._settings.num_workers if self.detect() else 1

    def set_world_size(self, size: int) -> None:
        """Do nothing: the job sets the size."""

    def global_rank(self) -> int:
        """Return this worker's rank. Joins the job if only the scheduler knows the rank."""
        if not self.detect():
            return 0
        return self._settings.rank if self._settings.rank >= 0 else current_session().rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the job sets the rank."""

    def local_rank(self) -> int:
        """Return this worker's index among the workers of its host."""
        return self._settings.local_rank

    def node_rank(self) -> int:
        """Return 0: paceline does not number hosts."""
        return 0


class PacelineStrategy(ParallelStrategy):
    """Trains a LightningModule on all workers of a job: its optimizers become :class:`DistributedOptimizer`.

    Ranks are the job's, so rank 0 logs and writes checkpoints, and Lightning gives every worker its part of the
    samples (``DistributedSampler``). ``sync_dist=True``, ``all_gather``, early stopping and the choice of checkpoints
    exchange values through the scheduler. These may be a few numbers, not tensors of the size of a model. Metrics of
    ``torchmetrics`` only synchronise through ``torch.distributed``, so here each worker has its own.

    If ``Trainer(devices=...)`` names several devices, a worker uses the device of its local rank. In a loop with
    ``dist_sync`` everything that Lightning does between backward and step (clipping, accumulation, manual optimization)
    means the same as with ``strategy="ddp"``. With other store types each worker clips its own gradients.

    Rank 0 gives the loggers of the Trainer the figures of the job, every ``log_every_n_steps``: samples per second, the
    parts of a step, and what scripts report, named ``paceline/...`` (docs/observing.md). The panel knows the Trainer's
    last step, and tells how long it still takes.

    Args:
        kvstore: a store, or the type of one. A store of one process (``local``) has a single worker.
        accelerator: as for Lightning's own strategies.
        checkpoint_io: as for Lightning's own strategies.
        precision_plugin: as for Lightning's own strategies.
        **options: options of every :class:`DistributedOptimizer`: ``update``, ``compression``, ``on_nan`` and others.
    """

    strategy_name = "paceline"

    def __init__(
        self,
        kvstore: str | KVStoreBase = "dist_sync",
        *,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **options: Any,
    ) -> None:
        super().__init__(accelerator, None, PacelineEnvironment(), checkpoint_io, precision_plugin)
        for name in {"model", "named_parameters", "samples"} & set(options):
            raise ValueError(f"the strategy sets {name}; leave it out")
        self._kvstore, self._options = kvstore, options
        self._store: KVStoreBase | None = kvstore if isinstance(kvstore, KVStoreBase) else None
        self._last_step: float | None = None
        """The last step of the present ``fit``, infinite where it is not known; None before the first step."""
        self._logged_at = -1
        self.set_world_ranks()

    # ---- properties ------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning must distribute the samples over the workers."""
        return self.world_size > 1

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank % len(devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments that select this worker's part of the samples."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Set the rank in Lightning's ``rank_zero_only``."""
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @property
    def store(self) -> KVStoreBase:
        """The store of this worker; joins the job at the first use."""
        if self._store is None:
            assert isinstance(self._kvstore, str)
            self._store = create(self._kvstore)
            if self._store.num_workers != self.world_size:
                raise MisconfigurationException(
                    f"a {self._store.type} store has {self._store.num_workers} workers, but the job has "
                    f"{self.world_size}; use a distributed store, as in PacelineStrategy('dist_sync')"
                )
        return self._store

    # ---- setting up ------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Join the job."""
        super().setup_environment()
        self.store  # noqa: B018 - an error about the job must be raised before the data is prepared

    def model_to_device(self) -> None:
        """Move the module to this worker's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Create the module's optimizers, and wrap them.

        Raises:
            PacelineError: the module was trained by another ``fit`` in this process, whose hooks it still has.
        """
        super().setup_optimizers(trainer)
        module = self.lightning_module
        assert module is not None
        if module in _trained:
            raise PacelineError(
                "this module was trained by fit already, and its parameters still push to the store of that fit; "
                "create a new module, load its weights from the checkpoint, and fit that"
            )
        _trained.add(module)
        self._last_step, self._logged_at = None, -1
        self.optimizers = [
            DistributedOptimizer(one, self.store, model=module, **self._options) for one in self.optimizers
        ]
        for one in self.optimizers:
            # Schedulers watch the module's optimizer, which never steps if the servers step.
            one.inner._opt_called = True  # type: ignore[attr-defined]

    # ---- a step ----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, and count the samples of its batch."""
        batch = args[0] if args else next(iter(kwargs.values()), None)
        for one in self.optimizers:
            if isinstance(one, DistributedOptimizer) and not isinstance(batch, Iterator):  # reading would consume it
                one.count(batch)
        module = self.lightning_module
        if module is not None and PacelineEnvironment.detect():
            self._tell_how_far(module)
            if self.global_rank == 0 and module.trainer.loggers:
                self._log_job(module.trainer)
        return super().training_step(*args, **kwargs)

    def _tell_how_far(self, module: pl.LightningModule) -> None:
        if self._last_step is None:
            self._last_step = math.inf  # optimizers that the module steps by hand make several steps of a batch
            if module.automatic_optimization:
                with contextlib.suppress(MisconfigurationException):  # accumulation that changes from epoch to epoch
                    self._last_step = module.trainer.estimated_stepping_batches
        if 0 < self._last_step < math.inf:
            reports.report(step=module.trainer.global_step, total=int(self._last_step))

    def _log_job(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        if step == self._logged_at or step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        self._logged_at = step
        status = current_session().call_scheduler(m.AskStatus(), "asking for the status")
        assert isinstance(status, m.Status)
        job = {name: value for name, (_, value) in status.figures.items()}
        figures = {f"paceline/{name}": value for name, value in (job | tracking.overview(JobView(status))[1]).items()}
        for logger in trainer.loggers if figures else ():
            logger.log_metrics(figures, step)

    # ---- between workers -------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers. Meanwhile no process waits for pushes of this worker."""
        stores = {id(one): one for one in (getattr(two, "kvstore", None) for two in self.optimizers)}
        for store in stores.values():
            if isinstance(store, DistStore):
                store.barrier()
        if self.is_distributed and not stores:
            _gather(f"lightning/barrier/{name or ''}", b"")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of worker ``src``: plain data (numbers, text, lists and dictionaries of them).

        Raises:
            TypeError: other data; no object is ever unpickled.
        """
        if not self.is_distributed:
            return obj
        payload = b""
        if self.global_rank == src:
            try:
                payload = msgspec.msgpack.encode(obj)
            except (TypeError, OverflowError) as error:
                raise TypeError(f"PacelineStrategy broadcasts plain data only: {error}") from error
        return msgspec.msgpack.decode(_gather("lightning/broadcast", payload)[src])

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all workers, stacked by rank. It has no gradient.

        Raises:
            ValueError: ``sync_grads`` is True.
        """
        if sync_grads:
            raise ValueError("PacelineStrategy gathers values, not gradients; sync_grads=True is not possible")
        if not self.is_distributed:
            return tensor
        payload = safetensors.save({"value": tensor.detach().cpu().contiguous()})
        found = [safetensors.load(one)["value"] for one in _gather("lightning/tensor", payload) if one]
        return torch.stack(found).to(tensor.device)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, sum, minimum or maximum over the workers; all have the same weight.

        Raises:
            ValueError: another operation.
        """
        if not self.is_distributed or not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(getattr(reduce_op, "name", reduce_op) or "mean").rpartition(".")[2].lower()
        if name not in _REDUCTIONS:
            raise ValueError(f"reduce_op is {reduce_op!r}; PacelineStrategy knows {', '.join(_REDUCTIONS)}")
        found = self.all_gather(tensor)
        if name in ("mean", "avg") and not found.is_floating_point():
            found = found.float()
        return _REDUCTIONS[name](found)


def _gather(name: str, payload: bytes) -> list[bytes]:
    """Return the payloads of all workers, by rank. Meanwhile no process waits for pushes of this worker."""
    session = current_session()
    session.stores.pause()
    return session.gather(name, payload)
