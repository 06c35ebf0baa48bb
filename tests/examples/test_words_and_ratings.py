"""The scripts for text and for ratings learn."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.net import lifeline
from paceline.testing import LocalJob
from tests.clusters import programs
from tests.examples import scripts

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *words: str, workers: int = 0) -> None:
    launch = ["-m", "paceline", "launch", "-n", str(workers), "-s", "1", "--", sys.executable] if workers else []
    programs.run([*launch, EXAMPLES / script, *words], timeout_s=570, check=True)


def test_the_language_model_learns_pythons_documentation(tmp_path: Path) -> None:
    small = ("--tied", "--emsize", "32", "--nhid", "32", "--nlayers", "1", "--batch_size", "64", "--vocabulary", "500")
    run("word_language_model.py", *small, "--epochs", "1", "--log-interval", "0", "--result", str(tmp_path / "result"))
    (epoch,) = json.loads((tmp_path / "result").read_text())["epochs"]
    assert epoch["valid_perplexity"] < 150  # 500 words: by chance 500


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 4,000 ratings that 4 hidden factors explain."""
    chance = torch.Generator().manual_seed(0)
    users, films = torch.randn(100, 4, generator=chance), torch.randn(60, 4, generator=chance)
    lines = []
    for _ in range(4000):
        user, film = (int(torch.randint(high, (), generator=chance)) for high in (100, 60))
        rating = round(max(1.0, min(5.0, 3 + 0.7 * float(users[user] @ films[film]))))
        lines.append(f"{user + 1}\t{film + 1}\t{rating}\t0\n")
    path = tmp_path_factory.mktemp("ratings") / "u.data"
    path.write_text("".join(lines))
    path.with_name("few").write_text("".join(lines[:1000]))
    return path


def factorise(*words: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    line = [*words, "--factor-size", "16", "--lr", "0.02", "--num-epoch", "1"]
    found: dict[str, Any] = scripts.train("matrix_factorization", line)
    return found


def factorise_far(*words: str) -> list[dict[str, Any]]:
    """Train with sparse and with dense gradients as a worker on another host than the server: its bytes are counted."""
    lifeline.host_id = lambda: "another host"
    return [factorise(*words, *more) for more in ([], ["--dense"])]


def test_matrix_factorisation_has_the_errors_of_one_process_and_sends_touched_rows_only(ratings: Path) -> None:
    data = ("--data", str(ratings.with_name("few")))
    one = factorise(*data, "--batch-size", "8")
    with LocalJob(2, 1) as job:
        rows, tables = job.run(factorise_far, *data, "--batch-size", "4", "--kv-store", "dist_sync")[0]
    assert rows["steps"] == one["steps"]
    assert rows["epochs"][0]["rmse"] == pytest.approx(one["epochs"][0]["rmse"], rel=1e-4)
    by_rows, by_tables = (run["stats"]["network_bytes"] / run["steps"] for run in (rows, tables))
    table = (100 + 60) * (16 + 1) * 4
    assert by_tables == pytest.approx(2 * 2 * table, rel=0.05)  # 2 workers push float32 and get float32
    # 4 users and 4 films are pushed, and those of 8 ratings come back, with a number for each of two rows.
    assert by_rows < 2 * (8 + 16) * (16 * 4 + 4 + 2 * 8) < by_tables / 5


def test_matrix_factorisation_learns_with_two_workers_and_sparse_gradients(ratings: Path, tmp_path: Path) -> None:
    words = ("--data", str(ratings), "--factor-size", "16", "--lr", "0.02", "--result", str(tmp_path / "result"))
    run("matrix_factorization.py", *words, "--kv-store", "dist_sync", workers=2)
    errors = [epoch["rmse"] for epoch in json.loads((tmp_path / "result").read_text())["epochs"]]
    assert errors[2] < 0.8 * errors[0]
