"""The scripts for several devices train, on one device as on all of them."""

from pathlib import Path

import pytest
import torch

from tests.examples import scripts


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_chapter_of_the_gluon_book_shows_what_devices_hold_and_trains(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = scripts.train("multi_device_gluon", ["--num-epochs", "1"])
    assert min(one, two) > 0.3  # ten classes
    lines = capsys.readouterr().out.splitlines()
    for what in ("output", "channel 0 of the first convolution", "its gradient"):
        assert [line for line in lines if what in line] == [f"=== {what} on cpu({number}) ===" for number in (0, 1)]
    assert [line for line in lines if "Running" in line] == [
        "Running on [cpu(0)], batch size 64",
        "Running on [cpu(0), cpu(1)], batch size 128",
    ]


def test_module_trains_on_unlike_devices_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    words = ["--network", "mlp", "--work-load", "3,1", "--num-epochs", "1", "--model-prefix", str(tmp_path / "net")]
    first = scripts.train("module_fit", words)
    second = scripts.train("module_fit", [*words, "--load-epoch", "1"])
    assert second > first > 0.3
