"""Train an image classifier on CIFAR-100, with the flags of MXNet's and MXNet-G's script of this name.

    python examples/make_data.py cifar100 /tmp/cifar100              # a small data set of the same format
    python examples/train_cifar100.py --data-dir /tmp/cifar100 --network resnet --num-layers 20
    paceline launch -n 4 -s 2 -- python examples/train_cifar100.py --data-dir /tmp/cifar100 --kv-store dist_gsync

The loop is that of ``common/fit.py``. CIFAR-100's binary files come from https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import torch
from common import fit, flags
from common.cifar import Cifar
from models import build
from readers import CIFAR100


def main() -> None:
    defaults = {"network": "dfn-mr", "num_classes": 100, "lr_step_epochs": "200,250"}
    args = flags.parser(__doc__, **defaults).parse_args()
    torch.manual_seed(args.seed)
    store = fit.open_store(args)
    data = Cifar(args, store, CIFAR100)
    fit.fit(args, build(args.network, **flags.network_options(args, image_size=32)), data, store)


if __name__ == "__main__":
    main()
