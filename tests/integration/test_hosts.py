"""Training over several hosts: the same bits as on one, through outages too; errors name a host that is lost."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import paceline
from paceline import DistributedOptimizer
from paceline.errors import PacelineError, PeerDiedError
from paceline.testing import LocalJob, tell
from tests.clusters.hosts import Hosts, HostsJob, why_no_hosts

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "possible")]

SOURCES = str(Path(paceline.__file__).parents[1])
STEPS = 8
#: At this rate a step takes some 0.2 s, so that what happens to the link happens in the middle of a frame.
SLOW_BITS_S = 100e6
#: Seconds that a job survives with default settings: a wink, and the restart of a switch.
OUTAGES = [2.0, 12.0]
#: For jobs that give up what is silent as soon as they notice it.
IMPATIENT = {"timeout_s": 60, "stall_timeout_s": 4}
#: Slower than anything that is called a network today.
SLOWEST_BITS_S = 10e6
NOTICED_WITHIN_S = 5.0

needs_filter = pytest.mark.skipif(shutil.which("iptables") is None, reason="one-way cuts need iptables")


# ---- what runs in the workers --------------------------------------------------------------------------------------


def new_training(compression=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(400, 600), torch.nn.Tanh(), torch.nn.Linear(600, 100))
    inner = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, DistributedOptimizer(inner, "dist_sync", model=model, compression=compression)


def train_step(model, optimizer, step):
    generator = torch.Generator().manual_seed(2 * step + optimizer.kvstore.rank)
    optimizer.zero_grad()
    model(torch.randn(16, 400, generator=generator)).square().mean().backward()
    optimizer.step()


def train(compression=None):
    """Return a digest of the weights, the seconds of the longest step, and how many servers share memory."""
    model, optimizer = new_training(compression)
    longest = 0.0
    for step in range(STEPS):
        start = time.monotonic()
        train_step(model, optimizer, step)
        longest = max(longest, time.monotonic() - start)
        if step == 2:
            tell("trains")
    weights = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
    [block] = optimizer.kvstore.table.blocks.values()
    return [hashlib.sha256(weights.numpy().tobytes()).hexdigest(), longest, len(block.mapped)]


def train_plain_and_compressed():
    return [train(), train({"type": "2bit", "threshold": 1e-3})]


def train_twice():
    return [train(), train()]


def train_until_failure():
    """Train for ever; return [error type, text, when] of what ends it."""
    model, optimizer = new_training()
    step = 0
    try:
        while True:
            train_step(model, optimizer, step)
            step += 1
            if step == 3:
                tell("trains")
    except PacelineError as error:
        return [type(error).__name__, str(error), time.monotonic()]


# ---- the same bits -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_one_host():
    """Return the digests of plain and compressed training of two workers who share memory with both servers."""
    with LocalJob(2, 2) as job:
        first, second = job.run(train_plain_and_compressed)
    assert [[one[0], one[2]] for one in first] == [[one[0], one[2]] for one in second]
    assert [one[2] for one in first] == [2, 2]
    return [one[0] for one in first]


def test_two_hosts_compute_the_same_bits_as_one(on_one_host):
    with Hosts(2) as hosts, HostsJob(hosts, [1, 1], [1, 1], encrypt=False) as job:
        before = hosts[0].counters()
        for found in job.run(train_plain_and_compressed):
            assert [one[0] for one in found] == on_one_host
            assert [one[2] for one in found] == [1, 1]  # each worker with the server of its own host
        crossed = hosts[0].counters() - before
    assert min(crossed.sent, crossed.received) > STEPS * 4 * 300_000 / 2


def unplug_for(hosts, seconds):
    hosts[1].unplug()
    time.sleep(seconds)
    hosts[1].plug()


def tear_connections(hosts):
    """Reset all TCP connections between the hosts, so that what is on its way is lost.

    Nothing happens with a kernel that cannot do it (CONFIG_INET_DIAG_DESTROY).
    """
    hosts[1].run(f"ss --kill --tcp dst {hosts[0].address}")


@pytest.mark.parametrize("outage_s", OUTAGES)
def test_outages_within_the_limit_change_no_bit_of_encrypted_training(on_one_host, outage_s):
    with Hosts(2, rate_bits_s=SLOW_BITS_S) as hosts, HostsJob(hosts, [1, 1], [1, 1]) as job:
        workers = job.start_all(train_twice)
        assert [worker.heard() for worker in workers] == ["trains"] * 2
        unplug_for(hosts, outage_s)
        assert [worker.heard() for worker in workers] == ["trains"] * 2
        tear_connections(hosts)
        for unplugged, reset in [worker.result() for worker in workers]:
            assert [unplugged[0], reset[0]] == [on_one_host[0]] * 2
            assert unplugged[1] > outage_s  # it did disturb
        assert [one.wait(30) for one in (*job.servers, job.scheduler)] == [0, 0, 0]
        named = f"worker 1 on {hosts[1].address} (pid {workers[1].pid}): its host was not heard for 4."
        assert (named in job.scheduler.output) == (outage_s > 4)


# ---- a host is lost ------------------------------------------------------------------------------------------------


def test_survivors_of_a_lost_host_name_it_and_the_lost_name_the_scheduler():
    with Hosts(3) as hosts, HostsJob(hosts, [1, 1, 1], [0, 1, 1], **IMPATIENT) as job:
        workers = job.start_all(train_until_failure)
        assert [worker.heard() for worker in workers] == ["trains"] * 3
        unplugged = time.monotonic()
        hosts[2].unplug()
        found = [worker.result(30) for worker in workers]
        for worker, (kind, text, when) in enumerate(found):
            lost = hosts[0] if worker == 2 else hosts[2]
            assert kind == PeerDiedError.__name__
            assert f" on {lost.address}" in text
            assert "died: its host was not heard for 4." in text
            assert when - unplugged < NOTICED_WITHIN_S
        assert all("worker 2" in text or "server 1" in text for _, text, _ in found[:2])
        assert "scheduler 0" in found[2][1]
        assert all(one.wait(30) != 0 for one in (*job.servers, job.scheduler))


@needs_filter
@pytest.mark.parametrize(("deaf", "mute"), [(0, 1), (1, 0)], ids=["to the scheduler", "from the scheduler"])
def test_network_that_carries_one_way_only_is_named_on_both_sides(deaf, mute):
    with Hosts(2) as hosts, HostsJob(hosts, [1, 1], [1, 0], **IMPATIENT) as job:
        workers = job.start_all(train_until_failure)
        assert [worker.heard() for worker in workers] == ["trains"] * 2
        cut = time.monotonic()
        hosts[deaf].run(f"iptables -A INPUT -s {hosts[mute].address} -j DROP")
        near, far = [worker.result(30) for worker in workers]
        assert [near[0], far[0]] == [PeerDiedError.__name__] * 2
        assert f"worker 1 on {hosts[1].address} died: its host was not heard for 4." in near[1]
        assert "its host was not heard for 4." in far[1]
        assert max(near[2], far[2]) - cut < NOTICED_WITHIN_S


# ---- a process is lost on a host that is there -----------------------------------------------------------------------


def test_stopped_process_is_named_by_what_others_see_on_its_host():
    with Hosts(2) as hosts, HostsJob(hosts, [1, 1], [0, 1], **IMPATIENT) as job:
        workers = job.start_all(train_until_failure)
        assert [worker.heard() for worker in workers] == ["trains"] * 2
        stopped = time.monotonic()
        workers[1].kill(signal.SIGSTOP)
        kind, text, when = workers[0].result(30)
        assert kind == PeerDiedError.__name__
        assert f"worker 1 on {hosts[1].address} died: it was not heard for 4." in text
        assert ": its process is stopped; " in text
        assert when - stopped < NOTICED_WITHIN_S


def test_stopped_process_that_is_alone_on_its_host_counts_as_stalled():
    with Hosts(2) as hosts, HostsJob(hosts, [1, 1], [1, 0], timeout_s=60, stall_timeout_s=6) as job:
        workers = job.start_all(train_until_failure)
        assert [worker.heard() for worker in workers] == ["trains"] * 2
        workers[1].kill(signal.SIGSTOP)
        kind, text, _ = workers[0].result(30)
        assert kind == PeerDiedError.__name__
        assert f"worker 1 on {hosts[1].address} died: it was not heard for 6." in text
        assert "although its host answers" in text


# ---- a slow network --------------------------------------------------------------------------------------------------


def test_slow_network_is_waited_for(on_one_host):
    with Hosts(2, rate_bits_s=SLOWEST_BITS_S) as hosts, HostsJob(hosts, [1, 1], [1, 1]) as job:
        first, second = job.run(train)
        assert first[0] == second[0] == on_one_host[0]
        assert first[1] > 0.5  # it is slow
        assert [one.wait(30) for one in (*job.servers, job.scheduler)] == [0, 0, 0]
        assert "not heard" not in job.report()


# ---- one connection is lost ------------------------------------------------------------------------------------------

HALF_DEAD = """
import subprocess
from paceline.net import Security, endpoints
from paceline.net.sockets import SocketHub, SocketListener

endpoints.BULK_TIMEOUT_S = 2.0
listener = SocketListener(["tcp://127.0.0.1:*"], Security(""), "server 0", bulk=True)
hub = SocketHub(Security(""))
channel = hub.connect(listener.addresses[0], b"peer", "server 0", bulk=True)
hub.send(channel, [b"first"])
while not (arrived := listener.receive(1.0)):
    pass
port = hub._channels[channel].socket.getsockname()[1]
filters = f"INPUT -p tcp --sport {port} -j DROP".split()
subprocess.run(["iptables", "-A", *filters], check=True)
hub.send(channel, [b"lost"])
while not hub.reopened():
    hub.receive(0.1)
print("reopened", hub.host_silent_s(channel), flush=True)
hub.send(channel, [b"again"])
while not (arrived := listener.receive(1.0)):
    pass
print("arrived", bytes(arrived[0][1][0]).decode())
hub.close()
listener.close()
"""


@needs_filter
def test_connection_whose_packets_no_longer_arrive_is_made_again(tmp_path):
    (tmp_path / "half_dead.py").write_text(HALF_DEAD)
    with Hosts(1) as hosts:
        done = subprocess.run(
            hosts[0].command([sys.executable, str(tmp_path / "half_dead.py")]),
            check=False, capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": SOURCES},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "arrived again"
