"""Forked processes of a job under test behave like programs that were started."""

import atexit
import fcntl
import functools
import os
import signal
import socket
import sys
import time

import pytest

from paceline.launch.supervise.guardian import Guardian
from paceline.testing import LocalJob, Process, WorkerFailedError
from paceline.testing.channel import readable
from tests.clusters import fork_server, fork_server_main
from tests.clusters.fork_server import ForkedProcess, ForkServer


def say_who_i_am():
    return [os.getpid(), os.getsid(0), os.environ["PACELINE_RANK"], "torch" in sys.modules]


def leave_a_note(path):
    import atexit

    def note():
        with open(path, "w") as file:
            file.write("left")

    atexit.register(note)
    print("to stdout")
    print("to stderr", file=sys.stderr)


def end_with(what):
    if what == "exception":
        raise ArithmeticError("no number")
    sys.exit({"text": "a text", "none": None}.get(what, what))


def wait_for_ever():
    time.sleep(600)


@pytest.fixture(scope="module")
def job():
    with LocalJob(2, 1) as running:
        yield running


def is_forked(process):
    return isinstance(process._handle, ForkedProcess)


def test_children_lead_their_sessions_and_have_their_own_environment(job):
    workers = [job.start(rank, say_who_i_am) for rank in (0, 1)]
    found = [worker.result() for worker in workers]
    assert all(is_forked(one) for one in (*workers, *job.servers, job.scheduler))
    assert [one[:2] for one in found] == [[worker.pid, worker.pid] for worker in workers]
    assert [one[2] for one in found] == ["0", "1"]


def test_what_is_registered_for_the_end_runs_and_output_is_kept(job, tmp_path):
    worker = job.start(0, leave_a_note, str(tmp_path / "note"))
    worker.result()
    assert (tmp_path / "note").read_text() == "left"
    assert {"to stdout", "to stderr"} <= set(worker.output.splitlines())


@pytest.mark.parametrize(
    ("what", "code", "words"), [(3, 3, ""), ("text", 1, "a text"), ("exception", 1, "ArithmeticError: no number")]
)
def test_exit_codes_are_those_of_programs(job, what, code, words):
    worker = job.start(0, end_with, what)
    with pytest.raises(WorkerFailedError, match=f"exit code {code}"):
        worker.result()
    assert words in worker.output


def test_signals_end_children_and_are_told(job):
    worker = job.start(0, wait_for_ever)
    assert worker.code is None
    with pytest.raises(TimeoutError, match="still runs after"):
        worker.wait(0.1)
    worker.kill(signal.SIGTERM)
    assert worker.wait(10) == -signal.SIGTERM
    worker.kill()  # nothing to kill any more


def test_what_a_library_reads_at_its_start_needs_a_program(job):
    worker = job.start(0, say_who_i_am, environment={"OMP_NUM_THREADS": "2"})
    assert not is_forked(worker)
    assert worker.result()[3] is False


def test_jobs_are_forked_too_after_a_library_has_set_a_variable(job, monkeypatch):
    """Importing scikit-learn sets two."""
    assert is_forked(job.scheduler)
    monkeypatch.setenv("KMP_PACELINE_TEST", "1")
    monkeypatch.setattr(fork_server, "ForkServer", functools.partial(ForkServer, is_usual=False))
    with LocalJob(num_workers=1, num_servers=1) as later:
        assert is_forked(later.scheduler)


def test_files_are_inherited_under_their_numbers(tmp_path):
    """The scheduler's pipe is one; here several, so close that they could overwrite each other."""
    env = dict(os.environ)
    fork_server, guardian = ForkServer(env, is_usual=False), Guardian()
    ends = [os.pipe() for _ in range(4)]
    try:
        code = f"import os; [os.write(fd, str(fd).encode()) for fd in {[write for _, write in ends]}]"
        argv = [sys.executable, "-m", "timeit", "-n", "1", "-r", "1", code]

        def start(argv, env, output, guardian, pass_fds):
            return fork_server.fork(argv, env, output, guardian.fd, pass_fds)

        process = Process("writer", argv, env, tmp_path, guardian, [write for _, write in ends], start)
        assert is_forked(process)
        assert process.wait(60) == 0, process.output
        assert [os.read(read, 100) for read, _ in ends] == [str(write).encode() for _, write in ends]
        process.close()
    finally:
        guardian.close()
        fork_server.close()
        for pair in ends:
            for fd in pair:
                os.close(fd)


def test_a_child_that_came_too_late_is_ended_and_not_taken_for_the_next(monkeypatch):
    fork_server, guardian = ForkServer(dict(os.environ), is_usual=False), Guardian()
    read, write = os.pipe()

    def fork(module):
        return fork_server.fork([sys.executable, "-m", module], dict(os.environ), write, guardian.fd, [])

    try:
        fork("this").wait(60)  # the forking process has started
        os.kill(fork_server._process.pid, signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr("tests.clusters.fork_server._START_TIMEOUT_S", 0.1)
            with pytest.raises(RuntimeError, match=r"within 0\.1 s"):
                fork("http.server")  # runs for ever
        os.kill(fork_server._process.pid, signal.SIGCONT)
        assert fork("this").wait(60) == 0
    finally:
        guardian.close()
        fork_server.close()
        os.close(read)
        os.close(write)


def test_a_fork_server_that_ended_forks_nothing_more():
    fork_server = ForkServer(dict(os.environ), is_usual=False)
    fork_server._process.kill()
    fork_server._process.wait(10)
    assert not fork_server.can_run([sys.executable, "-m", "paceline"], dict(os.environ))
    fork_server.close()


def test_files_with_high_numbers_are_waited_for():
    read, write = os.pipe()
    high = fcntl.fcntl(read, fcntl.F_DUPFD, 1100)
    assert readable([high], 0.0) == set()
    os.write(write, b"x")
    assert readable([high, write], 1.0) == {high}
    for fd in (read, write, high):
        os.close(fd)


def test_end_of_a_child_after_that_of_the_client_is_no_error(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = iter([(4711, 0), (0, 0)])
    monkeypatch.setattr(os, "waitpid", lambda *_: next(ends))
    with ours:
        theirs.close()
        fork_server_main._report_ends(ours)
        assert next(ends, None) is None, "all ends were taken"


def test_forking_process_that_does_not_end_in_time_is_killed(monkeypatch, capfd):
    monkeypatch.setattr(fork_server, "_END_TIMEOUT_S", 0.01)
    server = ForkServer(os.environ, is_usual=False)
    os.kill(server._process.pid, signal.SIGSTOP)
    server.close()
    atexit.unregister(server.close)
    assert server._process.returncode == -signal.SIGKILL
    assert capfd.readouterr().err == ""
