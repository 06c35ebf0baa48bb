"""Training with Module.fit: devices, unequal work, metrics, checkpoints, in one call.

python examples/module_fit.py                                       # two logical CPU devices, equal work
python examples/module_fit.py --gpus 0,2 --work-load 3,1            # GPU 0 is three times as fast
python examples/module_fit.py --gpus 0,2 --work-load auto           # measure, and keep adjusting
python examples/module_fit.py --model-prefix /tmp/digits --num-epochs 3
python examples/module_fit.py --model-prefix /tmp/digits --load-epoch 3
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

import torch
from models import NETWORKS

import paceline
from paceline.mx.callback import Speedometer, TensorBoard, do_checkpoint
from paceline.mx.module import Module


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpus", help="numbers of the GPUs to use: 0,2")
    where.add_argument("--cpus", type=int, default=2, help="how many logical CPU devices to use (2)")
    parser.add_argument("--work-load", help="'auto', or a weight per device: 3,1")
    parser.add_argument("--network", choices=["lenet", "mlp"], default="lenet")
    parser.add_argument("--kv-store", default="device")
    parser.add_argument("--gc-type", choices=["none", "2bit"], default="none", help="gradient compression")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--num-epochs", type=int, default=10)
    parser.add_argument("--model-prefix", help="save a checkpoint after every epoch under this path")
    parser.add_argument("--load-epoch", type=int, help="continue from this epoch of --model-prefix")
    parser.add_argument("--tensorboard", help="folder for TensorBoard's event files")
    return parser.parse_args(words)


def work_load(text: str | None) -> list[float] | str | None:
    return text if text in (None, "auto") else [float(part) for part in text.split(",")]


def make_module(args: argparse.Namespace) -> Module:
    torch.manual_seed(0)
    net = NETWORKS[args.network]()
    options = {
        "context": [paceline.gpu(int(i)) for i in args.gpus.split(",")]
        if args.gpus
        else [paceline.cpu(i) for i in range(args.cpus)],
        "work_load_list": work_load(args.work_load),
        "compression_params": {"type": "2bit", "threshold": 0.5} if args.gc_type == "2bit" else None,
    }
    if args.load_epoch is None:
        return Module(net, **options)
    return Module.load(args.model_prefix, args.load_epoch, net, load_optimizer_states=True, **options)


def main(words: Sequence[str] | None = None) -> float:
    """Train as the command line says; return the accuracy."""
    args = parse_arguments(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    module = make_module(args)
    train, test = paceline.data.digits(train=True), paceline.data.digits(train=False)
    # drop_last: a last batch of fewer samples than devices could not be split.
    loader = paceline.data.batches(train, paceline.data.ShardedSampler(train), args.batch_size, drop_last=True)
    at_epoch_end = [do_checkpoint(args.model_prefix, save_optimizer_states=True)] if args.model_prefix else []
    if args.tensorboard:
        at_epoch_end.append(TensorBoard(args.tensorboard))
    history = module.fit(
        loader,
        eval_data=paceline.data.batches(test, batch_size=120),
        eval_metric=["accuracy", "loss"],
        kvstore=args.kv_store,
        optimizer="sgd",
        optimizer_params={"learning_rate": args.lr, "momentum": 0.5},
        batch_end_callback=Speedometer(frequent=10),
        epoch_end_callback=at_epoch_end,
        begin_epoch=args.load_epoch or 0,
        num_epoch=(args.load_epoch or 0) + args.num_epochs,
    )
    if module.shares is not None:
        print(
            "shares:",
            ", ".join(f"{who} {share:.2f}" for who, share in zip(module.net.contexts, module.shares, strict=True)),
        )
    accuracy = float(history[-1].evaluation["accuracy"])
    print(f"accuracy: {accuracy:.4f}")
    return accuracy


if __name__ == "__main__":
    main()
