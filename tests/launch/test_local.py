from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from paceline.errors import LaunchError
from paceline.launch import Host, JobPlan, JobSpec, Late, Machine, ProcessSpec, make_plan
from paceline.launch.local import LocalBackend
from paceline.launch.plan import address_parts
from paceline.launch.preflight import CommandNotFoundError
from paceline.launch.process_environment import own_environ
from paceline.launch.supervise.crew import free_port
from paceline.net import Security
from paceline.net.security import new_job_key


def test_key_is_a_new_one_every_time() -> None:
    keys = {new_job_key() for _ in range(3)}
    assert len(keys) == 3
    assert all(len(key) == 40 and Security(key).psk for key in keys)


def test_scheduler_address_is_taken_apart_for_mxnet_scripts() -> None:
    known = address_parts("tcp://127.0.0.1:5555")
    assert known[Late.SCHEDULER] == "tcp://127.0.0.1:5555"
    assert (known[Late.SCHEDULER_HOST], known[Late.SCHEDULER_PORT]) == ("127.0.0.1", "5555")
    assert address_parts(None) == {}


def test_master_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_process_for_another_host_is_refused() -> None:
    plan = make_plan(JobSpec(("sh",), 1, hosts=(Host("node7"),)), Machine(sys.executable))
    with pytest.raises(LaunchError, match="scheduler is placed on node7; launcher 'local' runs on this machine only"):
        LocalBackend().check(plan)


def test_missing_command_is_found_before_anything_starts() -> None:
    plan = make_plan(JobSpec(("no-such-command",), 1), Machine(sys.executable))
    with pytest.raises(CommandNotFoundError):
        LocalBackend().check(plan)


def test_command_is_looked_up_on_the_path_that_the_process_will_have() -> None:
    with pytest.raises(CommandNotFoundError):
        LocalBackend().check(JobPlan((ProcessSpec("worker", 0, ("sh",), {"PATH": "/nowhere"}),)))


def test_identity_of_an_outer_job_does_not_leak_into_a_job_without_servers() -> None:
    code = "import sys; from paceline.cli import main; sys.exit(main(sys.argv[1:]))"
    command = ["launch", "-n", "1", "-s", "0", "--", "sh", "-c", "env"]
    outer = {"PACELINE_SCHEDULER": "tcp://outer:1", "PACELINE_JOB_KEY": "x" * 40, "PACELINE_READY_FD": "3"}
    outer |= {"PACELINE_WORKER_GROUPS": "0 1;", "DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": "outer"}
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "KEPT": "yes"}
        | {"PACELINE_ROLE": "worker", "RANK": "7", "MASTER_PORT": "1"}
        | outer,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    seen = dict(line.removeprefix("[worker 0] ").partition("=")[::2] for line in done.stdout.splitlines())
    assert not set(outer) & set(seen)
    assert (seen["KEPT"], seen["RANK"], seen["PACELINE_ROLE"]) == ("yes", "0", "worker")
    assert seen["MASTER_PORT"] != "1"


def test_environment_of_a_shell_stays_and_ranks_of_others_do_not() -> None:
    shell = {"MASTER_PORT": "29500", "DMLC_ROLE": "worker", "PACELINE_WEIGHT": "2", "OMPI_MCA_btl": "tcp"}
    assert own_environ(shell | {"HOROVOD_RANK": "3"}) == shell
    ranked = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0", "SLURM_PROCID": "0"}
    assert own_environ(ranked | {"HOME": "/home/ada", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}) == {
        "HOME": "/home/ada", "SLURM_JOB_ID": "7",
    }  # fmt: skip
