"""A checkpoint that one worker alone writes, as with ``if store.rank == 0``, is an error that says how it is done."""

import torch

import paceline
from paceline.errors import CheckpointError
from paceline.testing import LocalJob


def save_on_worker_0(path):
    net = torch.nn.Linear(2, 2)
    store = paceline.kvstore.create("dist_sync")
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), store, model=net)
    if store.rank == 0:
        try:
            paceline.save(path, net, optimizer, step=0)
        except CheckpointError as error:
            return str(error)
    return ""


def test_save_on_worker_0_alone_says_that_every_worker_calls_it(tmp_path):
    with LocalJob(2, 1) as job:
        text, _ = job.run(save_on_worker_0, str(tmp_path / "job.ckpt"))
    assert text.startswith("worker 1 left the job and took no part in the checkpoint: call paceline.save")
    assert "on every worker" in text
    assert list(tmp_path.iterdir()) == []
