"""The scripts with MXNet's flags train, go on from checkpoints, and say what is missing."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from paceline.data import digits
from tests.clusters import programs

whole = pytest.mark.skipif(not os.environ.get("PACELINE_TEST_EXAMPLES"), reason="several jobs: nox -s examples")
EXAMPLES = Path(__file__).parents[2] / "examples"
NETWORK = ("--network", "3conv", "--batch-size", "16", "--num-examples", "640")
SMALL = (*NETWORK, "--lr", "0.02", "--mom", "0.5", "--disp-batches", "0")


def run(*words: str, workers: int = 0, check: bool = True) -> "subprocess.CompletedProcess[str]":
    launch = ["-m", "paceline", "launch", "-n", str(workers), "-s", "1", "--", sys.executable] if workers else []
    return programs.run([*launch, *words], timeout_s=570, check=check)


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cifar10")
    run(str(EXAMPLES / "make_data.py"), "cifar10", str(folder))
    return folder


def epochs(result: Path) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads(result.read_text())["epochs"]
    return found


@whole
def test_two_workers_train_and_one_goes_on_from_their_checkpoint(cifar10: Path, tmp_path: Path) -> None:
    script, result = str(EXAMPLES / "train_cifar10.py"), tmp_path / "result.json"
    words = [
        script,
        *SMALL,
        "--data-dir",
        str(cifar10),
        "--model-prefix",
        str(tmp_path / "net"),
        "--result",
        str(result),
    ]
    run(*words, "--kv-store", "dist_sync", "--num-epochs", "2", "--top-k", "3", workers=2)
    first, second = epochs(result)
    assert second["loss"] < first["loss"]
    assert second["top-3"] > second["top-1"] > 0.2  # ten classes
    run(*words, "--num-epochs", "3", "--retrain")
    (third,) = epochs(result)
    assert third["epoch"] == 2
    assert third["loss"] < second["loss"] * 1.2  # it did not start anew


def test_benchmark_reports_speed_and_cost(tmp_path: Path) -> None:
    script, result = str(EXAMPLES / "train_imagenet.py"), tmp_path / "result.json"
    network = ("--network", "resnet", "--num-layers", "20", "--image-shape", "3,32,32")
    measured = ("--benchmark", "1", "--batch-size", "4", "--num-batches", "4", "--price-per-hour", "3.06")
    run(script, *network, *measured, "--result", str(result))
    found = json.loads(result.read_text())
    assert found["images/s of all workers"] == pytest.approx(found["images/s of worker 0"], rel=0.5)
    assert found["cost per epoch"] == pytest.approx(found["hours per epoch"] * 3.06, abs=0.01)


@pytest.mark.parametrize("script", ["train_cifar100.py", "train_imagenet.py"])
def test_without_data_a_script_says_in_one_sentence_where_it_comes_from(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(str(EXAMPLES / script), "--num-epochs", "1", check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "--data-dir" in done.stderr
    assert "make_data.py" in done.stderr


@pytest.fixture(scope="module")
def examples() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        import common.schedule

        yield common.schedule
        for name in [name for name in sys.modules if name.partition(".")[0] in {"common", "models", "devices"}]:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("flags", "rates"),
    [
        ({}, {0: 1.0, 99: 1.0}),
        ({"lr_step_epochs": "2,3"}, {19: 1.0, 20: 0.1, 30: 0.01}),
        ({"lr_factor_epoch": 0.5, "lr_factor": 0.5}, {4: 1.0, 5: 0.5, 10: 0.25}),
        ({"warmup_epochs": 1.0, "scale_lr": True}, {0: 0.4, 4: 2.0, 9: 4.0, 10: 4.0}),
    ],
)
def test_rate_follows_the_flags(examples: ModuleType, flags: dict[str, object], rates: dict[int, float]) -> None:
    given = {"lr_step_epochs": "", "lr_factor": 0.1, "lr_factor_epoch": None, "warmup_epochs": 0.0, "scale_lr": False}
    args = type("Args", (), given | flags)
    factor = examples.rate_factor(args, num_workers=4, steps_per_epoch=10)
    assert {step: pytest.approx(factor(step)) for step in rates} == rates


@whole
def test_folders_records_and_archives_train_alike(tmp_path: Path) -> None:
    script, losses = str(EXAMPLES / "train_imagenet.py"), []
    flags = ("--network", "3conv", "--image-shape", "3,32,32", "--batch-size", "16", "--num-examples", "160")
    makers = runpy.run_path(str(EXAMPLES / "make_data.py"))["MAKERS"]
    for form in ("imagenet", "imagenet-rec", "imagenet-tar"):
        folder, result = tmp_path / form, tmp_path / f"{form}.json"
        folder.mkdir()
        makers[form](folder)
        run(script, *flags, "--data-dir", str(folder), "--num-epochs", "1", "--lr", "0.02", "--result", str(result))
        losses.append(epochs(result)[0]["loss"])
    assert len(list((tmp_path / "imagenet").glob("train/*/*.png"))) == len(digits(train=True))
    assert losses[2] == losses[1]
    # The samples of a folder stand in another order, so only the level is the same.
    assert losses[1] == pytest.approx(losses[0], abs=0.5)
