"""The flags of MXNet's image classification scripts, and of MXNet-G's."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

import devices
from models import NETWORKS


def parser(doc: str | None, **defaults: object) -> argparse.ArgumentParser:
    """Return a parser of the flags that all scripts have.

    Args:
        doc: the script's documentation, for ``--help``.
        defaults: other defaults than those below.
    """
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    devices.add_arguments(found)
    _add_network(found)
    _add_training(found)
    _add_job(found)
    _add_data(found)
    _add_reports(found)
    found.set_defaults(**defaults)
    return found


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument("--network", choices=sorted(NETWORKS), default="resnet")
    group.add_argument("--num-layers", type=int, help="of a family: resnet, resnet-v1, vgg, dfn-mr")
    group.add_argument("--num-classes", type=int)
    group.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32",
                       help="type of the forward pass; weights and gradients stay float32 (float32)")  # fmt: skip
    group.add_argument("--label-smoothing", type=float, default=0.0, metavar="SHARE")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--batch-size", type=int, default=128, help="samples per worker and step (128)")
    group.add_argument("--num-epochs", type=int, default=20)
    group.add_argument("--optimizer", choices=["sgd", "nag", "adam"], default="sgd")
    group.add_argument("--lr", type=float, default=0.05)
    group.add_argument("--mom", type=float, default=0.9, help="momentum (0.9)")
    group.add_argument("--wd", type=float, default=1e-4, help="weight decay (1e-4)")
    group.add_argument("--seed", type=int, default=0)
    add_schedule(group)


def add_schedule(group: argparse._ActionsContainer) -> None:
    """Add the flags that :func:`common.schedule.rate_factor` reads."""
    group.add_argument("--lr-factor", type=float, default=0.1, help="what the rate is multiplied by (0.1)")
    group.add_argument("--lr-factor-epoch", type=float, help="multiply every so many epochs; may be 0.5")
    group.add_argument("--lr-step-epochs", default="", metavar="E,E", help="multiply after these epochs: 30,60,80")
    group.add_argument("--warmup-epochs", type=float, default=0.0, help="epochs in which the rate grows from 0")
    group.add_argument("--scale-lr", action="store_true", help="multiply the rate by the number of workers")


def _add_job(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("job")
    group.add_argument("--kv-store", default="local", help="local, device, dist_sync, dist_async, dist_ssync, ...")
    group.add_argument("--staleness", type=int, help="rounds that a worker may run ahead in dist_ssync, dist_gsync")
    group.add_argument("--gc-type", choices=["none", "2bit"], default="none", help="gradient compression")
    group.add_argument("--gc-threshold", type=float, default=0.01, help="size of a 2-bit step (0.01)")
    group.add_argument("--model-prefix", type=Path, help="checkpoints are PREFIX-0001.ckpt, ...: one per epoch")
    group.add_argument("--savemodel", action="store_true", help="write checkpoints (--model-prefix alone does, too)")
    group.add_argument(
        "--load-epoch", "--model-load-epoch", type=int, metavar="N", help="go on after epoch N of --model-prefix"
    )
    group.add_argument("--retrain", action="store_true", help="go on after the last epoch of --model-prefix")


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--data-dir", help="the folder with the data set")
    group.add_argument("--data-nthreads", type=int, default=2, help="processes that decode images (2)")
    add_part(group)


def add_part(group: argparse._ActionsContainer) -> None:
    """Add the flags that say which samples a worker trains on."""
    group.add_argument("--num-examples", type=int, help="samples of an epoch, of all workers together (all)")
    group.add_argument("--data-allocator", type=int, choices=[0, 1], default=0,
                       help="1: each worker's part of every batch is that of its line in ./data_sharding")  # fmt: skip


def _add_reports(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("reports")
    group.add_argument("--top-k", type=int, default=0, help="report this accuracy beside top-1")
    group.add_argument("--monitor", type=int, default=0, metavar="STEPS", help="print norms of gradients so often")
    group.add_argument("--disp-batches", type=int, default=20, metavar="STEPS", help="print the speed so often (20)")
    group.add_argument("--result", type=Path, help="write what is reported to this JSON file")


def network_options(args: argparse.Namespace, image_size: int) -> dict[str, int]:
    """Return the options of ``models.build`` that flags name, and the size of images where the network asks for it."""
    accepted = inspect.signature(NETWORKS[args.network]).parameters
    options = {"num_classes": args.num_classes, "num_layers": args.num_layers}
    if "image_size" in accepted:
        options["image_size"] = image_size
    return {name: value for name, value in options.items() if value is not None}
