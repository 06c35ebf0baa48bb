"""A process of the server's host leads a worker's TCP connection into the server's unix socket, not encrypted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import paceline
from paceline.net import new_job_key
from tests.clusters.hosts import Hosts, NamespaceHost, why_no_hosts

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "possible")]

SOURCES = str(Path(paceline.__file__).parents[1])
TENSOR = b"a gradient that nobody else may read"

#: Server 0 of a job: listens at TCP and at a unix socket.
SERVER = """
import os, sys
from paceline.net import Security
from paceline.net.sockets import SocketListener

security = Security(os.environ.get("KEY", ""))
listener = SocketListener([f"tcp://{sys.argv[1]}:*", "ipc://@paceline-relayed"], security, "server 0", bulk=True)
print(*listener.addresses, flush=True)
while True:
    listener.receive(1.0)
"""

#: Relays TCP to the unix socket as a user, without the key, and says whether the tensor came by in the clear.
RELAY = """
import os, select, socket, sys

uid, seen = int(sys.argv[1]), sys.argv[2].encode()
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
server = socket.create_server(("0.0.0.0", 0))
print(server.getsockname()[1], flush=True)
near, _ = server.accept()
far = socket.socket(socket.AF_UNIX)
found = b""
try:
    far.connect(chr(0) + "paceline-relayed")
    while True:
        for source, target in ((near, far), (far, near)):
            if select.select([source], [], [], 0.01)[0]:
                piece = source.recv(1 << 16)
                found += piece
                target.sendall(piece)
                if not piece or seen in found:
                    raise ConnectionError
except ConnectionError:
    print("in the clear" if seen in found else "nothing", flush=True)
"""

#: Worker 1: sends a tensor to server 0 at an address, and says what came of it.
WORKER = """
import os, sys
from paceline.net import Security
from paceline.net.sockets import SocketHub

hub = SocketHub(Security(os.environ.get("KEY", "")))
channel = hub.connect(sys.argv[1], b"worker-1", "server 0", bulk=True)
hub.send(channel, [b"push", sys.argv[2].encode() * 10_000])
while hub._channels[channel].refusal is None and not hub.is_open(channel):
    hub.receive(0.05)
hub.close(linger_s=5.0)
print(hub._channels[channel].refusal or "connected", flush=True)
"""


@contextlib.contextmanager
def running(host: NamespaceHost, key: str, program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": SOURCES, "KEY": key}
    command = host.command([sys.executable, "-c", program, *arguments])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Sequence[NamespaceHost]]:
    with Hosts(2) as made:
        yield made


@contextlib.contextmanager
def relayed(hosts: Sequence[NamespaceHost], key: str, uid: int) -> Iterator[tuple[str, subprocess.Popen[str], str]]:
    """Run server, relay and worker; yield what the relay says, the worker, and the server's own address."""
    with running(hosts[0], key, SERVER, hosts[0].address) as server:
        direct = line(server).split()[0]
        with running(hosts[0], "", RELAY, str(uid), TENSOR.decode()) as relay:
            address = f"tcp://{hosts[0].address}:{line(relay)}"
            with running(hosts[1], key, WORKER, address, TENSOR.decode()) as worker:
                yield line(relay), worker, direct


def test_tcp_that_is_led_into_a_unix_socket_is_refused_by_both_sides(hosts: Sequence[NamespaceHost]) -> None:
    """The relay runs as the job's own user."""
    key = new_job_key()
    with relayed(hosts, key, 0) as (seen, worker, direct):
        assert seen == "nothing"
        assert line(worker) == "the keys differ, or something between both has joined two connections"
        with running(hosts[1], key, WORKER, direct, TENSOR.decode()) as another:
            assert line(another) == "connected"


def test_relay_of_another_user_never_reaches_the_unix_socket(hosts: Sequence[NamespaceHost]) -> None:
    with relayed(hosts, new_job_key(), 65534) as (seen, _, _):
        assert seen == "nothing"


def test_in_a_job_without_a_key_the_same_relay_reads_everything(hosts: Sequence[NamespaceHost]) -> None:
    """So it is the handshake that stops it in the others."""
    with relayed(hosts, "", 0) as (seen, _, _):
        assert seen == "in the clear"
