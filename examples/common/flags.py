"""The flags of MXNet's image classification scripts, and of MXNet-G's."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import devices
from models import NETWORKS, build
from torch import nn

#: Networks for images of one channel; the others are for three.
GREY = ("lenet", "mlp")
COLOURED = tuple(sorted(NETWORKS.keys() - set(GREY)))

#: Flags that would change nothing: their names, when that is so, and why.
_IDLE: tuple[tuple[str, Callable[[argparse.Namespace], bool], str], ...] = (
    ("mom", lambda args: args.optimizer == "adam", "is of --optimizer sgd and nag; adam has no momentum to set"),
    (
        "lr_factor",
        lambda args: args.lr_step_epochs == "" and not args.lr_factor_epoch,
        "multiplies the rate after --lr-step-epochs or every --lr-factor-epoch; name one of them",
    ),
    ("gc_threshold", lambda args: args.gc_type == "none", "is the step of --gc-type 2bit; name that, too"),
    ("price_per_hour", lambda args: not args.benchmark, "is for the cost that --benchmark 1 reports; name that, too"),
    ("num_batches", lambda args: not args.benchmark, "is the number of batches of --benchmark 1; name that, too"),
)  # fmt: skip
_ADAM_RATE = 0.001


def parser(doc: str | None, networks: Collection[str] = COLOURED, **defaults: object) -> argparse.ArgumentParser:
    """Return a parser of the flags that all scripts have; :func:`parse` uses it.

    Args:
        doc: the script's documentation, for ``--help``.
        networks: the networks that fit the script's images.
        defaults: other defaults than those below.
    """
    usual = {"network": "resnet", "lr": 0.05, "mom": 0.9, "wd": 1e-4, "batch_size": 128, "num_epochs": 20}
    usual |= {"disp_batches": 20, "lr_step_epochs": ""} | defaults
    # The values of flags that were not given; parse fills them in, so that it knows which flags were given.
    later = {name: usual.pop(name) for name in ("lr", "mom", "lr_step_epochs")}
    later |= {"lr_factor": 0.1, "gc_threshold": 0.01}
    later |= {"num_batches": 20}
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    devices.add_arguments(found)
    _add_network(found, networks)
    _add_training(found, usual | later)
    _add_job(found)
    _add_data(found)
    _add_reports(found)
    found.set_defaults(**usual, later=later)
    return found


def parse(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags of a command line; with ``words`` None of that of this process.

    ``--lr-factor`` without a word on when it multiplies is MXNet-G's: after every epoch. ``notices`` of the result says
    so, for worker 0 to print.

    Raises:
        SystemExit: a flag is unknown, or changes nothing together with the others.
    """
    args = parser.parse_args(words)
    for name, is_idle, why in _IDLE:
        if getattr(args, name) is not None and is_idle(args):
            raise SystemExit(f"--{name.replace('_', '-')} {why}")
    args.notices = []
    if args.lr_factor is not None and args.lr_step_epochs is None and args.lr_factor_epoch is None:
        args.lr_step_epochs, args.lr_factor_epoch = "", 1.0
        args.notices.append(
            f"--lr-factor {args.lr_factor:g}: the rate is multiplied by it after every epoch, as in MXNet-G; for "
            f"MXNet's schedule name the epochs, as in --lr-step-epochs {args.later['lr_step_epochs'] or '30,60'}"
        )
    later = args.later | ({"lr": _ADAM_RATE} if args.optimizer == "adam" else {})
    for name, value in later.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.model_prefix is None and (args.savemodel or args.retrain or args.load_epoch is not None):
        args.model_prefix = Path("models", f"{args.network}{args.num_layers or ''}")
    return args


def _add_network(parser: argparse.ArgumentParser, networks: Collection[str]) -> None:
    group = parser.add_argument_group("network")
    group.add_argument("--network", choices=networks)
    group.add_argument("--num-layers", type=int, help="of a family: resnet, resnet-v1, vgg, dfn-mr")
    group.add_argument("--num-classes", type=int)
    group.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32",
                       help="type of the forward pass; weights and gradients stay float32 (float32)")  # fmt: skip
    group.add_argument("--label-smoothing", type=float, default=0.0, metavar="SHARE")


def _add_training(parser: argparse.ArgumentParser, usual: dict[str, object]) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--batch-size", type=int, help="samples per worker and step (%(default)s)")
    group.add_argument("--num-epochs", type=int, help="(%(default)s)")
    group.add_argument("--optimizer", choices=["sgd", "nag", "adam"], default="sgd")
    group.add_argument("--lr", type=float, help=f"learning rate ({usual['lr']}; {_ADAM_RATE} for adam)")
    group.add_argument("--mom", type=float, help=f"momentum of sgd and nag ({usual['mom']})")
    group.add_argument("--wd", type=float, help="weight decay (%(default)s)")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--lr-factor", type=float, help=f"what the rate is multiplied by ({usual['lr_factor']})")
    group.add_argument("--lr-factor-epoch", type=float, help="multiply every so many epochs; may be 0.5")
    group.add_argument("--lr-step-epochs", metavar="E,E",
                       help=f"multiply after these epochs: 30,60,80 ({usual['lr_step_epochs'] or 'none'}; with "
                       "--lr-factor alone: after every epoch)")  # fmt: skip
    group.add_argument("--warmup-epochs", type=float, default=0.0, help="epochs in which the rate grows from 0")
    group.add_argument("--scale-lr", action="store_true", help="multiply the rate by the number of workers")


def _add_job(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("job")
    group.add_argument("--kv-store", default="local", help="local, device, dist_sync, dist_async, dist_ssync, ...")
    group.add_argument("--staleness", type=int, help="rounds that a worker may run ahead in dist_ssync, dist_gsync")
    group.add_argument("--gc-type", choices=["none", "2bit"], default="none", help="gradient compression")
    group.add_argument("--gc-threshold", type=float, help="size of a 2-bit step (0.01)")
    group.add_argument("--model-prefix", type=Path, help="checkpoints are PREFIX-0001.ckpt, ...: one per epoch")
    group.add_argument("--savemodel", action="store_true", help="write checkpoints; their prefix is models/NETWORK")
    group.add_argument("--load-epoch", "--model-load-epoch", type=int, metavar="N", help="go on after epoch N")
    group.add_argument("--retrain", action="store_true", help="go on after the last epoch that has a checkpoint")


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--data-dir", help="the folder with the data set (%(default)s)")
    group.add_argument("--data-nthreads", type=int, help="processes that decode images of files (2)")
    group.add_argument("--num-examples", type=int, help="samples of an epoch, of all workers together (all)")
    group.add_argument("--data-allocator", type=int, choices=[0, 1], default=0,
                       help="1: each worker's part of every batch is that of its line in ./data_sharding")  # fmt: skip


def _add_reports(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reports")
    group.add_argument("--top-k", type=int, default=0, help="report this accuracy beside top-1")
    group.add_argument("--monitor", type=int, default=0, metavar="STEPS", help="print sizes of gradients so often")
    group.add_argument("--disp-batches", type=int, metavar="STEPS", help="print the speed so often (%(default)s)")
    group.add_argument("--result", type=Path, help="write what is reported to this JSON file")
    benchmark = parser.add_argument_group("benchmark")
    benchmark.add_argument("--benchmark", type=int, choices=[0, 1], default=0, help="1: measure, on made-up images")
    benchmark.add_argument("--num-batches", type=int, help="batches that are measured (20)")
    benchmark.add_argument("--price-per-hour", type=float, help="of one worker, in any currency")


def network_options(args: argparse.Namespace, image_size: int) -> dict[str, int]:
    """Return the options of ``models.build`` that flags name, and the size of images where the network asks for it."""
    accepted = inspect.signature(NETWORKS[args.network]).parameters
    options = {"num_classes": args.num_classes, "num_layers": args.num_layers}
    if "image_size" in accepted:
        options["image_size"] = image_size
    return {name: value for name, value in options.items() if value is not None}


def network(args: argparse.Namespace, image_size: int) -> nn.Module:
    """Return the network that flags name.

    Raises:
        SystemExit: it has no such option.
    """
    try:
        return build(args.network, **network_options(args, image_size))
    except ValueError as error:
        raise SystemExit(f"--network {args.network}: {error}") from error
