"""Train an LSTM on words of a text, with the flags of MXNet's script of this name.

    python examples/word_language_model.py --tied --epochs 2
    paceline launch -n 2 -s 2 -- python examples/word_language_model.py --tied --kvstore dist_sync --gctype 2bit

``--data`` names a folder with ``train.txt``, ``valid.txt`` and ``test.txt``; WikiText-2 calls them
``wiki.train.tokens`` and so on. Without it the text is the documentation that comes with Python itself, 76,800 words.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from models.words import Hidden, WordModel
from rich.console import Console
from torch.nn import functional as F

import paceline


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with train.txt, valid.txt and test.txt")
    parser.add_argument("--emsize", type=int, default=200, help="size of an embedding (200)")
    parser.add_argument("--nhid", type=int, default=200, help="size of the LSTM's state (200)")
    parser.add_argument("--nlayers", type=int, default=2, help="layers of the LSTM (2)")
    parser.add_argument("--lr", type=float, default=20.0, help="divided by 4 when the validation is no better (20)")
    parser.add_argument("--clip", type=float, default=0.25, help="largest norm of the gradient (0.25)")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument(
        "--batch_size", "--batch-size", type=int, default=20, help="texts side by side, per worker (20)"
    )
    parser.add_argument("--bptt", type=int, default=35, help="words of a step (35)")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--tied", action="store_true", help="the decoder shares the embedding's weights")
    parser.add_argument("--vocabulary", type=int, default=10_000, help="most frequent words; others are <unk> (10000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kvstore", "--kv-store", default="local")
    parser.add_argument("--gctype", "--gc-type", choices=["none", "2bit"], default="none", help="gradient compression")
    parser.add_argument("--gcthreshold", "--gc-threshold", type=float, default=0.001, help="size of a 2-bit step")
    parser.add_argument("--log-interval", type=int, default=50, help="steps between two reports (50)")
    parser.add_argument("--result", type=Path, help="write perplexities and speed to this JSON file")
    return parser.parse_args(words)


def texts(folder: Path | None) -> list[list[str]]:
    """Return the words for training, validation and test."""
    if folder is None:
        whole = " <eos> ".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
        words = re.findall(r"<eos>|\w+|[^\w\s]", whole.lower())
        tenth = len(words) // 10
        return [words[: 8 * tenth], words[8 * tenth : 9 * tenth], words[9 * tenth :]]
    found = []
    for part in ("train", "valid", "test"):
        paths = [path for name in (f"{part}.txt", f"wiki.{part}.tokens") if (path := folder / name).exists()]
        if not paths:
            raise SystemExit(f"{folder} holds no {part}.txt and no wiki.{part}.tokens; extract WikiText-2 or PTB there")
        found.append([word for line in paths[0].read_text().splitlines() for word in [*line.split(), "<eos>"]])
    return found


def numbered(parts: list[list[str]], vocabulary: int) -> tuple[list[torch.Tensor], int]:
    """Return words as numbers, and how many different ones there are; rare words share the number 0."""
    frequent = [word for word, _ in Counter(parts[0]).most_common(vocabulary - 1)]
    numbers = {word: number for number, word in enumerate(frequent, 1)}
    return [torch.tensor([numbers.get(word, 0) for word in part]) for part in parts], len(frequent) + 1


def columns(words: torch.Tensor, count: int) -> torch.Tensor:
    """Return a text as ``count`` columns side by side: [words of each, count]."""
    length = len(words) // count
    return words[: length * count].view(count, length).t().contiguous()


@torch.no_grad()
def perplexity(net: WordModel, words: torch.Tensor, bptt: int) -> float:
    net.eval()
    text, total = columns(words, 10), 0.0
    state = net.begin(text.shape[1])
    for begin in range(0, len(text) - 1, bptt):
        inputs, wanted = text[begin : begin + bptt][: len(text) - 1 - begin], text[begin + 1 : begin + 1 + bptt]
        scores, state = net(inputs, state)
        total += float(F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="sum"))
    return math.exp(total / (text[1:].numel()))


def detached(state: Hidden) -> Hidden:
    """Return a state that carries no gradient into the words before it."""
    return state[0].detach(), state[1].detach()


def main(words: Sequence[str] | None = None) -> tuple[WordModel, dict[str, Any]]:
    """Train as the command line says; return the model and the figures."""
    args = parse_arguments(words)
    torch.manual_seed(args.seed)
    store = paceline.kvstore.create(args.kvstore)  # paceline: 1. join the job
    (train, valid, test), vocabulary = numbered(texts(args.data), args.vocabulary)
    net = WordModel(vocabulary, args.emsize, args.nhid, args.nlayers, args.dropout, args.tied)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr)
    compression = None if args.gctype == "none" else {"type": args.gctype, "threshold": args.gcthreshold}
    # paceline: 2. the gradient becomes the mean over all workers' texts; dimension 1 of [T, B] counts them
    optimizer = paceline.DistributedOptimizer(
        optimizer, kvstore=store, model=net, compression=compression, batch_dim=1
    )  # fmt: skip
    # paceline: 3. each worker reads its own columns of the text
    mine = columns(train, args.batch_size * store.num_workers)[:, store.rank :: store.num_workers].contiguous()
    console, best, epochs = Console(quiet=store.rank != 0, highlight=False), math.inf, []
    for epoch in range(args.epochs):
        begun, seen = time.perf_counter(), 0
        net.train()
        state = net.begin(args.batch_size)
        for number, begin in enumerate(range(0, len(mine) - 1 - args.bptt, args.bptt), 1):
            optimizer.zero_grad()
            scores, state = net(mine[begin : begin + args.bptt], detached(state))
            loss = F.cross_entropy(scores.flatten(0, 1), mine[begin + 1 : begin + 1 + args.bptt].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), args.clip)
            optimizer.step()
            seen += args.bptt * args.batch_size
            if args.log_interval and number % args.log_interval == 0:
                speed = seen / (time.perf_counter() - begun)
                console.print(f"epoch {epoch} step {number}: {speed:.0f} words/s per worker, loss {loss.item():.3f}")
        found = perplexity(net, valid, args.bptt)
        console.print(f"epoch {epoch}: validation perplexity {found:.2f}")
        epochs.append({"epoch": epoch, "valid_perplexity": found, "words_per_s": seen / (time.perf_counter() - begun)})
        if found < best:
            best = found
        else:
            for group in optimizer.param_groups:
                group["lr"] /= 4
    final = perplexity(net, test, args.bptt)
    console.print(f"test perplexity {final:.2f}")
    result = {"epochs": epochs, "test_perplexity": final}
    if args.result and store.rank == 0:
        args.result.write_text(json.dumps(result, indent=2))
    store.close()  # paceline: 4. leave the job
    return net, result


if __name__ == "__main__":
    main()
