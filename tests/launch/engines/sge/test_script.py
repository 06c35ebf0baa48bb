from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.launch import Host, JobSpec, WorkerGroup
from paceline.launch.engines.sge.backend import job_script, options_of
from paceline.launch.engines.sge.inside import agent_file


def script(**options: str) -> list[str]:
    spec = JobSpec(("x",), 2, 1, job_id="ab", options=options)
    return job_script(spec, options_of(spec), "/py", "/f", "/d", "a b").splitlines()


def test_options_become_directives() -> None:
    lines = script(pe="mpi", queue="a.q,b.q", resources="gpu=1", time="1:00:00", project="p")
    for line in ("-pe mpi 3", "-q a.q,b.q", "-l gpu=1", "-l h_rt=1:00:00", "-P p", "-wd /d", "-notify"):
        assert f"#$ {line}" in lines
    assert lines[-2:] == ["export PYTHONPATH='a b'", "exec /py -m paceline.launch.engines.sge.inside /f"]


def test_what_no_directive_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="no blanks or quotes"):
        script(queue="a q")
    with pytest.raises(ValueError, match="did you mean 'queue'"):
        script(queu="a")


@pytest.mark.parametrize("group", [WorkerGroup("a", 1, select={"queue": "q"}), WorkerGroup("a", 1, hosts=(Host("h"),))])
def test_group_that_chooses_its_hosts_is_refused(group: WorkerGroup) -> None:
    with pytest.raises(ValueError, match="-o queue=NAME"):
        options_of(JobSpec(("x",), groups=(group,)))


def test_agent_file_keeps_words_and_ignores_notices(tmp_path: Path) -> None:
    file = tmp_path / "agent"
    file.write_text(agent_file(["sh", "-c", 'kill -USR2 $$; echo "$1"', "sh", "a 'b' $c"]))
    done = subprocess.run(["/bin/sh", str(file)], capture_output=True, text=True, check=True)
    assert done.stdout == "a 'b' $c\n"
