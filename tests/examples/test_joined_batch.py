"""Two workers reach what one process with the joined batch reaches: bit for bit without dropout and BatchNorm."""

import hashlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import paceline
from paceline.testing import LocalJob
from tests.examples import scripts

WORKERS = 2
WORDS = "--emsize 8 --nhid 8 --nlayers 1 --vocabulary 20 --bptt 8 --lr 5 --epochs 1 --dropout 0 --tied --log-interval 0"
DIGITS = "--num-examples 128 --num-epochs 2 --network lenet --lr 0.05 --mom 0.5 --wd 0.001"


def digest(net: torch.nn.Module) -> str:
    """Return a digest of the weights; running means of BatchNorm are none."""
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in net.parameters())).hexdigest()


def of_words(line: str) -> tuple[str, float]:
    """Train a word model; return a digest of its weights and its perplexity."""
    torch.set_num_threads(1)
    net, result = scripts.train("word_language_model", line.split())
    return digest(net), result["test_perplexity"]


def of_images(script: str, line: str) -> tuple[str, float]:
    """Train on images; return a digest of the weights and the accuracy."""
    torch.set_num_threads(1)
    training = scripts.train(script, line.split())
    return digest(training.net), training.figures[-1].get("top-1", 0.0)


def with_workers(function: Any, *arguments: str) -> tuple[str, float]:
    """Return what worker 0 returned; all have the same weights."""
    with LocalJob(WORKERS, 1) as job:
        first, *others = job.run(function, *arguments, timeout_s=1500)
    assert all(other[0] == first[0] for other in others)
    return tuple(first)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, chance = tmp_path_factory.mktemp("text"), torch.Generator().manual_seed(0)
    for part in ("train", "valid", "test"):
        words = torch.randint(19, (90, 10), generator=chance).tolist()
        (folder / f"{part}.txt").write_text("\n".join(" ".join(f"w{one}" for one in line) for line in words))
    return folder


def test_word_model_has_the_bits_of_one_process_that_adds_the_gradients_of_both_halves(text: Path) -> None:
    torch.set_num_threads(1)
    line = f"{WORDS} --data {text} --batch_size 4"
    found, _ = with_workers(of_words, f"{line} --kvstore dist_sync")
    script = scripts.module("word_language_model")
    args = script.parse_arguments(line.split())
    torch.manual_seed(args.seed)
    (train, _, _), vocabulary = script.numbered(script.texts(args.data), args.vocabulary)
    net = script.WordModel(vocabulary, args.emsize, args.nhid, args.nlayers, args.dropout, args.tied)
    before = digest(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr)
    joined = script.columns(train, args.batch_size * WORKERS)
    states = [net.begin(args.batch_size)] * WORKERS
    for begin in range(0, len(joined) - 1 - args.bptt, args.bptt):
        optimizer.zero_grad()
        for half in range(WORKERS):
            mine = joined[:, half::WORKERS]
            scores, states[half] = net(mine[begin : begin + args.bptt], script.detached(states[half]))
            wanted = mine[begin + 1 : begin + 1 + args.bptt]
            (F.cross_entropy(scores.flatten(0, 1), wanted.flatten()) / WORKERS).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), args.clip)
        optimizer.step()
    assert digest(net) == found != before


def trained_in_halves(args: Any, data: Any) -> tuple[str, str]:
    """Train a network in one process that adds the gradients of both halves of each batch; return digests of its
    weights before and after.

    BatchNorm sees a half at a time, as on two workers.
    """
    torch.manual_seed(args.seed)
    net = scripts.module("common.flags").network(args, 28 if args.network == "lenet" else 32)
    before = digest(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=args.mom, weight_decay=args.wd)
    for epoch in range(args.num_epochs):
        for images, labels in data.train(epoch):
            optimizer.zero_grad()
            for inputs, wanted in zip(images.chunk(WORKERS), labels.chunk(WORKERS), strict=True):
                (F.cross_entropy(net(inputs), wanted) / WORKERS).backward()
            optimizer.step()
    return before, digest(net)


def of_one_process(line: str, read: Any, networks: Any, is_cifar: bool) -> tuple[str, str]:
    torch.set_num_threads(1)
    fit, flags, memory = (scripts.module(f"common.{name}") for name in ("fit", "flags", "memory"))
    args = flags.parse(flags.parser("", networks, num_classes=10), line.split())
    return trained_in_halves(args, memory.InMemory(args, fit.open_store(args), read, is_cifar))


def test_lenet_has_the_bits_of_one_process_that_adds_the_gradients_of_both_halves() -> None:
    found, _ = with_workers(of_images, "train_mnist", f"{DIGITS} --batch-size 8 --kv-store dist_sync")
    grey = scripts.module("common.flags").GREY
    before, after = of_one_process(f"{DIGITS} --batch-size 16", paceline.data.digits, grey, is_cifar=False)
    assert after == found != before


def test_resnet_20_has_the_bits_of_one_process_whose_batch_norm_sees_a_half_at_a_time(tmp_path: Path) -> None:
    data = scripts.write_data(tmp_path, seed=0) / "cifar10"
    line = "--network resnet --num-layers 20 --num-epochs 2 --lr 0.05 --lr-step-epochs="
    words = f"{line} --batch-size 4 --kv-store dist_sync --data-dir {data}"
    found, _ = with_workers(of_images, "train_cifar10", words)
    read = partial(scripts.module("readers").CIFAR10, data)
    before, after = of_one_process(f"{line} --batch-size 8", read, scripts.module("common.flags").COLOURED, True)
    assert after == found != before


# ---- the whole form: nox -s examples ------------------------------------------------------------------------------

whole = pytest.mark.skipif(not os.environ.get("PACELINE_TEST_EXAMPLES"), reason="minutes: nox -s examples")
RESNET = "--network resnet --num-layers 20 --num-epochs 16 --lr 0.05 --lr-step-epochs 10,14 --num-examples 1280"


@whole
@pytest.mark.timeout(1800)
def test_resnet_20_is_within_a_point_of_one_process(tmp_path: Path) -> None:
    scripts.module("make_data").make_cifar(tmp_path, fine=False)
    line = f"{RESNET} --data-dir {tmp_path}"
    _, one = of_images("train_cifar10", f"{line} --batch-size 64")
    _, two = with_workers(of_images, "train_cifar10", f"{line} --batch-size 32 --kv-store dist_sync")
    print(f"accuracy of one process {one:.4f}, of {WORKERS} workers {two:.4f}")
    assert one > 0.9
    assert two == pytest.approx(one, abs=0.01)


@whole
def test_word_model_with_dropout_is_within_two_percent_of_one_process() -> None:
    line = "--tied --emsize 32 --nhid 32 --nlayers 1 --vocabulary 500 --epochs 2 --log-interval 0"
    _, one = of_words(f"{line} --batch_size 64")
    _, two = with_workers(of_words, f"{line} --batch_size 32 --kvstore dist_sync")
    print(f"perplexity of one process {one:.2f}, of {WORKERS} workers {two:.2f}")
    assert one < 150  # 500 words: by chance 500
    assert two == pytest.approx(one, rel=0.02)
