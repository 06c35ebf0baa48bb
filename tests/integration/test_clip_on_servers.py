"""Clipping by the norm over all servers in real jobs: equal to one process, and nobody waits for ever."""

import dataclasses
import os
import signal
import time

import pytest
import torch

from paceline import kvstore
from paceline.errors import DeadlineError, PeerDiedError
from paceline.testing import LocalJob, listen, tell

SIZES = (16.0, 48.0)


def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(10, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5))


def new_store(model, samples):
    store = kvstore.create("dist_sync").for_optimizer(mean=True, clip_norm=0.5)
    store.set_optimizer("adam", lr=0.01)
    keys = [name for name, _ in model.named_parameters()]
    store.init(keys, [param.detach() for param in model.parameters()])
    store.samples = samples
    return store, keys


def backward(model, step, part):
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(64, 10, generator=generator), torch.randint(0, 5, (64,), generator=generator)
    model.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs[part]), targets[part])
    (loss * (1.0 if step % 2 else 0.1)).backward()


def train():
    """Return the largest difference to one process in weights and norms, and how many rounds were clipped."""
    model, reference = new_model(), new_model()
    rank = int(os.environ["PACELINE_RANK"])
    store, keys = new_store(model, SIZES[rank])
    params, others = list(model.parameters()), list(reference.parameters())
    oracle = torch.optim.Adam(others, lr=0.01)
    start = int(sum(SIZES[:rank]))
    largest, clipped = 0.0, 0
    for step in range(20):
        backward(model, step, slice(start, start + int(SIZES[rank])))
        store.push(keys, [param.grad for param in params])
        norm = store.clip_round()
        store.pull(keys, [param.data for param in params])
        backward(reference, step, slice(None))
        wanted = float(torch.nn.utils.clip_grad_norm_(others, 0.5))
        oracle.step()
        differences = [(one - other).abs().max().item() for one, other in zip(params, others, strict=True)]
        largest = max(largest, abs(norm - wanted), *differences)
        clipped += norm > 0.5
    return [largest, clipped]


def ask_alone():
    """Worker 1 pushes and asks for the norm while worker 0 does not push."""
    model = new_model()
    store, keys = new_store(model, 1.0)
    if store.rank == 0:
        listen()
        return
    store.push(keys, [torch.ones_like(param) for param in model.parameters()])
    store.session.settings = dataclasses.replace(store.session.settings, timeout_s=1.0)
    try:
        store.clip_round()
    except DeadlineError as error:
        tell(str(error))


def be_killed_before_the_commit():
    """Worker 1 dies when all have pushed, before anybody has committed."""
    model = new_model()
    store, keys = new_store(model, 1.0)
    store.push(keys, [torch.ones_like(param) for param in model.parameters()])
    store.barrier()
    if store.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        store.pull(keys, [torch.zeros_like(param) for param in model.parameters()])
    except PeerDiedError as error:
        return [str(error), time.monotonic() - start]
    return ["no error", 0.0]


@pytest.mark.parametrize(("servers", "shared"), [(1, True), (2, True), (2, False)])
def test_training_is_that_of_one_process_that_clips(servers, shared):
    with LocalJob(num_workers=2, num_servers=servers, shared_memory=shared) as job:
        for largest, clipped in job.run(train):
            assert largest < 2e-5
            assert 0 < clipped < 20


def test_the_deadline_names_who_has_not_pushed():
    with LocalJob(num_workers=2) as job:
        first, second = job.start_all(ask_alone)
        text = second.heard()
        first.tell("go on")
    assert "norm of a round" in text
    assert "it waits for worker 0" in text


def test_a_death_between_push_and_commit_is_told():
    with LocalJob(num_workers=2) as job:
        text, waited_s = job.start_all(be_killed_before_the_commit)[0].result()
        assert "worker 1" in text
        assert waited_s < 20.0
