"""What ends a worker's process decides how it leaves its job."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.host.exitcodes import PEER_FAILED

SCRIPT = """
import sys, threading, time
from paceline.errors import PeerDiedError
from paceline.worker import leaving

class Session:
    failure = None
    def close(self, reason=""):
        print("closed", repr(reason), flush=True)

end = leaving.Exit()
end.install()
end.install()
end.session = session = Session()
"""


def run(script: str) -> tuple[int, list[str], str]:
    argv = [sys.executable, "-c", SCRIPT + script]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_script_that_ends_leaves() -> None:
    assert run("")[:2] == (0, ["closed ''"])


def test_exception_is_said_and_shown() -> None:
    code, out, err = run("raise ValueError('no')")
    assert (code, out[0]) == (1, "closed 'it raised ValueError: no'")
    assert "ValueError: no" in err


def test_exception_is_said_before_threads_have_ended() -> None:
    threads = "threading.Thread(target=lambda: (time.sleep(0.5), print('thread', flush=True))).start(); 1 / 0"
    assert run(threads)[1][:2] == ["closed 'it raised ZeroDivisionError: division by zero'", "thread"]


@pytest.mark.parametrize(
    "script",
    [
        "raise PeerDiedError('worker 1 died')",
        "session.failure = PeerDiedError('worker 1 died'); raise KeyError('what it led to')",
        "try:\n    raise PeerDiedError('worker 1 died')\nexcept PeerDiedError as e:\n    raise KeyError(1) from e",
        "try:\n    raise PeerDiedError('worker 1 died')\nexcept PeerDiedError:\n    raise KeyError(1)",
    ],
)
def test_who_ends_because_of_another_says_so_by_its_exit_code(script: str) -> None:
    code, out, err = run(script)
    assert (code, out[0]) == (PEER_FAILED, "closed ''")
    assert "Error" in err


@pytest.mark.parametrize(
    "body", ["raise KeyboardInterrupt", "\n try: 1 / 0\n except ZeroDivisionError: raise KeyboardInterrupt"]
)
def test_ctrl_c_shows_the_script_but_not_the_code_that_it_waited_in(body: str) -> None:
    wait = "import paceline.worker.leaving as inner\n"
    wait += f"exec(compile({'def wait(): ' + body!r}, inner.__file__, 'exec'))\n"
    code, out, err = run(wait + "def train():\n    wait()\ntrain()")
    assert code == -2
    assert out[0].startswith("closed 'it raised KeyboardInterrupt")
    assert "in train" in err
    assert "in wait" not in err
    assert "ZeroDivisionError" not in err


def test_nothing_is_said_where_nobody_joined() -> None:
    assert run("end.session = None")[:2] == (0, [])
    assert run("end.session = None; raise PeerDiedError('scheduler')")[0] == PEER_FAILED
