from __future__ import annotations

import pytest

from paceline.launch import ProcessName
from paceline.launch.supervise.blame import Failure, failure_block


def test_block_names_who_failed_first_and_shows_its_last_words() -> None:
    failure = Failure(ProcessName("worker", 1), 3, "exit code 3", 12.34)
    block = failure_block(
        failure, [b"loading", b"\xff boom"], {ProcessName("worker", 0): 1, ProcessName("server", 0): 139}
    )
    assert block.splitlines()[1:-1] == [
        b"worker 1 failed: exit code 3, 12.3 s after the start",
        b"its last lines:",
        b"    loading",
        b"    \xff boom",
        b"also left: worker 0 (exit code 1), server 0 (killed by SIGSEGV (exit code 139))",
    ]


def test_silent_death_by_kill_gets_a_hint() -> None:
    block = failure_block(Failure(ProcessName("worker", 0), 137, "killed by SIGKILL (exit code 137)", 1.0), [], {})
    assert b"out of memory" in block
    assert b"it printed nothing" in block


def test_taken_port_gets_a_hint() -> None:
    tail = [b"Traceback", b"DistNetworkError: code: -98, name: EADDRINUSE, message: address already in use"]
    block = failure_block(Failure(ProcessName("worker", 0), 1, "exit code 1", 1.0), tail, {})
    assert block.splitlines()[2].startswith(b"another program has its port; if that is MASTER_PORT, leave it unset")
    server = failure_block(Failure(ProcessName("server", 0), 1, "exit code 1", 1.0), tail, {})
    assert b"MASTER_PORT" not in server


@pytest.mark.parametrize(
    "last", [b"EOFError: EOF when reading a line", b"bdb.BdbQuit", b"[rank1]: EOFError: EOF when reading a line"]
)
def test_question_that_nobody_can_answer_gets_a_hint(last: bytes) -> None:
    block = failure_block(Failure(ProcessName("worker", 1), 1, "exit code 1", 1.0), [b"Traceback", last], {})
    assert block.splitlines()[2].startswith(b"processes of a job have no stdin: give what is asked for as an argument")


def test_block_names_the_command_that_shows_the_last_events() -> None:
    failure = Failure(ProcessName("worker", 0), 1, "exit code 1", 1.0)
    assert b"what all processes did last: paceline story j1" in failure_block(failure, [], {}, story="j1")
    assert b"paceline story" not in failure_block(failure, [], {})


def test_words_of_others_have_no_power_over_the_terminal() -> None:
    failure = Failure(ProcessName("worker", 0), 1, "exit code 1: \x1b[2J \udcff", 1.0)
    assert rb"worker 0 on h\x1b failed: exit code 1: \x1b[2J \udcff, 1.0 s" in failure_block(failure, [], {}, "h\x1b")
