"""Trackers: tools that keep the figures of a job, by name (``paceline launch --report-to NAME:TARGET``).

| name | target | default target |
|---|---|---|
| ``jsonl`` | path of a file: a JSON object per step | ``paceline-JOB.jsonl`` |
| ``csv`` | path of a file: a line per figure and step (``time,step,name,value``) | ``paceline-JOB.csv`` |
| ``tensorboard`` | a folder of event files | ``runs/paceline-JOB`` |
| ``wandb`` | a project; ``WANDB_*`` set the rest, ``WANDB_MODE=offline`` needs no account | ``paceline`` |
| ``trackio`` | a project; ``TRACKIO_*`` set the rest | ``paceline`` |
| ``mlflow`` | a tracking URI | ``MLFLOW_TRACKING_URI``, or MLflow's default |
| ``otlp`` | the URL to which metrics are sent over HTTP | ``OTEL_EXPORTER_OTLP_*``, or OpenTelemetry's default |

All but the first two need a package of their own, each an extra of paceline. The
packages are imported by the thread of the tracker, after the job has started.
Your own class is found by ``paceline.register`` and by an entry point of the group ``paceline.trackers``.

:mod:`paceline.observe.tracking` runs them.
"""

from __future__ import annotations

import csv
import importlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib.util import find_spec
from typing import IO, Any, ClassVar

from paceline import extensions
from paceline.errors import MissingExtraError


class Tracker(ABC):
    """A tool that keeps figures. All methods but the constructor are called by one thread.

    Args:
        target: the text after the name and its colon; empty: the default target.

    Raises:
        MissingExtraError: its package is not installed. The job then does not start.
    """

    name: ClassVar[str] = ""

    def __init__(self, target: str = "") -> None:
        self.target = target

    @abstractmethod
    def start(self, job: str) -> None:
        """Open the tool. ``job`` is the job's id."""

    @abstractmethod
    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Keep figures of one step. Steps of one figure rise, unless a script begins to count anew."""

    def flush(self) -> None:  # noqa: B027 - most tools need none
        """Called when no more figures wait: logged figures must not get lost when the process is killed."""

    @abstractmethod
    def finish(self) -> None:
        """Close the tool at the end of the job."""


class _File(Tracker):
    """Writes lines to a file, each with the time in seconds since 1970."""

    _file: IO[str]

    def start(self, job: str) -> None:
        self._file = open(self.target or f"paceline-{job}.{self.name}", "a", newline="")  # noqa: SIM115

    def flush(self) -> None:
        self._file.flush()

    def finish(self) -> None:
        self._file.close()


@extensions.register("tracker")
class _Jsonl(_File):
    """A JSON object per step, in a line."""

    name = "jsonl"

    def log(self, figures: Mapping[str, float], step: int) -> None:
        own = {"time": round(time.time(), 3), "step": step}
        named = {f"figure/{name}" if name in own else name: value for name, value in figures.items()}
        self._file.write(json.dumps(own | named) + "\n")


@extensions.register("tracker")
class _Csv(_File):
    """A line per figure and step."""

    name = "csv"

    def start(self, job: str) -> None:
        super().start(job)
        self._rows = csv.writer(self._file)
        if self._file.tell() == 0:
            self._rows.writerow(["time", "step", "name", "value"])

    def log(self, figures: Mapping[str, float], step: int) -> None:
        now = round(time.time(), 3)
        self._rows.writerows([now, step, name, value] for name, value in figures.items())


# ---- trackers that need a package ------------------------------------------------------------------------------------


class _Packaged(Tracker):
    """A tracker of a package, which may be absent."""

    package: ClassVar[str]

    def __init__(self, target: str = "") -> None:
        super().__init__(target)
        try:
            is_there = find_spec(self.package) is not None
        except ModuleNotFoundError:  # a package around it is absent
            is_there = False
        if not is_there:
            extra = f"pip install 'paceline[{self.name}]'"
            raise MissingExtraError(f"--report-to {self.name} needs {self.package}: {extra}")


@extensions.register("tracker")
class _TensorBoardTracker(_Packaged):
    """Scalars in event files."""

    name, package = "tensorboard", "tensorboard"

    def start(self, job: str) -> None:
        self._proto = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(self.target or f"runs/paceline-{job}")

    def log(self, figures: Mapping[str, float], step: int) -> None:
        values = [self._proto.Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._proto.Summary(value=values)))

    def flush(self) -> None:
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


@extensions.register("tracker")
class _Wandb(_Packaged):
    """A run of Weights & Biases. Figures are shown over ``step``, since steps of different figures may differ."""

    name, package = "wandb", "wandb"

    def start(self, job: str) -> None:
        self._run = importlib.import_module("wandb").init(project=self.target or "paceline", name=job)
        self._run.define_metric("*", step_metric="step")

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log({**figures, "step": step})

    def finish(self) -> None:
        self._run.finish()


@extensions.register("tracker")
class _Trackio(_Packaged):
    """A run of trackio."""

    name, package = "trackio", "trackio"

    def start(self, job: str) -> None:
        self._run = importlib.import_module("trackio").init(project=self.target or "paceline", name=job, embed=False)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def finish(self) -> None:
        self._run.finish()


@extensions.register("tracker")
class _Mlflow(_Packaged):
    """A run of MLflow, in the experiment ``paceline``."""

    name, package = "mlflow", "mlflow"

    def start(self, job: str) -> None:
        self._entities = importlib.import_module("mlflow.entities")
        self._client = importlib.import_module("mlflow.tracking").MlflowClient(self.target or None)
        known = self._client.get_experiment_by_name("paceline")
        experiment = known.experiment_id if known else self._client.create_experiment("paceline")
        self._run: str = self._client.create_run(experiment, run_name=job).info.run_id

    def log(self, figures: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(self._run, [self._entities.Metric(*one, now, step) for one in figures.items()])

    def finish(self) -> None:
        self._client.set_terminated(self._run)


@extensions.register("tracker")
class _Otlp(_Packaged):
    """Gauges of OpenTelemetry, sent by OTLP over HTTP; ``paceline.step`` has the step of the last figures."""

    name, package = "otlp", "opentelemetry.exporter.otlp.proto.http"

    def start(self, job: str) -> None:
        metrics = importlib.import_module("opentelemetry.sdk.metrics")
        export = importlib.import_module("opentelemetry.sdk.metrics.export")
        http = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        resource = importlib.import_module("opentelemetry.sdk.resources").Resource.create(
            {"service.name": "paceline", "service.instance.id": job}
        )
        sender = http.OTLPMetricExporter(self.target or None)
        self._provider = metrics.MeterProvider([export.PeriodicExportingMetricReader(sender)], resource)
        self._meter = self._provider.get_meter("paceline")
        self._gauges: dict[str, Any] = {}

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for own, value in {**figures, "step": step}.items():
            name = "paceline." + own.replace("/", ".")
            if name not in self._gauges:
                self._gauges[name] = self._meter.create_gauge(name)
            self._gauges[name].set(value)

    def finish(self) -> None:
        self._provider.shutdown()
