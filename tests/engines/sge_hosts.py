"""A real Grid Engine on hosts with names, for tests, with a cell of its own; the programs are Debian's."""
# ruff: noqa: E501 - sed cannot break lines

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.clusters.hosts import StepwiseStart
from tests.engines.named_hosts import NamedHosts

_INSTALLED = Path("/var/lib/gridengine")
_USER = "sgeadmin"
_PROGRAMS = ("sge_qmaster", "sge_execd", "qsub", "qconf")
_START_S = 90.0

_SET_UP = r"""
set -e
E='s/^\(min_.id\).*/\1 0/;s/^load_report_time.*/load_report_time 00:00:02/;s#^execd_spool_dir.*#execd_spool_dir '$FOLDER'/execd#;s/^max_unheard.*/max_unheard 00:00:10/' qconf -mconf
E='s/^schedule_interval.*/schedule_interval 0:0:1/;s/^flush_\(submit\|finish\)_sec.*/flush_\1_sec 1/' qconf -msconf
E='s/^slots.*/slots 999/;s/^allocation_rule.*/allocation_rule $round_robin/;s/^control_slaves.*/control_slaves TRUE/;s/^job_is_first.*/job_is_first_task FALSE/' qconf -ap paceline
E=';' qconf -ahgrp @pc
for h in $HOSTS; do qconf -ah $h; qconf -as $h; E="s/^hostname.*/hostname $h/" qconf -ae; qconf -aattr hostgroup hostlist $h @pc; done
E='s/^hostlist.*/hostlist @pc/;s/^slots.*/slots 4/;s/^pe_list.*/pe_list paceline/;s/^load_thresholds.*/load_thresholds NONE/;s/^shell_start_mode.*/shell_start_mode unix_behavior/;s/^notify.*/notify 00:00:20/' qconf -aq main.q
for h in $HOSTS; do install -d -m 1777 $FOLDER/tmp-$h; qconf -aattr queue tmpdir "[$h=$FOLDER/tmp-$h]" main.q; done
"""


def why_no_sge() -> str:
    """Return why Grid Engine cannot run here; an empty text when it can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"needs {', '.join(absent)} (packages gridengine-master, -exec and -client)" if absent else ""


class SgeHosts(StepwiseStart):
    """A master and an execution daemon per host.

    Args:
        hosts: where; the first has the master.
        folder: for all files; other users can enter it.
    """

    def __init__(self, hosts: NamedHosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self._root = folder / "root"
        self.environment = {**os.environ, "SGE_ROOT": str(self._root), "SGE_CELL": "default"}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def _open(self, stack: contextlib.ExitStack) -> None:
        self._make_cell()
        stack.callback(self.close)
        editor = self._folder / "editor"
        editor.write_text('#!/bin/sh\nsleep 1; exec sed -i "$E" "$1"\n')
        editor.chmod(0o755)
        self._daemon(self._hosts.names[0], "sge_qmaster")
        self._until(lambda: "h1" in self._try("qconf -sh"))
        names = " ".join(self._hosts.names)
        env = {**self.environment, "EDITOR": str(editor), "HOSTS": names, "FOLDER": str(self._folder)}
        self._hosts.run("h1", ["sh", "-c", _SET_UP], env, _START_S)
        for name in self._hosts.names:
            self._daemon(name, "sge_execd")
        self._until(self._ready)

    def close(self) -> None:
        """End all daemons."""
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()

    def _make_cell(self) -> None:
        """Make an empty cluster, as the package does when it is installed."""
        common, spool = self._root / "default" / "common", self._folder / "spool"
        for path in (common, spool / "qmaster" / "job_scripts", spool / "spooldb", self._folder / "execd"):
            path.mkdir(parents=True)
        for path in _INSTALLED.iterdir():
            if path.name != "default":
                (self._root / path.name).symlink_to(path)
        text = (_INSTALLED / "default" / "common" / "bootstrap").read_text()
        (common / "bootstrap").write_text(text.replace("/var/spool/gridengine", str(spool)))
        (common / "act_qmaster").write_text(f"{self._hosts.names[0]}\n")
        subprocess.run(["chown", "-R", _USER, str(self._folder)], check=True)
        script = "/usr/share/gridengine/scripts/init_cluster"
        command = ["runuser", "-u", _USER, "--", script, str(self._root), "default", str(spool / "spooldb"), _USER]
        subprocess.run(command, check=True, capture_output=True, env=self.environment)

    def _ready(self) -> bool:
        lines = [line.split() for line in self._try("qhost").splitlines()]
        return sum(1 for words in lines if words and words[0] in self._hosts.names and words[3] != "-") == len(
            self._hosts.names
        )

    def _daemon(self, host: str, program: str) -> None:
        """Start a daemon in a process namespace that ends with one process."""
        wait = f"{program}; exec sleep infinity"
        own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", wait]
        self._daemons.append(
            subprocess.Popen(
                self._hosts.command(host, own),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self.environment,
            )
        )

    def _try(self, command: str) -> str:
        with contextlib.suppress(AssertionError):
            return self._hosts.run("h1", command, self.environment)
        return ""

    def _until(self, true: Callable[[], bool]) -> None:

        until = time.monotonic() + _START_S
        while not true():
            assert time.monotonic() < until, self._try("qhost")
            time.sleep(0.3)
