"""Predict ratings of films by matrix factorisation; only rows of users and films of the batch travel.

    pip install --no-deps recbole
    paceline launch -n 2 -s 2 -- python examples/matrix_factorization.py --kv-store dist_sync
    paceline launch -n 2 -s 2 -- python examples/matrix_factorization.py --data ml-100k/u.data --kv-store dist_sync

The flags are those of MXNet's script of this name. Without ``--data`` the ratings are MovieLens-100K, which package
recbole ships; they are read in place. ``--data`` is another file of MovieLens (https://grouplens.org):
``u.data`` of MovieLens-100K, ``ratings.dat`` of the larger ones, or any text with lines of user, film and rating.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from readers import packaged
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import paceline


class Factorization(nn.Module):
    """A rating is the dot product of a user's and a film's vector, plus a number for each (Koren et al. 2009)."""

    def __init__(self, users: int, films: int, factors: int, sparse: bool) -> None:
        super().__init__()
        self.users = nn.Embedding(users, factors, sparse=sparse)
        self.films = nn.Embedding(films, factors, sparse=sparse)
        self.user_bias = nn.Embedding(users, 1, sparse=sparse)
        self.film_bias = nn.Embedding(films, 1, sparse=sparse)
        for table in (self.users, self.films):
            nn.init.normal_(table.weight, std=0.1)
        for table in (self.user_bias, self.film_bias):
            nn.init.zeros_(table.weight)

    def forward(self, user: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
        biases = self.user_bias(user)[:, 0] + self.film_bias(film)[:, 0]
        return (self.users(user) * self.films(film)).sum(1) + biases


def packaged_ratings() -> Path:
    """Return the ratings that a package ships."""
    return packaged("recbole", "dataset_example/ml-100k/ml-100k.inter", "name MovieLens' u.data with --data")


def read_ratings(path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return user, film and rating of each line; users and films are numbered from 0."""
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        fields = re.split(r"::|[\t ,;]+", line)
        if len(fields) >= 3 and fields[0].isdigit() and fields[1].isdigit():
            rows.append((int(fields[0]), int(fields[1]), float(fields[2])))
    if not rows:
        raise SystemExit(f"{path} holds no lines of user, film and rating; u.data of MovieLens-100K does")
    users, films, ratings = zip(*rows, strict=True)
    numbers = [torch.unique(torch.tensor(one), return_inverse=True)[1] for one in (users, films)]
    return numbers[0], numbers[1], torch.tensor(ratings)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file of user, film and rating (recbole's MovieLens-100K)")
    parser.add_argument("--num-epoch", "--num-epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128, help="ratings per worker and step (128)")
    parser.add_argument("--factor-size", type=int, default=128, help="length of a vector (128)")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--dense", action="store_true", help="gradients are whole tables, for comparison")
    parser.add_argument("--kv-store", default="local")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="write errors, speed and bytes to this JSON file")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Train as the command line says; return the figures."""
    args = parse_arguments(words)
    torch.manual_seed(args.seed)
    store = paceline.kvstore.create(args.kv_store)  # paceline: 1. join the job
    user, film, rating = read_ratings(args.data or packaged_ratings())
    held_out = torch.arange(len(rating)) % 10 == 9
    train = paceline.data.ArrayDataset(user[~held_out], film[~held_out], rating[~held_out])
    together = args.batch_size * store.num_workers
    # paceline: 2. train on my part of each batch of all workers
    sampler = paceline.data.ShardedSampler(
        train, store.num_workers, store.rank, seed=args.seed, global_batch_size=together
    )
    loader = paceline.data.batches(train, sampler, args.batch_size)
    net = Factorization(int(user.max()) + 1, int(film.max()) + 1, args.factor_size, sparse=not args.dense)
    kind = torch.optim.Adam if args.dense else torch.optim.SparseAdam
    # paceline: 3. the gradient becomes the mean over all workers' ratings
    optimizer = paceline.DistributedOptimizer(kind(net.parameters(), lr=args.lr), kvstore=store, model=net)
    console, epochs = Console(quiet=store.rank != 0, highlight=False), []
    mean = rating[~held_out].mean()
    for epoch in range(args.num_epoch):
        begun, seen = time.perf_counter(), 0
        sampler.set_epoch(epoch)
        for users, films, wanted in loader:
            optimizer.zero_grad()
            F.mse_loss(net(users, films), wanted - mean).backward()
            optimizer.step()
            seen += len(wanted)
        seconds = time.perf_counter() - begun
        with torch.no_grad():
            error = F.mse_loss(net(user[held_out], film[held_out]), rating[held_out] - mean).sqrt().item()
        console.print(f"epoch {epoch}: {seen / seconds:.0f} ratings/s per worker, RMSE {error:.4f} of held-out ratings")
        epochs.append({"epoch": epoch, "rmse": error, "ratings_per_s": seen / seconds})
    store.barrier()
    result = {"epochs": epochs, "steps": args.num_epoch * len(loader), "stats": store.stats()}
    if args.result and store.rank == 0:
        args.result.write_text(json.dumps(result))
    store.close()  # paceline: 4. leave the job
    return result


if __name__ == "__main__":
    main()
