"""Callbacks of ``Module.fit``."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.errors import MissingExtraError
from paceline.mx.module import BatchCallback, BatchEnd, EpochCallback, EpochEnd
from paceline.naming import absent

logger = logging.getLogger(__name__)


class Speedometer:
    """Logs samples per second of this worker, and the metrics, every ``frequent`` batches.

    Args:
        batch_size: samples per batch; None uses the real size of each batch.
        frequent: batches between two lines.
        auto_reset: reset the metrics after every line, as MXNet does. Then the metrics that ``fit`` returns for the
            epoch cover only the batches after the last line.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        batch_size: int | None = None,
        frequent: int = 50,
        auto_reset: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if frequent < 1:
            raise ValueError(f"frequent is {frequent}; it must be at least 1")
        self._batch_size, self._frequent, self._auto_reset, self._clock = batch_size, frequent, auto_reset, clock
        self._since: float | None = None
        self._samples = 0
        self.speed = float("nan")
        """Samples per second, as last logged."""

    def __call__(self, param: BatchEnd) -> None:
        """Count one batch."""
        if param.nbatch == 0 or self._since is None:
            self._since, self._samples = self._clock(), 0
            return
        self._samples += self._batch_size or param.batch_size
        if param.nbatch % self._frequent:
            return
        now = self._clock()
        self.speed = self._samples / max(now - self._since, 1e-9)
        values = "".join(f"\t{name}={value:f}" for name, value in param.eval_metric.get_name_value())
        first = param.nbatch - self._frequent
        logger.info(
            "Epoch[%d] Batch [%d-%d]\tSpeed: %.2f samples/sec%s", param.epoch, first, param.nbatch, self.speed, values
        )
        if self._auto_reset:
            param.eval_metric.reset()
        self._since, self._samples = now, 0


def do_checkpoint(
    prefix: str | os.PathLike[str], period: int = 1, save_optimizer_states: bool = False
) -> EpochCallback:
    """Return an epoch callback that saves the model every ``period`` epochs, on rank 0 only.

    Args:
        prefix: path of the files without ``-0001.safetensors``.
        period: epochs between two checkpoints.
        save_optimizer_states: save the optimizer's state too.
    """
    if period < 1:
        raise ValueError(f"period is {period}; it must be at least 1")

    def callback(param: EpochEnd) -> None:
        if (param.epoch + 1) % period == 0 and param.module.rank == 0:
            param.module.save_checkpoint(prefix, param.epoch + 1, save_optimizer_states)

    return callback


def log_train_metric(period: int, auto_reset: bool = False) -> BatchCallback:
    """Return a batch callback that logs the metrics every ``period`` batches; with ``auto_reset`` resets them then."""
    if period < 1:
        raise ValueError(f"period is {period}; it must be at least 1")

    def callback(param: BatchEnd) -> None:
        if param.nbatch % period == 0:
            for name, value in param.eval_metric.get_name_value():
                logger.info("Iter[%d] Batch[%d] Train-%s=%f", param.epoch, param.nbatch, name, value)
            if auto_reset:
                param.eval_metric.reset()

    return callback


class ProgressBar:
    """Shows a bar per epoch on the terminal.

    Args:
        total: batches per epoch.
        **options: options of ``rich.progress.Progress``.
    """

    def __init__(self, total: int, **options: Any) -> None:
        from rich.progress import Progress

        self._total, self._progress = total, Progress(**options)
        self._tasks: dict[int, Any] = {}

    def __call__(self, param: BatchEnd) -> None:
        """Count one batch."""
        if param.epoch not in self._tasks:
            self._progress.start()
            self._tasks[param.epoch] = self._progress.add_task(f"epoch {param.epoch}", total=self._total)
        self._progress.update(self._tasks[param.epoch], completed=param.nbatch + 1)
        if param.nbatch + 1 >= self._total:
            self._progress.stop()


class TensorBoard:
    """Writes metrics for TensorBoard; give it as an epoch callback.

    Args:
        logging_dir: folder of the event files.
        prefix: first part of the names of the curves.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, logging_dir: str | os.PathLike[str], prefix: str = "") -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError("TensorBoard needs tensorboard: pip install 'paceline[tensorboard]'") from None
        self._writer: Any = SummaryWriter(os.fspath(logging_dir))
        self._prefix = f"{prefix}/" if prefix else ""

    def __call__(self, param: EpochEnd) -> None:
        """Write the metrics of one epoch."""
        for kind, values in (("train", param.train), ("eval", param.evaluation)):
            for name, value in values.items():
                self._writer.add_scalar(f"{self._prefix}{kind}/{name}", value, param.epoch)
        self._writer.flush()


if not TYPE_CHECKING:  # a checker knows the names above, and no others
    _NAMES = ("Speedometer", "do_checkpoint", "log_train_metric", "ProgressBar", "TensorBoard")
    _INSTEAD = {
        "LogValidationMetricsCallback": "fit(eval_data=...), which logs them after every epoch",
        "module_checkpoint": "do_checkpoint(prefix, period, save_optimizer_states)",
    }
    __getattr__ = absent(__name__, _NAMES, _INSTEAD)
