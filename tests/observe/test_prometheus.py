"""The figures of a job as Prometheus reads them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import paceline
from paceline.observe.account import COMPUTE, DATA, SERVER_PARTS, WORKER_PARTS
from paceline.observe.job_view import JobView
from paceline.observe.prometheus import METRICS, text
from paceline.observe.verdicts import Verdict
from paceline.wire import messages as m

DASHBOARD = Path(paceline.__file__).parents[2] / "docs" / "grafana.json"


def member(role: str, rank: int, host: str = "h") -> m.Member:
    return m.Member(role, rank, 0, host, "", 1, "tcp://1.2.3.4:5", b"secret")


def state(role: str, round: int, samples: float, phase: str = "live") -> m.MemberState:
    parts = [0] * len(WORKER_PARTS if role == "worker" else SERVER_PARTS)
    parts[DATA], parts[COMPUTE] = 1_500_000, 250_000
    whole = [m.Window(1, round, samples, parts)]
    figures = {"val/loss": (round, 0.25)} if role == "worker" else {}
    return m.MemberState(round, 1.0, 0.5, 2**20, 10, 20, phase, "", 0.1, whole, whole, figures)


def example() -> str:
    members = [member("server", 0), member("worker", 0), member("worker", 1, 'a"b\\c\nd')]
    states = [state("server", 0, 40.0), state("worker", 7, 320.0), state("worker", 5, 80.0, "dead")]
    deaths = [m.Death("worker", 1, "h", "it was killed")]
    slow = [Verdict(0, "h", "data", DATA, 2.5, 0.8, 3, 10.0)]
    job = JobView(m.Status(members, states, deaths, figures={"val/loss": (7, 0.125)}))
    return text(job, slow, "job1", "0.1.0", 1e9)


def test_every_metric_has_its_samples() -> None:
    lines = example().splitlines()
    for line in (
        'paceline_build_info{version="0.1.0",job="job1"} 1',
        'paceline_members{role="worker",state="dead"} 1',
        'paceline_members{role="worker",state="live"} 1',
        'paceline_deaths_total{role="worker"} 1',
        'paceline_deaths_total{role="server"} 0',
        'paceline_worker_rounds_total{rank="0",host="h"} 7',
        'paceline_worker_samples_total{rank="0",host="h"} 320.0',
        'paceline_worker_samples_total{rank="1",host="a\\"b\\\\c\\nd"} 80.0',
        'paceline_worker_step_seconds_total{rank="0",host="h",part="data"} 1.5',
        'paceline_server_updates_total{rank="0",host="h"} 40.0',
        'paceline_server_seconds_total{rank="0",host="h",part="merge"} 0.25',
        'paceline_network_transmit_bytes_total{role="worker",rank="0",host="h"} 10',
        'paceline_last_heartbeat_timestamp_seconds{role="worker",rank="0",host="h"} 999999999.5',
        'paceline_slowdown_ratio{role="worker",rank="0",host="h",cause="data"} 2.5',
        'paceline_reported{name="val/loss"} 0.125',
        'paceline_worker_reported{rank="0",host="h",name="val/loss"} 0.25',
    ):
        assert line in lines
    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} == set(METRICS)


def test_time_of_a_worker_is_the_sum_of_its_parts() -> None:
    found = re.findall(r'paceline_worker_step_seconds_total\{rank="0",host="h",part="\w+"\} (\S+)', example())
    assert len(found) == len(WORKER_PARTS)
    assert sum(map(float, found)) == 1.75


def test_nothing_secret_and_no_address_is_shown() -> None:
    assert "secret" not in example()
    assert "1.2.3.4" not in example()


def test_job_that_nobody_has_joined_has_a_text() -> None:
    assert 'paceline_deaths_total{role="worker"} 0' in text(JobView(m.Status([], [], [])), [], "job1", "0.1.0", 0.0)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: nox -s trackers")
def test_promtool_finds_nothing_to_complain_about() -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=example(), check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_dashboard_shows_metrics_that_exist() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    shown = {name for one in expressions for name in re.findall(r"paceline_\w+", one)}
    assert len(panels) >= 8
    assert shown <= set(METRICS)
    rates = [one for one in expressions if "_total" in one]
    assert rates
    assert all(re.search(r"(rate|increase)\(paceline_\w+_total", one) for one in rates)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: nox -s trackers")
def test_promtool_reads_the_expressions_of_the_dashboard(tmp_path: Path) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"].replace("$__rate_interval", "1m") for one in panels for target in one["targets"]]
    rules = [{"record": f"rule{number}", "expr": one} for number, one in enumerate(expressions)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    command = ["promtool", "check", "rules", str(tmp_path / "rules.yml")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"{len(rules)} rules found" in done.stdout
