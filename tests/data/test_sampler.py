import json
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from paceline.data import ArrayDataset, ShardedSampler
from paceline.data.ledger import epoch_order

lengths = st.integers(1, 200)
parts = st.integers(1, 7)


@given(lengths, parts, st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_equal_parts_are_equally_long_and_cover_the_data_in_every_epoch(
    length: int, num_parts: int, seed: int, epoch: int, shuffle: bool
) -> None:
    samplers = [ShardedSampler(length, num_parts, part, seed=seed, shuffle=shuffle) for part in range(num_parts)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    handed_out = [list(sampler) for sampler in samplers]
    assert {len(part) for part in handed_out} == {len(samplers[0])}
    assert set().union(*handed_out) == set(range(length))


@given(lengths, parts, st.integers(0, 5))
def test_uneven_parts_hand_out_every_sample_exactly_once(length: int, num_parts: int, epoch: int) -> None:
    num_parts = min(length, num_parts)
    samplers = [ShardedSampler(length, num_parts, part, even=False) for part in range(num_parts)]
    together = np.concatenate([sampler.indices(epoch) for sampler in samplers])
    assert sorted(together) == list(range(length))


def test_shuffling_cuts_one_order_of_the_whole_data_set() -> None:
    order = epoch_order(10, seed=3, epoch=2)
    first, second = (ShardedSampler(10, 2, part, seed=3) for part in range(2))
    assert np.concatenate([first.indices(2), second.indices(2)]).tolist() == order.tolist()


def test_order_is_the_same_on_every_machine() -> None:
    assert epoch_order(8, seed=0, epoch=0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]


def test_seed_and_epoch_both_change_the_order() -> None:
    orders = {tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_without_shuffle_parts_are_contiguous() -> None:
    assert [list(ShardedSampler(9, 4, part, shuffle=False)) for part in range(4)] == [
        [0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8],
    ]  # fmt: skip


def test_each_iteration_is_the_next_epoch_even_when_one_is_abandoned() -> None:
    sampler = ShardedSampler(20)
    epochs = [list(sampler), list(islice(sampler, 3)), list(sampler)]
    assert epochs[0] == sampler.indices(0).tolist()
    assert epochs[1] == sampler.indices(1).tolist()[:3]
    assert epochs[2] == sampler.indices(2).tolist()
    assert sampler.epoch == 2


def test_set_epoch_chooses_the_next_epoch() -> None:
    sampler = ShardedSampler(20)
    sampler.set_epoch(5)
    assert list(sampler) == sampler.indices(5).tolist()
    sampler.set_epoch(5)
    assert list(sampler) == sampler.indices(5).tolist()


def test_spans_share_each_global_batch_in_proportion() -> None:
    spans = [(0.0, 0.3), (0.3, 0.35), (0.35, 1.0)]
    samplers = [ShardedSampler(1437, span=span, global_batch_size=64) for span in spans]
    assert [sampler.batch_size for sampler in samplers] == [19, 3, 42]
    assert {len(sampler) // (sampler.batch_size or 0) for sampler in samplers} == {23}
    assert set(np.concatenate([sampler.indices(0) for sampler in samplers])) == set(range(1437))


def test_global_batch_is_the_same_for_any_number_of_workers() -> None:
    alone = ShardedSampler(100, global_batch_size=10, seed=1).indices(0).reshape(-1, 10)
    shared = [ShardedSampler(100, 3, part, global_batch_size=10, seed=1) for part in range(3)]
    rows = [sampler.indices(0).reshape(10, -1) for sampler in shared]
    assert np.concatenate(rows, axis=1).tolist() == alone.tolist()


def test_uneven_spans_hand_out_exactly_their_fraction() -> None:
    slow, fast = (ShardedSampler(1000, span=span, even=False) for span in [(0.0, 0.3), (0.3, 1.0)])
    assert (len(slow), len(fast)) == (300, 700)
    assert not set(slow.indices(4)) & set(fast.indices(4))


@given(st.data())
def test_state_continues_with_exactly_the_remaining_samples(data: st.DataObject) -> None:
    length, num_parts = data.draw(st.integers(5, 60)), data.draw(st.integers(1, 4))
    sampler = ShardedSampler(length, num_parts, num_parts - 1, drop_last=True)
    taken = data.draw(st.integers(0, len(sampler)))
    sampler.set_epoch(data.draw(st.integers(0, 2)))
    iterator = iter(sampler)
    done = list(islice(iterator, taken))
    state = json.loads(json.dumps(sampler.state_dict()))
    fresh = ShardedSampler(length, num_parts, num_parts - 1, drop_last=True)
    fresh.load_state_dict(state)
    if taken == len(sampler):
        assert list(fresh) == sampler.indices(sampler.epoch + 1).tolist()
    else:
        assert done + list(fresh) == sampler.indices(sampler.epoch).tolist() if taken else list(fresh)
        assert list(fresh) == sampler.indices(fresh.epoch).tolist()


def test_loaded_position_survives_set_epoch_of_the_same_epoch_only() -> None:
    sampler = ShardedSampler(10)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "position": 4})
    sampler.set_epoch(3)
    assert list(sampler) == sampler.indices(3).tolist()[4:]
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "position": 4})
    sampler.set_epoch(4)
    assert list(sampler) == sampler.indices(4).tolist()


def test_loader_that_fetches_ahead_can_say_what_was_trained_on() -> None:
    sampler = ShardedSampler(10)
    list(islice(sampler, 8))
    assert sampler.state_dict(position=2)["position"] == 2
    with pytest.raises(ValueError, match="8 samples of epoch 0 were handed out"):
        sampler.state_dict(position=9)


@pytest.mark.parametrize(
    ("other", "name"), [(ShardedSampler(12, num_parts=3), "num_parts"), (ShardedSampler(12, 2, seed=1), "seed")]
)
def test_state_of_another_part_is_refused_in_mid_epoch_and_changes_nothing(other: ShardedSampler, name: str) -> None:
    sampler = ShardedSampler(12, num_parts=2)
    list(islice(sampler, 2))
    with pytest.raises(ValueError, match=f"middle of epoch 0 with .*{name}"):
        other.load_state_dict(sampler.state_dict())
    assert list(other) == other.indices(0).tolist()


def test_state_of_a_finished_epoch_fits_another_number_of_workers() -> None:
    sampler = ShardedSampler(12, num_parts=2)
    list(sampler)
    other = ShardedSampler(12, num_parts=3)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == other.indices(1).tolist()


@pytest.mark.parametrize("where", [{"epoch": -1}, {"position": 11}, {"position": -1}])
def test_impossible_state_is_refused(where: dict[str, int]) -> None:
    sampler = ShardedSampler(10)
    with pytest.raises(ValueError, match="this part has 10 samples"):
        sampler.load_state_dict(sampler.state_dict() | where)


def test_dropped_samples_count_as_handed_out() -> None:
    sampler = ShardedSampler(10)
    assert [len(batch) for batch in islice(sampler.index_batches(4, drop_last=True), 2)] == [4, 4]
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (1, 0)


def test_torch_loader_can_be_resumed_between_batches() -> None:
    dataset = ArrayDataset(torch.arange(20))
    sampler = ShardedSampler(dataset, num_parts=2, part_index=1)
    seen = [batch for (batch,) in islice(DataLoader(dataset, batch_size=4, sampler=sampler), 2)]
    fresh = ShardedSampler(dataset, num_parts=2, part_index=1)
    fresh.load_state_dict(sampler.state_dict())
    rest = [batch for (batch,) in DataLoader(dataset, batch_size=4, sampler=fresh)]
    assert torch.cat(seen + rest).tolist() == sampler.indices(0).tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": 0}, "part 0 of 1 of 0 samples is empty"),
        ({"data": 3, "num_parts": 4, "drop_last": True}, "part 0 of 4 of 3 samples is empty; use fewer workers"),
        ({"data": 10, "num_parts": 2, "part_index": 2}, "part_index is 2"),
        ({"data": 10, "seed": -1}, "seed is -1"),
        ({"data": 10, "span": (0.0, 0.3)}, "give global_batch_size"),
        ({"data": 10, "span": (0.0, 0.3), "num_parts": 2, "even": False}, "not both"),
        ({"data": 10, "span": (0.0, 0.3), "num_parts": 1, "even": False}, "not both"),
        ({"data": 10, "span": (0.3, 0.3), "even": False}, "0 <= begin < end <= 1"),
        ({"data": 10, "span": (0.0, 0.01), "global_batch_size": 4}, "is empty"),
        ({"data": 10, "global_batch_size": 4, "even": False}, "needs even=True"),
        ({"data": 10, "global_batch_size": 0}, "at least 1"),
    ],
)
def test_contradictory_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardedSampler(**arguments)  # type: ignore[arg-type]


JOB = {"PACELINE_SCHEDULER": "tcp://127.0.0.1:1", "PACELINE_INSECURE": "1", "PACELINE_NUM_WORKERS": "3"}


@pytest.mark.parametrize(
    ("env", "part"),
    [
        ({}, (1, 0)),
        (JOB | {"PACELINE_RANK": "2"}, (3, 2)),
        ({"PACELINE_RANK": "1", "PACELINE_NUM_WORKERS": "2"}, (2, 1)),  # -s 0 --no-torchrun-env
        ({"RANK": "1", "WORLD_SIZE": "4"}, (4, 1)),
    ],
)
def test_parts_are_those_of_the_job_unless_they_are_given(
    env: dict[str, str], part: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    workers, rank = part
    expected = list(ShardedSampler(12, workers, rank))
    assert list(ShardedSampler(12)) == list(ShardedSampler(12, part_index=rank)) == expected
    assert list(ShardedSampler(12, workers)) == expected
    assert len(ShardedSampler(12, 1)) == len(ShardedSampler(12, span=(0.0, 1.0), even=False)) == 12
    if workers > 1:
        with pytest.raises(ValueError, match=f"num_parts is 5, and the job has {workers} workers: give part_index"):
            ShardedSampler(12, num_parts=5)


def test_negative_epoch_and_empty_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="epochs count from 0"):
        ShardedSampler(3).set_epoch(-1)
    sampler = ShardedSampler(3)
    with pytest.raises(TypeError, match="float"):
        sampler.set_epoch(1.5)  # type: ignore[arg-type]
    assert sampler.epoch == 0
    with pytest.raises(ValueError, match="at least 1"):
        ShardedSampler(3).index_batches(0)


def test_numbers_of_numpy_are_plain_in_states() -> None:
    sampler = ShardedSampler(np.int64(10), num_parts=2)  # type: ignore[arg-type]
    sampler.set_epoch(np.int64(2))  # type: ignore[arg-type]
    assert json.loads(json.dumps(sampler.state_dict()))["epoch"] == 2


def test_state_of_another_kind_says_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="this is no state of such a sampler: it has no epoch, position, but seed"):
        ShardedSampler(3).load_state_dict({"seed": 1})
