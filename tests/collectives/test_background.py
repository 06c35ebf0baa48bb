"""Which thread runs the operations of a rank, and how long a rank waits for rank 0."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.collectives import background
from paceline.collectives.background import Background
from paceline.collectives.environment import HvdSettings
from paceline.collectives.execute import Operation
from paceline.collectives.negotiation.machine import Negotiation
from paceline.collectives.negotiation.messages import (
    Batch,
    Down,
    Entered,
    OperationRequest,
    RankEntered,
    RankLeft,
    Submission,
    ToCoordinator,
    ToRank,
)
from paceline.collectives.planes.base import Alone
from paceline.collectives.timeline import Timeline
from paceline.hvd.errors import HorovodInternalError


class Link:
    """Rank 0 of a job of one rank, in memory. Notes the threads that send."""

    def __init__(self) -> None:
        self.machine = Negotiation(1, HvdSettings().options)
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.senders: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    def send(self, message: ToCoordinator) -> None:
        if isinstance(message.body, RankLeft):
            actions: Any = self.machine.lose(0, message.body.reason, message.body.failed)
        else:
            assert isinstance(message.body, Submission)
            self.senders.put(threading.current_thread())
            actions = self.machine.submit(0, message.body, 0.0)
        for action in actions:
            assert isinstance(action, Batch | Down)
            self.inbox.put(ToRank(message.generation, action))

    def receive(self, timeout_s: float) -> list[ToRank]:
        try:
            found = self.inbox.get(timeout=timeout_s) if timeout_s else self.inbox.get_nowait()
        except queue.Empty:
            return []
        return [] if found is None else [found]

    def wake(self) -> None:
        self.inbox.put(None)


def made(link: Any) -> Background:
    """Return a background that has entered a job of one rank."""
    entered = Entered((RankEntered(1, "host", "id", os.getpid()),), 0)
    one = Background(link, 1, 0, entered, [], HvdSettings(), Timeline())
    one.plane_for = lambda members, device: Alone()
    return one


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def job(link: Link, monkeypatch: pytest.MonkeyPatch) -> Iterator[Background]:
    monkeypatch.setattr(background, "_IDLE_S", 60.0)  # a wake-up that is lost makes a test fail
    one = made(link)
    yield one
    one.leave("the test is over")
    assert not one._thread.is_alive()


def reduction(name: str, numel: int = 4) -> Operation:
    request = OperationRequest("allreduce", name, dtypes=("float32",), shapes=((numel,),))
    return Operation(request, [torch.ones(numel)])


def test_thread_that_waits_runs_the_operations_of_a_backward(job: Background, link: Link) -> None:
    for _ in range(20):
        job.hold()
        handles = [job.start(reduction(f"gradient {number}")) for number in range(3)]
        assert link.senders.empty()
        assert [job.synchronize(handle).sum().item() for handle in handles] == [4.0] * 3
        assert link.senders.get(timeout=10) is threading.current_thread()


def test_operations_run_although_nobody_waits(job: Background, link: Link) -> None:
    operation = reduction("x")
    handle = job.start(operation)
    assert link.senders.get(timeout=10) is job._thread
    assert job.synchronize(handle).sum().item() == 4.0
    assert job.poll(handle)


def test_many_bytes_are_sent_while_backward_computes(job: Background, link: Link) -> None:
    job.hold()
    job.start(reduction("small"))
    assert link.senders.empty()
    job.start(reduction("large", background.HOLD_BYTES // 4))
    assert link.senders.get(timeout=10) is job._thread


def test_held_operations_are_sent_when_backward_failed(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_IDLE_S", 0.01)
    job = made(link)
    job.hold()
    job.start(reduction("x"))
    assert link.senders.get(timeout=10) is job._thread
    job.leave("the test is over")


class Silent(Link):
    """Rank 0 that answers nothing; each wait for it takes its whole time, by a simulated clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.left = threading.Event()

    def send(self, message: ToCoordinator) -> None:
        if isinstance(message.body, RankLeft):
            self.left.set()

    def receive(self, timeout_s: float) -> list[ToRank]:
        self.now += timeout_s
        return []

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now


def test_wait_ends_when_rank_0_says_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Silent()
    monkeypatch.setattr(background, "time", link)
    job = made(link)
    with pytest.raises(HorovodInternalError, match=r"rank 0, where the coordinator runs, has sent nothing for 3. s"):
        job.wait(job._handles[job.start(reduction("x"))])
    assert link.left.is_set()
    assert 30 <= link.now < 40
    with pytest.raises(HorovodInternalError, match="has sent nothing"):
        job.start(reduction("y"))


def test_interrupted_wait_harms_nobody(job: Background, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Alone):
        def allreduce(self, *arguments: Any) -> None:
            raise KeyboardInterrupt

    def interrupt(timeout_s: float) -> list[ToRank]:
        raise KeyboardInterrupt

    job.hold()
    handle = job.start(reduction("x"))
    operation = job._handles[handle]
    with monkeypatch.context() as patch:
        patch.setattr(link, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            job.wait(operation)
        patch.undo()
    assert job.wait(operation).sum().item() == 4.0
    job.plane_for = lambda members, device: Interrupted()
    job.hold()
    with pytest.raises(KeyboardInterrupt):
        job.synchronize(job.start(reduction("x")))
    with pytest.raises(HorovodInternalError, match="KeyboardInterrupt"):
        job.start(reduction("x"))
