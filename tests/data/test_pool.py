"""A worker's side of a pool: what it refuses, and what it says while it waits."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import paceline
from paceline.consistency import Policy
from paceline.data import PooledBatchSampler
from paceline.data.pool import Walker
from paceline.errors import DeadlineError
from paceline.membership.effects import Answer, Waiting
from paceline.membership.log import MembershipLog
from paceline.membership.pools import Pools
from paceline.testing.one_process import OneProcess
from paceline.wire import messages as m

SHARDS = ["a.tar", "b.tar", "c.tar"]


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Policy("all"), "SharedBatchSampler gives them"),
        (Policy("groups", groups=((0,),), bound=1), "with a bound has no pool"),
    ],
)
def test_workers_that_need_equally_many_batches_have_no_pool(policy: Policy, why: str) -> None:
    [store] = OneProcess("a").stores(policy)
    with pytest.raises(ValueError, match=why):
        PooledBatchSampler(10, store, batch_size=2)


def test_process_alone_and_empty_batches_have_no_pool() -> None:
    with pytest.raises(ValueError, match="needs a distributed store"):
        PooledBatchSampler(10, paceline.kvstore.create("local"), batch_size=2)
    [store] = OneProcess("a").stores(Policy("each"))
    with pytest.raises(ValueError, match="batch_size 0"):
        PooledBatchSampler(10, store, batch_size=0)


class Session:
    """A worker's session with a scheduler that has pools only, and a clock that stands still but for waits."""

    settings = SimpleNamespace(timeout_s=60.0)
    joining = SimpleNamespace(add=lambda name, part: None)
    stores = SimpleNamespace(go_away=lambda: None, come_back=lambda phase: None)
    round = 0

    def __init__(self, rank: int, pools: Pools) -> None:
        self.rank, self._pools, self.calls = rank, pools, list[Any]()
        self.free_at = float("inf")
        """Time at which the other worker leaves."""

    def ask_scheduler(self, body: m.Request, what: str) -> Any:
        call = SimpleNamespace(done=False, body=None, what=what)
        self.calls.append(call)
        handlers: dict[type, Any] = {m.TakeSamples: self._pools.take, m.AskSamples: self._pools.rest}
        handle = handlers.get(type(body), self._pools.wait)
        self._answer(handle(self.rank, Waiting(b"%d" % self.rank, len(self.calls)), body))
        return call

    def call_scheduler(self, body: m.Request, what: str, timeout_s: float | None = None) -> m.Body:
        body = self.ask_scheduler(body, what).body
        assert body is not None
        return body

    def wait(self, calls: list[Any], timeout_s: float) -> None:
        end = self._pools.now + timeout_s
        if not calls[0].done and self.free_at <= end:
            self._pools.now = max(self._pools.now, self.free_at)
            self._answer(self._pools.leave(0, 0))
        if not calls[0].done:
            self._pools.now = end
            raise DeadlineError(f"{calls[0].what} was not answered within {timeout_s:g} s")

    def _answer(self, actions: list[Any]) -> None:
        for one in actions:
            assert isinstance(one, Answer)
            self.calls[one.seq - 1].done, self.calls[one.seq - 1].body = True, one.body


def waiting_worker(is_pool_of_shards: bool) -> tuple[Walker, Session]:
    """Return the side of a worker that finds all samples held: worker 0 has had them for 30 s."""
    pools = Pools(2, MembershipLog())
    pools.take(0, Waiting(b"0", 1), m.TakeSamples("p", 3, 1, 0, 3, 0))
    pools.now = 30.0
    session = Session(1, pools)
    settings = {"length": 3, "seed": 0, "shuffle": False}
    return Walker(session, "p", settings, 0, by_push=not is_pool_of_shards), session  # type: ignore[arg-type]


def test_line_says_who_holds_which_shards_for_how_long(caplog: pytest.LogCaptureFixture) -> None:
    walker, session = waiting_worker(is_pool_of_shards=True)
    session.free_at = 4000.0
    with caplog.at_level(logging.WARNING):
        assert walker.take(walker.begin(), 1, SHARDS.__getitem__) == ((0, 1),)
    assert [one.getMessage() for one in caplog.records] == [
        "worker 1 has waited 10 s for samples of pool 'p': worker 0 has held a.tar, b.tar, c.tar for 40 s"
    ]


def test_short_wait_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    walker, session = waiting_worker(is_pool_of_shards=True)
    session.free_at = 35.0
    with caplog.at_level(logging.WARNING):
        assert walker.take(walker.begin(), 1, SHARDS.__getitem__) == ((0, 1),)
    assert not caplog.records


@pytest.mark.parametrize(("limit_s", "lines"), [(60, 1), (10, 0), (4, 0)])
def test_wait_that_is_too_long_ends_with_all_of_its_time_and_who_holds_the_samples(
    caplog: pytest.LogCaptureFixture, limit_s: float, lines: int
) -> None:
    walker, session = waiting_worker(is_pool_of_shards=False)
    session.settings = SimpleNamespace(timeout_s=float(limit_s))
    with caplog.at_level(logging.WARNING), pytest.raises(DeadlineError) as error:
        walker.take(walker.begin(), 1)
    assert str(error.value) == (
        f"worker 1 has waited {limit_s} s for samples of pool 'p': worker 0 has held 3 samples for {30 + limit_s} s; "
        "if a batch takes as long here, raise PACELINE_TIMEOUT_S"
    )
    assert len(caplog.records) == lines, "a line and an error at once would say the same twice"


def test_wait_for_shards_ends_after_a_day() -> None:
    walker, _ = waiting_worker(is_pool_of_shards=True)
    with pytest.raises(DeadlineError, match=r"has waited 86400 s for .*: worker 0 has held a.tar, b.tar, c.tar for 8"):
        walker.take(walker.begin(), 1, SHARDS.__getitem__)
