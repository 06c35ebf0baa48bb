"""What somebody sees who is not of the job: on the network, and as another user of the host."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from paceline import kvstore
from paceline.net import Security, new_job_key, sockets
from paceline.net.memory import SharedTensor
from paceline.net.sockets import SocketHub, SocketListener
from paceline.testing import LocalJob
from tests.integration.relays import tcp_pair

TENSOR = np.arange(50_000, dtype=np.uint32)
SMALL = b"what the head of a message says"


def recorded(security, monkeypatch):
    """Send a message through a relay; return all bytes that passed it."""
    seen = bytearray()
    dial = sockets.dial

    def relayed(address):
        ours, theirs = tcp_pair()
        far = dial(address)
        far.settimeout(None)

        def relay(source, target):
            while piece := source.recv(1 << 16):
                seen.extend(piece)
                target.sendall(piece)

        for source, target in ((theirs, far), (far, theirs)):
            threading.Thread(target=relay, args=(source, target), daemon=True).start()
        return ours

    monkeypatch.setattr(sockets, "dial", relayed)
    listener, hub = SocketListener(["tcp://127.0.0.1:*"], security, "server 0", bulk=True), SocketHub(security)
    try:
        hub.send(hub.connect(listener.addresses[0], b"peer", "server 0", bulk=True), [SMALL, TENSOR])
        while not (arrived := listener.receive(1.0)):
            pass
        assert [bytes(frame) for frame in arrived[0][1]] == [SMALL, TENSOR.tobytes()]
    finally:
        hub.close()
        listener.close()
    return bytes(seen)


@pytest.mark.parametrize(("key", "encrypt", "tensor", "small"), [
    (True, True, False, False), (True, False, True, False), (False, True, True, True),
])  # fmt: skip
def test_what_the_network_sees(monkeypatch, key, encrypt, tensor, small):
    seen = recorded(Security(new_job_key() if key else "", encrypt), monkeypatch)
    assert (TENSOR.tobytes()[40_000:40_064] in seen) is tensor
    assert (SMALL in seen) is small


def idle():
    kvstore.create("dist_sync").init("w", torch.zeros(3))


@pytest.mark.parametrize(("settings", "words"), [
    ({"insecure": True}, ["has no key"]), ({"encrypt": False}, ["sent in the clear"]), ({}, []),
])  # fmt: skip
def test_one_line_of_warning_says_what_is_not_protected(settings, words):
    with LocalJob(2, 2, **settings) as job:
        job.run(idle)
        said = [line for line in job.report().splitlines() if "has no key" in line or "in the clear" in line]
    assert len(said) == len(words)
    assert all(word in line for word, line in zip(words, said, strict=True))


OTHER_USER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for path in sys.argv[2:]:
    try:
        open(path, "rb").read(1)
    except PermissionError:
        print("refused")
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(10)
    try:
        sock.connect(chr(0) + sys.argv[1])
        sock.sendall(b"PCL1K" + os.urandom(49))
        print("answered" if sock.recv(1000) else "closed")
    except ConnectionError:
        print("closed")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_memory_keys_and_unix_sockets_are_closed_to_other_users():
    name = f"paceline-test-{os.getpid()}"
    shared = SharedTensor(1000, torch.float32)
    listener = SocketListener([f"ipc://@{name}"], Security(new_job_key()), "server 0")
    of_this_process = [f"/proc/{os.getpid()}/{path}" for path in (f"fd/{shared.fd}", "environ", "mem")]
    command = [sys.executable, "-c", OTHER_USER, name, *of_this_process]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    got = listener.receive(0.1)
    listener.close()
    shared.close()
    assert done.stdout == "refused\n" * 3 + "closed\n", done.stderr
    assert got == []


OTHER_LISTENER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX) as sock:
    sock.bind(chr(0) + sys.argv[1])
    sock.listen()
    print("listens", flush=True)
    print(sock.accept()[0].recv(1000), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_unix_socket_of_another_user_hears_nothing():
    """Somebody who has taken the name of a socket, and could relay to the one that is meant."""
    name = f"paceline-test-other-{os.getpid()}"
    hub = SocketHub(Security(new_job_key()))
    with subprocess.Popen([sys.executable, "-c", OTHER_LISTENER, name], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "listens\n"
        channel = hub.connect(f"ipc://@{name}", b"worker-1", "server 0")
        hub.send(channel, [b"push", TENSOR])
        heard = other.stdout.readline()
    hub.close()
    assert heard == "b''\n"
    assert str(hub._channels[channel].refusal) == "a process of another user listens there"
