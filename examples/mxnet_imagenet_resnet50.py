"""Train ResNet-50 on ImageNet: train_imagenet.py by the name and with the numbers of Horovod's page on MXNet.

    mpirun -np 16 -H server1:4,server2:4,server3:4,server4:4 -bind-to none -map-by slot -mca pml ob1 -mca btl ^openib \\
        python mxnet_imagenet_resnet50.py

Each rank trains on the GPU of its number on its host, if there are any. The images are in the folder ``imagenet``, or
where ``--data-dir`` says. All flags of train_imagenet.py are accepted, and stand before these.
"""

import sys

import torch
import train_imagenet

import paceline.hvd as hvd

WORDS = (
    "--kv-store horovod --network resnet-v1 --num-layers 50 --batch-size 256 --lr 0.1 --scale-lr --mom 0.9 --wd 0.0001 "
    "--dtype float16 --data-dir imagenet"
)


def main() -> None:
    words = WORDS.split()
    if torch.cuda.is_available():
        hvd.init()
        words += ["--gpus", str(hvd.local_rank())]
    train_imagenet.main([*words, *sys.argv[1:]])


if __name__ == "__main__":
    main()
