"""The hub joins remote shells and containers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.launch.engines.yarn import hub as module
from paceline.launch.engines.yarn.container import AgentChannel, connect
from paceline.launch.engines.yarn.hub import ContainerHub
from paceline.launch.remote.shell import ERR, EXIT, LOST, OUT, unpack
from paceline.net.security import new_job_key

Ask = Callable[[str], socket.socket]


@pytest.fixture
def key() -> str:
    return new_job_key()


@pytest.fixture
def hub(key: str) -> ContainerHub:
    return ContainerHub(key, ["worker-0"])


@pytest.fixture
def container(hub: ContainerHub, key: str) -> Iterator[AgentChannel]:
    listener = socket.create_server(("127.0.0.1", 0))
    with contextlib.closing(hub.listen(listener)):
        channel = connect("127.0.0.1", listener.getsockname()[1], key, "worker-0")
        yield channel
        channel.close()


@pytest.fixture
def ask(hub: ContainerHub) -> Iterator[Ask]:
    opened: list[socket.socket] = []

    def shell(name: str) -> socket.socket:
        near, far = socket.socketpair()
        opened.append(near)
        threading.Thread(target=hub.serve, args=[far], daemon=True).start()
        near.sendall(json.dumps(name).encode() + b"\n")
        return near

    yield shell
    for one in opened:
        with contextlib.suppress(OSError):  # its other end is gone
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def frames(shell: socket.socket) -> list[tuple[int, bytes]]:
    """Return what a shell gets, up to its exit code."""
    found = []
    for frame in unpack(shell):
        found.append(frame)
        if frame[0] == EXIT:
            break
    return found


def test_shell_and_container_hear_each_other_until_the_container_ends(ask: Ask, container: AgentChannel) -> None:
    shell = ask("worker-0")
    assert container.receive() == b"agent"
    shell.sendall(b"start")
    assert container.receive() == b"start"
    container.send(b"started")
    container.close()
    assert frames(shell) == [(OUT, b"started"), (EXIT, b"0")]


def test_end_of_input_reaches_the_container(ask: Ask, container: AgentChannel) -> None:
    shell = ask("worker-0")
    assert container.receive() == b"agent"
    shell.shutdown(socket.SHUT_WR)
    assert container.receive() == b""


def test_shell_whose_container_does_not_come_has_a_deadline(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REJOIN_S", 0.05)
    text = b"the container worker-0 has not connected within 0.05 s\n"
    assert frames(ask("worker-0")) == [(ERR, text), (EXIT, str(LOST).encode())]


def test_connections_that_never_speak_keep_no_container_out(tmp_path: Path, key: str) -> None:
    """More of them than the hub has descriptors."""
    path, most = str(tmp_path / "socket"), 300
    asked = json.dumps({"socket": path, "port": 0, "key": key, "names": ["worker-0"]})
    code = f"import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most})); " \
           "runpy.run_module('paceline.launch.engines.yarn.hub', run_name='__main__')"  # fmt: skip
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(hub.kill)
        assert hub.stdin is not None
        assert hub.stdout is not None
        hub.stdin.write(f"{asked}\n")
        hub.stdin.flush()
        port = int(hub.stdout.readline())
        for _ in range(2 * most):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
        channel = connect("127.0.0.1", port, key, "worker-0")
        assert hub.stdout.readline() == "all\n"
        assert len(os.listdir(f"/proc/{hub.pid}/fd")) < most
        channel.close()
