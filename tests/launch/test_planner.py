from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import config
from paceline.launch import Host, JobPlan, JobSpec, Late, Machine, make_plan
from paceline.launch.placing import place_workers

MACHINE = Machine("/usr/bin/python", {"127.0.0.1": 8})


def plan(machine: Machine = MACHINE, **arguments: object) -> JobPlan:
    return make_plan(JobSpec(**({"command": ("train", "-x"), "num_workers": 2, "num_servers": 1} | arguments)), machine)  # type: ignore[arg-type]


def env(made: JobPlan, role: str, rank: int = 0) -> dict[str, object]:
    return next(dict(process.env) for process in made if (process.role, process.rank) == (role, rank))


def test_every_process_can_resolve_its_settings() -> None:
    made = plan(settings={"staleness": "3", "weighting": "inverse", "timeout_s": "7"})
    known = dict.fromkeys(Late, "tcp://127.0.0.1:1")
    for process in made:
        settings = config.from_environment(process.environment(known))
        assert (settings.role, settings.rank, settings.local_rank) == (process.role, process.rank, process.rank)
        assert (settings.num_workers, settings.num_servers, settings.job_id) == (2, 1, "job")
        assert (settings.staleness, settings.weighting, settings.timeout_s) == (3, "inverse", 7.0)
        assert settings.scheduler == "tcp://127.0.0.1:1"
        assert settings.job_key


def test_groups_name_hosts_as_the_list_of_hosts_does() -> None:
    hosts = tuple(map(Host, ("node1", "me@node2", "10.0.0.3")))
    made = plan(num_workers=4, hosts=hosts, settings={"groups": "node1;node2 10.0.0.3;"})
    assert {process.env["PACELINE_GROUPS"] for process in made} == {"0 1; 2 3;"}


def test_insecure_job_has_no_key() -> None:
    made = plan(settings={"insecure": "1"})
    assert not made.needs(Late.JOB_KEY)
    known = dict.fromkeys(Late, "tcp://127.0.0.1:1")
    assert all(config.from_environment(process.environment(known)).insecure for process in made)


def test_only_the_scheduler_binds_and_reports() -> None:
    made = plan()
    assert env(made, "scheduler")["PACELINE_SCHEDULER"] is Late.BIND
    assert env(made, "scheduler")["PACELINE_READY_FD"] is Late.READY_FD
    for role in ("server", "worker"):
        assert env(made, role)["PACELINE_SCHEDULER"] is Late.SCHEDULER
        assert "PACELINE_READY_FD" not in env(made, role)


def test_workers_get_the_variables_of_torchrun_and_mxnet() -> None:
    worker = env(plan(), "worker", 1)
    assert [worker[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [*"1212"]
    assert (worker["MASTER_ADDR"], worker["MASTER_PORT"]) == ("127.0.0.1", Late.MASTER_PORT)
    assert (worker["DMLC_ROLE"], worker["DMLC_NUM_WORKER"], worker["DMLC_NUM_SERVER"]) == ("worker", "2", "1")
    assert (worker["DMLC_PS_ROOT_URI"], worker["DMLC_PS_ROOT_PORT"]) == (Late.SCHEDULER_HOST, Late.SCHEDULER_PORT)
    assert not {"RANK", "DMLC_ROLE", "MASTER_PORT"} & set(env(plan(), "server"))


def test_job_without_servers_has_workers_only() -> None:
    made = plan(num_servers=0)
    assert [process.role for process in made] == ["worker", "worker"]
    settings = config.from_environment(made.processes[0].environment({Late.MASTER_PORT: "1"}))
    assert settings.scheduler == ""
    assert not made.needs(Late.JOB_KEY)


def test_workers_share_the_cores() -> None:
    made = plan(num_workers=3)
    assert env(made, "worker")["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS=2" in made.notes[0]
    assert "OMP_NUM_THREADS" not in env(made, "server")
    assert env(plan(num_workers=20), "worker")["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MASTER_PORT", "PYTHONUNBUFFERED"])
def test_users_own_value_wins_over_a_default(name: str) -> None:
    environ = Machine("python", {"127.0.0.1": 8}, {name: "5"})
    assert env(plan(environ), "worker")[name] == "5"
    assert env(plan(environ, env={name: "6"}), "worker")[name] == "6"
    assert env(plan(env={name: "7"}), "worker")[name] == "7"


def test_chosen_number_of_threads_needs_no_note() -> None:
    assert plan(env={"OMP_NUM_THREADS": "5"}).notes == ()
    assert plan(Machine("python", {"127.0.0.1": 8}, {"OMP_NUM_THREADS": "5"})).notes == ()


def test_option_is_stronger_than_variable() -> None:
    made = plan(settings={"staleness": "3"}, env={"PACELINE_STALENESS": "4", "PACELINE_LOG_LEVEL": "INFO"})
    assert {process.env["PACELINE_STALENESS"] for process in made} == {"3"}
    assert {process.env["PACELINE_LOG_LEVEL"] for process in made} == {"INFO"}


@pytest.mark.parametrize("name", ["PACELINE_RANK", "PACELINE_JOB_KEY", "RANK", "PACELINE_READY_FD"])
def test_identity_of_a_process_cannot_be_given(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is set by the launcher"):
        plan(env={name: "1"})


def test_processes_are_dealt_to_hosts_in_turn() -> None:
    made = plan(num_workers=3, num_servers=2, hosts=(Host("a"), Host("b")))
    assert [process.host for process in made] == ["a", "a", "b", "a", "a", "b"]
    assert [env(made, "worker", rank)["LOCAL_RANK"] for rank in range(3)] == ["0", "1", "0"]
    assert [env(made, "worker", rank)["LOCAL_WORLD_SIZE"] for rank in range(3)] == ["2", "2", "1"]
    assert env(made, "worker", 2)["MASTER_ADDR"] is Late.MASTER_ADDR
    assert "OMP_NUM_THREADS" not in env(made, "worker")


def test_workers_of_a_ddp_script_know_their_node_as_under_torchrun() -> None:
    made = plan(num_workers=4, num_servers=1, hosts=(Host("a", slots=3), Host("b", slots=1)), ddp=True, max_restarts=2)
    workers = [env(made, "worker", rank) for rank in range(4)]
    names = ("GROUP_RANK", "LOCAL_RANK", "ROLE_RANK")
    assert [[one[name] for name in names] for one in workers] == [[*"000"], [*"011"], [*"022"], [*"103"]]
    for one in workers:
        assert (one["GROUP_WORLD_SIZE"], one["ROLE_WORLD_SIZE"], one["ROLE_NAME"]) == ("2", "4", "default")
        assert (one["TORCHELASTIC_RESTART_COUNT"], one["TORCHELASTIC_MAX_RESTARTS"]) == (Late.RESTART, "2")
    alone = env(plan(num_servers=1, ddp=True), "worker")
    assert (alone["TORCHELASTIC_RESTART_COUNT"], alone["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "0")
    assert "GROUP_RANK" not in env(plan(num_servers=1), "worker")


def test_scheduler_of_a_job_that_may_start_again_has_the_secret_of_its_page() -> None:
    made = plan(num_servers=1, settings={"dashboard": "8080"}, max_restarts=2)
    assert [process.role for process in made if Late.PAGE_TOKEN in process.env.values()] == ["scheduler"]
    assert not plan(num_servers=1, settings={"dashboard": "8080"}).needs(Late.PAGE_TOKEN)
    assert not plan(num_servers=1, max_restarts=2).needs(Late.PAGE_TOKEN)


@given(st.sets(st.sampled_from("abc"), min_size=1), st.integers(1, 20))
def test_local_ranks_number_the_processes_of_each_host(hosts: set[str], count: int) -> None:
    spec = JobSpec(("train",), count, hosts=tuple(map(Host, sorted(hosts))))
    dealt = [place for _, place in place_workers(spec)]
    sizes = Counter(place.host for place in dealt)
    for host, size in sizes.items():
        assert [place.local_rank for place in dealt if place.host == host] == list(range(size))
        assert {place.local_size for place in dealt if place.host == host} == {size}
        ranks = [rank for rank, place in enumerate(dealt) if place.host == host]
        assert ranks == list(range(ranks[0], ranks[0] + size))
    assert sum(sizes.values()) == count
