from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from paceline.launch import processes


def await_end(pid: int) -> None:
    """Wait until a child has ended, and leave it as a zombie."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_zombie_does_not_count_as_living() -> None:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        assert processes.living({process.pid}) == {process.pid}
        process.kill()
        await_end(process.pid)
        assert processes.living({process.pid}) == set()


def test_name_with_brackets_and_spaces_is_read_correctly() -> None:
    script = "echo 'a) Z 1 (b' >/proc/$$/comm; echo up; read x"
    with subprocess.Popen(
        ["sh", "-c", script], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert processes.living({process.pid}) == {process.pid}


def test_stopped_process_acts_on_a_signal() -> None:
    with subprocess.Popen(["sh", "-c", "kill -STOP $$"], start_new_session=True) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        processes.send(signal.SIGTERM, {process.pid})
        assert process.wait(60) == -signal.SIGTERM


def test_session_without_processes_is_ignored() -> None:
    with subprocess.Popen(["true"], start_new_session=True) as process:
        await_end(process.pid)
        processes.send(signal.SIGTERM, {process.pid})
        assert process.wait() == 0


def test_stopped_process_is_known() -> None:
    with subprocess.Popen(["sh", "-c", "kill -STOP $$"], start_new_session=True) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert processes.stopped({process.pid, os.getpid()}) == {process.pid}
        process.kill()
        await_end(process.pid)
        assert processes.stopped({process.pid}) == set()


def test_cpu_time_of_a_session_counts_its_processes_and_their_ended_children() -> None:
    work = "import time\nwhile time.process_time() < 0.2: pass"
    script = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}]); print('up', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        found = processes.usage({process.pid})
        assert list(found) == [process.pid]
        assert found[process.pid].cpu_s >= 0.19
        until = time.monotonic() + 30
        while processes.usage({process.pid})[process.pid].is_ready:  # until it waits for input
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_process_that_computes_is_ready() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) as process:
        until = time.monotonic() + 30
        while not processes.usage({process.pid})[process.pid].is_ready:
            assert time.monotonic() < until
            time.sleep(0.01)
        process.kill()


def test_birth_tells_processes_of_one_id_apart() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        born = processes.birth(process.pid)
        assert born == processes.birth(process.pid) != ""
        assert float(born) >= float(processes.birth(os.getpid()))
        process.kill()
        await_end(process.pid)
        assert processes.birth(process.pid) == ""
