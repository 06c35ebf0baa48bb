from __future__ import annotations

import os
import subprocess
import sys

from paceline.membership import GONE
from paceline.net.hosts import process_state


def test_process_that_has_ended_is_told_from_one_that_runs() -> None:
    assert process_state(os.getpid()) in ("R", "S")
    ended = subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE)
    assert ended.stdout is not None
    ended.stdout.read()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(ended.pid) in GONE, "its parent has not removed it yet"
    ended.communicate()
    assert process_state(ended.pid) in GONE
