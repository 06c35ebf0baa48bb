"""Trackers of packages, read back with these packages' own readers. ``nox -s trackers`` installs all of them."""

from __future__ import annotations

import http.server
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline import extensions
from paceline.errors import MissingExtraError
from paceline.observe.tracking import TrackerThread, make

FIGURES = [({"loss": 0.5, "throughput/samples_per_sec": 400.0}, 3), ({"accuracy": 0.75}, 1), ({"loss": 0.25}, 4)]


def track(spec: str, caplog: pytest.LogCaptureFixture) -> None:
    """Give the figures to a tool, and wait until it is closed."""
    thread = TrackerThread(spec, "job1")
    for figures, step in FIGURES:
        thread.put(figures, step)
    thread.close(120.0)
    assert [one.getMessage() for one in caplog.records if "--report-to" in one.getMessage()] == []


def test_tensorboard_reads_the_event_files_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    track(f"tensorboard:{tmp_path}", caplog)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    read = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert read == {"loss": [(3, 0.5), (4, 0.25)], "accuracy": [(1, 0.75)], "throughput/samples_per_sec": [(3, 400.0)]}


def test_package_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for absent in ("nowhere", "nowhere.at.all"):
        monkeypatch.setattr(extensions.find("tracker", "tensorboard"), "package", absent)
        with pytest.raises(MissingExtraError, match=rf"needs {absent}: pip install 'paceline\[tensorboard\]'"):
            make("tensorboard")


def log_records(log: bytes, header: int = 7, block: int = 32768) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's form: parts with CRC, length and type, of which 1 and 4 end a record."""
    data, at = b"", header
    while at + 7 <= len(log):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        data, at = data + log[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            yield data
            data = b""


def rows_of(file: Path) -> list[dict[str, float]]:
    """Return the figures of each step in a file of wandb's."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for data in log_records(file.read_bytes()):
        found = [(one.key or "/".join(one.nested_key), one.value_json) for one in Record.FromString(data).history.item]
        rows += [{key: json.loads(value) for key, value in found if not key.startswith("_")}] if found else []
    return rows


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb: nox -s trackers")
def test_wandb_keeps_a_run_without_an_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    track("wandb:digits", caplog)
    [file] = tmp_path.rglob("*.wandb")
    rows, deadline = rows_of(file), time.monotonic() + 30.0
    while len(rows) < len(FIGURES) and time.monotonic() < deadline:  # a process of wandb's writes them
        time.sleep(0.1)
        rows = rows_of(file)
    assert rows == [{**figures, "step": step} for figures, step in FIGURES]


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs mlflow: nox -s trackers")
def test_mlflow_keeps_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "runs").as_uri()
    track(f"mlflow:{uri}", caplog)
    client = MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("paceline").experiment_id])
    assert (run.info.run_name, run.info.status) == ("job1", "FINISHED")
    assert [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "loss")] == [
        (3, 0.5),
        (4, 0.25),
    ]
    assert run.data.metrics["throughput/samples_per_sec"] == 400.0


@pytest.mark.skipif(find_spec("trackio") is None, reason="needs trackio: nox -s trackers")
def test_trackio_keeps_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    track("trackio:digits", caplog)
    [file] = [one for one in tmp_path.rglob("*.db") if one.name.startswith("digits")]
    with sqlite3.connect(file) as base:
        rows = base.execute("select step, metrics from metrics order by id").fetchall()
    read = [(step, json.loads(text)) for step, text in rows]
    assert read == [(step, figures) for figures, step in FIGURES]


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what OpenTelemetry sends."""

    bodies: list[bytes]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[str]:
    Collector.bodies = []
    server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/metrics"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.skipif(find_spec("opentelemetry") is None, reason="needs OpenTelemetry: nox -s trackers")
def test_collector_of_opentelemetry_gets_the_last_figures(
    collector: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    track(f"otlp:{collector}", caplog)
    request = ExportMetricsServiceRequest()
    request.ParseFromString(Collector.bodies[-1])
    [resource] = request.resource_metrics
    names = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("paceline", "job1")
    read = {one.name: one.gauge.data_points[0].as_double for one in resource.scope_metrics[0].metrics}
    assert read.pop("paceline.step") in (4.0, 0.0)  # an integer, or a double
    assert read == {
        "paceline.loss": 0.25,
        "paceline.accuracy": 0.75,
        "paceline.throughput.samples_per_sec": 400.0,
    }
