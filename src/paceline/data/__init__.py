"""Data for workers: samplers that divide a data set, fast batches from memory, and readers of small data sets."""

from paceline.data.auto import batch_sampler
from paceline.data.cifar import CIFAR10, CIFAR100
from paceline.data.dataset import ArrayDataset
from paceline.data.digits import digits
from paceline.data.loader import Batches, batches
from paceline.data.mnist import MNIST
from paceline.data.pool import PooledBatchSampler
from paceline.data.records import Records, RecordWriter
from paceline.data.sampler import ShardedSampler
from paceline.data.shares import SharedBatchSampler
from paceline.data.spans import read_spans

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "ArrayDataset",
    "Batches",
    "PooledBatchSampler",
    "RecordWriter",
    "Records",
    "ShardedSampler",
    "SharedBatchSampler",
    "batch_sampler",
    "batches",
    "digits",
    "read_spans",
]
