"""No thread of paceline lives when the interpreter ends: one that is in the cipher then would abort the process."""

from __future__ import annotations

import atexit
import threading
import time

import pytest
import torch

from paceline import kvstore
from paceline.testing import LocalJob, tell
from paceline.worker.current import current_session


def say_who_lives():
    """Runs after all exit handlers that paceline registers later."""
    tell([one.name for one in threading.enumerate() if one.name.startswith("paceline")])


def exit_while_a_thread_joins():
    atexit.register(say_who_lives)
    threading.Thread(target=kvstore.create, args=("dist_sync",), daemon=True).start()
    while not [one for one in threading.enumerate() if one.name.startswith("paceline-read")]:
        time.sleep(0.01)


def exit_in_the_middle():
    atexit.register(say_who_lives)
    store = kvstore.create("dist_sync")
    store.init("w", torch.zeros(1 << 20))
    store.push("w", torch.ones(1 << 20))


def exit_after_an_error():
    atexit.register(say_who_lives)
    store = kvstore.create("dist_sync")
    store.init("w", torch.zeros(10))
    current_session().gather("all", b"")
    raise ArithmeticError("the loss is not a number")


def exit_twice():
    atexit.register(say_who_lives)
    store = kvstore.create("dist_sync")
    store.close()
    store.session.close()
    store.session.close()


@pytest.mark.parametrize("transport", [{}, {"unix_sockets": False, "shared_memory": False}])
@pytest.mark.parametrize("function", [exit_in_the_middle, exit_twice, exit_after_an_error])
def test_no_thread_lives_when_the_interpreter_ends(function, transport):
    with LocalJob(1, 1, **transport) as job:
        [worker] = job.start_all(function)
        assert worker.heard() == []
        assert worker.wait(30.0) == (1 if function is exit_after_an_error else 0)


def test_no_thread_lives_that_joins_while_the_interpreter_ends():
    with LocalJob(2, 1) as job:
        worker = job.start(0, exit_while_a_thread_joins)
        assert worker.heard() == []
        assert worker.wait(30.0) == 0
