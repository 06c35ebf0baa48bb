from __future__ import annotations

import os
import signal
import subprocess

from paceline.launch.supervise import sessions


def await_end(pid: int) -> None:
    """Wait until a child has ended, and leave it as a zombie."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_zombie_does_not_count_as_living() -> None:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        assert sessions.living({process.pid}) == {process.pid}
        process.kill()
        await_end(process.pid)
        assert sessions.living({process.pid}) == set()


def test_name_with_brackets_and_spaces_is_read_correctly() -> None:
    script = "echo 'a) Z 1 (b' >/proc/$$/comm; echo up; read x"
    with subprocess.Popen(
        ["sh", "-c", script], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert sessions.living({process.pid}) == {process.pid}


def test_stopped_process_acts_on_a_signal() -> None:
    with subprocess.Popen(["sh", "-c", "kill -STOP $$"], start_new_session=True) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        sessions.send(signal.SIGTERM, {process.pid})
        assert process.wait(60) == -signal.SIGTERM


def test_session_without_processes_is_ignored() -> None:
    with subprocess.Popen(["true"], start_new_session=True) as process:
        await_end(process.pid)
        sessions.send(signal.SIGTERM, {process.pid})
        assert process.wait() == 0
