"""Hosts with names: network namespaces whose processes see their own host name and an /etc/hosts with all of them."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.clusters.hosts import Hosts

_ENTER = 'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; exec "$@"'


class NamedHosts:
    """Hosts ``h1`` to ``hN`` around a switch, with the addresses 10.77.0.1 to 10.77.0.N.

    Args:
        count: how many.
        folder: where the hosts file is written.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self._hosts = Hosts(count)
        self.names = tuple(f"h{index + 1}" for index in range(count))
        self._file = folder / "hosts"

    def __enter__(self) -> NamedHosts:
        self._hosts.__enter__()
        addresses = [host.address for host in self._hosts]
        lines = [f"{address} {name}" for address, name in zip(addresses, self.names, strict=True)]
        self._file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._hosts.__exit__(kind, error, tb)

    def address(self, name: str) -> str:
        """Return the IPv4 address of a host."""
        return self._hosts[self.names.index(name)].address

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on a host. The process keeps its id; all else is inherited."""
        enter = ["unshare", "--uts", "--mount", "sh", "-c", _ENTER, "sh", str(self._file), name, *argv]
        return self._hosts[self.names.index(name)].command(enter)

    def limit(self, name: str) -> None:
        """Limit what leaves a host to 80 Mbit/s."""
        self._hosts[self.names.index(name)].run("tc qdisc add dev eth0 root tbf rate 80mbit burst 64kb latency 50ms")

    def run(
        self, name: str, argv: Sequence[str] | str, env: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> str:
        """Run a command on a host and return what it printed.

        Raises:
            AssertionError: it failed.
        """
        words = shlex.split(argv) if isinstance(argv, str) else argv
        done = subprocess.run(
            self.command(name, words), env=env, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        assert done.returncode == 0, f"{words} on {name}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout
