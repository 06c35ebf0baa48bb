"""Every script learns with every store: two epochs of small real data, and the loss falls (``nox -s examples``).

None of them is said to train alone, or on the samples of others.
"""

import json
import os
import random
import re
import sys
from pathlib import Path

import pytest

from examples import make_data
from tests.clusters import programs

EXAMPLES = Path(__file__).parents[2] / "examples"
ALONE = ("local", "device")
STORES = (*ALONE, "dist_sync", "dist_async", "dist_ssync", "dist_gsync", "dist_ksync", "allreduce")


IMAGES = "--network 3conv --num-examples 640 --batch-size 16 --lr 0.02 --mom 0.5 --disp-batches 0"
FOLDER = "--network resnet --num-layers 20 --image-shape 3,32,32 --num-examples 160 --batch-size 8 --data-nthreads 0"
#: Flags of each script, where its data is, and the name of its loss in the figures of an epoch.
SCRIPTS = {
    "train_mnist.py": ("--num-epochs 2 --network mlp --data-dir", "mnist", "loss"),
    "train_cifar10.py": (f"--num-epochs 2 {IMAGES} --data-dir", "cifar10", "loss"),
    "train_cifar100.py": (f"--num-epochs 2 {IMAGES} --data-dir", "cifar100", "loss"),
    "train_imagenet.py": (f"--num-epochs 2 {FOLDER} --disp-batches 0 --data-dir", "imagenet-rec", "loss"),
    "word_language_model.py": (
        "--epochs 2 --emsize 16 --nhid 16 --nlayers 1 --batch_size 64 --bptt 20 --vocabulary 200 --lr 5",
        "",  # Python's own documentation
        "valid_perplexity",
    ),
    "matrix_factorization.py": ("--num-epochs 2 --factor-size 8 --lr 0.02 --data", "u.data", "rmse"),
    "linear_classification.py": ("--num-epochs 2 --batch-size 16 --lr 0.02 --data", "libsvm/train.libsvm", "loss"),
}
#: The rest of the table needs about an hour of two cores.
USUAL = [("linear_classification.py", "dist_gsync")]
EVERY = [(script, store) for script in SCRIPTS for store in STORES]
CASES = EVERY if os.environ.get("PACELINE_TEST_EXAMPLES") else USUAL


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the data sets of the cases; ratings are made up, but can be learned."""
    folder, chance = tmp_path_factory.mktemp("data"), random.Random(0)
    for name in {SCRIPTS[script][1].partition("/")[0] for script, _ in CASES} & set(make_data.MAKERS):
        (folder / name).mkdir()
        make_data.MAKERS[name](folder / name)
    ratings = [(user, film) for user in range(60) for film in range(40) if chance.random() < 0.8]
    (folder / "u.data").write_text("".join(f"{user}\t{film}\t{1 + (user + film) % 5}\t0\n" for user, film in ratings))
    (folder / "groups").write_text("0\n1\n")
    return folder


@pytest.mark.parametrize(("script", "store"), CASES)
def test_loss_falls(data: Path, tmp_path: Path, script: str, store: str) -> None:
    flags, where, loss = SCRIPTS[script]
    job = "-n 2 -s 0" if store == "allreduce" else "-n 2 -s 1"
    options = {"dist_ssync": ["--staleness", "2"], "dist_gsync": ["--groups", "groups"]}.get(store, [])
    launch = [] if store in ALONE else ["-m", "paceline", "launch", *job.split(), *options, "--", sys.executable]
    words = [*flags.split(), *([str(data / where)] if where else [])]
    words += ["--kv-store", store, "--result", str(tmp_path / "result")]
    done = programs.run([*launch, EXAMPLES / script, *words], cwd=data, timeout_s=570)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"workers? [-0-9, ]+ (trains?|walks?) ", done.stdout + done.stderr)
    first, second = (epoch[loss] for epoch in json.loads((tmp_path / "result").read_text())["epochs"])
    assert second < first
