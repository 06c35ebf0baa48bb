"""Every way to a server carries the same values, and a way that is not to be had is replaced, saying so."""

import logging
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import kvstore
from paceline.net import Security, new_job_key, records
from paceline.net.sockets import SocketHub, SocketListener
from paceline.testing import LocalJob, listen, tell
from paceline.worker.current import current_session


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


def leave_early(rounds):
    """Train so many rounds, leave, and tell the weights before and after the others went on."""
    store = kvstore.create("dist_sync")
    store.set_updater("add", rate=1.0)
    store.init("w", torch.zeros(5000))
    block = store.table.blocks[0]
    for _ in range(rounds[store.rank]):
        store.pushpull("w", torch.ones(5000), torch.zeros(5000))
    seen = [float(block.values[4999])]
    in_place = "memfd:paceline" in Path("/proc/self/maps").read_text() and block.value_file is None
    store.close()
    tell("left")
    listen(60)
    return [*seen, float(block.values[4999])], in_place


def test_worker_that_left_keeps_its_weights_while_the_others_on_its_host_train_on():
    with LocalJob(2, 2) as job:
        workers = job.start_all(leave_early, [1, 3])
        for worker in workers:
            assert worker.heard() == "left"
        for worker in workers:
            worker.tell("look")
        results = [worker.result() for worker in workers]
    assert results == [[[2.0, 2.0], True], [[4.0, 4.0], True]]


NUMEL = 1 << 24  # more than sockets hold


def come_to_a_barrier_while_values_are_under_way():
    """Come to a barrier after a push whose answer the network carries slowly; return the values of the answer."""
    gate, fill = threading.Event(), records.Intake.fill

    def slow(intake, target):
        if len(target) > 1 << 16:
            gate.wait(120)
        fill(intake, target)

    records.Intake.fill = slow
    store = store_of_one_large_key()
    store.push("w", torch.ones(NUMEL))
    barrier = threading.Thread(target=store.barrier)
    barrier.start()
    tell("comes to a barrier")
    listen(120)
    gate.set()
    barrier.join(120)
    store.lifecycle.wait_for_own_requests()  # a barrier does not wait for the answer of a push
    [block] = store.table.blocks.values()
    found = [float(block.values.min()), float(block.values.max())]
    store.close()
    return found


def train_on_meanwhile():
    """Push another round than the worker at the barrier."""
    store = store_of_one_large_key()
    store.push("w", torch.ones(NUMEL))
    listen(120)
    store.push("w", torch.full((NUMEL,), 4.0))
    store.send_command_to_servers("ping")  # the server has the push
    tell("has pushed")
    store.barrier()
    out = torch.zeros(NUMEL)
    store.pull("w", out)
    store.close()
    return [float(out.min()), float(out.max())]


def store_of_one_large_key():
    store = kvstore.create("dist_sync")
    store.set_updater("add", rate=1.0)
    store.init("w", torch.zeros(NUMEL))
    return store


def test_values_under_way_to_a_worker_at_a_barrier_are_those_of_its_round():
    with LocalJob(2, 1, shared_memory=False, unix_sockets=False) as job:
        slow, fast = job.start(0, come_to_a_barrier_while_values_are_under_way), job.start(1, train_on_meanwhile)
        assert slow.heard(120) == "comes to a barrier", job.report()
        fast.tell("go on")
        assert fast.heard(120) == "has pushed", job.report()
        slow.tell("go on")
        assert [slow.result(120), fast.result(120)] == [[2.0, 2.0], [6.0, 6.0]]


def test_listener_sends_everything_once_whatever_waits():
    security = Security(new_job_key(), encrypt=False)
    listener, hub = SocketListener(["tcp://127.0.0.1:*"], security, "server 0", bulk=True), SocketHub(security)
    try:
        channel = hub.connect(listener.addresses[0], b"peer", "server 0", bulk=True)
        hub.send(channel, [b"hello"])
        while not (arrived := listener.receive(1.0)):
            pass
        large = np.zeros(1 << 18, np.uint8)
        for number in range(40):
            listener.send(arrived[0][0], [b"%d" % number, large], urgency=40 - number if number % 10 else None)
        order = []
        while len(order) < 40:
            listener.receive(0.0)
            order += [int(bytes(frames[0])) for _, frames in hub.receive(0.01)]
    finally:
        hub.close()
        listener.close()
    assert sorted(order) == list(range(40))
    for number in range(0, 40, 10):
        assert set(order[: order.index(number)]) == set(range(number))


def test_channel_that_was_lost_and_is_back_says_so_once():
    security = Security(new_job_key())
    first = SocketListener(["tcp://127.0.0.1:*"], security, "server 0")
    hub = SocketHub(security)
    try:
        channel = hub.connect(first.addresses[0], b"peer", "server 0")
        wait_until(lambda: hub.is_open(channel))
        assert hub.reopened() == []
        first.close()
        wait_until(lambda: not hub.is_open(channel))
        second = SocketListener(first.addresses, security, "server 0")
        wait_until(lambda: hub.is_open(channel))
        assert hub.reopened() == [channel]
        assert hub.reopened() == []
        second.close()
    finally:
        hub.close()


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_channel_that_is_refused_never_blocks_and_says_why():
    listener = SocketListener(["tcp://127.0.0.1:*"], Security(new_job_key()), "server 0")
    hub = SocketHub(Security(""))
    try:
        channel = hub.connect(listener.addresses[0], b"stranger", "server 0")
        deadline = time.monotonic() + 20
        while not hub.refused(channel):
            assert time.monotonic() < deadline
            hub.send(channel, [b"let me in"])
            hub.receive(0.02)
        for _ in range(100):
            hub.send(channel, [b"let me in"])
        assert any(words in str(hub.refused(channel)) for words in ("keys differ", "uses a key"))
    finally:
        hub.close()
        listener.close()
