"""``paceline trace`` and ``paceline story`` of a real job."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import paceline
from paceline.cli import main
from paceline.config import Settings
from paceline.net.security import new_job_key
from paceline.observe import ring
from paceline.observe.events import ROUND
from paceline.testing import LocalJob, Worker
from tests.observe.test_event_order import checked


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def train(stop):
    """Train until there is a file."""
    store = paceline.kvstore.create("dist_sync")
    model = torch.nn.Linear(16, 4)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), kvstore=store, model=model)
    while not Path(stop).exists():
        time.sleep(0.05 if store.rank == 1 else 0.01)
        optimizer.zero_grad()
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()


def await_rounds(job: LocalJob) -> list[Worker]:
    """Wait until the workers have made some rounds, as their rings say."""
    path = ring.folder_of("test", job.job_key)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [one for one in ring.rings(path) if sum(event.kind == ROUND for event in one[1]) > 3]
        if len(found) == job.num_workers:
            return job.workers
        time.sleep(0.1)
    raise TimeoutError(job.report())


def arrows_by_sql(path: Path) -> Counter[str]:
    """Return the arrows of all flows by the names of their ends, from Perfetto's own SQL."""
    from perfetto.trace_processor import TraceProcessor

    try:
        made = TraceProcessor(trace=str(path))
    except Exception as error:  # noqa: BLE001 - the package fetches its program when it is first used
        pytest.skip(f"Perfetto's trace_processor does not run here: {error}")
    with made as processor:
        query = """select one.name as begin, two.name as end from flow
            join slice as one on slice_out = one.id join slice as two on slice_in = two.id"""
        return Counter(f"{_kind(one.begin)} > {_kind(one.end)}" for one in processor.query(query))


def _kind(name: str) -> str:
    return " ".join(name.split()[:2])


def test_running_job_is_traced_and_a_killed_one_has_a_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop, path = tmp_path / "stop", tmp_path / "out" / "trace.json"
    with LocalJob(2, 1, heartbeat_interval_s=0.1) as job:
        job.start_all(train, str(stop))
        workers = await_rounds(job)
        monkeypatch.setenv("PACELINE_JOB_KEY", job.job_key)
        words = ["--scheduler", job.address, "--rounds", "3", "-o", str(path), "--per-rank", str(tmp_path / "ranks")]
        assert main(["trace", *words]) == 0, job.report()
        assert "clocks aligned to 0 us" in capsys.readouterr().out
        workers[1].kill()
        for one in workers:
            one.wait(60.0)
    trace = json.loads(path.read_text())
    phases = checked(trace["traceEvents"])
    assert phases["s"] == phases["f"] == trace["paceline"]["flows"] >= 6
    names = [one["name"] for one in trace["traceEvents"] if one["ph"] == "X"]
    assert names.count("wait for worker 1") >= 3
    assert {"compute", "send", "copy", "merge", "apply", "wait for server 0"} <= set(names)
    ranks = [json.loads(one.read_text()) for one in sorted((tmp_path / "ranks").iterdir())]
    assert [one["distributedInfo"]["rank"] for one in ranks] == [0, 1]
    assert main(["story", "test"]) == 0
    told = capsys.readouterr().out
    assert "worker 1   its last event: it has ended without a goodbye" in told
    assert "hears that worker 1 died" in told
    if importlib.util.find_spec("perfetto"):
        ways = ("push to > push of", "push of > answer to", "answer to > answer of")
        assert arrows_by_sql(path) == dict.fromkeys(ways, trace["paceline"]["flows"])


def test_story_names_the_hosts_whose_events_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    ring.note_hosts("j1", "key", ["node7"])
    ring.note_hosts("j2", "key", [])
    assert main(["story"]) == 0
    told = "missing here: the events of its processes on node7; try: ssh node7 paceline story j1\n"
    assert capsys.readouterr().out == told


def test_story_needs_one_job(capsys: pytest.CaptureFixture[str]) -> None:
    for job in ("ab1", "ab2"):
        ring.note_hosts(job, "key", [job])
    assert main(["story", "ab"]) == 1
    assert "several jobs begin with 'ab': ab1, ab2; name one" in capsys.readouterr().err
    assert main(["story", "ab1"]) == 0
    assert "on ab1;" in capsys.readouterr().out


def test_starts_of_a_job_have_stories_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    key = new_job_key()
    for restart in range(2):
        ring.start(Settings(job_id="j1", job_key=key, restart=restart))
        if not restart:
            ring.note(ROUND, 7)
        ring.stop()
    assert main(["story"]) == 0
    assert (
        "job j1, start 1 (others: --start 0), its processes on this host; there are no events yet\n"
        in capsys.readouterr().out
    )
    assert main(["story", "j1", "--start", "0"]) == 0
    told = capsys.readouterr().out
    assert "job j1, start 0 (others: --start 1), its processes on this host; the last event was at 20" in told
    assert "begins to push round 7" in told
    assert main(["story", "j1", "--start", "2"]) == 1
    assert "no events of start 2 of job j1 are on this host; there are [0, 1]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["story"], "no events of any job are on this host"),
        (["story", "x"], "no events of job 'x' are on this host"),
        (["story", "a", "b"], "one job at a time, not a and b"),
        (["trace", "a", "b"], "one job at a time, not a and b"),
        (["trace"], "no job of yours runs on this machine"),
        (["trace", "--rounds", "0"], "--rounds"),
        (["trace", "--rounds", "10001"], "--rounds: 10001 is too large; it is at most 10000"),
        (["trace", "--timeout", "3601"], "--timeout: 3601 is too large; it is at most 3600"),
        (["trace", "--merge", "/nowhere"], "--merge /nowhere: "),
    ],
)
def test_command_that_cannot_work_says_why(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) in (1, 2)
    assert error in capsys.readouterr().err


def test_profile_without_an_end_of_lists_in_lists_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = 1_000_000  # Python 3.12 and later take some thousands
    (tmp_path / "deep.json").write_text(f"{deep * '['}{deep * ']'}")
    assert main(["trace", "--merge", str(tmp_path / "deep.json")]) == 2
    assert re.search("deep.json: (maximum recursion depth exceeded|Stack overflow)", capsys.readouterr().err)
