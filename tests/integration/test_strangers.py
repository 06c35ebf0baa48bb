"""Who has not the job's key cannot fill the memory of any role, keep members from joining, nor stop their rounds.

``PACELINE_FUZZ_CONNECTIONS=10000 pytest tests/integration/test_strangers.py`` opens 10,000 connections of each kind.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paceline import kvstore
from paceline.net import Security
from paceline.net.handshake import Initiator, Responder, Way
from paceline.testing import LocalJob, listen, tell
from tests.integration.relays import listening_ports

CONNECTIONS = int(os.environ.get("PACELINE_FUZZ_CONNECTIONS", "2000"))
GROWTH_BYTES = 64 * 2**20
JOIN_S = ROUND_S = 2.0
ROUNDS = 20
ATTACKS = [
    ("huge", 8),
    *((kind, CONNECTIONS) for kind in ("huge", "cut", "silent", "slow", "garbage", "replayed", "all")),
]

pytestmark = pytest.mark.timeout(180)


class Strangers:
    """Strangers that attack for as long as the ``with`` block takes, and have recorded a member's handshake."""

    def __init__(self, kind, count, addresses, job_key):
        script = Path(__file__).with_name("strangers.py")
        places = [address.removeprefix("tcp://") for address in addresses]
        self._command = [sys.executable, str(script), kind, str(count), "160", *places]
        recorded = [handshake(Security(job_key).psk, name) for name in ("scheduler", "server 0")]
        self._env = {**os.environ, "RECORDED": " ".join(f"{hello.hex()}:{join.hex()}" for hello, join in recorded)}
        self._count = count

    def __enter__(self):
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, env=self._env)
        said = self._process.stdout.readline().split()
        assert said[:1] == [b"open"]
        assert int(said[1]) >= self._count
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def handshake(psk, name):
    """Return what a member sends to a listener: HELLO and JOIN."""
    way = Way(False, name)
    initiator = Initiator(psk, b"worker-1", True, way)
    hello = initiator.hello()
    join, _ = initiator.take(Responder(psk, True, way).take(hello))
    return hello, join


def train():
    """Join, train when asked to, and leave when asked to; tell how long joining and the longest round took."""
    start = time.monotonic()
    store = kvstore.create("dist_sync")
    joined_s = time.monotonic() - start
    store.set_updater("add")
    store.init("w", torch.zeros(100))
    tell([store.session.servers[0].address, joined_s])
    listen(100)
    value, longest_s = torch.ones(100), 0.0
    for _ in range(ROUNDS):
        start = time.monotonic()
        store.pushpull("w", torch.ones(100), out=value)
        longest_s = max(longest_s, time.monotonic() - start)
    tell([value[0].item(), longest_s])
    listen(100)


@pytest.mark.parametrize(("kind", "count"), ATTACKS)
def test_strangers_fill_no_memory_and_stop_nobody(kind, count):
    with LocalJob(2, 1, unix_sockets=False, shared_memory=False, start_timeout_s=100) as job:
        first = job.start(0, train)
        server = server_address(job)
        roles = {"scheduler": job.scheduler, "server": job.servers[0], "worker": first}
        before = {name: role.rss_bytes() for name, role in roles.items()}
        with Strangers(kind, count, [job.address, server], job.job_key):
            second = job.start(1, train)
            joined = [worker.heard(90)[1] for worker in (first, second)]
            for worker in (first, second):
                worker.tell("go on")
            trained = [worker.heard(90) for worker in (first, second)]
            grown = {name: role.rss_bytes() - before[name] for name, role in roles.items()}
            for worker in (first, second):
                worker.tell("go on")
            for worker in (first, second):
                worker.result()
    assert [value for value, _ in trained] == [2.0 * ROUNDS] * 2
    assert max(grown.values()) < GROWTH_BYTES, grown
    assert joined[1] < JOIN_S
    assert max(longest_s for _, longest_s in trained) < ROUND_S


def server_address(job):
    """Return where the server listens: the port that it has bound, before anybody could tell."""
    deadline = time.monotonic() + 60
    while not (ports := listening_ports(job.servers[0].pid)):
        assert time.monotonic() < deadline, "the server listens nowhere"
        time.sleep(0.1)
    return f"127.0.0.1:{ports[0]}"
