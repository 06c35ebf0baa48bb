"""Real processes: small scripts in the place of scheduler, servers and workers."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, cast

import psutil
import pytest

from paceline.errors import LaunchError
from paceline.launch import JobSpec, Late, Machine, make_plan
from paceline.launch.supervise import supervisor
from paceline.launch.supervise.crew import Processes
from paceline.launch.supervise.supervisor import SupervisedJob, Supervisor, Surroundings

READY = "echo tcp://127.0.0.1:5555 >/dev/fd/$READY_FD; "
STAYS = READY + "exec sleep 1000"
#: all-done is a fifo: a reader waits until a worker writes.
LEAVES_WHEN_TOLD = READY + "read x <all-done"
#: Waits for another process of the job to end; the launcher keeps it as a zombie.
AFTER_WORKER_0 = "until grep -q ') Z' /proc/$(cat w0.pid)/stat; do sleep 0.02; done 2>/dev/null; "

MakeJob = Callable[..., Any]


def failure(job: Any) -> list[str]:
    """The block at the end of stderr, without its rules."""
    lines = job.err()
    assert lines[-1] == "-" * 78
    return lines[lines.index("-" * 78) + 1 : -1]


def test_runs_of_a_job_have_keys_of_their_own_and_one_secret_of_their_page(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, runs = [1, 1, 0], []

    class Run:
        interrupted = False

        def __init__(self, plan: object, known: dict[Late, str], make_crew: object) -> None:
            runs.append(known)

        def run(self) -> int:
            return codes[len(runs) - 1]

    monkeypatch.setattr(supervisor, "Supervisor", Run)
    spec = JobSpec(("train",), 1, 1, settings={"dashboard": "0"}, max_restarts=2)
    assert SupervisedJob(make_plan(spec, Machine("python", {}, {})), cast(Any, None)).wait() == 0
    assert [one[Late.RESTART] for one in runs] == ["0", "1", "2"]
    assert len({one[Late.JOB_KEY] for one in runs}) == 3
    assert len({one[Late.PAGE_TOKEN] for one in runs}) == 1


def test_good_job_ends_by_itself_with_zero(make_job: MakeJob) -> None:
    job = make_job().start(
        "echo hello from $ADDRESS; echo bad >&2; printf partial; echo >all-done",
        "echo $PORT",
        scheduler=LEAVES_WHEN_TOLD,
        servers=("echo serve $ADDRESS",),
    )
    assert job.wait() == 0
    assert {"[worker 0] hello from tcp://127.0.0.1:5555", "[worker 0] partial"} <= set(job.out())
    assert "[server 0] serve tcp://127.0.0.1:5555" in job.out()
    port = next(line.removeprefix("[worker 1] ") for line in job.out() if line.startswith("[worker 1]"))
    assert 1024 <= int(port) < 65536
    assert job.err() == ["[worker 0] bad"]
    assert job.left() == []


def test_first_failure_decides_and_is_the_last_thing_on_the_screen(make_job: MakeJob) -> None:
    job = make_job().start(
        "echo $$ >w0.pid; echo loading; echo boom >&2; exit 3",
        AFTER_WORKER_0 + "echo worker 0 died; echo >all-done; exit 4",
        scheduler=LEAVES_WHEN_TOLD,
    )
    assert job.wait() == 3
    assert "[worker 1] worker 0 died" in job.out()
    block = failure(job)
    assert block[0].startswith("worker 0 failed: exit code 3, ")
    assert sorted(block[2:4]) == ["    boom", "    loading"]
    assert block[4].startswith("also left: ")
    assert "worker 1 (exit code 4)" in block[4]
    assert job.left() == []


def test_survivors_that_stay_are_terminated(make_job: MakeJob) -> None:
    job = make_job(survivors_s=0.1).start("exit 3", "trap 'echo bye; exit 0' TERM; sleep 1000 & wait", scheduler=STAYS)
    assert job.wait() == 3
    assert any("did not leave within 0.1 s" in line for line in job.err())
    assert failure(job)[0].startswith("worker 0 failed: exit code 3, ")
    assert job.left() == []


def test_survivors_that_ignore_sigterm_are_killed(make_job: MakeJob) -> None:
    job = make_job(survivors_s=0.1, terminate_s=0.1).start(
        "read x <all-done; kill -9 $$",
        "trap '' TERM INT HUP; echo >all-done; while :; do sleep 1000; done",
        scheduler=STAYS,
    )
    assert job.wait() == 137
    assert failure(job)[0].startswith("worker 0 failed: killed by SIGKILL (exit code 137), ")
    assert job.left() == []


def test_stopped_survivor_is_ended(make_job: MakeJob) -> None:
    job = make_job(survivors_s=0.1).start("read x <all-done; exit 3", "echo >all-done; kill -STOP $$", scheduler=STAYS)
    assert job.wait() == 3
    assert job.left() == []


def test_process_that_the_scheduler_names_fails_the_job(make_job: MakeJob) -> None:
    named = READY + """echo '["lost", ["server", 0], "it left too early", false]' >/dev/fd/$READY_FD; exec sleep 1000"""
    job = make_job(survivors_s=0.1).start("exec sleep 1000", scheduler=named, servers=("exit 0",))
    assert job.wait() == 1
    assert failure(job)[0].startswith("server 0 failed: it left too early, ")


def test_exit_handlers_may_run_after_servers_and_scheduler_have_left(make_job: MakeJob) -> None:
    job = make_job(leave_s=0.1).start(
        "until grep -q ') Z' /proc/$(cat server.pid)/stat; do sleep 0.02; done 2>/dev/null; sleep 0.5; echo done",
        scheduler=LEAVES_WHEN_TOLD,
        servers=("echo $$ >server.pid; echo >all-done",),
    )
    assert job.wait() == 0
    assert job.out() == ["[worker 0] done"]


def test_server_that_exits_slowly_is_waited_for(make_job: MakeJob) -> None:
    over = READY + """echo '["over"]' >/dev/fd/$READY_FD"""
    slow = "until grep -q ') Z' /proc/$(cat w0.pid)/stat; do sleep 0.02; done 2>/dev/null; sleep 0.5; echo flushed"
    job = make_job(leave_s=0.1).start("echo $$ >w0.pid", scheduler=over, servers=(slow,))
    assert job.wait() == 0
    assert "[server 0] flushed" in job.out()
    assert job.err() == []


@pytest.mark.parametrize("agents", [False, True], ids=["here", "on other hosts"])
def test_worker_that_hangs_in_its_exit_is_named_and_ended(agents: bool, make_job: MakeJob) -> None:
    over = READY + """echo '["over"]' >/dev/fd/$READY_FD"""
    scheduler = over.replace("READY_FD", "PACELINE_READY_FD") if agents else over
    job = make_job(idle_s=0.1, survivors_s=0.1).start("exec sleep 1000", scheduler=scheduler, agents=agents)
    assert job.wait() == 1
    where = " on h1" if agents else ""
    assert failure(job)[0].startswith(f"worker 0{where} failed: did not exit, and has used no CPU time for ")
    assert job.left() == []


def test_scheduler_is_told_of_victims_after_the_others_that_ended_meanwhile(make_job: MakeJob) -> None:
    told = (
        READY + 'while read -r line; do echo "$line"; case $line in *76,*) break;; esac; done </dev/fd/$ENDED_FD >told'
    )
    gated = "echo $$ >w{0}.pid; until test -e go; do sleep 0.02; done; {1}"
    job = make_job().start(gated.format(0, "exit 76"), gated.format(1, "exit 3"), scheduler=told)
    pids = [job.wait_for_file(f"w{rank}.pid") for rank in range(2)]
    job.send(signal.SIGSTOP)
    os.waitid(os.P_PID, job.process.pid, os.WSTOPPED | os.WNOWAIT)
    (job.folder / "go").touch()
    for pid in pids:
        ended = os.pidfd_open(int(pid))
        assert select.select([ended], [], [], 60)[0]
        os.close(ended)
    job.send(signal.SIGCONT)
    assert job.wait() == 3
    ends = [line for line in (job.folder / "told").read_text().splitlines() if "exited" in line]
    assert ends == ['["exited", ["worker", 1], 3, ""]', '["exited", ["worker", 0], 76, ""]']


def test_lost_host_fails_the_job_and_is_the_reason_also_if_the_scheduler_repeats_the_exit_code(
    make_job: MakeJob,
) -> None:
    scheduler = """trap '' TERM; echo tcp://127.0.0.1:1 >/dev/fd/$PACELINE_READY_FD
        while read -r line; do case $line in *255,*) break;; esac; done </dev/fd/$PACELINE_ENDED_FD
        reason='its process ended: exit code 255'
        echo '["lost", ["worker", 0], "'$reason'", false]' >/dev/fd/$PACELINE_READY_FD; exec sleep 1000"""
    job = make_job(terminate_s=0.1).start("kill -9 $PPID; exec sleep 1000", scheduler=scheduler, agents=True)
    assert job.wait() == 255
    assert failure(job)[0].startswith("worker 0 on h1 failed: exit code 255: the agent of h1 ended, ")
    assert job.left() == []


def test_scheduler_that_dies_before_it_is_ready_shows_its_last_words(make_job: MakeJob) -> None:
    job = make_job().start("echo never", scheduler="echo address in use >&2; exit 5")
    assert job.wait() == 5
    assert failure(job)[0].startswith("scheduler failed: exit code 5, ")
    assert failure(job)[2] == "    address in use"
    assert job.out() == []


def test_worker_that_closes_its_output_is_waited_for(make_job: MakeJob) -> None:
    job = make_job().start("exec >&- 2>&-; read x <all-done; exit 6", "echo >all-done", scheduler=None)
    assert job.wait() == 6


def test_what_a_worker_leaves_behind_neither_blocks_the_end_nor_survives_it(make_job: MakeJob) -> None:
    job = make_job().start("sleep 1000 & echo $! started", scheduler=None)
    assert job.wait() == 0
    assert job.err() == ["[launch] terminating what worker 0 left running"]
    assert job.left() == []


def test_helper_that_ends_by_itself_is_left_to_finish(make_job: MakeJob) -> None:
    after = "(" + AFTER_WORKER_0 + "echo cleaned >cleaned) & echo $$ >w0.pid"
    job = make_job().start(after, scheduler=None)
    assert job.wait() == 0
    assert job.err() == []
    assert (job.folder / "cleaned").read_text() == "cleaned\n"


def test_background_jobs_in_groups_of_their_own_are_ended(make_job: MakeJob) -> None:
    script = "import os, time\nif not os.fork():\n    os.setpgid(0, 0)\n    time.sleep(1000)\nprint('ok')"
    job = make_job().start(f'exec "{sys.executable}" -c "{script}"', scheduler=None)
    assert job.wait() == 0
    assert job.out() == ["[worker 0] ok"]
    assert job.left() == []


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=str,
)
def test_signal_is_forwarded_and_ends_everything(signum: int, code: int, make_job: MakeJob) -> None:
    name = signal.Signals(signum).name.removeprefix("SIG")
    job = make_job(survivors_s=5).start(
        f"trap 'echo saved; exit 0' {name}; sleep 1000 & echo up >w0; wait",
        "echo up >w1; kill -STOP $$",
        scheduler=STAYS,
    )
    job.wait_for_file("w0")
    job.wait_for_file("w1")
    job.send(signum)
    assert job.wait() == code
    assert "[worker 0] saved" in job.out()
    assert job.left() == []


def test_second_interrupt_does_not_wait(make_job: MakeJob) -> None:
    job = make_job().start("trap 'echo no >no' INT; echo up >up; while :; do sleep 0.02; done", scheduler=STAYS)
    job.wait_for_file("up")
    job.send(signal.SIGINT)
    job.wait_for_file("no")
    job.send(signal.SIGINT)
    assert job.wait() == 130
    assert job.left() == []


def test_ignored_hangup_stays_ignored(make_job: MakeJob) -> None:
    job = make_job().start("echo up >up; read x <all-done; echo done", scheduler=None, ignored=(signal.SIGHUP,))
    job.wait_for_file("up")
    job.send(signal.SIGHUP)
    (job.folder / "all-done").write_text("\n")
    assert job.wait() == 0
    assert job.out() == ["[worker 0] done"]


def test_reader_that_goes_away_ends_the_job(make_job: MakeJob) -> None:
    read_fd, write_fd = os.pipe()
    job = make_job().start("while :; do echo y || exit 1; done", scheduler=STAYS, out_fd=write_fd)
    os.close(write_fd)
    assert os.read(read_fd, 5) == b"[work"
    os.close(read_fd)
    assert job.wait() == 141
    assert job.left() == []


def test_command_that_cannot_be_run_is_named(make_job: MakeJob) -> None:
    job = make_job(survivors_s=0.1).start("true", scheduler=STAYS, shell="no-such-shell")
    assert job.wait() == 1
    assert "'no-such-shell' cannot be run: No such file or directory" in failure(job)[0]


def test_many_lines_from_many_workers_all_arrive(make_job: MakeJob) -> None:
    count = 3000
    job = make_job().start(*[f"seq {count}"] * 4, scheduler=None)
    assert job.wait() == 0
    for rank in range(4):
        mine = [line.removeprefix(f"[worker {rank}] ") for line in job.out() if line.startswith(f"[worker {rank}] ")]
        assert mine == [str(number) for number in range(1, count + 1)]


def test_processes_have_no_terminal_and_no_input(make_job: MakeJob) -> None:
    job = make_job().start("cat; echo terminal $(cut -d' ' -f7 /proc/$$/stat)", scheduler=None)
    assert job.wait() == 0
    assert job.out() == ["[worker 0] terminal 0"]


def test_nobody_inherits_the_launchers_pipes(make_job: MakeJob) -> None:
    job = make_job().start("ls /proc/$$/fd", "ls /proc/$$/fd", scheduler=LEAVES_WHEN_TOLD, servers=("echo >all-done",))
    assert job.wait() == 0
    seen = [line.split("] ")[1] for line in job.out() if line.startswith("[worker")]
    assert set(seen) <= {"0", "1", "2", "10"}  # dash keeps its own copy of the script at 10


class Lost(Processes):
    """A crew whose engine refuses the job, and then does not answer."""

    is_closed = False

    def opening(self) -> bool:
        raise LaunchError("the cluster refused it")

    def finish(self) -> None:
        raise LaunchError("kubectl delete did not answer")

    def close(self) -> None:
        self.is_closed = True

    late = start = check = look = send = cast(Any, None)


def opened() -> tuple[set[str], list[int]]:
    """Return the descriptors and the children of this process."""
    return set(os.listdir("/proc/self/fd")), [one.pid for one in psutil.Process().children()]


def test_engine_that_does_not_answer_at_the_end_leaves_neither_descriptor_nor_child() -> None:
    before, crew = opened(), Lost()
    plan = make_plan(JobSpec(("true",), 1, 0), Machine("/py", {}, {}, "/"))
    with pytest.raises(LaunchError, match="kubectl delete did not answer"):
        Supervisor(plan, {}, lambda around: crew).run()
    assert crew.is_closed
    assert opened() == before


def test_crew_that_cannot_be_made_leaves_neither_descriptor_nor_child() -> None:
    def refuse(around: Surroundings) -> Processes:
        raise LaunchError("no kubectl")

    before = opened()
    plan = make_plan(JobSpec(("true",), 1, 0), Machine("/py", {}, {}, "/"))
    with pytest.raises(LaunchError, match="no kubectl"):
        Supervisor(plan, {}, refuse).run()
    assert opened() == before
