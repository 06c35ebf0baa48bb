"""The figures of a job reach the user's tools."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.config import Settings
from paceline.errors import ConfigError
from paceline.membership import Membership
from paceline.scheduler.exports import Exports
from paceline.testing import LocalJob, listen, tell

STEPS, ACCURACY_STEP = 20, 7


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def test_report_that_the_disk_does_not_take_leaves_no_part_of_it(tmp_path: Path) -> None:
    code = f"""
import resource
from paceline.config import Settings
from paceline.membership import Membership
from paceline.scheduler.exports import Exports

settings = Settings(report={str(tmp_path / "job.html")!r})
exports = Exports(settings)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
exports.close(Membership(settings, 0.0, lambda: b"token"))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert "job.html of this job is not written: [Errno 27] File too large" in ended.stderr
    assert list(tmp_path.iterdir()) == []


# ---- start -----------------------------------------------------------------------------------------------------------


def test_unknown_tool_ends_the_start_of_the_job() -> None:
    with pytest.raises(ConfigError, match="unknown tool of --report-to 'jsonel'; did you mean 'jsonl'"):
        Exports(Settings(report_to="jsonel:a"))


@pytest.mark.parametrize(
    "given",
    [
        {"report": "/no/such/a.html"},
        {"report": "/"},
        {"report": "/dev/null"},
    ],
)
def test_page_that_cannot_be_ends_the_start_of_the_job(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(given))} "):
        Exports(Settings(**given))


# ---- a job -----------------------------------------------------------------------------------------------------------


def train() -> None:
    """Train with batches of 8 samples on rank 0 and of 24 on rank 1, and report."""
    store = paceline.kvstore.create("dist_sync")
    model = torch.nn.Linear(4, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), kvstore=store, model=model)
    samples = 8 if store.rank == 0 else 24
    for step in range(STEPS):
        optimizer.samples = samples
        optimizer.zero_grad()
        model(torch.ones(samples, 4)).mean().backward()
        optimizer.step()
        paceline.report(rank=store.rank, step=step)
    tell("trained")
    listen()
    paceline.report(accuracy=float(store.rank), step=ACCURACY_STEP)  # the last heartbeat brings it


@pytest.fixture
def job(tmp_path: Path) -> Iterator[LocalJob]:
    report_to = f"jsonl:{tmp_path / 'a.jsonl'}"
    more = {"dashboard": "0", "report": str(tmp_path / "job.html")}
    with LocalJob(2, 1, metrics="0", report_to=report_to, heartbeat_interval_s=0.1, **more) as made:
        for worker in made.start_all(train):
            worker.heard()
        yield made


def url_of(job: LocalJob) -> str:
    found = re.search(r"metrics of this job: (\S+)", job.scheduler.output)
    assert found is not None, job.scheduler.output
    return found[1]


def settled(read, is_good, timeout_s=60.0):
    """Return what ``read`` returns when it is good."""
    deadline = time.monotonic() + timeout_s
    while not is_good(found := read()):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def end(job: LocalJob) -> None:
    for worker in job.workers:
        worker.tell("go on")
    for worker in job.workers:
        worker.result()
    assert job.scheduler.wait(60.0) == 0, job.report()


def test_figures_of_a_job_are_served_and_kept(job: LocalJob, tmp_path: Path) -> None:
    line = f'paceline_worker_rounds_total{{rank="1",host="127.0.0.1"}} {STEPS}'
    text = settled(lambda: get(url_of(job)), lambda text: line in text and "paceline_reported{" in text)
    samples = {rank: float(re.search(rf'samples_total{{rank="{rank}".*}} (\S+)', text)[1]) for rank in (0, 1)}
    assert samples[1] == 3 * samples[0] > 0
    assert 'paceline_reported{name="rank"} 0.75' in text  # weighted by samples
    assert 'paceline_worker_reported{rank="1",host="127.0.0.1",name="rank"} 1.0' in text
    assert job.job_key not in text
    end(job)
    kept = [json.loads(one) for one in (tmp_path / "a.jsonl").read_text().splitlines()]
    ranks = {one["step"]: one["rank"] for one in kept if "rank" in one}
    assert ranks == dict.fromkeys(range(STEPS), 0.75)
    assert [(one["step"], one["accuracy"]) for one in kept if "accuracy" in one] == [(ACCURACY_STEP, 0.75)]
    last = kept[-1]
    assert last["worker/1/accuracy"] == 1.0


def history_of(page: str, is_good) -> Any:
    """Return the history that an open page has when its state is good."""
    with urllib.request.urlopen(page.replace("/?", "/events?"), timeout=30) as events:
        assert events.readline() == b"event: history\n"
        history = json.loads(events.readline().removeprefix(b"data: "))
        deadline = time.monotonic() + 60.0
        while not is_good(history["state"]):
            assert time.monotonic() < deadline, history["state"]
            line = events.readline()
            if line.startswith(b"data: "):
                history["state"] = json.loads(line.removeprefix(b"data: "))["state"]
    return history


def test_link_in_the_place_of_the_new_report_is_not_followed(tmp_path: Path) -> None:
    """Where the folder is open to all users, one of them could have others' files written over."""
    report, file = tmp_path / "job.html", tmp_path / "file"
    file.write_text("as it was")
    Path(f"{report}.new").symlink_to(file)
    settings = Settings(role="scheduler", job_id="j", report=str(report))
    Exports(settings).close(Membership(settings, 0.0, lambda: b""))
    assert file.read_text() == "as it was"
    assert not report.is_symlink()
    assert "<html" in report.read_text()


def test_page_and_report_have_the_figures_of_the_job(job: LocalJob, tmp_path: Path) -> None:
    [page] = re.findall(r"the page of this job: (\S+)", job.scheduler.output)

    def is_settled(state: Any) -> bool:
        rows = {row["name"]: row for row in state.get("rows", ())}
        told = len(rows) == 3 and rows["server 0"]["values"] > 0 and rows["worker 1"]["parts"] != {}
        return told and rows["worker 0"]["round"] == rows["worker 1"]["round"] == STEPS

    history = history_of(page, is_settled)
    rows = {row["name"]: row for row in history["state"]["rows"]}
    assert (rows["server 0"]["values"], rows["server 0"]["buckets"]) == (5, 1)
    assert job.job_key not in json.dumps(history)
    end(job)
    text = (tmp_path / "job.html").read_text()
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    report = json.loads(data)
    rows = {row["name"]: row for row in report["state"]["rows"]}
    assert {row["state"] for row in rows.values()} == {"left"}
    assert report["state"]["figures"]["accuracy"] == {"step": ACCURACY_STEP, "value": 0.75}
    assert report["state"]["cohorts"] == sum(row["came_last"] for row in rows.values()) == STEPS
    assert report["state"]["staleness"] == [[1, STEPS]]
    lane = report["lanes"]["worker 1"]
    assert sum(point[2][1] for point in [*lane["older"], *lane["recent"]]) == (STEPS - 1) * 24
    assert not (tmp_path / "job.html.new").exists()


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus: nox -s trackers")
def test_prometheus_scrapes_a_job(job: LocalJob, tmp_path: Path) -> None:
    target = url_of(job).split("/")[2]
    with socket.create_server(("127.0.0.1", 0)) as free:
        own = f"127.0.0.1:{free.getsockname()[1]}"
    config = {"scrape_configs": [{"job_name": "paceline", "static_configs": [{"targets": [target]}]}]}
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    words = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", f"--web.listen-address={own}"]
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(["prometheus", *words], cwd=tmp_path, stdout=log, stderr=log)
    try:
        query = f"http://{own}/api/v1/query?query=sum(paceline_worker_samples_total)"

        def read() -> list[str]:
            try:
                return [one["value"][1] for one in json.loads(get(query))["data"]["result"]]
            except OSError:  # it starts
                return []

        [total] = settled(read, lambda found: found and float(found[0]) >= (STEPS - 1) * 32)
        assert float(total) in ((STEPS - 1) * 32, STEPS * 32)
    finally:
        server.terminate()
        server.wait(30.0)
    end(job)
