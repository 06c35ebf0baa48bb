"""Train an image classifier on ImageNet, or measure how fast it trains, with the flags of MXNet's script of this name.

    python examples/make_data.py imagenet /tmp/images                   # a small data set in the same folders
    python examples/train_imagenet.py --data-dir /tmp/images --network resnet-v1 --num-layers 18 --image-shape 3,64,64
    paceline launch -n 4 -s 4 -- python examples/train_imagenet.py --benchmark 1 --network resnet --num-layers 50 \\
        --kv-store dist_sync --batch-size 32 --price-per-hour 3.06

The loop is that of ``common/fit.py``. With ``--benchmark 1`` images are made up, and the speed is reported: per
worker, of all workers, beside that of a worker by itself, and with ``--price-per-hour`` what an epoch costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from common import fit, flags
from common.imagenet import ImageNet


def main(words: Sequence[str] | None = None) -> fit.Training | None:
    """Train as the command line says."""
    parser = flags.parser(__doc__, lr=0.1, lr_step_epochs="30,60,80", num_epochs=90)
    parser.add_argument("--image-shape", default="3,224,224", help="channels, height and width (3,224,224)")
    args = flags.parse(parser, words)
    size = int(args.image_shape.split(",")[-1])
    return fit.run(args, (3, size, size), lambda store: ImageNet(args, store, size))


if __name__ == "__main__":
    main()
