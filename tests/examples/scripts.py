"""The scripts of ``examples/`` and their modules, imported as their own processes import them."""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def module(name: str) -> Any:
    """Return a module by the name that scripts give it: ``train_mnist``, ``common.flags``."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


def train(name: str, words: Iterable[object]) -> Any:
    """Run a script in this process with these flags; return its result."""
    return module(name).main([str(word) for word in words])


def weights(net: torch.nn.Module) -> list[torch.Tensor]:
    """Return weights and buffers of a network."""
    return [one.detach().clone() for one in net.state_dict().values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Return whether two networks have the same weights, bit for bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def write_data(folder: Path, seed: int) -> Path:
    """Write 16 random samples for training and 8 for tests in the formats of all four scripts."""
    chance, make_data = np.random.default_rng(seed), module("make_data")
    for name in ("mnist", "cifar10", "cifar100", "imagenet"):
        (folder / name).mkdir(parents=True)

    def pixels(*shape: int) -> Any:
        return chance.integers(256, size=shape).astype(np.uint8)

    for part, count in (("train", 16), ("t10k", 8)):
        labels = np.arange(count, dtype=np.uint8) % 10
        make_data._write_idx(folder / "mnist" / f"{part}-images-idx3-ubyte", pixels(count, 28, 28))
        make_data._write_idx(folder / "mnist" / f"{part}-labels-idx1-ubyte", labels)
        np.hstack([labels[:, None], labels[:, None], pixels(count, 3072)]).tofile(
            folder / "cifar100" / ("train.bin" if part == "train" else "test.bin")
        )
    for number in range(1, 7):
        labels = np.arange(8 if number == 6 else 4, dtype=np.uint8)
        name = "test_batch.bin" if number == 6 else f"data_batch_{number}.bin"
        np.hstack([labels[:, None], pixels(len(labels), 3072)]).tofile(folder / "cifar10" / name)
    from PIL import Image

    for part, count in (("train", 16), ("val", 8)):
        for number in range(count):
            path = folder / "imagenet" / part / str(number % 4) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels(20, 20, 3)).save(path)
    return folder
