"""Faults on demand do what they say, and a job bears them without a change of a bit."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch

from paceline import DistributedOptimizer
from paceline.net.sockets import SocketHub
from paceline.testing import Faults, LocalJob, faulty, tell
from paceline.testing.faults import Chance, DelayedMessages

COUNT, PEERS = 2000, 4


def handed_over(faults: Faults, may_lose: bool = True) -> tuple[list[tuple[int, int]], list[float]]:
    """Return (peer, number) of messages that come every millisecond, and how late each is, as they are handed over."""
    held: DelayedMessages[int] = DelayedMessages(Chance(faults, "server 0", lambda seconds: None))
    taken, late = [], []
    for tick in range(COUNT + 1000):
        now = tick / 1000
        held.add([(tick % PEERS, [tick])] if tick < COUNT else [], now, lambda peer: may_lose)
        for peer, (number,) in held.take(now):
            taken.append((peer, number))
            late.append(now - number / 1000)
    assert held.wait_s(99.0, 1.0) == 1.0, "something is still held"
    return taken, late


def test_messages_of_one_peer_stay_in_order_and_others_overtake_them() -> None:
    taken, late = handed_over(Faults(delay_s=0.02, repeat=0.0, lose=0.0))
    assert sorted(number for _, number in taken) == list(range(COUNT))
    assert [number for _, number in taken] != sorted(number for _, number in taken)
    for peer in range(PEERS):
        mine = [number for one, number in taken if one == peer]
        assert mine == sorted(mine)
    assert 0.015 < max(late) < 0.0215


def test_messages_get_lost_and_come_twice_as_often_as_was_said() -> None:
    taken, _ = handed_over(Faults(delay_s=0.01, repeat=0.1, lose=0.05))
    counts = Counter(number for _, number in taken)
    assert 0.03 * COUNT < COUNT - len(counts) < 0.07 * COUNT
    assert 0.07 * COUNT < sum(number == 2 for number in counts.values()) < 0.13 * COUNT


def test_nothing_is_lost_where_that_is_forbidden() -> None:
    taken, _ = handed_over(Faults(repeat=0.0, lose=0.5), may_lose=False)
    assert len(taken) == COUNT


def test_the_same_seed_makes_the_same_faults_and_another_one_others() -> None:
    assert handed_over(Faults(seed=3)) == handed_over(Faults(seed=3))
    assert handed_over(Faults(seed=3)) != handed_over(Faults(seed=4))


# ---- in a job ------------------------------------------------------------------------------------------------------


def train(steps: int) -> str:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5))
    optimizer = DistributedOptimizer(torch.optim.Adam(net.parameters()), "dist_sync", model=net)
    tell(faulty.current.SocketHub is not SocketHub)
    for step in range(steps):
        generator = torch.Generator().manual_seed(2 * step + optimizer.kvstore.rank)
        optimizer.zero_grad()
        net(torch.randn(8, 20, generator=generator)).square().mean().backward()
        optimizer.step()
    weights = torch.cat([param.detach().reshape(-1) for param in net.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def results(faults: Faults | None) -> set[str]:
    with LocalJob(2, 2, faults=faults, shared_memory=False) as job:
        workers = job.start_all(train, 20)
        assert [worker.heard() for worker in workers] == [faults is not None] * 2
        return {worker.result() for worker in workers}


def test_a_job_under_faults_computes_the_same_bits() -> None:
    plain = results(None)
    assert len(plain) == 1
    assert results(Faults(seed=7, lose=0.05, repeat=0.2)) == plain
