"""Threads of one worker share its session, over real sockets."""

from __future__ import annotations

import threading

import torch

from paceline import kvstore
from paceline.errors import PacelineError
from paceline.net import client
from paceline.testing import LocalJob, listen, tell

LONG_S = 60.0


def new_store():
    store = kvstore.create("dist_sync")
    store.set_updater("add")
    store.init(["w", "v"], [torch.zeros(50_000), torch.zeros(50_000)])
    store.barrier()
    return store


def push_while_a_thread_waits():
    """Worker 0 has a thread that waits for worker 1, and asks meanwhile."""
    store, value = new_store(), torch.ones(50_000)
    if store.rank == 1:
        listen()
        for key in ("w", "v"):
            store.pushpull(key, value.clone())
        return 0
    client.CHECK_INTERVAL_S = 2 * LONG_S  # only messages end waits
    waiting = threading.Thread(target=store.pushpull, args=("w", value))
    waiting.start()
    stats = [store.stats()["updates"] for _ in range(20)]
    other = torch.ones(50_000)
    store.push("v", other)
    assert waiting.is_alive(), "nobody has pushed for it"
    tell(stats)
    store.pull("v", other)
    waiting.join(LONG_S)
    return [value[0].item(), other[0].item()]


def leave_while_a_thread_waits():
    store, value = new_store(), torch.ones(50_000)
    if store.rank == 1:
        listen()
        return ""
    found = []

    def wait():
        try:
            store.pushpull("w", value)
        except PacelineError as error:
            found.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    store.stats()  # after it the thread's push is under way, or will be refused
    store.session.close("enough")
    waiting.join(LONG_S)
    tell("left")
    return found[0]


def test_a_thread_asks_and_waits_while_another_one_waits():
    with LocalJob(2, 1) as job:
        workers = job.start_all(push_while_a_thread_waits)
        assert workers[0].heard() == [0] * 20
        workers[1].tell("push")
        assert workers[0].result() == [2.0, 2.0]


def test_leaving_ends_the_waits_of_other_threads():
    with LocalJob(2, 1) as job:
        workers = job.start_all(leave_while_a_thread_waits)
        assert workers[0].heard() == "left"
        assert "it can send no more requests" in workers[0].result()
