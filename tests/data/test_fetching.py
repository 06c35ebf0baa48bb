"""Which batch a loop has, as a sampler has dealt it, however a DataLoader fetches it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

from paceline import kvstore
from paceline.data import ShardedSampler, SharedBatchSampler, batches, dealt, fetching

DATA = TensorDataset(torch.arange(26.0))


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Let ``gc.collect()`` look at what these tests make, and not at hundreds of thousands of objects of libraries."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_dealt() -> Iterator[None]:
    yield
    gc.collect()
    dealt._open.clear()
    dealt._left.clear()


def singles() -> ShardedSampler:
    return ShardedSampler(DATA, 2, 1, even=False)


def shares() -> SharedBatchSampler:
    return SharedBatchSampler(DATA, kvstore.create("local"), global_batch_size=8)


def sizes(loader: Iterable[Any]) -> list[tuple[int, int | None]]:
    """Return for each batch how many samples it has, and how many were dealt."""
    found = []
    for (x,) in loader:
        batch = dealt.newest(0, None)
        found.append((len(x), None if batch is None else batch.samples))
    return found


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "singles": lambda: DataLoader(DATA, batch_size=4, sampler=singles()),
    "singles, last one dropped": lambda: DataLoader(DATA, batch_size=4, sampler=singles(), drop_last=True),
    "singles, by workers": lambda: DataLoader(DATA, batch_size=4, sampler=singles(), num_workers=2),
    "singles, by a batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(singles(), 4, False)),
    "shares": lambda: DataLoader(DATA, batch_sampler=shares()),
    "shares, by workers": lambda: DataLoader(DATA, batch_sampler=shares(), num_workers=1, prefetch_factor=3),
    "from memory": lambda: batches(DATA, singles(), 4),
    "shares, without a loader": lambda: ((DATA.tensors[0][one],) for one in shares()),
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_loop_has_as_many_samples_as_were_dealt_for_its_batch(name: str) -> None:
    loader = LOADERS[name]()
    found = sizes(loader)
    assert len(found) >= 3
    assert all(real == number for real, number in found)
    assert dealt.newest(0, None) is None


def test_a_loader_that_keeps_its_workers_deals_each_epoch_anew() -> None:
    loader = DataLoader(DATA, batch_size=4, sampler=singles(), num_workers=1, persistent_workers=True)
    first = iter(loader)
    assert len(next(first)[0]) == 4
    for _ in range(2):
        assert sizes(loader) == [(4, 4), (4, 4), (4, 4), (1, 1)]


class Every(Sampler[list[int]]):
    """Deals every second index: what it leaves out is nobody's batch."""

    def __init__(self, sampler: ShardedSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        for number, index in enumerate(self._sampler):
            if number % 2:
                yield [index]


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(DATA, batch_sampler=Every(singles())),
        lambda: DataLoader(DATA, batch_size=None, sampler=singles()),
        lambda: DataLoader(DATA, batch_size=4, sampler=singles(), num_workers=1, in_order=False),
        lambda: ((DATA.tensors[0][[one]],) for one in singles()),
    ],
)
def test_nothing_is_said_of_batches_that_others_make_of_the_indices(loader: Callable[[], Iterable[Any]]) -> None:
    for _ in loader():
        assert dealt.newest(0, None) is None


def test_a_batch_that_a_loop_has_kept_is_still_known() -> None:
    (x,) = next(iter(DataLoader(DATA, batch_size=4, sampler=singles())))
    batch = dealt.newest(0, None)
    assert batch is not None
    assert batch.samples == len(x) == 4
    assert dealt.newest(dealt.count(), batch) is batch


def test_an_iterator_is_freed_when_its_loop_ends_early() -> None:
    iterator = iter(DataLoader(DATA, batch_size=4, sampler=singles()))
    next(iterator)
    gc.disable()
    try:
        walks = len(dealt._open)
        del iterator
        assert len(dealt._open) == walks - 1
    finally:
        gc.enable()


def test_a_batch_that_fails_is_not_that_of_the_next() -> None:
    class Failing(torch.utils.data.Dataset[tuple[torch.Tensor]]):
        def __len__(self) -> int:
            return 26

        def __getitem__(self, index: int) -> tuple[torch.Tensor]:
            if index in bad:
                raise OSError("broken file")
            return (torch.zeros(1),)

    sampler = ShardedSampler(DATA, 2, 1, even=False, shuffle=False)
    bad = {int(sampler.indices(0)[5])}
    iterator, found = iter(DataLoader(Failing(), batch_size=4, sampler=sampler)), []
    while True:
        try:
            (x,) = next(iterator)
        except OSError:
            continue
        except StopIteration:
            break
        batch = dealt.newest(0, None)
        found.append((len(x), batch and batch.samples))
    assert found == [(4, 4), (4, 4), (1, 1)]


def test_sampler_at_the_address_of_one_that_is_gone_is_not_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "id", lambda one: 7, raising=False)  # as the memory of the first one used again
    walks = [fetching.Dealing(BatchSampler(range(8), 2, drop_last=False)) for _ in range(3)]
    with walks[1], walks[2]:
        walks[0].deal(3)
        last = dealt.newest(0, None)
        assert last is not None
        walks[0].__exit__(GeneratorExit, None, None)
        walks[1].deal(4)
        walks[2].deal(30)
        assert dealt.newest(last.number, last) is None


def train(loader: Iterable[Any], stop: int | None = None) -> list[int]:
    found: list[int] = []
    for number, (x,) in enumerate(loader, start=1):
        dealt.note_use()
        found += x.int().tolist()
        if number == stop:
            break
    return found


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealt, "_uses", dealt._Uses(are_noted=True))


KNOWN = ["singles", "singles, by workers", "shares", "shares, by workers", "from memory"]


def sampler_of(loader: Any) -> Any:
    batch_sampler = getattr(loader, "batch_sampler", None)
    return batch_sampler if isinstance(batch_sampler, SharedBatchSampler) else loader.sampler


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_state_counts_the_batches_that_the_loop_has_got_and_not_those_fetched_ahead(name: str, stop: int) -> None:
    loader, other = LOADERS[name](), LOADERS[name]()
    whole = train(LOADERS[name]())
    seen = []
    for number, (x,) in enumerate(loader, start=1):
        seen += x.int().tolist()
        if number == stop:
            state = sampler_of(loader).state_dict()
            break
    assert sampler_of(loader).state_dict() == state
    sampler_of(other).load_state_dict(state)
    assert seen + train(other) == whole


@pytest.mark.usefixtures("uses")
@pytest.mark.parametrize("name", KNOWN)
def test_an_iteration_that_is_left_before_a_backward_pass_comes_again(name: str) -> None:
    loader, other = LOADERS[name](), LOADERS[name]()
    sampler = sampler_of(loader)
    before = sampler.state_dict()
    next(iter(loader))
    assert sampler.state_dict() == before
    next(iter(loader))
    sampler.set_epoch(0)
    expected = [train(other) for _ in range(3)]
    assert train(loader) == expected[0]
    first = train(loader, stop=1)
    assert first == expected[1][: len(first)]
    assert train(loader) == expected[2]


@pytest.mark.usefixtures("uses")
@pytest.mark.parametrize("name", KNOWN)
def test_a_look_at_the_rest_of_an_epoch_leaves_the_rest(name: str) -> None:
    loader, resumed = LOADERS[name](), LOADERS[name]()
    begun = train(loader, stop=2)
    sampler_of(resumed).load_state_dict(sampler_of(loader).state_dict())
    next(iter(resumed))
    sampler_of(resumed).set_epoch(0)
    assert begun + train(resumed) == train(LOADERS[name]())


def test_where_nobody_notes_uses_each_iteration_is_the_next_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealt, "_uses", dealt._Uses())
    loader = LOADERS["singles"]()
    next(iter(loader))
    assert train(loader) == singles().indices(1).tolist()
