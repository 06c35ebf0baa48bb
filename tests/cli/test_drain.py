"""Workers leave a running job, by ``paceline drain`` and by SIGTERM; the launcher's own SIGTERM ends all of it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.app import main
from tests.clusters import programs
from tests.clusters.fork_server import ForkedProcess

DEADLINE_S = 60.0

TRAINS = """
import os, sys, time, torch, paceline

store = paceline.kvstore.create("dist_sync")
model = torch.nn.Linear(2, 1)
optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), kvstore=store, model=model)
sampler = paceline.data.SharedBatchSampler(1_000_000, store, global_batch_size=8, shares="measured")
for number, indices in enumerate(sampler):
    model(torch.ones(len(indices), 2)).sum().backward()
    optimizer.step()
    if number == 2:
        print("trains", store.rank, os.getpid(), flush=True)
    time.sleep(0.02)
"""


class Job:
    """A job of four workers, and all that it has printed."""

    def __init__(self, process: ForkedProcess, path: Path) -> None:
        self.process, self.path = process, path

    def await_text(self, *texts: str) -> str:
        until = time.monotonic() + DEADLINE_S
        while not all(text in self.path.read_text() for text in texts):
            assert time.monotonic() < until, self.path.read_text()
            time.sleep(0.01)
        return self.path.read_text()

    def pid(self, rank: int) -> int:
        return next(int(line.split()[-1]) for line in self.path.read_text().splitlines() if f"trains {rank} " in line)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "train.py").write_text(TRAINS)
    words = ["-m", "paceline", "launch", "-n", "4", "-s", "1", "--", sys.executable, tmp_path / "train.py"]
    path = tmp_path / "output"
    with path.open("wb") as output, programs.started(words, output.fileno(), output.fileno()) as process:
        made = Job(process, path)
        made.await_text(*(f"trains {rank} " for rank in range(4)))
        yield made


def test_workers_leave_one_by_one_and_the_launchers_own_signal_ends_the_job(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    os.kill(job.pid(1), signal.SIGTERM)
    job.await_text("has left after round", ": SIGTERM")

    assert main(["drain", "2", "--why", "the machine is needed"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "worker 2 is to leave after its step"
    assert second.startswith("worker 2 has left after round ")
    job.await_text(": the machine is needed")

    assert main(["drain", "2"]) == 1
    assert "has left already" in capsys.readouterr().err
    assert main(["drain", "localhost"]) == 1
    assert "nobody would go on without workers 0, 3" in capsys.readouterr().err
    assert main(["drain"]) == 2
    assert main(["status"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in shown[1:6]] == ["live", "live", "left", "left", "live"]
    assert "ago: worker 1 left after round " in shown[-2]
    assert shown[-1].endswith(": the machine is needed")
    assert main(["status", "--json"]) == 0
    assert '"generation": 2, "kind": "left", "workers": [2]' in capsys.readouterr().out
    assert main(["replay"]) == 0
    log = capsys.readouterr().out
    assert "the job starts with workers 0-3\n" in log
    assert "generation 1, " in log

    job.process.send_signal(signal.SIGTERM)
    assert job.process.wait(DEADLINE_S) == 143
    text = job.path.read_text()
    assert text.count("has left after round") == 2
