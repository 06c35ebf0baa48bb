"""Golden files: what ``--dry-run`` prints for one job on every backend; see ``golden.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.launch import Host, JobSpec, Machine, backend, names, parse_group
from tests.launch import golden

FOLDER = Path(__file__).with_name("golden")
ENVIRON = {"PYTHONPATH": "/home/ada/train/src", "NCCL_DEBUG": "INFO", "WANDB_API_KEY": "hush-hush", "HOME": "/home/me"}
MACHINE = Machine("/usr/bin/python3", {"127.0.0.1": 8}, ENVIRON, "/home/ada/train")
#: Options without which a backend would ask a program.
OPTIONS = {
    "mpi": {"mpi": "openmpi", "mpirun": "mpirun"},
    "k8s": {"image": "registry/train:1"},
    "yarn": {"rm": "http://rm:8088"},
}
#: Environments in which a backend does something else.
INSIDE = {"slurm": {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "h[1-2]"}}

HOSTS = (Host("h1", port=2222, slots=2, group="fast", interface="eth1"), Host("h2", weight=0.5, group="old"))


def spec(name: str, *, groups: bool = False) -> JobSpec:
    """Return a job with everything that a spec can hold that does not depend on the backend."""
    here = name == "local"
    return JobSpec(
        command=("python", "train.py", "--name", "a b"),
        num_workers=0 if groups else 2,
        num_servers=1,
        job_id="0123abcd",
        hosts=JobSpec.hosts if here or not groups else HOSTS,
        groups=tuple(map(parse_group, GROUPS)) if groups else (),
        env={"GREETING": 'hello, "you"'},
        env_worker={"W": "1"},
        env_server={"S": "1"},
        settings={"staleness": "3"},
        options=OPTIONS.get(name, {}),
    )


GROUPS = ("fast: n=2, slots=2, env=X=1, weight=2, cpus=4, gpus=1, memory=8Gi", "old: n=1, args=--batch-size 16")

CASES = [
    *((name, f"{name}.txt", False, {}) for name in names()),
    *((name, f"{name}-groups.txt", True, {}) for name in names() if name != "local"),
    *((name, f"{name}-inside.txt", False, environ) for name, environ in INSIDE.items()),
]


@pytest.mark.parametrize(("name", "file", "groups", "environ"), CASES, ids=[file for _, file, _, _ in CASES])
def test_plan_is_as_before(name: str, file: str, groups: bool, environ: dict[str, str]) -> None:
    chosen = backend(name)
    machine = Machine(MACHINE.python, MACHINE.cores, ENVIRON | environ, MACHINE.directory)
    text = chosen.render(chosen.plan(spec(name, groups=groups), machine))
    assert text == chosen.render(chosen.plan(spec(name, groups=groups), machine))
    assert "hush-hush" not in text
    golden.check(FOLDER / file, text)


def test_there_is_no_golden_file_of_a_backend_that_is_gone() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {file for _, file, _, _ in CASES}
