"""The actor that runs one command on a node. Imported by Ray's workers and by the driver only, because it needs ray."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
from collections.abc import Iterator, Sequence

import ray

from paceline.launch.remote.agent import ADDRESS_VARIABLE
from paceline.launch.remote.shell import ERR, EXIT, OUT, READ_BYTES


@ray.remote(max_restarts=0, max_task_retries=0, concurrency_groups={"input": 1, "output": 1})
class Shell:
    """Runs a command whose stdin is a pipe from this process: when the actor dies, the command's stdin ends."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, ADDRESS_VARIABLE: ray.util.get_node_ip_address()},
        )

    @ray.method(concurrency_group="output", num_returns="streaming")
    def output(self) -> Iterator[tuple[int, bytes]]:
        """Give the command's output, then its exit code."""
        process = self._process
        with selectors.DefaultSelector() as selector:
            for kind, stream in ((OUT, process.stdout), (ERR, process.stderr)):
                assert stream is not None
                selector.register(stream, selectors.EVENT_READ, kind)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, READ_BYTES)
                    if data:
                        yield key.data, data
                    else:
                        selector.unregister(key.fileobj)
        code = process.wait()
        yield EXIT, str(code if code >= 0 else 128 - code).encode()

    @ray.method(concurrency_group="input")
    def write(self, data: bytes) -> None:
        """Write to the command's stdin; no data: close it."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):  # it does not read any more; its exit code says why
            if data:
                rest = memoryview(data)
                while rest:
                    rest = rest[stdin.write(rest) :]
            else:
                stdin.close()
