"""Every experiment of MXNet-G starts by its name, with the network, data set and mode that the name says."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from examples import make_data
from examples.mxnet_g import experiments
from examples.mxnet_g.experiments import MODES, TRAININGS
from tests.clusters import programs

SCRIPTS = Path(__file__).parents[2] / "examples" / "mxnet_g"
NAMES = [f"{mode}_{training}" for mode in MODES for training in TRAININGS]

#: What a name stands for: network, its layers; the rate's factor after some epochs.
MEANT = {
    "3conv": ("3conv", None),
    "inception_small": ("inception-bn-28-small", None),
    "inception": ("inception-bn", None),
    "dfnmr": ("dfn-mr", None),
    "resnet20": ("resnet", 20),
    "resnet164": ("resnet", 164),
    "resnet34": ("resnet", 34),
    "resnet50": ("resnet", 50),
}
FACTORS = {
    "cifar10_resnet": {219: 1.0, 220: 0.1, 280: 0.001},
    "cifar": {1: 0.94, 200: 0.94**200},
    "imagenet_resnet": {29: 1.0, 30: 0.1, 90: 0.001},
    "imagenet": {1: 0.98},
}


def start(name: str, folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {"PYTHON": sys.executable}
    command = ["sh", str(SCRIPTS / f"{name}.sh"), *flags]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=570, check=False)


def printed(name: str, folder: Path, *flags: str) -> list[str]:
    """Return the words that a name prints."""
    done = start(name, folder, "--dry-run", *flags)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the words that each name stands for. The files are alike: one of each mode says that it prints them."""
    folder = tmp_path_factory.mktemp("empty")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = {name: experiments.line([name])[0] for name in NAMES}
    for name in NAMES[:: len(TRAININGS) + 1]:
        assert printed(name, folder) == found[name]
    return found


@pytest.fixture(scope="module")
def common() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS.parent))
        import common.flags
        import common.schedule

        yield common
        for name in [name for name in sys.modules if name.partition(".")[0] in {"common", "models", "devices"}]:
            del sys.modules[name]


def test_there_is_one_file_for_each_name_and_no_other_and_they_are_alike() -> None:
    files = sorted(SCRIPTS.glob("*.sh"))
    assert [path.stem for path in files] == sorted(NAMES)
    assert len(files) == 36
    assert len({path.read_text() for path in files}) == 1
    assert all(os.access(path, os.X_OK) for path in files)


@pytest.mark.parametrize("name", NAMES)
def test_name_says_what_is_trained(lines: dict[str, list[str]], common: ModuleType, name: str) -> None:
    mode, data, network = name.split("_", 2)
    cut = lines[name].index("--")
    job, (python, script, *flags) = lines[name][:cut], lines[name][cut + 1 :]
    assert job == ["paceline", "launch", "-n", "2", "-s", "2", *(["--groups", "auto"] if mode == "gsp" else [])]
    assert (python, Path(script).name, Path(script).exists()) == (sys.executable, f"train_{data}.py", True)
    args = common.flags.parse(common.flags.parser(""), flags)
    assert (args.data_dir, args.gpus, args.kv_store) == (f"data/{data}", "0,1", MODES[mode])
    assert (args.network, args.num_layers) == MEANT[network]
    training = TRAININGS[f"{data}_{network}"]
    assert args.staleness == (training.staleness if mode == "ssp" else None)
    assert (args.batch_size, args.lr, args.num_epochs, args.wd) == (
        training.batch_size, training.lr, training.epochs, training.wd,
    )  # fmt: skip
    factor = common.schedule.rate_factor(args, num_workers=1, steps_per_epoch=1)
    expected = next(values for begin, values in FACTORS.items() if f"{data}_{network}".startswith(begin))
    assert {epoch: factor(epoch) for epoch in expected} == pytest.approx(expected)
    with torch.device("meta"):
        common.flags.NETWORKS[args.network](**common.flags.network_options(args, 224 if data == "imagenet" else 32))


def test_files_of_the_folder_make_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("10.10.10.21\n# the old ones\n10.10.10.22\n10.10.10.23\n")
    Path("groups").write_text("10.10.10.21\n10.10.10.22 10.10.10.23\n")
    Path("data_sharding").write_text("0 0.4\n0.4 0.7\n0.7 1\n")
    words, _ = experiments.line(["gsp_cifar10_resnet20", "-i", "ib0", "-s", "1"])
    job = words[: words.index("--")]
    assert job == ["paceline", "launch", "-n", "3", "-s", "1", "-i", "ib0", "-H", "hosts", "--groups", "groups"]
    assert words[-2:] == ["--data-allocator", "1"]


@pytest.mark.parametrize("flag", ["--cpus=1", "--gpus=2"])
def test_devices_that_are_named_replace_the_two_gpus(flag: str) -> None:
    assert experiments.line(["bsp_cifar10_3conv", flag])[0][-1] == flag
    assert "0,1" not in experiments.line(["bsp_cifar10_3conv", flag])[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with small data sets where the experiments look for them."""
    folder = tmp_path_factory.mktemp("experiments")
    for data in ("cifar10", "cifar100"):
        (folder / "data" / data).mkdir(parents=True)
        make_data.MAKERS[data](folder / "data" / data)
    (folder / "groups").write_text("0\n1\n")
    (folder / "data_sharding").write_text("0 0.25\n0.25 1\n")
    return folder


#: A job of four processes takes some seconds: the other modes and data sets in ``nox -s examples``.
TRAINED = ["gsp_cifar10_3conv"] + (
    ["ssp_cifar100_inception_small", "asp_cifar10_inception_small"] if os.environ.get("PACELINE_TEST_EXAMPLES") else []
)


@pytest.mark.parametrize("name", TRAINED)
def test_experiment_trains_by_its_name(folder: Path, name: str) -> None:
    few = ("--cpus", "1", "--network", "3conv", "--num-epochs", "1", "--num-examples", "64", "--batch-size", "16")
    program, *words = printed(name, folder, "-s", "1", *few)
    assert [program, *words[:5]] == ["paceline", "launch", "-n", "2", "-s", "1"]
    done = programs.run(["-m", program, *words], cwd=folder, timeout_s=570)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "epoch 0: " in done.stdout


def test_name_becomes_the_launcher_of_the_words_that_it_prints(folder: Path) -> None:
    done = start("bsp_cifar10_3conv", folder, "-n", "-1")
    assert done.returncode == 2
    assert done.stdout.startswith("paceline launch -n -1 ")
    assert "paceline launch: number of workers is -1" in done.stderr


def test_without_a_gpu_one_sentence_says_so(common: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    args = common.flags.parser("").parse_args(["--gpus", "0,1"])
    with pytest.raises(SystemExit, match=r"--gpus 0,1: torch finds 1 GPUs here; --cpus 1 trains without any"):
        common.flags.devices.named(args)
