"""The text of ``paceline up``."""

from __future__ import annotations

import shlex

import pytest

from paceline.cli.options import read_hosts
from paceline.cli.up_text import WIDTH, host_list, shown_command, shown_findings, shown_plan
from paceline.hetero import WorkerRound
from paceline.hetero.files import Report
from paceline.launch import Host
from paceline.launch.remote.host_checks import Finding
from paceline.sim.hosts_plan import HostPlanner

HOSTS = (
    Host("h1", port=2222, weight=3, interface="eth1"),
    Host("me@h2"),
    Host("fe80::1", port=22),
    Host("me@10.0.0.1", interface="10.1.0.0/16"),
)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_list_of_hosts_is_read_as_it_was_meant(count: int) -> None:
    hosts = HOSTS[:count]
    assert read_hosts(host_list(hosts, [1] * count)) == hosts, "slots are left out where they are alike"
    slots = list(range(1, count + 1))
    found = read_hosts(host_list(hosts, slots))
    assert [host.slots for host in found] == ([None] if count == 1 else slots)
    assert [host.name for host in found] == [host.name for host in hosts]


def test_command_is_one_line_for_a_shell_and_narrow() -> None:
    words = ["-n", "12", "-H", "h1 slots=2,h2", *["--env", "NAME=a 'b'"] * 6, "--", "python", "train.py", "--lr", "0.1"]
    shown = shown_command(words)
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert shlex.split(shown.partition("command:\n")[2].replace("\\\n", "")) == ["paceline", "launch", *words]


def test_hosts_that_cannot_be_used_have_their_reason_below_the_table() -> None:
    about = {"version": "3.11.7", "cores": 4}
    facts = {"versions": {"paceline": "1.0", "torch": ""}, "shared": True}
    torch = "torch is missing for /usr/bin/python3: pip install torch"
    findings = [
        Finding(Host("h1"), about, facts, reached={"h2": "", "h3": "Connection refused"}, problems=[torch]),
        Finding(Host("h2"), about, facts, reached={"h1": ""}),
        Finding(Host("h3"), problems=["host h3 is unknown: " + "check its name in the hosts file or in ssh's " * 2]),
    ]
    shown = shown_findings(findings)
    assert shown.startswith("hosts: 1 of 3 can be used\n")
    assert "h1    3.11.7  missing" in shown
    assert "1 of 2" in shown
    assert f"  h1: {torch}" in shown
    assert max(map(len, shown.splitlines())) <= WIDTH


@pytest.mark.parametrize(("round_s", "is_advised"), [(2.0, True), (0.102, False)])
def test_local_steps_are_advised_where_hosts_wait_for_the_network(round_s: float, is_advised: bool) -> None:
    steps = ((WorkerRound(32.0, 0.1, round_s - 0.1),) * 20,) * 2
    report = Report(("h1:0", "h2:0"), steps, 0.0, 1_000_000, "dist_sync")
    planner = HostPlanner(report, ["h1", "h2"], {("h1", "h2"): (2e6, 1e-4)})
    shown = " ".join(shown_plan(planner.plan(keep_all=True), planner).split())
    advice = "local steps, at some loss: periods of 16 steps, int8 both ways, answers up to 4 steps late"
    assert (advice in shown) == is_advised
    assert ('paceline.DistributedOptimizer(..., local_steps="16 by speed", delay=4,' in shown) == is_advised
