from __future__ import annotations

import re
import tomllib

import pytest

from paceline.launch import Host, JobSpec, Machine, WorkerGroup, group_from_table, make_plan, parse_group
from paceline.launch.worker_groups import amount

MACHINE = Machine("/usr/bin/python", directory="/home/ada/train")


def test_group_of_a_command_line() -> None:
    text = """a100: n=2, hosts=h1,h2:2222, env=A=1, env=B="two, three", env=C='x=y', slots=1, weight=3.5, iface=eth1,
        select=zone=a, select=gpu=a100, args=--batch-size 32 '--name=a b', cpus=4, gpus=1, memory=8Gi"""
    assert parse_group(text) == WorkerGroup(
        "a100",
        2,
        hosts=(Host("h1"), Host("h2", port=2222)),
        env={"A": "1", "B": "two, three", "C": "x=y"},
        slots=1,
        weight=3.5,
        interface="eth1",
        select={"zone": "a", "gpu": "a100"},
        args=("--batch-size", "32", "--name=a b"),
        resources={"cpus": "4", "gpus": "1", "memory": "8Gi"},
    )


def test_comma_without_a_key_belongs_to_the_value() -> None:
    assert parse_group("a: n=1, env=PATHS=a,b c, slots=1").env == {"PATHS": "a,b c"}


def test_group_of_a_table_is_that_of_the_command_line() -> None:
    table = tomllib.loads('n = 2\nhosts = ["h1", "h2"]\nslots = 1\nargs = ["--lr", "0.1"]\n[env]\nA = "b, c"\nN = 1\n')
    assert group_from_table("old", table) == parse_group(
        "old: n=2, hosts=h1,h2, slots=1, args=--lr 0.1, env=A='b, c', env=N=1"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n=2", "has no name"),
        ("a:", "the number of workers is missing"),
        ("a: n=two", "group a: n=two is not an integer"),
        ("a: n=0", "group a: n=0; a group has at least 1 worker"),
        ("a: n=1, slots=0", "group a: slots=0"),
        ("a: n=1, n=2", "group a: n: it is given twice"),
        ("a: n=1, env=A", "'A' is not NAME=VALUE"),
        ("a: count", "'count' is not one of n, count, hosts"),
        ("A: n=1", "group 'A': a name is of lower-case letters"),
        ("a: n=1, weight=0", "weight=0"),
        ("a: n=1, weight=1e16", "weight=1e+16; it is above 0, and at most 1e+15"),
    ],
)
def test_mistake_is_explained(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_group(text)


def test_workers_of_a_group_get_its_hosts_options_and_environment() -> None:
    groups = (
        parse_group("fast: n=2, hosts=h1, env=A=2, args=--batch-size 64, weight=2"),
        parse_group("old: n=1, interface=eth9"),
    )
    hosts = (Host("h1", group="fast"), Host("h2", group="old", weight=0.5, interface="eth1"))
    spec = JobSpec(("train",), hosts=hosts, groups=groups, env={"A": "1"}, env_worker={"B": "1"}, env_server={"C": "1"})
    plan = make_plan(spec, MACHINE)
    workers = [process for process in plan if process.role == "worker"]
    assert [(one.host, one.group, one.argv) for one in workers] == [
        ("h1", "fast", ("train", "--batch-size", "64")),
        ("h1", "fast", ("train", "--batch-size", "64")),
        ("h2", "old", ("train",)),
    ]
    assert [one.env["A"] for one in workers] == ["2", "2", "1"]
    assert [one.env["PACELINE_WEIGHT"] for one in workers] == ["2", "2", "0.5"]
    assert [one.env.get("PACELINE_INTERFACE") for one in workers] == [None, None, "eth9"]
    assert {one.env["PACELINE_WORKER_GROUPS"] for one in workers} == {"0 1; 2;"}
    assert {one.env["B"] for one in workers} == {"1"}
    servers = [process for process in plan if process.role != "worker"]
    assert [one.host for one in servers] == ["h1", "h1", "h2", "h1"]
    assert {(one.env["A"], one.env["C"], one.env.get("B")) for one in servers} == {("1", "1", None)}
    assert servers[2].env["PACELINE_INTERFACE"] == "eth1"
    assert [host.name for host in plan.hosts] == ["h1", "h2"]
    assert plan.directory == "/home/ada/train"


@pytest.mark.parametrize(
    ("groups", "hosts", "message"),
    [
        (("a: n=3",), (Host("h1", slots=2),), "3 workers of group a do not fit: the hosts h1 have 2 slots"),
        (("a: n=2, slots=1",), (Host("h1"),), "have 1 slots for them"),
        (("a: n=1", "b: n=1"), (Host("h1", slots=1),), "1 workers of group b do not fit"),
        (("a: n=1",), (Host("h1", group="b"),), "group a has no host"),
    ],
)
def test_workers_that_do_not_fit_are_refused(groups: tuple[str, ...], hosts: tuple[Host, ...], message: str) -> None:
    spec = JobSpec(("train",), hosts=hosts, groups=tuple(map(parse_group, groups)))
    with pytest.raises(ValueError, match=message):
        make_plan(spec, MACHINE)


def test_number_of_workers_must_be_that_of_the_groups() -> None:
    assert JobSpec(("train",), groups=(WorkerGroup("a", 2), WorkerGroup("b", 3))).num_workers == 5
    with pytest.raises(ValueError, match="the groups have 5 workers together, and the job 4"):
        JobSpec(("train",), 4, groups=(WorkerGroup("a", 2), WorkerGroup("b", 3)))
    with pytest.raises(ValueError, match="two groups have one name"):
        JobSpec(("train",), groups=(WorkerGroup("a", 2), WorkerGroup("a", 3)))


def test_processes_can_have_a_host_each() -> None:
    plan = make_plan(JobSpec(("train",), 2, 1), MACHINE, alone=True)
    assert [process.host for process in plan] == ["scheduler-0", "server-0", "worker-0", "worker-1"]
    assert {process.env["LOCAL_WORLD_SIZE"] for process in plan if process.role == "worker"} == {"1"}


def test_amount_beyond_all_numbers_is_none() -> None:
    with pytest.raises(ValueError, match=r"memory='999.*' is not an amount"):
        amount("memory", 5000 * "9")
