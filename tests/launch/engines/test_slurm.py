"""The launcher slurm, without a cluster. tests/engines has one."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launch import Host, JobSpec, Machine, backend, parse_group
from paceline.launch.engines import batch, slurm
from paceline.launch.engines.slurm import expand_nodes, place_on_nodes
from paceline.launch.job_spec import from_json, to_json


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("h1", ["h1"]),
        ("h[1-3,7],gpu05", ["h1", "h2", "h3", "h7", "gpu05"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_list_of_nodes(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


def test_spec_survives_the_way_into_the_allocation() -> None:
    spec = JobSpec(
        ("train", "a b"), num_servers=1, hosts=(Host("h1", slots=2),), env={"A": "1"}, settings={"age": "3"},
        groups=(parse_group("a: n=2, hosts=h1:22, env=X='y,z', args=-x"),), options={"time": "5"},
    )  # fmt: skip
    assert from_json(to_json(spec)) == spec


def test_variables_that_are_not_utf_8_survive_the_way_into_the_allocation() -> None:
    spec = JobSpec(("train", "\udcff"), 1, env={"PLACE": "K\udcf6ln"})
    assert from_json(to_json(spec)) == spec


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nonsense": 1}, "its fields differ; install the same paceline"),
        ({"graces": {"nonsense": 1}}, "its fields differ; install the same paceline"),
        ({"num_workers": "many"}, "Expected `int`"),
        ({"hosts": []}, "there is no host to run on"),
    ],
)
def test_job_of_another_version_is_refused(change: dict[str, object], says: str) -> None:
    values = json.loads(to_json(JobSpec(("train",), 1)))
    with pytest.raises(ValueError, match=f"not a job of this version of paceline.*{says}"):
        from_json(json.dumps(values | change))


def test_groups_take_the_nodes_of_their_components() -> None:
    spec = JobSpec(("train",), groups=(parse_group("a: n=1"), parse_group("b: n=2")))
    environ = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "h1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n[1-2]",
    }
    placed, components = place_on_nodes(spec, environ)
    assert [[host.name for host in group.hosts] for group in placed.groups] == [["h1"], ["n1", "n2"]]
    assert components == {"h1": "0", "n1": "1", "n2": "1"}
    with pytest.raises(ValueError, match="the allocation has 3 components, and the job 2 groups"):
        place_on_nodes(spec, environ | {"SLURM_HET_SIZE": "3"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": "x"}, "launcher 'slurm' has no option 'queue'"),
        ({"nodes": "two"}, "-o nodes=two is not an integer"),
        ({"signal": "soon"}, "-o signal=soon"),
        ({"nodes": "-1"}, "neither is below 0"),
        ({"output": "out-%x-%j"}, "knows no sign of Slurm's but %j"),
        ({"partition": "a\n#SBATCH --uid=0\nrm x"}, "a request to Slurm has no control characters"),
        ({"output": "a\nrm x"}, "a request to Slurm has no control characters"),
    ],
)
def test_wrong_option_is_explained(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backend("slurm").plan(JobSpec(("train",), 1, options=options), Machine("python", directory="/home/ada/train"))


def test_group_may_have_more_workers_than_slots_on_a_node() -> None:
    spec = JobSpec(("train",), groups=(parse_group("old: n=5, slots=2, gpus=1, cpus=3, memory=1.5Gi"),))
    lines = backend("slurm").plan(spec, Machine("python", directory="/home/ada/train")).script.splitlines()
    asked = {"--nodes=3", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=3", "--mem=3072"}
    assert {f"#SBATCH {one}" for one in asked} <= set(lines)


def test_blanks_and_signs_are_in_quotes() -> None:
    options = {"constraint": "a&b", "output": 'my "job".out', "partition": "gpu,old-1"}
    spec, machine = JobSpec(("train",), 1, options=options), Machine("python", directory="/home/ada/a b")
    asked = {'--chdir="/home/ada/a b"', '--output="my \\"job\\".out"', '--constraint="a&b"', "--partition=gpu,old-1"}
    assert {f"#SBATCH {one}" for one in asked} <= set(backend("slurm").plan(spec, machine).script.splitlines())


def test_variables_for_a_users_own_srun_are_for_the_workers_only() -> None:
    own = {"SRUN_CPUS_PER_TASK": "2", "SLURM_LABELIO": "1"}
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "h1", "SLURM_TASK_PROLOG": "/etc/prolog"}
    environ |= {"SSH_CONNECTION": "10.9.9.9 5000 10.9.9.1 22"}
    plan = backend("slurm").plan(JobSpec(("train",), 1), Machine("python", environ=environ | own))
    [host] = plan.plan.hosts
    assert plan.command(host)[:4] == [
        "env",
        "--unset=SLURM_LABELIO",
        "--unset=SRUN_CPUS_PER_TASK",
        "--unset=SSH_CONNECTION",
    ]
    assert own.items() <= plan.environ.items()
    plain = backend("slurm").plan(
        JobSpec(("train",), 1), Machine("python", environ={"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "h1"})
    )
    assert plain.command(host)[0] == "srun"


def test_variables_of_sbatch_override_no_directive_of_ours() -> None:
    options = {"partition": "gpu", "time": "5"}
    plan = backend("slurm").plan(JobSpec(("train",), 1, options=options), Machine("python", directory="/home/ada"))
    found = slurm.overriding(plan.script)
    assert {"SBATCH_EXPORT", "SBATCH_OUTPUT", "SBATCH_ERROR", "SBATCH_SIGNAL", "SBATCH_PARTITION"} <= set(found)
    assert {"SBATCH_TIMELIMIT", "SBATCH_ARRAY_INX", "SBATCH_WAIT"} <= set(found)
    assert not {"SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_MEM_PER_CPU"} & set(found), "they count: we ask for none"


#: Each call takes a word from a file; the last one stays.
SCONTROL = """
cd "$(dirname "$0")"
read state <states
test "$(wc -l <states)" = 1 || sed -i 1d states
test "$state" != EMPTY || exit 0
test "$state" != SILENT || { echo "Unable to contact slurm controller" >&2; exit 1; }
test "$state" != SIGNAL || { kill -USR1 $PPID; state=RUNNING; }
echo JobId=7 JobState=$state ExitCode=3:0
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm.SlurmJob, "poll_s", 0.01)


def job(states: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> slurm.SlurmJob:
    """Return a job that goes through states."""
    for name, text in {"scontrol": SCONTROL, "scancel": 'echo "$@" >> "$(dirname "$0")/asked"'}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "states").write_text("\n".join(states.split()) + "\n")
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return slurm.SlurmJob("7", folder / "out")


def test_signal_for_workers_goes_the_way_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert job("SIGNAL RUNNING FAILED", tmp_path, monkeypatch).wait() == 3
    assert (tmp_path / "asked").read_text() == "--batch --signal=USR1 7\n"
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_job_that_does_not_end_after_scancel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm.SlurmJob, "cancel_s", 0.1)
    stuck = job("COMPLETING", tmp_path, monkeypatch)
    with pytest.raises(LaunchError, match=r"job 7 has not ended 0\.1 s after scancel: scontrol show job 7"):
        stuck.cancel()
    (tmp_path / "states").write_text("CANCELLED\n")
    stuck.cancel()
    stuck.cancel()
    assert (tmp_path / "asked").read_text() == "7\n7\n"


def test_controller_that_does_not_answer_for_a_while_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job("SILENT RUNNING SILENT SILENT FAILED", tmp_path, monkeypatch).wait() == 3
    said = "[launch] scontrol refused: Unable to contact slurm controller; asking again for 600 s\n"
    assert capsys.readouterr().err == 2 * said


def test_answer_that_has_no_state_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job("RUNNING EMPTY FAILED", tmp_path, monkeypatch).wait() == 3
    assert "scontrol says nothing of the state of job 7: ''; asking again" in capsys.readouterr().err


def test_controller_that_never_answers_again_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "SILENCE_S", 0.1)
    with pytest.raises(LaunchError, match="scontrol refused: Unable to contact slurm controller"):
        job("RUNNING SILENT", tmp_path, monkeypatch).wait()
