"""Every flag of the training scripts has an effect in every script, or is refused with a sentence."""

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import scripts

#: Data set and flags of each script. The four scripts share flags and loop: two in ``make test``.
SCRIPTS = {
    "train_mnist": ("mnist", "--network mlp"),
    "train_imagenet": ("imagenet", "--network 3conv --image-shape 3,16,16 --data-nthreads 0"),
} | (
    {"train_cifar10": ("cifar10", "--network 3conv"), "train_cifar100": ("cifar100", "--network 3conv")}
    if os.environ.get("PACELINE_TEST_EXAMPLES")
    else {}
)
USUAL = "--batch-size 8 --num-epochs 2 --num-examples 16 --lr 0.05 --lr-step-epochs="


@dataclass(frozen=True)
class Run:
    """One run of a script: its result, and what it printed."""

    training: Any
    output: str

    @property
    def weights(self) -> list[torch.Tensor]:
        return scripts.weights(self.training.net)


Effect = Callable[[Run, Run], bool]


def trains_otherwise(before: Run, after: Run) -> bool:
    return not scripts.same(before.weights, after.weights)


def differs(name: str) -> Effect:
    return lambda before, after: getattr(before.training, name) != getattr(after.training, name)


def prints(text: str) -> Effect:
    return lambda before, after: text not in before.output and text in after.output


def writes(path: str) -> Effect:
    return lambda before, after: Path(path).exists()


def size(run: Run) -> int:
    return sum(one.numel() for one in run.weights)


#: The flag with its value; other flags that it needs; its effect.
EFFECTS: list[tuple[str, str, Effect]] = [
    ("--network {other}", "", lambda before, after: size(before) != size(after)),
    ("--num-classes 12", "", lambda before, after: size(before) != size(after)),
    ("--cpus 2", "", differs("where")),
    ("--kv-store device", "", lambda before, after: (before.training.store.type, after.training.store.type)
        == ("local", "device")),
    ("--gc-type 2bit", "--kv-store device", trains_otherwise),
    ("--gc-threshold 0.5", "--kv-store device --gc-type 2bit", trains_otherwise),
    ("--batch-size 4", "", differs("steps")),
    ("--lr 0.01", "", trains_otherwise),
    ("--lr-factor 0.5", "--lr-factor-epoch 1", trains_otherwise),
    ("--lr-factor-epoch 1", "", trains_otherwise),
    ("--lr-step-epochs 1", "", trains_otherwise),
    ("--warmup-epochs 1", "", trains_otherwise),
    ("--num-epochs 1", "", lambda before, after: len(after.training.figures) == 1),
    ("--num-examples 8", "", lambda before, after: after.training.seen == 16),
    ("--optimizer adam", "", trains_otherwise),
    ("--optimizer nag", "", trains_otherwise),
    ("--mom 0", "", trains_otherwise),
    ("--wd 0.5", "", trains_otherwise),
    ("--dtype float16", "", trains_otherwise),
    ("--dtype bfloat16", "", trains_otherwise),
    ("--label-smoothing 0.3", "", trains_otherwise),
    ("--label-smoothing 0.3", "--cpus 2", trains_otherwise),
    ("--seed 1", "", trains_otherwise),
    ("--data-dir {other_data}", "", trains_otherwise),
    ("--data-allocator 1", "", lambda before, after: after.training.seen == before.training.seen / 2),
    ("--model-prefix p/net", "", writes("p/net-0002.ckpt")),
    ("--model-prefix q/net", "--cpus 2", writes("q/net-0002.ckpt")),
    ("--retrain", "", prints("training starts from the beginning")),
    ("--savemodel", "", prints("wrote models/")),
    ("--benchmark 1 --num-batches 1", "", prints("images/s of all workers")),
    ("--price-per-hour 3", "--benchmark 1 --num-batches 1", prints("cost per epoch")),
    ("--top-k 3", "", prints("top-3")),
    ("--monitor 1", "", prints("mean |gradient|")),
    ("--monitor 1", "--cpus 2", prints("mean |gradient|")),
    ("--disp-batches 1", "--disp-batches 0", prints("epoch 1 batch 2/2")),
    ("--result r.json", "", writes("r.json")),
]  # fmt: skip
REFUSED = [
    ("--gpus 77", "--gpus 77: torch finds"),
    ("--staleness 1", "--kv-store local: .* no option 'staleness'"),
    ("--lr-step-epochs= --lr-factor 0.5", "--lr-factor multiplies the rate after --lr-step-epochs"),
    ("--optimizer adam --mom 0.5", "--mom is of --optimizer sgd and nag"),
    ("--gc-threshold 0.5", "--gc-threshold is the step of --gc-type 2bit"),
    ("--price-per-hour 3", "--benchmark 1"),
    ("--dtype bfloat16 --cpus 2", "--dtype bfloat16 trains on one device per worker"),
    ("--num-layers 3", "has no option num_layers"),
]


class Runner:
    """Runs scripts in one folder; runs with the same flags are made once."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.data, self.other = (scripts.write_data(folder / str(seed), seed) for seed in (0, 1))
        self._capsys = capsys

    def __call__(self, script: str, words: str) -> Run:
        data, own = SCRIPTS[script]
        words = words.format(
            other="lenet" if script == "train_mnist" else "resnet --num-layers 8", other_data=self.other / data
        )
        line = [*own.split(), "--data-dir", self.data / data, *USUAL.split(), *words.split()]
        self._capsys.readouterr()
        training = scripts.train(script, line)
        return Run(training, self._capsys.readouterr().out)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("data_sharding").write_text("0 0.5\n")
    torch.set_num_threads(1)
    return Runner(tmp_path, capsys)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_flag_has_an_effect(run: Runner, script: str) -> None:
    before: dict[str, Run] = {}
    idle = []
    for flag, needed, effect in EFFECTS:
        if needed not in before:
            before[needed] = run(script, needed)
        after = run(script, f"{needed} {flag}")
        if not effect(before[needed], after):
            idle.append(f"{needed} {flag}")
    assert not idle


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_that_change_nothing_are_refused_in_one_sentence(run: Runner, script: str) -> None:
    for words, sentence in REFUSED:
        with pytest.raises(SystemExit, match=sentence):
            run(script, words)


def test_lr_factor_alone_multiplies_after_every_epoch_as_in_mxnet_g_and_says_so(
    run: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    data = run.data / "cifar10"
    words = f"--network 3conv --batch-size 8 --num-epochs 2 --num-examples 16 --lr 0.05 --data-dir {data}"
    nets = {}
    for flags in ("--lr-factor 0.5", "--lr-factor 0.5 --lr-factor-epoch 1", "--lr-factor 0.5 --lr-step-epochs 200"):
        nets[flags] = scripts.weights(scripts.train("train_cifar10", [*words.split(), *flags.split()]).net)
        said = "--lr-factor 0.5: the rate is multiplied by it after every epoch" in capsys.readouterr().out
        assert said == (flags == "--lr-factor 0.5")
    alone, every, never = nets.values()
    assert scripts.same(alone, every)
    assert not scripts.same(alone, never)


def test_cifar_is_read_where_mxnet_g_has_it(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.data)
    words = "--network 3conv --batch-size 8 --num-epochs 1 --num-examples 16"
    assert scripts.train("train_cifar100", words.split()).seen == 16


def test_only_images_of_files_are_decoded_in_processes(run: Runner) -> None:
    with pytest.raises(SystemExit, match="--data-nthreads: these images are in memory"):
        run("train_mnist", "--data-nthreads 1")
    before = len(multiprocessing.active_children())
    training = run("train_imagenet", "--data-nthreads 1").training
    assert len(multiprocessing.active_children()) == before + 1
    del training


@pytest.mark.parametrize("flag", ["--retrain", "--load-epoch 1"])
@pytest.mark.parametrize("devices", ["", "--cpus 2"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_run_that_goes_on_ends_with_the_bits_of_one_without_a_break(
    run: Runner, script: str, devices: str, flag: str
) -> None:
    whole = run(script, devices)
    run(script, f"{devices} --savemodel --num-epochs 1")
    rest = run(script, f"{devices} {flag}")
    assert [figures["epoch"] for figures in rest.training.figures] == [1]
    assert rest.training.steps == whole.training.steps
    if devices:  # copies of a network have their own running means of BatchNorm; a checkpoint holds one of them
        weights = [[one.detach() for one in run.training.net.parameters()] for run in (whole, rest)]
        assert scripts.same(*weights)
    else:
        assert scripts.same(rest.weights, whole.weights)
