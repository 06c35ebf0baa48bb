"""What a transport holds for a peer goes with the peer."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import paceline
from paceline.net import Security, new_job_key
from paceline.net.sockets import SocketHub, SocketListener

SOURCES = str(Path(paceline.__file__).parents[1])
COUNT = 30

MANY = """
import sys, time
from paceline.net import Security
from paceline.net.sockets import SocketHub

address, key, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
hubs = [SocketHub(Security(key)) for _ in range(count)]
for number, hub in enumerate(hubs):
    channel = hub.connect(address, b"member %d" % number, "server 0")
    hub.send(channel, [b"hello"])
time.sleep(600)
"""


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.parametrize("watch", [False, True])
def test_nothing_is_left_of_peers_that_were_killed(watch: bool) -> None:
    key = new_job_key()
    listener = SocketListener(["tcp://127.0.0.1:*"], Security(key), "server 0", watch=watch)
    before = held()
    try:
        for _ in range(3):
            argv = [sys.executable, "-c", MANY, listener.addresses[0], key, str(COUNT)]
            with subprocess.Popen(argv, env=os.environ | {"PYTHONPATH": SOURCES}) as peers:
                heard: set[bytes] = set()
                while len(heard) < COUNT:
                    for peer, _ in listener.receive(5.0):
                        heard.add(peer)
                        listener.send(peer, [b"welcome"])
                peers.kill()
            wait_until(lambda: not listener._peers)
            assert len(listener.lost()) == (COUNT if watch else 0)
            assert listener.lost() == []
            wait_until(lambda: held() == before)
    finally:
        listener.close()


def test_nothing_is_left_of_a_listener_that_a_hub_has_lost() -> None:
    before, security = held(), Security(new_job_key())
    for _ in range(5):
        listener, hub = SocketListener(["tcp://127.0.0.1:*"], security, "server 0"), SocketHub(security)
        hub.send(hub.connect(listener.addresses[0], b"member", "server 0"), [b"hello"])
        assert listener.receive(5.0)
        listener.close()
        hub.close()
    wait_until(lambda: held() == before)
