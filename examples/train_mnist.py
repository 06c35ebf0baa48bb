"""Train LeNet or a multi-layer perceptron on handwritten digits, on one machine or on many that are not alike.

    python examples/train_mnist.py
    python examples/train_mnist.py --gpus 0,2 --kv-store device
    paceline launch -n 4 -s 2 -- python examples/train_mnist.py --kv-store dist_sync
    paceline launch -n 4 -s 2 -- python examples/train_mnist.py --kv-store dist_async --gc-type 2bit

The loop is that of ``common/fit.py``: plain PyTorch; the lines that paceline adds are marked ``# paceline:``. With
several devices (``--gpus 0,2``, or ``--cpus 2`` to try it anywhere) a step is that of ``devices.py``. Without
``--data-dir`` it trains on the 1,797 digits that come with paceline, so it needs no download.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from common import fit, flags
from common.memory import InMemory
from readers import MNIST

import paceline

# With more workers an update comes from more samples (dist_sync) or is staler (dist_async). A small step with little
# momentum stands both; Adam does too, but not the coarse gradients of --gc-type 2bit.
DEFAULTS = {"lr": 0.03, "mom": 0.5, "wd": 0.0, "batch_size": 16, "num_epochs": 15, "disp_batches": 0, "num_classes": 10}


def main(words: Sequence[str] | None = None) -> fit.Training | None:
    """Train as the command line says."""
    args = flags.parse(flags.parser(__doc__, flags.GREY, network="lenet", **DEFAULTS), words)
    read = partial(MNIST, args.data_dir) if args.data_dir else paceline.data.digits
    return fit.run(args, (1, 28, 28), lambda store: InMemory(args, store, read))


if __name__ == "__main__":
    main()
