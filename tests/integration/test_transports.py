"""Every way to a server carries the same values, and a way that is not to be had is replaced, saying so."""

import logging
import resource

import pytest
import torch

from paceline import kvstore
from paceline.roles.session import current_session
from paceline.testing import LocalJob


def exchange(limit_bytes=None):
    """Push and pull 1 MiB twice; return the values, whether memory was shared, the way to the server, and the log."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("paceline").addHandler(handler)
    if limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    store = kvstore.create("dist_sync")
    store.set_updater("add", rate=1.0)
    store.init("w", torch.zeros(1 << 18))
    out = torch.zeros(1 << 18)
    for _ in range(2):
        store.push("w", torch.full((1 << 18,), store.rank + 1.0))
        store.pull("w", out)
    shared = any(block.mapped for block in store.table.blocks.values())
    address = current_session().servers[0].address
    return [float(out.min()), float(out.max()), shared, "ipc:" in address, lines]


@pytest.mark.parametrize(
    ("settings", "shared", "unix"),
    [
        ({"shared_memory": False}, False, True),
        ({"shared_memory": False, "unix_sockets": False, "encrypt": False}, False, False),
        ({"insecure": True, "unix_sockets": False}, True, False),
    ],
)
def test_every_transport_carries_the_same_values(settings, shared, unix):
    with LocalJob(2, 1, **settings) as job:
        for low, high, *how in job.run(exchange, timeout_s=60):
            assert [low, high] == [6.0, 6.0]
            assert how[:2] == [shared, unix]


def test_shared_memory_that_is_too_small_is_replaced_by_sockets_with_a_word():
    with LocalJob(1, 1) as job:
        [[low, high, shared, _, lines]] = job.run(exchange, 1 << 16, timeout_s=60)
    assert [low, high, shared] == [2.0, 2.0, False]
    assert any("no shared memory" in line and "using sockets" in line for line in lines)
