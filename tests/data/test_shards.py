"""Shard files that are dealt to workers: in parts, in processes of a loader, and to webdataset."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tarfile
from collections.abc import Iterator
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from paceline.data import Shards, shards
from paceline.observe.account import Steps
from paceline.testing.one_process import OneProcess
from paceline.worker.round_times import RoundTimes

URLS = [f"train-{number:03}.tar" for number in range(11)]


def parts(count: int, **options: Any) -> list[Shards]:
    return [shards(URLS, num_parts=count, part_index=index, **options) for index in range(count)]


@pytest.mark.parametrize("shares", ["equal", [1, 2, 5]])
def test_every_shard_is_dealt_once_per_epoch(shares: Any) -> None:
    team = parts(3, shares=shares)
    epochs = [[list(one) for one in team] for _ in range(3)]
    for dealt in epochs:
        assert sorted(url for one in dealt for url in one) == URLS
        assert [len(one) for one in dealt] == ([4, 4, 3] if shares == "equal" else [1, 3, 7])
    assert epochs[0] != epochs[1]
    assert [one.epoch for one in team] == [2, 2, 2]


def test_order_is_kept_without_shuffle_and_parts_default_to_the_workers_of_the_store() -> None:
    team = [shards(URLS, store, shuffle=False) for store in OneProcess("aa").stores()]
    assert [url for one in team for url in one] == URLS


def test_fractions_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "spans").write_text("0 0.2\n0.2 1\n")
    assert [len(list(one)) for one in parts(2, shares=tmp_path / "spans")] == [2, 9]


def test_a_paths_list_yields_strings(tmp_path: Path) -> None:
    assert list(shards([tmp_path / "a"])) == [str(tmp_path / "a")]


@pytest.mark.parametrize(
    ("arguments", "error", "why"),
    [
        ({"urls": "a.tar"}, TypeError, r"give a list, such as sorted\(glob\.glob\('a\.tar'\)\)"),
        ({"urls": []}, ValueError, "0 shards"),
        ({"seed": -1}, ValueError, "seed -1"),
        ({"num_parts": 12, "part_index": 0}, ValueError, "11 shards are not enough for 12 parts"),
        ({"num_parts": 2, "part_index": 2}, ValueError, "part_index is 2"),
        ({"num_parts": 2, "part_index": 0, "shares": [1, 0]}, ValueError, "each fraction is above 0"),
        ({"num_parts": 2, "part_index": 0, "shares": "measured"}, ValueError, "it has no other parts"),
        ({"shares": "pool"}, ValueError, "a pool needs the job's store"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        shards(**{"urls": URLS} | arguments)


# ---- measured speeds -------------------------------------------------------------------------------------------------


def test_measured_shares_follow_the_speeds_before_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers 0 and 1 compute 16 samples in 1 s and in 3 s; then worker 1 leaves."""
    stores = OneProcess("aa").stores()
    said = [[0.0, 16.0], [16.0, 16 / 3], [16.0, None]]
    team = [shards(URLS, store, shares="measured") for store in stores]
    sizes = []
    for epoch, rates in enumerate(said, start=1):
        packed = [b"" if rate is None else struct.pack("<d", rate) for rate in rates]
        dealt = []
        for store, one, rate in zip(stores, team, rates, strict=True):
            if rate is not None:
                monkeypatch.setattr(store.session, "pace", RoundTimes(), raising=False)
                monkeypatch.setattr(store.session, "gather", lambda name, payload, packed=packed: packed)
                one.set_epoch(epoch)
                dealt.append(list(one))
        assert sorted(url for one in dealt for url in one) == URLS
        sizes.append([len(one) for one in dealt])
    assert sizes == [[6, 5], [8, 3], [11]]


def test_measured_shares_go_on_in_mid_epoch_with_the_part_of_then(monkeypatch: pytest.MonkeyPatch) -> None:
    store = OneProcess("aa").stores()[0]
    before, after = (shards(URLS, store, shares="measured") for _ in range(2))
    monkeypatch.setattr(store.session, "pace", RoundTimes(), raising=False)
    monkeypatch.setattr(store.session, "gather", lambda name, payload: [struct.pack("<d", one) for one in (3, 1)])
    before.set_epoch(2)
    seen = list(islice(before, 3))
    after.load_state_dict(before.state_dict())
    after.set_epoch(2)
    rest = list(after)
    assert len({*seen, *rest}) == 8
    assert seen[2] == rest[0]


def test_speed_is_samples_per_second_of_the_last_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    (store,) = OneProcess("a").stores()
    pace = RoundTimes()
    for number in range(1, 9):
        pace.add(Steps(number, 1, 32.0, [2.0] + [0.0] * 9))
    monkeypatch.setattr(store.session, "pace", pace, raising=False)
    heard = []
    monkeypatch.setattr(store.session, "gather", lambda name, payload: heard.append(payload) or [payload])
    shards(URLS, store, shares="measured").set_epoch(1)
    assert struct.unpack("<d", heard[0]) == (pytest.approx(16.0),)


# ---- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", ["equal", [1, 3]])
def test_an_epoch_goes_on_with_the_shard_that_was_under_way(shares: Any) -> None:
    whole = [list(one) for one in parts(2, shares=shares)]
    for before, after, expected in zip(parts(2, shares=shares), parts(2, shares=shares), whole, strict=True):
        seen = list(islice(iter(before), 2))
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        after.set_epoch(0)
        assert seen[:1] + list(after) == expected
        assert after.state_dict()["epoch"] == 1


def test_a_shard_that_is_done_does_not_come_again() -> None:
    (before,), (after,) = parts(1), parts(1)
    (seen,) = islice(iter(before), 1)
    before.done()
    after.load_state_dict(before.state_dict())
    assert sorted([seen, *after]) == URLS


def test_a_state_of_another_kind_is_refused() -> None:
    ((dealt,),) = [parts(1)]
    with pytest.raises(ValueError, match="no state of such a sampler: it has no position"):
        dealt.load_state_dict({"epoch": 0, "left": [[0, 11]], "length": 11, "seed": 0, "shuffle": True})
    with pytest.raises(TypeError):
        dealt.set_epoch(1.5)  # type: ignore[arg-type]
    assert sorted(dealt) == URLS


def test_a_state_of_another_part_is_refused_in_mid_epoch() -> None:
    first, second = parts(2)
    next(walk := iter(first))
    next(walk)
    with pytest.raises(ValueError, match=r"in the middle of epoch 0 for part \[0, 2\] .*this one is \[1, 2\]"):
        second.load_state_dict(first.state_dict())
    assert len(list(second)) == 5


# ---- loaders ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Eleven archives of three samples each, 0 to 32."""
    folder = tmp_path_factory.mktemp("archives")
    for number, name in enumerate(URLS):
        with tarfile.open(folder / name, "w") as file:
            for sample in range(3 * number, 3 * number + 3):
                member, data = tarfile.TarInfo(f"{sample}.cls"), str(sample).encode()
                member.size = len(data)
                file.addfile(member, io.BytesIO(data))
    return [str(folder / name) for name in URLS]


class Numbers(IterableDataset[int]):
    """The numbers in archives."""

    def __init__(self, urls: Shards) -> None:
        self.urls = urls

    def __iter__(self) -> Iterator[int]:
        for url in self.urls:
            with tarfile.open(url) as archive:
                yield from (int(member.name.removesuffix(".cls")) for member in archive)


def loader(dealt: Shards, processes: int, **options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(dealt), batch_size=None, num_workers=processes, **options)


@pytest.mark.parametrize("processes", [0, 2])
def test_every_sample_is_read_once_with_unequal_shares(archives: list[str], processes: int) -> None:
    team = [shards(archives, num_parts=2, part_index=index, shares=[1, 4]) for index in range(2)]
    for epoch in range(2):
        seen = []
        for one in team:
            one.set_epoch(epoch)
            seen += list(loader(one, processes))
        assert sorted(seen) == list(range(33))


def test_processes_that_stay_follow_the_epoch_of_the_main_process(archives: list[str]) -> None:
    dealt, alone = shards(archives), shards(archives)
    found = loader(dealt, 2, persistent_workers=True)
    for epoch in (4, 1):
        dealt.set_epoch(epoch)
        alone.set_epoch(epoch)
        assert sorted(found) == list(range(33))
        first, second = islice(alone, 2)
        dealt.set_epoch(epoch)
        assert [*islice(found, 2)] == [3 * archives.index(first), 3 * archives.index(second)]


def test_a_process_that_is_spawned_follows_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the shards by pickle: without the store, and with the memory that says what comes next."""
    (store,) = OneProcess("a").stores()
    monkeypatch.setattr(store.session, "pace", RoundTimes(), raising=False)
    dealt, alone = (shards(URLS, store, shares="measured") for _ in range(2))
    there = pickle.loads(ForkingPickler.dumps(dealt))
    for one in (dealt, alone):
        one.set_epoch(3)
    expected = list(alone)
    monkeypatch.setattr("torch.utils.data._utils.worker._worker_info", SimpleNamespace(id=0, num_workers=2))
    assert list(there) == expected[::2]


def test_processes_go_on_in_mid_epoch(archives: list[str]) -> None:
    before, after = shards(archives), shards(archives)
    seen = list(islice(loader(before, 0), 9))  # three archives; the last one is under way
    after.load_state_dict(before.state_dict())
    after.set_epoch(0)
    assert sorted(seen[:6] + list(loader(after, 2))) == list(range(33))


def test_an_epoch_that_processes_read_twice_is_refused(archives: list[str]) -> None:
    dealt = shards(archives)
    assert len(list(loader(dealt, 2))) == 33
    with pytest.raises(ValueError, match=r"begun epoch 0 of these shards before; call set_epoch\(epoch\)"):
        list(loader(dealt, 2))
    dealt.set_epoch(1)
    assert len(list(loader(dealt, 2))) == 33


def test_a_state_of_an_epoch_that_processes_read_is_refused(archives: list[str]) -> None:
    dealt = shards(archives)
    assert dealt.state_dict()["epoch"] == 0
    for _ in loader(dealt, 2):
        with pytest.raises(ValueError, match=r"read epoch 0.*call set_epoch\(1\) when the loop has ended"):
            dealt.state_dict()
    dealt.set_epoch(1)
    assert dealt.state_dict()["epoch"] == 1


# ---- webdataset ------------------------------------------------------------------------------------------------------


def test_webdataset_gets_the_shards_of_this_worker() -> None:
    team = parts(2)
    source = [{"url": url} for url in URLS]
    dealt = [one["url"] for part in team for one in part.split(iter(source))]
    assert sorted(dealt) == URLS
    with pytest.raises(ValueError, match="give both the same"):
        team[0].split(source[1:])


@pytest.mark.parametrize("processes", [0, 2])
def test_webdataset_reads_every_sample_once(archives: list[str], processes: int) -> None:
    wds = pytest.importorskip("webdataset")
    team = [shards(archives, num_parts=2, part_index=index, shares=[1, 4]) for index in range(2)]
    loaders = [
        wds.WebLoader(
            wds.WebDataset(archives, nodesplitter=one.split, shardshuffle=False), batch_size=None, num_workers=processes
        )
        for one in team
    ]
    for epoch in range(2):
        for one in team:
            one.set_epoch(epoch)
        assert sorted(int(sample["cls"]) for found in loaders for sample in found) == list(range(33))
