"""A Slurm cluster on this machine, for tests of launchers: a controller on the first host, a node on each other."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.launch.supervise.child import die_with_parent
from tests.clusters.hosts import Hosts, StepwiseStart, why_no_hosts

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "sinfo")
_START_S = 120.0
_CONFIG = """\
ClusterName=paceline
SlurmctldHost=h0({controller})
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/ctld.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
SchedulerParameters=bf_interval=1,batch_sched_delay=1,sched_min_interval=100000
"""


def why_no_slurm() -> str:
    """Return why Slurm cannot run here, for skipping tests; an empty text when it can."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    return why_no_hosts() or (f"needs {', '.join(absent)} (packages slurm-wlm, munge)" if absent else "")


class SlurmCluster(StepwiseStart):
    """Nodes ``h1``, ``h2``, ... of a Slurm cluster in network namespaces. ::

        with SlurmCluster(2) as cluster:
            subprocess.run(cluster.command(["srun", "-N2", "hostname"]), env=cluster.environ)

    Args:
        nodes: how many.
        partitions: nodes by partition; one of all by default.
        cpus: of each node, as Slurm sees it.
    """

    def __init__(self, nodes: int, partitions: Mapping[str, Sequence[int]] | None = None, cpus: int = 4) -> None:
        self.hosts = Hosts(nodes + 1)
        self._nodes, self._cpus = nodes, cpus
        self._partitions = dict(partitions or {"all": range(1, nodes + 1)})
        self._daemons: list[subprocess.Popen[bytes]] = []

    def _open(self, stack: contextlib.ExitStack) -> None:
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-slurm-")))
        self.folder.chmod(0o755)
        stack.enter_context(self.hosts)
        stack.callback(self._stop)
        self._configure()
        self._start_munge()
        self._start(0, ["slurmctld", "-D", "-c"])
        for index in range(1, self._nodes + 1):
            self._start(index, ["slurmd", "-D", "-N", f"h{index}"])
        self._wait()

    @property
    def environ(self) -> dict[str, str]:
        """Environment of Slurm's programs."""
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on the controller's host."""
        return self._on(0, argv)

    def run(self, *argv: str) -> str:
        """Run a program of Slurm; return what it prints."""
        done = subprocess.run(self.command(argv), env=self.environ, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def daemon(self, index: int) -> int:
        """Return the process that runs a node's daemon; all that runs on the node comes from it."""
        return self._daemons[index + 1].pid

    def processes(self, index: int) -> list[str]:
        """Return the command lines of what runs on a host, except its daemon and what holds the namespace."""
        own = os.readlink(f"/proc/{self._daemons[index + 1].pid}/ns/net")
        found = []
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # no process, or it has ended
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if command and process.name.isdigit() and os.readlink(process / "ns/net") == own:
                    found.append(command)
        return [one for one in found if not one.startswith(("slurmd", "slurmctld", "slurmstepd", "unshare ", "cat"))]

    def _on(self, index: int, argv: Sequence[str]) -> list[str]:
        own = ["unshare", "--uts", "sh", "-c", f'hostname h{index}; exec "$@"', "sh"]
        return self.hosts[index].command([*own, *argv])

    def _configure(self) -> None:
        lines = [_CONFIG.format(folder=self.folder, controller=self.hosts[0].address)]
        for index in range(1, self._nodes + 1):
            lines.append(f"NodeName=h{index} NodeAddr={self.hosts[index].address} CPUs={self._cpus} RealMemory=4096\n")
        for name, nodes in self._partitions.items():
            names = ",".join(f"h{index}" for index in nodes)
            default = "YES" if name == next(iter(self._partitions)) else "NO"
            lines.append(f"PartitionName={name} Nodes={names} Default={default} State=UP MaxTime=INFINITE\n")
        (self.folder / "slurm.conf").write_text("".join(lines))
        (self.folder / "ctld").mkdir()

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        command = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket"]
        command += [f"--pid-file={self.folder}/munge.pid", f"--seed-file={self.folder}/munge.seed", "--num-threads=2"]
        self._popen([*command, f"--log-file={self.folder}/munge.log"], "munged")
        until = time.monotonic() + _START_S
        while not (self.folder / "munge.socket").exists():
            if time.monotonic() > until:
                raise OSError(f"munged did not start: {self._said('munged')}")
            time.sleep(0.02)

    def _start(self, index: int, argv: Sequence[str]) -> None:
        self._popen(self._on(index, argv), f"{argv[0]}{index}")

    def _popen(self, command: Sequence[str], name: str) -> None:
        with open(self.folder / f"{name}.out", "wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environ,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    preexec_fn=die_with_parent,  # noqa: PLW1509 - a run of tests that is killed leaves no daemons
                )
            )

    def _said(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text(errors="replace")[-2000:]

    def _wait(self) -> None:
        until = time.monotonic() + _START_S
        while len(self.run("sinfo", "-hN", "-t", "idle", "-o", "%N").split()) < self._nodes:
            if time.monotonic() > until:
                logs = [self._said("slurmctld0"), *(self._said(f"slurmd{n}") for n in range(1, self._nodes + 1))]
                raise OSError(f"Slurm did not start: {self.run('sinfo')} {logs}")
            time.sleep(0.1)

    def _stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
