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


def watched() -> tuple[torch.nn.Sequential, SampleCounter, ModelWatch]:
    net, samples = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)), SampleCounter(None, 0)
    return net, samples, ModelWatch(net, samples, None, Weights("this process"))


def test_copies_have_no_hooks_that_do_anything() -> None:
    net, samples, _watch = watched()
    twin = copy.deepcopy(net)
    twin(torch.ones(5, 3))
    assert samples.take(lambda: False).samples == 0


def test_saved_models_load_and_run() -> None:
    net, _, _watch = watched()
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(torch.ones(2, 3)), net(torch.ones(2, 3)))
    assert copy.deepcopy(loaded)[0].weight.shape == (3, 3)


def test_model_does_not_keep_what_watches_it() -> None:
    net, samples, watch = watched()
    del watch
    gc.collect()
    net(torch.ones(2, 3))
    assert samples.take(lambda: False).samples == 0


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
    watch = ModelWatch(net, samples, None, Weights("this process"))
    samples.touch()
    compiled(torch.ones(5, 3)).sum().backward()
    assert samples.take().rows == 5.0
    watch.close()


def test_scripting_a_watched_model_says_how_it_can_be_done() -> None:
    net, _, watch = watched()
    with pytest.raises(PacelineError, match=r"optimizer\.close\(\).*named_parameters"):
        torch.jit.script(net)
    watch.close()
    assert torch.equal(torch.jit.script(net)(torch.ones(2, 3)), net(torch.ones(2, 3)))


def test_scripted_model_is_refused_at_once() -> None:
    net = torch.jit.script(torch.nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"named_parameters=.*optimizer\.samples"):
        paceline.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), "local", model=net)
