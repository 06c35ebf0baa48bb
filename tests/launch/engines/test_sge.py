from __future__ import annotations

import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launch import Host, JobSpec, Machine, WorkerGroup
from paceline.launch.engines import sge
from paceline.launch.engines.sge import agent_file, job_script, on_allocation, options_of, read_hostfile


def script(**options: str) -> list[str]:
    spec = JobSpec(("x",), 2, 1, job_id="ab", options=options)
    return job_script(spec, options_of(spec), "/py", "/f", "/d", "a b").splitlines()


def test_options_become_directives() -> None:
    lines = script(pe="mpi", queue="a.q,b.q", resources="gpu=1", time="1:00:00", project="p")
    for line in ("-pe mpi 3", "-q a.q,b.q", "-l gpu=1", "-l h_rt=1:00:00", "-P p", "-wd /d", "-notify"):
        assert f"#$ {line}" in lines
    assert lines[-2:] == ["export PYTHONPATH='a b'", "exec /py -P -m paceline.launch.engines.sge /f"]


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


def test_job_inside_a_job_ends_by_the_notice_of_the_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def run(*_: object) -> int:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not told
        os.kill(os.getpid(), signal.SIGUSR2)
        return 0

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(one, lambda number, _: None) for one in numbers]
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    monkeypatch.setattr(sge, "_run", run)
    request = sge.SgeRequest(JobSpec(("x",), 1, 1), Machine("py"), "", str(tmp_path / "job"), "", {}, inside=True)
    try:
        assert sge.InsideJob(request).wait() == 0
    finally:
        for one, handler in zip(numbers, before, strict=True):
            signal.signal(one, handler)
    assert told == [signal.SIGTERM]


def test_folder_that_somebody_else_has_made_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts would run the script of an agent that is in it."""
    monkeypatch.setenv("PE_HOSTFILE", str(tmp_path / "hosts"))
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "agent").write_text("touch pwned\n")
    request = sge.SgeRequest(JobSpec(("x",), 1, 1), Machine("py"), "", str(tmp_path / "job"), "", {}, inside=True)
    monkeypatch.setattr(sge, "_heed_notices", lambda: None)
    with pytest.raises(LaunchError, match="the folder of the job cannot be made"):
        sge.InsideJob(request).wait()
    assert (tmp_path / "job" / "agent").exists()


def test_full_disk_leaves_no_folder_with_the_variables_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sge, "write_text", full)
    request = sge.SgeRequest(JobSpec(("x",), 1, 1), Machine("py"), "", str(tmp_path / "job"), "", {}, inside=False)
    with pytest.raises(LaunchError, match="No space left on device"):
        sge.SgeJob(request)
    assert not (tmp_path / "job").exists()


def free(spec: JobSpec, **slots: int) -> dict[str, int | None]:
    placed = on_allocation(spec, slots)
    return {host.name: host.slots for host in placed.hosts}


def test_lines_of_the_hostfile_are_hosts_with_slots() -> None:
    text = "h1 2 main.q@h1 UNDEFINED\nh2 1 main.q@h2 UNDEFINED\n"
    assert read_hostfile(text) == {"h1": 2, "h2": 1}


@pytest.mark.parametrize("text", ["", "h1\n", "h1 two q@h1\n"])
def test_another_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PE_HOSTFILE"):
        read_hostfile(text)


def test_workers_get_the_slots_that_servers_leave() -> None:
    assert free(JobSpec(("x",), 2, 2), h1=2, h2=1, h3=1) == {"h1": 1, "h2": 0, "h3": 1}


def test_two_lines_of_one_host_count_together() -> None:
    assert read_hostfile("h1 1 q\nh2 1 q\nh1 1 q\n") == {"h1": 2, "h2": 1}


def test_servers_that_crowd_a_host_take_no_slot_from_workers() -> None:
    spec = JobSpec(("x",), 2, 3)
    assert free(spec, h1=1, h2=4) == {"h1": 0, "h2": 3}
    assert free(JobSpec(("x",), 4, 1), h1=1, h2=3) == {"h1": 1, "h2": 3}


#: By program: a job runs until it is deleted, and prints a last line then. Ctrl-C comes while the launcher looks at it.
ENGINE = {
    "qsub": "echo 7",
    "qstat": 'test -d "$FOLDER/gone" && { echo "Following jobs do not exist: 7" >&2; exit 1; }; kill -INT $PPID',
    "qdel": 'printf "the last words" >>"$FOLDER/out"; mkdir "$FOLDER/gone"',
}


def submitted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[sge.SgeJob, Path]:
    """Return a job of the engine above, and its folder."""
    for name, text in ENGINE.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    request = sge.SgeBackend().plan(JobSpec(("x",), 1, 0, job_id="1"), Machine("/py", {}, {}, str(folder)))
    monkeypatch.setenv("FOLDER", request.folder)
    return sge.SgeJob(request), Path(request.folder)


def test_output_of_the_end_of_an_interrupted_job_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, folder = submitted(tmp_path, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        job.wait()
    assert capsys.readouterr().out == "the last words"
    assert not folder.exists()


@pytest.mark.parametrize(("left", "code"), [("7", 7), (None, 1)])
def test_exit_code_is_that_which_the_launcher_inside_has_left(
    left: str | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, folder = submitted(tmp_path, monkeypatch)
    (folder / "gone").mkdir()
    (folder / "out").write_text("a line\n")
    if left:
        (folder / "code").write_text(left)
    assert job.wait() == code
    shown = capsys.readouterr()
    assert shown.out == "a line\n"
    assert ("Grid Engine ended job 7: qacct -j 7 says why" in shown.err) is (left is None)
    assert not folder.exists()
