"""Hosts made of network namespaces: they reach each other at the rate asked for, and leave nothing behind."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.clusters.fork_server import ForkedProcess
from tests.clusters.hosts import Hosts, HostsJob, why_no_hosts

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "possible")]

ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    got = 0
    while data := connection.recv(1 << 20):
        got += len(data)
    connection.sendall(b"%d" % got)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10) as connection:
    connection.sendall(bytes(int(sys.argv[3])))
    connection.shutdown(socket.SHUT_WR)
    print(connection.recv(100).decode())
"""


def carry(hosts, source, target, size):
    """Send bytes from one host to another; returns what arrived and the seconds."""
    listen = hosts[target].command([sys.executable, "-c", ECHO, hosts[target].address])
    with subprocess.Popen(listen, stdout=subprocess.PIPE, text=True) as echo:
        port = echo.stdout.readline().strip()
        send = [sys.executable, "-c", SEND, hosts[target].address, port, str(size)]
        start = time.monotonic()
        done = subprocess.run(hosts[source].command(send), capture_output=True, text=True, check=True, timeout=30)
        return int(done.stdout), time.monotonic() - start


def namespaces_of_children():
    """Return the network namespaces that processes of this one live in."""
    found = set()
    for task in Path("/proc").glob("[0-9]*"):
        try:
            if f"PPid:\t{os.getpid()}\n" in (task / "status").read_text():
                found.add(os.readlink(task / "ns/net"))
        except OSError:
            continue
    return found - {os.readlink("/proc/self/ns/net")}


def network_of_this_process():
    return os.readlink("/proc/self/ns/net")


@pytest.mark.parametrize("count", [2, 3])
def test_every_host_reaches_every_other_and_counts_what_crosses(count):
    with Hosts(count) as hosts:
        assert len({host.address for host in hosts}) == len(hosts) == count
        for target in range(1, count):
            before = hosts[0].counters(), hosts[target].counters()
            assert carry(hosts, 0, target, 1_000_000)[0] == 1_000_000
            assert 1_000_000 < (hosts[0].counters() - before[0]).sent < 1_100_000
            assert 1_000_000 < (hosts[target].counters() - before[1]).received < 1_100_000


@pytest.mark.parametrize("count", [2, 3])
def test_a_cable_carries_no_more_than_its_rate(count):
    with Hosts(count, rate_bits_s=16e6) as hosts:
        arrived, seconds = carry(hosts, 1, 0, 2_000_000)
        assert arrived == 2_000_000
        assert seconds > 0.9  # 1 s, less what the token bucket holds at the start


def test_hosts_do_not_reach_what_is_outside():
    with socket.create_server(("0.0.0.0", 0)) as outside, Hosts(2) as hosts:
        send = [sys.executable, "-c", SEND, "127.0.0.1", str(outside.getsockname()[1]), "1"]
        done = subprocess.run(hosts[0].command(send), capture_output=True, text=True, check=False, timeout=30)
        assert "Connection refused" in done.stderr


def test_a_pulled_plug_stops_a_stream_and_loses_nothing_of_it():
    with Hosts(2) as hosts:
        listen = hosts[1].command([sys.executable, "-c", ECHO, hosts[1].address])
        with subprocess.Popen(listen, stdout=subprocess.PIPE, text=True) as echo:
            port = echo.stdout.readline().strip()
            hosts[0].unplug()
            send = [sys.executable, "-c", SEND, hosts[1].address, port, "100000"]
            cut_off = subprocess.run(hosts[0].command(send), capture_output=True, text=True, check=False, timeout=30)
            assert "Network is unreachable" in cut_off.stderr
            hosts[0].plug()
            again = subprocess.run(hosts[0].command(send), capture_output=True, text=True, check=True, timeout=30)
            assert int(again.stdout) == 100_000


def test_hosts_vanish_after_an_error():
    assert not namespaces_of_children()

    def fail():
        with Hosts(3):
            assert len(namespaces_of_children()) == 4  # and the switch
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert not namespaces_of_children()


def test_a_command_that_fails_says_what_and_why():
    with Hosts(1) as hosts, pytest.raises(OSError, match=r"`ip link set nothing up` failed.*nothing"):
        hosts[0].run("ip link set nothing up")


def test_numbers_that_make_no_hosts_are_refused():
    with pytest.raises(ValueError, match="0 hosts"):
        Hosts(0)
    with Hosts(2) as hosts, pytest.raises(ValueError, match=r"workers=\[1\] has 1 numbers for 2 hosts"):
        HostsJob(hosts, workers=[1])


def test_processes_of_a_job_are_forked_into_the_networks_of_their_hosts():
    with Hosts(2) as hosts, HostsJob(hosts, workers=[1, 1], servers=[1, 0]) as job:
        networks = job.run(network_of_this_process)
        link = ["readlink", "/proc/self/ns/net"]
        assert networks == [subprocess.check_output(host.command(link), text=True).strip() for host in hosts]
        assert len({*networks, network_of_this_process()}) == 3
        assert all(isinstance(one._handle, ForkedProcess) for one in (job.scheduler, *job.servers, *job.workers))
