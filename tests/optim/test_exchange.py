"""Exchanges: when pushes leave, what they carry, and a second kind that pushes the way of some local steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial

import pytest
import torch

from paceline.errors import PacelineError
from paceline.kvstore.dist import DistStore
from paceline.net.call import Call
from paceline.optim.binding import Bound
from paceline.optim.buffers import Buffers
from paceline.optim.exchange import ServerExchange
from paceline.optim.names import NamedParameter, name_parameters
from paceline.testing.one_process import OneProcess
from paceline.updaters import make_spec
from paceline.wire import messages as m
from paceline.worker.traffic import Carried

WIDTH = 8


def net_of(rank: int) -> torch.nn.Sequential:
    """Return a net of two layers, which lie in two buckets; every rank has other weights."""
    torch.manual_seed(rank)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, 1))


class Worker:
    """One worker's net, and its exchange."""

    def __init__(self, store: DistStore, kind: type[ServerExchange] = ServerExchange) -> None:
        self.store, self.net = store, net_of(store.rank)
        self.params = list(self.net.parameters())
        self.inner = torch.optim.SGD(self.params, lr=0.5)
        self.exchange = kind(store, self.inner, self.net, "server", "Do not.")

    def start(self) -> None:
        named = name_parameters(self.inner.param_groups, self.net.named_parameters())
        self.buffers = Buffers(self.store, [[self.net]], self.params)
        self.exchange.add(named)

    def backward(self, value: float = 1.0) -> None:
        chance = torch.Generator().manual_seed(int(100 * value) + self.store.rank)
        for param in self.params:
            param.grad = torch.randn(param.shape, generator=chance)


def workers_of(job: OneProcess, kind: type[ServerExchange] = ServerExchange) -> list[Worker]:
    workers = [Worker(store, kind) for store in job.stores(mean=True)]
    for one in workers:
        one.store.set_spec(make_spec("sgd", lr=0.5))
    for one in workers:
        one.start()
    return workers


class WaitsError(Exception):
    """Somebody waits for a server."""


@pytest.mark.parametrize("seed", range(8))
def test_no_hook_waits_and_a_round_is_answered_after_its_buffers_are_there(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = OneProcess("ab", "ab", seed=seed, bigarray_bound=WIDTH)
    first, other = workers_of(job)
    job.deliver_all()
    before = len(job.requests)

    def wait(calls: Iterable[Call], timeout_s: float | None = None) -> None:
        if list(calls):
            raise WaitsError

    with torch.no_grad():
        first.net[1].running_mean.add_(1.0)  # type: ignore[union-attr,operator]
    with monkeypatch.context() as patch:
        patch.setattr(type(first.store.session), "wait", lambda self, calls, timeout_s=None: wait(calls))
        pushes = []
        for one in (first, other):
            one.backward()
            pushes.append(Carried(after=one.buffers.publish()))
            for param in reversed(one.params):
                if one.exchange.fill(param):
                    one.exchange.push(pushes[-1])
    assert pushes[0].after is not None
    assert pushes[1].after is None, "only rank 0 sends buffers"
    other.exchange.push_rest(pushes[1])
    with pytest.raises(PacelineError, match="waits for ever: push"):
        other.exchange.settle()  # one push of rank 0 is missing
    sent = [type(body) for peer, _, body in job.requests[before:] if peer == "worker 0"]
    assert m.SetValues in sent
    first.exchange.push_rest(pushes[0])
    first.exchange.settle()
    other.buffers.settled()
    other.buffers.take()
    assert torch.equal(other.net[1].running_mean, first.net[1].running_mean)  # type: ignore[arg-type]


def test_gradient_after_its_push_is_refused_with_the_advice() -> None:
    [one] = workers_of(OneProcess("a"))
    one.backward()
    for param in one.params:
        one.exchange.fill(param)
    one.exchange.push(Carried())
    with pytest.raises(PacelineError, match=r"'2.bias' got another gradient after its push. Do not."):
        one.exchange.fill(one.params[-1])


def test_what_a_push_carries_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Carried().samples = 2.0  # type: ignore[misc]


class DeltaExchange(ServerExchange):
    """Pushes the way of the local steps since the last round: the value last read, less the weight now."""

    def add(self, named: Sequence[NamedParameter]) -> None:
        super().add(named)
        for one in self.bound.values():
            one.put_grad = partial(self._put_delta, one)  # type: ignore[method-assign]

    @staticmethod
    def _put_delta(one: Bound, side: object) -> None:
        torch.sub(one.value, one.param.data, out=one.grad)

    def _check_unchanged(self, one: Bound) -> None:
        """Local steps change the weights."""


def test_one_local_step_of_sgd_with_an_outer_rate_of_1_is_a_step_in_lock_step() -> None:
    deltas = workers_of(OneProcess("aa", "ab"), DeltaExchange)
    plain = workers_of(OneProcess("aa", "ab"))
    for one in deltas:
        one.store.set_options([{"lr": 1.0}])
    for round in (1.0, 2.0, 3.0):
        for one in (*deltas, *plain):
            one.backward(round)
        for one in deltas:
            one.inner.step()
        for one in (*deltas, *plain):
            one.exchange.push_rest(one.store.carried())
        for one in (*deltas, *plain):
            one.exchange.settle()
            one.exchange.take()
    start = net_of(0).parameters()
    for one in deltas:
        for delta, gradient, first in zip(one.params, plain[0].params, start, strict=False):
            torch.testing.assert_close(delta, gradient)
            assert not torch.equal(delta, first)
