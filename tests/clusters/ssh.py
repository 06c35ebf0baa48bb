"""Hosts with ssh servers, for tests of launchers: real sshd in network namespaces."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.launch.supervise.child import die_with_parent
from tests.clusters.hosts import Hosts, NamespaceHost, StepwiseStart, why_no_hosts

_SSHD = "/usr/sbin/sshd"
PORT = 2222
_START_S = 120.0

_SERVER = """\
Port {port}
HostKey {folder}/hostkey
AuthorizedKeysFile {folder}/authorized_keys
PermitRootLogin prohibit-password
UsePAM no
PasswordAuthentication no
StrictModes no
PidFile none
MaxStartups 200
MaxSessions 100
"""
_CLIENT = """\
Host *
 User root
 Port {port}
 IdentityFile {folder}/id
 IdentitiesOnly yes
 UserKnownHostsFile {folder}/known_hosts
 StrictHostKeyChecking yes
 ConnectTimeout 5
 ServerAliveInterval 2
 ServerAliveCountMax 3
"""


def why_no_ssh() -> str:
    """Return why ssh servers cannot run here, for skipping tests; an empty text when they can."""
    absent = [name for name in (_SSHD, "ssh", "ssh-keygen") if shutil.which(name) is None]
    return why_no_hosts() or (f"needs {', '.join(absent)} (packages openssh-server, openssh-client)" if absent else "")


class SshHosts(StepwiseStart):
    """Hosts of :mod:`tests.clusters.hosts`, each with a host name of its own and an ssh server. ::

        with SshHosts(3) as cluster:
            cluster.hostfile([1, 2])
            subprocess.run(cluster.command(["ssh", "-F", cluster.client_config, "h1", "hostname"]))

    The first host is where the launcher runs. ``h0``, ``h1`` and so on are aliases of the ssh client's configuration,
    not names that resolve.

    Args:
        count: of hosts.
        hidden: by host, folders that are empty there and shared with nobody.
        paths: by host, its PATH.
        rate_bits_s: see :class:`~tests.clusters.hosts.Hosts`.
    """

    def __init__(
        self,
        count: int,
        *,
        hidden: Mapping[int, Sequence[str]] | None = None,
        paths: Mapping[int, str] | None = None,
        rate_bits_s: float | None = None,
    ) -> None:
        self.hosts = Hosts(count, rate_bits_s=rate_bits_s)
        self._hidden, self._paths = dict(hidden or {}), dict(paths or {})
        self._servers: dict[int, subprocess.Popen[bytes]] = {}

    def _open(self, stack: contextlib.ExitStack) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-ssh-")))
        stack.enter_context(self.hosts)
        stack.callback(self._stop)
        self._configure()
        for index in range(len(self.hosts)):
            self.start(index)

    @property
    def client_config(self) -> str:
        """Path of the ssh client's configuration."""
        return str(self.folder / "ssh_config")

    def __getitem__(self, index: int) -> NamespaceHost:
        return self.hosts[index]

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` where the launcher runs."""
        return self.hosts[0].command(argv)

    def hostfile(self, lines: Sequence[str], name: str = "hosts") -> str:
        """Write a hostfile and return its path."""
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))
        return str(self.folder / name)

    def start(self, index: int) -> None:
        """Start the ssh server of a host and wait until it answers."""
        steps = [f"hostname h{index}"]
        steps += [f"mount -t tmpfs none {shlex.quote(folder)}" for folder in self._hidden.get(index, ())]
        if index in self._paths:
            config = self.folder / f"sshd_config{index}"
            config.write_text(f"{self._server_config()}SetEnv PATH={self._paths[index]}\n")
        else:
            config = self.folder / "sshd_config"
        steps.append(f"exec {_SSHD} -D -f {config} -E {self.folder}/h{index}.log")
        shell = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-ec"]
        command = self.hosts[index].command([*shell, "; ".join(steps)])
        self._servers[index] = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - a run of tests that is killed leaves no hosts
        )
        self._wait_for(index)

    def daemon(self, index: int) -> int:
        """Return the process that runs a host's ssh server; all that runs on the host comes from it."""
        return self._servers[index].pid

    def kill(self, index: int) -> None:
        """End a host's ssh server and everything that it has started: the host dies."""
        self._servers[index].kill()
        self._servers[index].wait()

    def processes(self, index: int) -> list[str]:
        """Return the command lines of what runs on a host, except its ssh server and what holds the namespace."""
        return list(self._processes(index).values())

    def end(self, index: int, command: str) -> None:
        """Kill the processes of a host that have this command line, and no others of this machine."""
        for process in [process for process, line in self._processes(index).items() if line == command]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _processes(self, index: int) -> dict[int, str]:
        own = os.readlink(f"/proc/{self._servers[index].pid}/ns/net")
        found = {}
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # no process, or it has ended
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if command and process.name.isdigit() and os.readlink(process / "ns/net") == own:
                    found[int(process.name)] = command
        ours = ("sshd: /usr/sbin/sshd", _SSHD, "unshare ", "cat")
        return {process: line for process, line in found.items() if not line.startswith(ours)}

    def _configure(self) -> None:
        Path("/run/sshd").mkdir(parents=True, exist_ok=True)
        for name in ("hostkey", "id", "stranger"):
            subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        shutil.copy(self.folder / "id.pub", self.folder / "authorized_keys")
        (self.folder / "sshd_config").write_text(self._server_config())
        key = " ".join((self.folder / "hostkey.pub").read_text().split()[:2])
        addresses = [host.address for host in self.hosts]
        names = [f"[{one}]:{PORT}" for one in addresses]
        (self.folder / "known_hosts").write_text("".join(f"{name} {key}\n" for name in names))
        aliases = "".join(f"Host h{index}\n HostName {one}\n" for index, one in enumerate(addresses))
        (self.folder / "ssh_config").write_text(aliases + _CLIENT.format(folder=self.folder, port=PORT))

    def _server_config(self) -> str:
        return _SERVER.format(folder=self.folder, port=PORT)

    def _wait_for(self, index: int) -> None:
        probe = f"exec 3<>/dev/tcp/{self.hosts[index].address}/{PORT}"
        until = time.monotonic() + _START_S
        command = self.hosts[index].command(["bash", "-c", probe])
        while subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
            if time.monotonic() > until or self._servers[index].poll() is not None:
                log = self.folder / f"h{index}.log"
                raise OSError(f"sshd on h{index} did not start: {log.read_text() if log.exists() else 'no log'}")
            time.sleep(0.02)

    def _stop(self) -> None:
        for server in self._servers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, 9)
            server.wait()
