"""Data for workers: samplers that divide a data set, fast batches from memory, and handwritten digits."""

from paceline.data.auto import batch_sampler
from paceline.data.dataset import ArrayDataset, Batches, batches
from paceline.data.digits import digits
from paceline.data.partition import read_spans
from paceline.data.pool import PooledBatchSampler
from paceline.data.record_files import Records, RecordWriter
from paceline.data.sampler import ShardedSampler
from paceline.data.shards import Shards, shards
from paceline.data.shares import SharedBatchSampler

__all__ = [
    "ArrayDataset",
    "Batches",
    "PooledBatchSampler",
    "RecordWriter",
    "Records",
    "ShardedSampler",
    "Shards",
    "SharedBatchSampler",
    "batch_sampler",
    "batches",
    "digits",
    "read_spans",
    "shards",
]
