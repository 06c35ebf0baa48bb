"""Nonsense in one message stays with that message: threads, connections and later calls go on."""

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

import paceline
from paceline import kvstore
from paceline.errors import PacelineError
from paceline.net import sockets
from paceline.testing import LocalJob
from paceline.wire import messages as m
from paceline.worker import answers
from tests.integration.relays import tcp_pair

SOURCES = str(Path(paceline.__file__).parents[1])
SOCKETS = {"shared_memory": False, "unix_sockets": False}


def new_store(keys=1, numel=1000):
    store = kvstore.create("dist_sync")
    store.set_updater("add")
    store.init(list(range(keys)), [torch.zeros(numel) for _ in range(keys)])
    return store


# ---- an answer that cannot be used -----------------------------------------------------------------------------------


def use_a_damaged_answer(kind):
    """Meet an answer whose use raises; return what the call raised, and what later calls brought."""
    store, value = new_store(), torch.ones(1000)
    right = answers.store_values
    if kind == "raises":

        def damaged(blocks, entries, frames):
            raise ValueError("not of this world")
    else:

        def damaged(blocks, entries, frames):
            right(blocks, entries, [frame[:-4] for frame in frames])

    answers.store_values = damaged
    try:
        store.pushpull(0, value)
        error = "nothing"
    except (PacelineError, ValueError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    answers.store_values = right
    start = time.monotonic()
    store.pushpull(0, value.fill_(1.0))
    store.barrier()
    return [error, value[0].item(), time.monotonic() - start, len(store.session._client)]


@pytest.mark.parametrize(
    ("kind", "text"),
    [("raises", "ValueError: not of this world"), ("cut", "ProtocolError: push of round 1 at server 0")],
)
def test_answer_that_cannot_be_used_ends_its_call_and_leaves_nothing_undone(kind, text):
    with LocalJob(1, 1, timeout_s=30, **SOCKETS) as job:
        [(error, value, took_s, in_flight)] = job.run(use_a_damaged_answer, kind)
        assert job.servers[0].wait(30) == 0
    assert error.startswith(text)
    assert value == 2.0
    assert took_s < 10.0, "no call waited for the one that failed"
    assert in_flight == 0


# ---- a damaged connection to the scheduler ---------------------------------------------------------------------------


class Damaging:
    """Relays connections to the scheduler, and flips bits at the beginning of every tenth piece from there."""

    def __init__(self):
        self._dial, self.flipped = sockets.dial, 0

    def dial(self, address):
        far = self._dial(address)
        if address != os.environ["PACELINE_SCHEDULER"]:
            return far
        ours, theirs = tcp_pair()
        far.settimeout(None)
        for source, target, flips in ((theirs, far, False), (far, theirs, True)):
            threading.Thread(target=self._relay, args=(source, target, flips), daemon=True).start()
        return ours

    def _relay(self, source, target, flips):
        pieces = 0
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                pieces += 1
                if flips and pieces % 10 == 0:
                    self.flipped += 1
                    piece = bytes(one ^ 0x55 for one in piece[:16]) + piece[16:]
                target.sendall(piece)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def train_with_a_damaged_lifeline(seconds):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("paceline").addHandler(handler)
    damaging = Damaging()
    sockets.dial = damaging.dial
    store, value = new_store(), torch.ones(1000)
    rounds, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        store.pushpull(0, value.fill_(1.0))
        rounds += 1
        time.sleep(0.01)
    alive = [thread.name for thread in threading.enumerate() if thread.name == "paceline-lifeline"]
    return [damaging.flipped, value[0].item() == rounds, alive, lines]


@pytest.mark.parametrize("insecure", [False, True])
def test_damaged_messages_do_not_end_the_lifeline(insecure):
    settings = {"insecure": True} if insecure else {}
    with LocalJob(1, 1, timeout_s=30, heartbeat_interval_s=0.05, heartbeat_timeout_s=4.0, **settings) as job:
        [(flipped, is_right, alive, lines)] = job.run(train_with_a_damaged_lifeline, 8.0)
        assert [job.scheduler.wait(30), job.servers[0].wait(30)] == [0, 0], job.report()
    assert flipped > 3
    assert is_right
    assert alive == ["paceline-lifeline"]
    assert any("scheduler" in line or "listener" in line for line in lines), lines


# ---- reads cut nothing -----------------------------------------------------------------------------------------------


def read_single_keys(keys, numel):
    """Count the entries of a push of all keys, and time it, before and after single keys are read and refused."""
    store = new_store(keys, numel)
    names = list(range(keys))
    values = [torch.ones(numel) for _ in names]
    asked = []
    ask = store.session.ask_server

    def spy(server, body, *rest):
        if isinstance(body, m.Push):
            asked.append(len(body.entries))
        return ask(server, body, *rest)

    store.session.ask_server = spy

    def one_push():
        asked.clear()
        start = time.perf_counter()
        store.pushpull(names, values)
        return sum(asked), time.perf_counter() - start

    for _ in range(3):
        one_push()
    before = [one_push() for _ in range(10)]
    out = torch.zeros(numel)
    for name in names:
        store.table.blocks[0].fresh = [False] * keys
        store.pull(name, out)
    refused = 0
    block = store.table.blocks[0]
    for name in names:
        part = block.ranges([name])[0]
        entry = m.Entry(0, part.bucket, part.start, part.length, 999)
        body = m.Push(store.name, [entry], 1.0, b"", False, True, True)
        try:
            store.session.wait([ask(block.layout.buckets[part.bucket].server, body, "a push of no round")])
        except (PacelineError, ValueError):
            refused += 1
    after = [one_push() for _ in range(10)]
    fastest = [min(took for _, took in pushes) for pushes in (before, after)]
    return [before[-1][0], after[-1][0], *fastest, refused]


def test_reads_and_refused_pushes_leave_later_pushes_as_they_were():
    with LocalJob(1, 1, timeout_s=30) as job:
        [(before, after, took_before_s, took_after_s, refused)] = job.run(read_single_keys, 50, 2000)
    assert refused == 50
    assert after == before
    assert took_after_s < 3 * took_before_s


# ---- the first optimizer ---------------------------------------------------------------------------------------------

PROBE = """
import sys
import torch

if "torch._dynamo" not in sys.modules:
    raise RuntimeError("the server has not imported torch._dynamo, which takes seconds")

class Probe(torch.optim.SGD):
    pass
"""


def set_the_probe():
    store = kvstore.create("dist_sync")
    store.set_optimizer("probe:Probe", lr=1.0)
    store.init("w", torch.zeros(4))
    value = torch.ones(4)
    store.pushpull("w", value)
    return value.tolist()


def test_server_is_ready_for_its_first_optimizer_when_it_serves(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    path = os.pathsep.join([SOURCES, str(tmp_path)])  # another one than the forking process has: a program of its own
    with LocalJob(1, 1, timeout_s=60, environment={"PYTHONPATH": path}, allow="probe:Probe") as job:
        assert job.run(set_the_probe) == [[-1.0] * 4]
