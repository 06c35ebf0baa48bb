from __future__ import annotations

import os
import subprocess
import sys

from paceline.membership import GONE
from paceline.net.hosts import process_state


def test_process_that_has_ended_is_told_from_one_that_runs() -> None:
    assert process_state(os.getpid()).letter in ("R", "S")
    ended = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    assert ended.stdout is not None
    ended.stdout.read()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(ended.pid).letter in GONE, "its parent has not removed it yet"
    ended.communicate()
    assert process_state(ended.pid).letter in GONE


def test_process_is_ready_if_any_of_its_threads_is() -> None:
    program = "import threading; threading.Thread(target=lambda: [print(flush=True), max(iter(int, 1))]).start()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as computes:
        assert computes.stdout is not None
        computes.stdout.readline()
        before = process_state(computes.pid)
        while (now := process_state(computes.pid)).cpu_s == before.cpu_s:
            assert now.letter == "R"
        computes.kill()
    assert before.letter == "R", "the first thread of it waits for the other one"
