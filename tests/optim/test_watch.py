"""Models that a DistributedOptimizer watches stay ordinary models."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch

import paceline
from paceline.errors import PacelineError
from paceline.kvstore.weights import Weights
from paceline.optim.samples import SampleCounter
from paceline.optim.watch import ModelWatch


class Waits:
    """Counts how often it was asked to wait."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def watched(lazy: bool = False) -> tuple[torch.nn.Sequential, Waits, SampleCounter, ModelWatch]:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    waits, samples = Waits(), SampleCounter(None, 0)
    return net, waits, samples, ModelWatch(net, samples, None, waits, lazy, Weights("this process"))


def test_copies_have_no_hooks_that_do_anything() -> None:
    net, waits, samples, _watch = watched()
    twin = copy.deepcopy(net)
    before = waits.count
    twin(torch.ones(5, 3))
    assert waits.count == before
    assert samples.take(lambda: False).samples == 0


def test_saved_models_load_and_run() -> None:
    net, _, _, _watch = watched()
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(torch.ones(2, 3)), net(torch.ones(2, 3)))
    assert copy.deepcopy(loaded)[0].weight.shape == (3, 3)


def test_model_does_not_keep_what_watches_it() -> None:
    net, waits, _, watch = watched()
    del watch
    gc.collect()
    net(torch.ones(2, 3))
    assert waits.count == 0


def test_every_way_to_read_a_lazy_models_weights_waits_for_them() -> None:
    net, waits, _, _watch = watched(lazy=True)
    reads = (
        lambda: net[0](torch.ones(1, 3)),
        lambda: net(torch.ones(1, 3)),
        net.state_dict,
        net[1].state_dict,
        lambda: copy.deepcopy(net),
        lambda: copy.deepcopy(net[0]),
        lambda: torch.save(net, io.BytesIO()),
    )
    for read in reads:
        before = waits.count
        read()
        assert waits.count > before


def test_weights_are_copied_after_the_wait() -> None:
    net = torch.nn.Linear(2, 1)

    def arrive() -> None:
        with torch.no_grad():
            net.weight.fill_(7.0)

    watch = ModelWatch(net, SampleCounter(None, 0), None, arrive, lazy=True, weights=Weights("this process"))
    assert (copy.deepcopy(net).weight == 7.0).all()
    assert watch is not None


def test_copied_and_saved_optimizers_are_the_wrapped_ones_with_their_state() -> None:
    net = torch.nn.Linear(3, 1)
    optimizer = paceline.DistributedOptimizer(torch.optim.Adam(net.parameters()), "local", model=net)
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    for one in (twin, torch.load(buffer, weights_only=False)):
        assert type(one) is torch.optim.Adam
        assert [int(state["step"]) for state in one.state.values()] == [1, 1]


def test_model_that_was_compiled_and_has_run_is_watched() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    compiled = torch.compile(net, backend="eager")
    compiled(torch.ones(5, 3))  # as many as later: another shape is compiled anew
    samples = SampleCounter(None, 0)
    watch = ModelWatch(net, samples, None, Waits(), False, Weights("this process"))
    samples.touch()
    compiled(torch.ones(5, 3)).sum().backward()
    assert samples.take().rows == 5.0
    watch.close()


def test_scripting_a_watched_model_says_how_it_can_be_done() -> None:
    net, _, _, watch = watched()
    with pytest.raises(PacelineError, match=r"optimizer\.close\(\).*named_parameters"):
        torch.jit.script(net)
    watch.close()
    assert torch.equal(torch.jit.script(net)(torch.ones(2, 3)), net(torch.ones(2, 3)))


def test_scripted_model_is_refused_at_once() -> None:
    net = torch.jit.script(torch.nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"named_parameters=.*optimizer\.samples"):
        paceline.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), "local", model=net)
