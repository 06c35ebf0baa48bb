"""What a codec leaves of a push, counted where messages are handed to the transport."""

import pytest
import torch

from paceline import kvstore
from paceline.testing import LocalJob
from paceline.worker.current import current_session

#: As in a residual network: large kernels, and two small tensors beside each.
SHAPES = [shape for width in (64, 128, 256) for shape in [(width, width, 3, 3), (width,), (width,)] * 4]
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES)
ROUNDS = 3


def bytes_pushed(namespace, compression):
    """Push all keys some times; return the bytes sent to servers per round."""
    store = kvstore.create("dist_sync", namespace=namespace)
    store.set_optimizer("sgd", lr=0.1)
    if compression:
        store.set_gradient_compression(compression)
    keys = list(range(len(SHAPES)))
    store.init(keys, [torch.zeros(shape) for shape in SHAPES])
    grads = [torch.randn(shape) for shape in SHAPES]
    hub, sizes = current_session()._client._hub, []
    send = hub.send

    def counted(channel, frames):
        sizes.append(sum(memoryview(frame).nbytes for frame in frames))
        send(channel, frames)

    hub.send = counted
    for _ in range(ROUNDS):
        store.push(keys, grads)
    store.barrier()
    hub.send = send
    return sum(sizes) / ROUNDS


def push_in_every_way():
    codecs = {"none": None, "2bit": {"type": "2bit", "threshold": 0.5}, "int8": {"type": "int8"}}
    return {name: bytes_pushed(name, params) for name, params in codecs.items()}


@pytest.fixture(scope="module")
def pushed():
    with LocalJob(2, 2, shared_memory=False) as job:
        return job.run(push_in_every_way)


@pytest.mark.parametrize(("name", "ratio"), [("none", 1), ("int8", 4), ("2bit", 16)])
def test_pushes_have_the_size_that_the_codec_promises_and_a_hundredth_more_at_most(pushed, name, ratio):
    for worker in pushed:
        assert 1.0 <= worker[name] / (4 * NUMEL / ratio) <= 1.01
