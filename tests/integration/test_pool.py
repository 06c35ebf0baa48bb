"""Workers of unlike speed take batches from one pool; each sample is trained on once per epoch."""

from __future__ import annotations

import time

import pytest
import torch

import paceline
from paceline.testing import LocalJob
from paceline.worker.current import current_session

LENGTH, EPOCHS = 101, 2


def train(store_type, options, leaves_after, pauses_s):
    """Train with a pause after each step, one of worker 0 and one of the others; worker 2 may leave early."""
    store = paceline.kvstore.create(store_type, **options)
    data = torch.randn(LENGTH, 4, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(4, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), kvstore=store, model=model)
    sampler = paceline.data.PooledBatchSampler(LENGTH, store, batch_size=4)
    seen = []
    for _ in range(EPOCHS):
        trained = []
        for indices in sampler:
            if leaves_after is not None and store.rank == 2 and len(trained) >= leaves_after:
                current_session().close()
                return [trained]
            optimizer.zero_grad()
            model(data[indices]).square().mean().backward()
            optimizer.step()
            time.sleep(pauses_s[store.rank > 0])
            trained += indices
        seen.append(trained)
    return seen


@pytest.mark.parametrize(
    ("store_type", "options", "pauses_s"),
    [
        ("dist_async", {}, [0.0, 0.2]),  # far longer than what a step takes beside other tests
        ("dist_ssync", {}, [0.0, 0.0]),
        ("dist_ksync", {"k": 2}, [0.0, 0.0]),
        ("dist_gsync", {"groups": [[0], [1, 2]]}, [0.0, 0.0]),
    ],
)
def test_every_sample_is_trained_on_once_per_epoch(store_type, options, pauses_s):
    with LocalJob(num_workers=3, num_servers=1) as job:
        results = job.run(train, store_type, options, None, pauses_s)
    for epoch in range(EPOCHS):
        assert sorted(index for one in results for index in one[epoch]) == list(range(LENGTH))
    if store_type == "dist_async":
        fast, *slow = (len(one[1]) for one in results)
        assert fast > max(slow)


def test_samples_of_a_worker_that_leaves_go_to_the_others():
    """Worker 2 leaves with a batch in its hands that it has not trained on."""
    with LocalJob(num_workers=3, num_servers=1) as job:
        results = job.run(train, "dist_async", {}, 8, [0.02, 0.02])
    assert 8 <= len(results[2][0]) < 16
    assert sorted(index for one in results for index in one[0]) == list(range(LENGTH))
    assert sorted(index for one in results[:2] for index in one[1]) == list(range(LENGTH))
