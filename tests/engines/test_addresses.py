"""The launcher ssh where hosts have addresses that are valid on one host or on one link only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.ssh import SshHosts, why_no_ssh
from tests.engines.small_jobs import trained, write_training

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(why_no_ssh()), reason=why_no_ssh())]

#: The launcher's own machine, whose name is one of loopback there, as on Debian; and another one by two addresses.
ALIASES = """\
Host near
 HostName 127.0.1.1
Host v4
 HostName 169.254.7.1
Host v6
 HostName fe80::71%%eth0
Host near v4 v6
 StrictHostKeyChecking no
 UserKnownHostsFile /dev/null
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SshHosts]:
    """Two hosts that only a cable joins; their interfaces have unlike names."""
    with SshHosts(2) as made:
        for words in ("link set eth0 down", "link set eth0 name net7", "link set net7 up"):
            made[1].run(f"ip {words}")
        for index, name in enumerate(("eth0", "net7")):
            made[index].run(f"ip addr flush dev {name}")
            made[index].run(f"ip addr add 169.254.7.{index}/16 dev {name}")
            made[index].run(f"ip addr add fe80::7{index}/64 dev {name} nodad")
        (made.folder / "aliases").write_text(ALIASES + Path(made.client_config).read_text())
        yield made


def paceline(cluster: SshHosts, folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        cluster.command([sys.executable, "-m", "paceline", *words]), cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environ, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("other", ["v4", "v6"])
def test_hosts_of_a_direct_cable_train_together_one_under_a_name_of_loopback(
    cluster: SshHosts, other: str, tmp_path: Path
) -> None:
    ssh = f"ssh -F {cluster.folder}/aliases"
    words = ["-n", "2", "-s", "2", "-H", f"{other},near", "-o", f"ssh={ssh}", "--", sys.executable]
    done = paceline(cluster, tmp_path, "launch", *words, write_training(tmp_path))
    assert done.returncode == 0, done.stderr
    assert trained(done.stdout, ["h1", "h0"]), done.stdout
    checked = paceline(cluster, tmp_path, "doctor", "-H", f"{other},near", "--ssh", ssh)
    assert checked.stdout.endswith("nothing to fix\n"), checked.stdout + checked.stderr


def test_firewall_may_let_a_range_of_ports_through_only(cluster: SshHosts, tmp_path: Path) -> None:
    for words in ("-p tcp --dport 2222 -j ACCEPT", "-p tcp --dport 20000:20019 -j ACCEPT", "-p tcp --syn -j DROP"):
        for index, name in enumerate(("eth0", "net7")):
            cluster[index].run(f"iptables -A INPUT -i {name} {words}")
    ssh = f"ssh -F {cluster.folder}/aliases"
    try:
        words = ["-n", "2", "-s", "2", "-H", "v4,near", "-o", f"ssh={ssh}", "--", sys.executable]
        done = paceline(cluster, tmp_path, "launch", *words, write_training(tmp_path), PACELINE_PORTS="20000-20019")
        checked = paceline(cluster, tmp_path, "doctor", "-H", "v4,near", "--ssh", ssh, PACELINE_PORTS="20000-20019")
    finally:
        for index in range(2):
            cluster[index].run("iptables -F")
    assert done.returncode == 0, done.stderr
    assert trained(done.stdout, ["h1", "h0"]), done.stdout
    assert checked.stdout.endswith("nothing to fix\n"), checked.stdout + checked.stderr
