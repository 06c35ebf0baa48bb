"""MXNet-G's experiments: nine trainings in four modes, each with a file of the original's name that starts it.

    sh examples/mxnet_g/gsp_cifar10_inception_small.sh --data-dir /data/cifar10 --cpus 1
    sh examples/mxnet_g/ssp_cifar10_resnet20.sh -n 4 -s 2 --dry-run      # print the line, start nothing
    sh examples/mxnet_g/bsp_cifar10_3conv.sh --cpus 1 --num-epochs 2     # any flag of the training script

The files ``hosts``, ``groups`` and ``data_sharding`` of the current directory are used as MXNet-G uses them: a worker
and a server on each host, the groups of ``dist_gsync``, and the samples of each worker. Without ``hosts`` the job runs
here, with two workers; without ``groups`` a short job measures them. The line that is run is printed first.

Batch sizes, learning rates, schedules and staleness are those of the originals. Where these differ between modes, the
batch size is that of ``gsp``, and the number of epochs the highest; two of the originals have no ``ssp`` form.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1]
MODES = {"bsp": "dist_sync", "asp": "dist_async", "ssp": "dist_ssync", "gsp": "dist_gsync"}
NUM_EXAMPLES = {"cifar10": 50_000, "cifar100": 50_000, "imagenet": 1_281_167}


@dataclass(frozen=True)
class Training:
    """A network, a data set and how one is trained on the other.

    Attributes:
        data: the data set; ``train_DATA.py`` is the script.
        network: flags that name it.
        batch_size: samples per worker and step.
        lr: learning rate.
        schedule: flags of the rate.
        epochs: how many.
        staleness: rounds that a worker may run ahead in ``dist_ssync``.
        wd: weight decay.
    """

    data: str
    network: str
    batch_size: int
    lr: float
    schedule: str
    epochs: int
    staleness: int
    wd: float = 1e-5

    def flags(self, mode: str) -> list[str]:
        """Return the flags of the script in a mode."""
        found = [*self.network.split(), "--batch-size", self.batch_size, "--lr", self.lr, *self.schedule.split()]
        found += ["--wd", self.wd, "--num-epochs", self.epochs, "--num-examples", NUM_EXAMPLES[self.data]]
        found += ["--kv-store", MODES[mode], *(["--staleness", self.staleness] if mode == "ssp" else [])]
        return list(map(str, found))


EVERY_EPOCH = "--lr-step-epochs= --lr-factor-epoch 1 --lr-factor"
SMALL, LARGE = f"{EVERY_EPOCH} 0.94", f"{EVERY_EPOCH} 0.98"
CIFAR_STEPS, IMAGENET_STEPS = "--lr-step-epochs 220,260,280", "--lr-step-epochs 30,60,90"
INCEPTION_SMALL = "--network inception-bn-28-small"
RESNET = "--network resnet --num-layers"

TRAININGS = {
    "cifar10_3conv": Training("cifar10", "--network 3conv", 5, 0.001, SMALL, 5, 1),
    "cifar10_inception_small": Training("cifar10", INCEPTION_SMALL, 45, 0.1, SMALL, 1, 1),
    "cifar10_resnet20": Training("cifar10", f"{RESNET} 20", 25, 0.05, CIFAR_STEPS, 400, 10, wd=1e-4),
    "cifar10_resnet164": Training("cifar10", f"{RESNET} 164", 20, 0.1, CIFAR_STEPS, 300, 0, wd=1e-4),
    "cifar100_dfnmr": Training("cifar100", "--network dfn-mr", 20, 0.1, SMALL, 200, 0),
    "cifar100_inception_small": Training("cifar100", INCEPTION_SMALL, 20, 0.1, SMALL, 200, 0),
    "imagenet_inception": Training("imagenet", "--network inception-bn", 30, 0.5, LARGE, 200, 0),
    "imagenet_resnet34": Training("imagenet", f"{RESNET} 34", 25, 0.1, IMAGENET_STEPS, 1, 0, wd=1e-4),
    "imagenet_resnet50": Training("imagenet", f"{RESNET} 50", 30, 0.1, IMAGENET_STEPS, 300, 0, wd=1e-4),
}


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the name and the launcher's options, and all other words: flags of the training script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = [f"{mode}_{training}" for training in TRAININGS for mode in MODES]
    parser.add_argument("name", choices=names, metavar="NAME", help="of an experiment: that of its file")
    parser.add_argument("-n", "--num-workers", type=int, help="workers (as many as hosts; here 2)")
    parser.add_argument("-s", "--num-servers", type=int, help="servers (as many as workers)")
    parser.add_argument("-i", "--interface", help="network interface of every host")
    parser.add_argument("-H", "--hostfile", help="file with a host per line (hosts, if there is one)")
    parser.add_argument("--launcher", help="ssh, mpi, ... (ssh with hosts, else local)")
    parser.add_argument("--groups", help="groups file of dist_gsync, or auto (groups, if there is one, else auto)")
    parser.add_argument("--dry-run", action="store_true", help="print the line, start nothing")
    return parser.parse_known_args(words)


def line(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the words of the launch line of an experiment, and whether they are only to be printed."""
    options, flags = parse(words)
    mode, _, name = options.name.partition("_")
    training = TRAININGS[name]
    script = [sys.executable, str(EXAMPLES / f"train_{training.data}.py")]
    own = [*script, "--data-dir", f"data/{training.data}", *training.flags(mode)]
    if not any(flag.partition("=")[0] in ("--gpus", "--cpus") for flag in flags):
        own += ["--gpus", "0,1"]
    if Path("data_sharding").exists():
        own += ["--data-allocator", "1"]
    return ["paceline", "launch", *_job(options, mode), "--", *own, *flags], options.dry_run


def _job(options: argparse.Namespace, mode: str) -> list[str]:
    """Return the launcher's options."""
    hosts = options.hostfile or ("hosts" if Path("hosts").exists() else None)
    count = options.num_workers or (_number_of(hosts) if hosts else 2)
    groups = options.groups or ("groups" if Path("groups").exists() else "auto")
    found = {"-n": count, "-s": options.num_servers or count, "-i": options.interface, "-H": hosts}
    found |= {"--launcher": options.launcher, "--groups": groups if mode == "gsp" else None}
    return [str(word) for pair in found.items() if pair[1] is not None for word in pair]


def _number_of(hosts: str) -> int:
    from paceline.launch.host_list import parse_hosts  # takes longer than all else here

    return len(parse_hosts(Path(hosts).read_text(), hosts))


def main() -> None:
    words, is_dry = line([Path(sys.argv[1]).stem if len(sys.argv) > 1 else "--help", *sys.argv[2:]])
    print(shlex.join(words), flush=True)
    if not is_dry:
        os.execv(sys.executable, [sys.executable, "-m", *words])


if __name__ == "__main__":
    main()
