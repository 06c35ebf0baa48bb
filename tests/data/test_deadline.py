"""Parts of a step until a deadline: which are begun, and what the gradients are then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import paceline
from paceline.consistency import Policy
from paceline.data import PooledBatchSampler, SharedBatchSampler
from paceline.testing.one_process import OneProcess


class Steps:
    """One worker with a clock of its own; each part takes what the test says."""

    def __init__(self, deadline_s: float | None, max_batch: int = 2, length: int = 20, batch: int = 10) -> None:
        self.now, self.x = 0.0, torch.randn(length, 3, generator=torch.Generator().manual_seed(0))
        self.weight = torch.nn.Parameter(torch.ones(3))
        inner = torch.optim.SGD([self.weight], lr=0.1)
        self.optimizer = paceline.DistributedOptimizer(inner, kvstore=paceline.kvstore.create("local"))
        self.sampler = SharedBatchSampler(
            length,
            paceline.kvstore.create("local"),
            global_batch_size=batch,
            max_batch=max_batch,
            deadline_s=deadline_s,
            shuffle=False,
        )
        self.sampler._now = lambda: self.now
        if self.sampler._deadline is not None:
            self.sampler._deadline._clock = lambda: self.now

    def run(self, seconds: list[float]) -> list[list[int]]:
        """Train for an epoch whose parts take these times, and then none; returns what each step did."""
        steps, times = [], iter(seconds)
        for indices in self.sampler:
            done = []
            self.optimizer.zero_grad()
            for (part,) in self.sampler.parts_in_time(self.optimizer, torch.tensor(indices)):
                self.now += next(times, 0.0)
                (self.x[part] @ self.weight).square().mean().backward()  # type: ignore[no-untyped-call]
                done += part.tolist()
            self.check_gradient(done)
            self.optimizer.step()
            steps.append(done)
        return steps

    def check_gradient(self, done: list[int]) -> None:
        assert self.optimizer.samples == len(done)
        weight, x = self.weight.detach(), self.x[done]
        expected = 2 * x.T @ (x @ weight) / len(done)
        torch.testing.assert_close(self.weight.grad, expected)


@pytest.mark.parametrize("max_batch", [1, 2, 3, 4, 7, 10])
def test_gradient_is_the_mean_over_what_was_done(max_batch: int) -> None:
    steps = Steps(1.0, max_batch).run([0.3, 0.3, 0.3, 0.3, 2.0])
    assert sorted(index for done in steps for index in done) == list(range(20))
    assert len(steps) > 2 or max_batch > 3


def test_rest_comes_at_the_end_of_the_epoch() -> None:
    # Two parts of a second each; the third would end too late. Afterwards a part takes no time.
    steps = Steps(2.5).run([1.0, 1.0])
    assert steps == [[0, 1, 2, 3], [10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [4, 5, 6, 7, 8, 9]]


def test_first_part_is_always_done_and_a_slow_one_is_finished() -> None:
    # The slow part makes the next ones look slow: each step does one part, until they are seen to be fast.
    steps = Steps(0.5, max_batch=5).run([9.0])
    assert steps[:2] == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]
    assert sorted(index for done in steps for index in done) == list(range(20))


def test_without_a_deadline_all_parts_are_done() -> None:
    assert Steps(None, max_batch=3).run([9.0]) == [list(range(10)), list(range(10, 20))]


def test_epoch_goes_on_with_what_is_left_for_later() -> None:
    steps = Steps(2.5, length=15)
    walk = iter(steps.sampler)
    for seconds in (0.0, 3.0):
        indices = next(walk)
        for _part in steps.sampler.parts_in_time(steps.optimizer, torch.tensor(indices)):
            steps.now += seconds
    state = steps.sampler.state_dict()
    assert (state["batch"], state["first"], state["again"]) == (2, 15, [12, 13, 14])
    after = Steps(2.5, length=15)
    after.sampler.load_state_dict(state)
    assert after.run([]) == [[12, 13, 14]]
    assert after.sampler.state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"deadline_s": 0.0, "max_batch": 1}, "deadline_s is 0.0"),
        ({"deadline_s": 1.0}, "deadline_s needs max_batch"),
        ({"deadline_s": 1.0, "max_batch": 1, "prefetch": 2}, "num_workers=0"),
    ],
)
def test_senseless_deadlines_are_refused(options: dict[str, Any], why: str) -> None:
    [store] = OneProcess("a").stores()
    with pytest.raises(ValueError, match=why):
        SharedBatchSampler(10, store, global_batch_size=5, **options)


def test_deadline_needs_lock_step_or_a_pool() -> None:
    [store] = OneProcess("a").stores(Policy("each"))
    with pytest.raises(ValueError, match=r"deadline_s needs dist_sync.*Take a pool"):
        SharedBatchSampler(10, store, global_batch_size=5, max_batch=1, deadline_s=1.0)
    with pytest.raises(ValueError, match="deadline_s needs max_batch"):
        PooledBatchSampler(10, store, batch_size=5, deadline_s=1.0)
