"""Shares of every global batch: together the workers train on each sample once per epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import paceline
from paceline.consistency import Policy
from paceline.data import SharedBatchSampler
from paceline.errors import ConfigError
from paceline.testing.one_process import OneProcess


def samplers(workers: int, length: int, batch: int, **options: Any) -> list[SharedBatchSampler]:
    stores = OneProcess("a" * workers).stores()
    return [SharedBatchSampler(length, store, global_batch_size=batch, **options) for store in stores]


@pytest.mark.parametrize("shares", ["equal", [1, 2, 4]])
@pytest.mark.parametrize("length", [96, 100, 33])
def test_every_sample_is_trained_on_once_per_epoch(shares: Any, length: int) -> None:
    team = samplers(3, length, 16, shares=shares)
    for epoch in range(2):
        batches = [list(one) for one in team]
        assert {len(one) for one in batches} == {len(team[0])}
        seen = [index for one in batches for batch in one for index in batch]
        repeated = 2 if length == 33 else 0  # one sample is left, for three workers
        assert set(seen) == set(range(length))
        assert len(seen) == length + repeated
        assert team[0].epoch == epoch


def test_worker_0_says_once_that_batches_of_lock_step_go_by_speed(caplog: pytest.LogCaptureFixture) -> None:
    for policy in (Policy("all"), Policy("groups", groups=((0,), (1,)), bound=1)):
        for store in OneProcess("aa").stores(policy):
            paceline.data.batch_sampler(100, store, batch_size=8)
    [line] = caplog.messages
    assert line.startswith(
        "worker 0: paceline.data.batch_sampler deals each 16 samples by measured speed, as dist_sync"
    )
    assert "will differ from 8" in line


def test_shares_are_as_asked() -> None:
    fast, slow = samplers(2, 100, 10, shares=[4, 1])
    assert [len(batch) for batch in fast] == [8] * 10
    assert [len(batch) for batch in slow] == [2] * 10
    assert fast.shares == {0: 8, 1: 2}


def test_spans_of_a_file_are_fractions(tmp_path: Path) -> None:
    path = tmp_path / "data_sharding"
    path.write_text("0 0.2\n0.2 1\n")
    assert samplers(2, 100, 10, shares=path)[0].shares == {0: 2, 1: 8}
    with pytest.raises(ConfigError, match="it needs 3"):
        samplers(3, 100, 10, shares=str(path))


def test_order_is_new_in_every_epoch_and_the_same_for_a_seed() -> None:
    (one,), (other,) = samplers(1, 50, 10, seed=3), samplers(1, 50, 10, seed=3)
    first, second = list(one), list(one)
    assert first != second
    other.set_epoch(1)
    assert list(other) == second
    (plain,) = samplers(1, 20, 10, shuffle=False)
    assert list(plain) == [list(range(10)), list(range(10, 20))]


def test_last_smaller_batch_can_be_left_out() -> None:
    team = samplers(2, 25, 10, drop_last=True)
    assert [len(list(one)) for one in team] == [2, 2]


@pytest.mark.parametrize("workers_after", [2, 3])
def test_epoch_goes_on_where_it_was_stopped_with_any_number_of_workers(workers_after: int) -> None:
    before = samplers(2, 60, 12)
    walks = [iter(one) for one in before]
    seen = [index for _ in range(2) for walk in walks for index in next(walk)]
    state = json.loads(json.dumps(before[0].state_dict()))
    after = samplers(workers_after, 60, 12)
    for one in after:
        one.load_state_dict(state)
        one.set_epoch(0)
    seen += [index for one in after for batch in one for index in batch]
    assert sorted(seen) == list(range(60))
    assert after[0].state_dict()["epoch"] == 1


def test_batches_fetched_ahead_are_not_skipped() -> None:
    (sampler,) = samplers(1, 40, 10, prefetch=2)
    walk = iter(sampler)
    for _ in range(3):
        next(walk)
    assert sampler.state_dict()["batch"] == 1


def test_state_of_other_data_is_refused() -> None:
    (sampler,) = samplers(1, 40, 10)
    next(iter(sampler))
    state = sampler.state_dict()
    (other,) = samplers(1, 50, 10)
    with pytest.raises(ValueError, match=r"in the middle of epoch 0 with \{'length': 40\}"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="batch 9; an epoch has 4"):
        sampler.load_state_dict(state | {"batch": 9})


def test_loader_of_torch_takes_it() -> None:
    data = paceline.data.ArrayDataset(torch.arange(20.0))
    sampler = SharedBatchSampler(data, paceline.kvstore.create("local"), global_batch_size=8, shares="measured")
    sizes = [len(batch[0]) for batch in DataLoader(data, batch_sampler=sampler)]
    assert sizes == [8, 8, 4]
    assert sampler.speeds[0].seconds(8) > 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"max_batch": 0}, "max_batch 0"),
        ({"shares": [1, float("nan")]}, "cannot divide anything"),
        ({"shares": [1, 2, 3]}, "not one per worker; the job has 2"),
        ({"length": 1}, "1 samples are not enough"),
        ({"batch": 1}, "too small for 2 workers"),
        ({"length": 9, "batch": 10, "drop_last": True}, "9 samples are not enough"),
    ],
)
def test_senseless_arguments_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        samplers(2, **({"length": 100, "batch": 10} | options))
    with pytest.raises(ValueError, match="epochs count from 0"):
        samplers(1, 10, 5)[0].set_epoch(-1)


def test_shares_that_are_neither_known_nor_a_file_are_named() -> None:
    with pytest.raises(ConfigError, match="shares='mesured' is neither 'equal' nor 'measured', nor is there such"):
        samplers(2, 100, 10, shares="mesured")


def test_measured_shares_need_lock_step() -> None:
    [store] = OneProcess("a").stores(Policy("each"))
    with pytest.raises(ValueError, match="needs dist_sync"):
        SharedBatchSampler(10, store, global_batch_size=5, shares="measured")
    assert SharedBatchSampler(10, store, global_batch_size=5).shares == {0: 5}


def test_share_that_is_too_large_for_memory_is_cut_into_even_parts() -> None:
    (sampler,) = samplers(1, 40, 10, max_batch=4)
    x, y = torch.arange(20.0).reshape(10, 2), torch.arange(10)
    parts = sampler.parts(x, y)
    assert [weight for weight, _ in parts] == pytest.approx([0.4, 0.3, 0.3])
    assert torch.equal(torch.cat([one for _, (one, _) in parts]), x)
    assert torch.equal(torch.cat([one for _, (_, one) in parts]), y)
    (whole,) = samplers(1, 40, 10)
    assert [weight for weight, _ in whole.parts(x)] == [1.0]
