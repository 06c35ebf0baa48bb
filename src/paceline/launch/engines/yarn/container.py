"""What runs in a container: ``python -m paceline.launch.engines.yarn.container HOST:PORT NAME DIRECTORY``.

It connects to the launcher's hub, and runs an agent whenever a remote shell asks for one: once, and once more after
each restart of the job. The key is the variable ``PACELINE_HUB_KEY``, or in the file ``PACELINE_HUB_KEY_FILE``.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from paceline.errors import PacelineError
from paceline.launch.engines.yarn.channel import AgentChannel, connect
from paceline.net.handshake import HandshakeError

KEY_VARIABLE, KEY_FILE_VARIABLE = "PACELINE_HUB_KEY", "PACELINE_HUB_KEY_FILE"

_READ_BYTES = 65536
#: Most seconds an agent may take to end its processes.
_LEAVE_S = 10.0


def main(words: Sequence[str]) -> int:
    """Serve until the launcher is gone; return the exit code."""
    address, name, directory = words
    host, _, port = address.rpartition(":")
    try:
        key = _key()
    except OSError as error:
        print(f"the hub's key cannot be read: {error}; containers must run as the launcher's user", file=sys.stderr)
        return 1
    if not os.path.isdir(directory):
        print(f"this node has no directory {directory}: nodes must share it", file=sys.stderr)
        return 1
    served = False
    while True:
        try:
            channel = connect(host.strip("[]"), int(port), key, name)
        except (OSError, HandshakeError) as error:
            if served:  # the job is over
                return 0
            print(f"the launcher at {address} cannot be reached from here: {error}", file=sys.stderr)
            return 1
        try:
            _serve(channel, directory)
        except (OSError, PacelineError) as error:
            print(f"the connection to the launcher ended: {error}", file=sys.stderr)
        finally:
            channel.close()
        served = True


def _key() -> str:
    path = os.environ.pop(KEY_FILE_VARIABLE, "")
    return Path(path).read_text() if path else os.environ.pop(KEY_VARIABLE)


def _serve(channel: AgentChannel, directory: str) -> None:
    """Wait for a remote shell, and run an agent for it."""
    if channel.receive() is None:
        return
    agent = subprocess.Popen(
        [sys.executable, "-m", "paceline", "agent"], cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert agent.stdin is not None
    assert agent.stdout is not None
    sender = threading.Thread(target=_send_output, args=[agent.stdout, channel], daemon=True)
    sender.start()
    try:
        while data := channel.receive():
            agent.stdin.write(data)
            agent.stdin.flush()
    finally:
        _end(agent)
        sender.join(_LEAVE_S)


def _end(agent: subprocess.Popen[bytes]) -> None:
    """End an agent's input, so that it ends its processes and itself."""
    assert agent.stdin is not None
    with contextlib.suppress(OSError):  # it has ended by itself
        agent.stdin.close()
    try:
        agent.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


def _send_output(stdout: IO[bytes], channel: AgentChannel) -> None:
    """Pass on an agent's output; its end ends the connection."""
    try:
        while data := os.read(stdout.fileno(), _READ_BYTES):
            channel.send(data)
    except OSError:  # the launcher is gone; the agent learns it from its input
        pass
    channel.close()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
