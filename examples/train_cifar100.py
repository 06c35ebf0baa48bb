"""Train an image classifier on CIFAR-100, with the flags of MXNet's and MXNet-G's script of this name.

    python examples/make_data.py cifar100 /tmp/cifar100              # a small data set of the same format
    python examples/train_cifar100.py --data-dir /tmp/cifar100 --network resnet --num-layers 20
    paceline launch -n 4 -s 2 -- python examples/train_cifar100.py --data-dir /tmp/cifar100 --kv-store dist_gsync

The loop is that of ``common/fit.py``. CIFAR-100's binary files come from https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

from collections.abc import Sequence

from common import fit, memory
from readers import CIFAR100


def main(words: Sequence[str] | None = None) -> fit.Training | None:
    """Train as the command line says."""
    return memory.train_cifar(__doc__, CIFAR100, words, network="dfn-mr", num_classes=100)


if __name__ == "__main__":
    main()
