"""Train an image classifier on CIFAR-10, with the flags of MXNet's and MXNet-G's script of this name.

    python examples/make_data.py cifar10 /tmp/cifar10              # a small data set of the same format
    python examples/train_cifar10.py --data-dir /tmp/cifar10 --network resnet --num-layers 20
    paceline launch -n 4 -s 2 -- python examples/train_cifar10.py --data-dir /tmp/cifar10 --kv-store dist_gsync

The loop is that of ``common/fit.py``. CIFAR-10's binary files come from https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

from collections.abc import Sequence

from common import fit, memory
from readers import CIFAR10


def main(words: Sequence[str] | None = None) -> fit.Training | None:
    """Train as the command line says."""
    return memory.train_cifar(__doc__, CIFAR10, words, network="inception-bn-28-small", num_classes=10)


if __name__ == "__main__":
    main()
