"""Who has not the job's key cannot fill the memory of any role, nor keep members from joining."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paceline import kvstore
from paceline.testing import LocalJob, listen, tell

CONNECTIONS = int(os.environ.get("PACELINE_FUZZ_CONNECTIONS", "2000"))
GROWTH_BYTES = 64 * 2**20
JOIN_S = 2.0
ATTACKS = [
    ("huge", 8),
    *((kind, CONNECTIONS) for kind in ("huge", "cut", "silent", "slow", "garbage", "replayed", "all")),
]

pytestmark = pytest.mark.timeout(180)


class Strangers:
    """Strangers that attack for as long as the ``with`` block takes."""

    def __init__(self, kind, count, addresses):
        script = Path(__file__).with_name("strangers.py")
        places = [address.removeprefix("tcp://") for address in addresses]
        self._command = [sys.executable, str(script), kind, str(count), "100", *places]

    def __enter__(self):
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE)
        assert self._process.stdout.readline() == b"open\n"
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def train():
    """Join, train a round when asked to, and tell how long joining took."""
    start = time.monotonic()
    store = kvstore.create("dist_sync")
    joined_s = time.monotonic() - start
    store.set_updater("add")
    store.init("w", torch.zeros(100))
    tell([store.session.servers[0].address, joined_s])
    listen(100)
    value = torch.ones(100)
    store.pushpull("w", value)
    return value[0].item()


@pytest.mark.parametrize(("kind", "count"), ATTACKS)
def test_strangers_fill_no_memory_and_stop_nobody(kind, count):
    with LocalJob(2, 1, unix_sockets=False, shared_memory=False, start_timeout_s=100) as job:
        first = job.start(0, train)
        server = server_address(job)
        before = [job.scheduler.rss_bytes(), job.servers[0].rss_bytes()]
        with Strangers(kind, count, [job.address, server]):
            second = job.start(1, train)
            joined = [worker.heard(90)[1] for worker in (first, second)]
            grown = [
                role.rss_bytes() - size for role, size in zip([job.scheduler, job.servers[0]], before, strict=True)
            ]
            for worker in (first, second):
                worker.tell("go on")
            assert [worker.result() for worker in (first, second)] == [2.0, 2.0]
    assert max(grown) < GROWTH_BYTES, grown
    assert joined[1] < JOIN_S


def server_address(job):
    """Return where the server listens: the port that it has bound, before anybody could tell."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        inodes = {
            link[8:-1]
            for fd in Path(f"/proc/{job.servers[0].pid}/fd").iterdir()
            if (link := os.readlink(fd)).startswith("socket:")
        }
        for line in Path(f"/proc/{job.servers[0].pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                return f"127.0.0.1:{int(re.split(':', fields[1])[1], 16)}"
        time.sleep(0.1)
    raise TimeoutError("the server listens nowhere")
