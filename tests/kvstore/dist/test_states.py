"""State of optimizers in stores: its files, and what an optimizer on servers makes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import DistributedOptimizer
from paceline.errors import KeyMismatchError
from paceline.kvstore.base import KVStore
from paceline.kvstore.inprocess import LocalStore
from paceline.testing.one_process import OneProcess


def test_state_of_an_optimizer_in_the_worker_is_not_the_stores_to_save(tmp_path: Path) -> None:
    """Written without it, a file would be complete to the eye, and training would go on with other weights."""
    [store] = OneProcess("a").stores()
    net = torch.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(torch.optim.Adam(net.parameters()), store, model=net, update="worker")
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    for call in (
        lambda: store.save_optimizer_states(str(tmp_path / "states")),
        lambda: store.load_optimizer_states(str(tmp_path / "states")),
        store.optimizer_states,
    ):
        with pytest.raises(ValueError, match=r"has no optimizer.*paceline\.save"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_state_of_an_optimizer_on_the_servers_is_saved(tmp_path: Path) -> None:
    [store] = OneProcess("a").stores()
    net = torch.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(torch.optim.Adam(net.parameters()), store, model=net, update="server")
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    before = store.optimizer_states()
    store.save_optimizer_states(str(tmp_path / "states"))
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    store.load_optimizer_states(str(tmp_path / "states"))
    after = store.optimizer_states()
    assert before["weight"].keys() == {"exp_avg", "exp_avg_sq", "step"}
    for name, value in before["weight"].items():
        assert torch.equal(after["weight"][name], value)


# ---- files of stores -------------------------------------------------------------------------------------------------

SHAPES = {"a": (3, 2), "b": (4,), "c": (), "d": (2,)}


def new_store(kind: str, optimizer: str = "adam", **options: Any) -> KVStore:
    [store] = [LocalStore()] if kind == "local" else OneProcess("a", servers="aa").stores()
    store.set_optimizer(optimizer, **options)
    return store


def gradient(key: str, step: int) -> torch.Tensor:
    numel = math.prod(SHAPES[key])
    return torch.linspace(-1, 1 + step, numel + len(key) + step)[:numel].reshape(SHAPES[key]) + 0.25


def trained(store: KVStore, values: Mapping[str, torch.Tensor], steps: int, unlike: bool = False) -> KVStore:
    """Initialise all keys and push some; ``unlike``: b at every second step only, and c never."""
    store.init(list(values), list(values.values()))
    for step in range(steps):
        keys = [key for key in values if not unlike or key in "ad" or (key == "b" and step % 2)]
        for key in keys:
            store.push(key, gradient(key, step))
    return store


def values_of(store: KVStore) -> dict[str, torch.Tensor]:
    outs = {key: torch.empty(shape) for key, shape in SHAPES.items()}
    store.pull(list(outs), list(outs.values()))
    return outs


@pytest.mark.parametrize("optimizer", ["adam", "nadam", "asgd", "adagrad", "rprop", "sgd", "lamb", "ftrl", "sgld"])
@pytest.mark.parametrize("way", [("local", "dist"), ("dist", "local"), ("dist", "dist"), ("local", "local")])
def test_state_goes_from_one_kind_of_store_to_another_with_counters_of_each_key(
    optimizer: str, way: tuple[str, str], tmp_path: Path
) -> None:
    """A key without any push took over the number of steps of its neighbour, and its first steps were too long."""
    initial = {key: gradient(key, 9) for key in SHAPES}
    store, file = trained(new_store(way[0], optimizer), initial, 4, unlike=True), str(tmp_path / "states")
    store.save_optimizer_states(file)
    other = new_store(way[1], optimizer)
    other.init(list(SHAPES), list(values_of(store).values()))
    other.load_optimizer_states(file)
    for step in range(2):
        for one in (store, other):
            one.push(list(SHAPES), [gradient(key, step) for key in SHAPES])
    expected = values_of(store)
    for key, found in values_of(other).items():
        torch.testing.assert_close(found, expected[key], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["local", "dist"])
def test_dumped_options_are_loaded_too(kind: str, tmp_path: Path) -> None:
    store = new_store(kind, "sgd", lr=1.0, momentum=0.5)
    store.init("x", torch.zeros(1))
    store.set_options([{"lr": 0.125}])
    store.save_optimizer_states(str(tmp_path / "with"), dump_optimizer=True)
    store.save_optimizer_states(str(tmp_path / "without"))
    other, out = new_store(kind, "sgd", lr=2.0, momentum=0.5), torch.empty(1)
    other.init("x", torch.zeros(1))
    other.load_optimizer_states(str(tmp_path / "without"))
    assert other.options()[0]["lr"] == 2.0
    other.load_optimizer_states(str(tmp_path / "with"))
    assert other.options()[0]["lr"] == 0.125
    other.pushpull("x", torch.ones(1), out)
    assert out.item() == -0.125


@pytest.mark.parametrize("kind", ["local", "dist"])
def test_keys_that_a_file_does_not_have_begin_anew(kind: str, tmp_path: Path) -> None:
    file, old = str(tmp_path / "states"), {"a": gradient("a", 0)}
    for optimizer in ("adam", "adagrad"):
        trained(new_store(kind, optimizer), old, 3).save_optimizer_states(file)
        initial = {key: gradient(key, 9) for key in SHAPES}
        store = trained(new_store(kind, optimizer), initial, 5)
        store.load_optimizer_states(file)
        other = new_store(kind, optimizer)
        other.init(list(SHAPES), list(values_of(store).values()))
        other.load_optimizer_states(file)
        for one in (store, other):
            one.push(list(SHAPES), [gradient(key, 1) for key in SHAPES])
        expected = values_of(other)
        assert all(torch.equal(found, expected[key]) for key, found in values_of(store).items())


def test_states_of_another_optimizer_or_model_are_refused_and_change_nothing(tmp_path: Path) -> None:
    file = str(tmp_path / "states")
    for optimizer, keys in (("rmsprop", {"a": (3, 2)}), ("adam", {"a": (2, 3)}), ("adam", {"a": (3, 2), "z": (1,)})):
        saved = new_store("dist", optimizer)
        saved.set_gradient_compression({"type": "2bit", "threshold": 4.0})
        saved.init(list(keys), [torch.zeros(shape) for shape in keys.values()])
        saved.push(list(keys), [torch.ones(shape) for shape in keys.values()])
        saved.save_optimizer_states(file)
        store = new_store("dist")
        store.set_gradient_compression({"type": "2bit", "threshold": 4.0})
        store.init("a", torch.zeros(3, 2))
        store.push("a", torch.full((3, 2), 0.5))
        before = store.optimizer_states()["a"], store.codec_states()["a"]
        with pytest.raises((ValueError, KeyMismatchError)):
            store.load_optimizer_states(file)
        for found, expected in zip((store.optimizer_states()["a"], store.codec_states()["a"]), before, strict=True):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)


def test_state_with_other_kinds_of_numbers_than_servers_have_is_refused_by_name() -> None:
    store = new_store("dist")
    store.init("a", torch.zeros(3, 2))
    with pytest.raises(TypeError, match="optimizer state on servers is float32.*not complex64"):
        store.set_optimizer_states({"a": {"exp_avg": torch.zeros(3, 2, dtype=torch.complex64)}})
    assert store.optimizer_states() == {"a": {}}


# ---- optimizers on servers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adagrad])
def test_parameters_without_dimensions_keep_their_state_through_a_state_dict(cls: type[torch.optim.Optimizer]) -> None:
    """Their state has no dimensions either, as counters have none."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale, self.last = (
                torch.nn.Parameter(torch.tensor(one)) for one in ([1.0, 2.0], 3.0, [4.0])
            )

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return (batch @ self.first * self.scale + self.last).square().mean()

    def train(net: Net, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            net(torch.tensor([[1.0, step], [step, 0.5]])).backward()
            optimizer.step()

    nets = [Net(), Net()]
    alone = cls(nets[0].parameters(), lr=0.01)
    [store] = OneProcess("a").stores()
    served = DistributedOptimizer(cls(nets[1].parameters(), lr=0.01), store, model=nets[1], update="server")
    for net, optimizer in zip(nets, (alone, served), strict=True):
        train(net, optimizer, range(3))
    expected, saved = alone.state_dict()["state"], served.state_dict()
    for number, state in expected.items():
        found = saved["state"][number]
        assert found.keys() == state.keys()
        for name, one in state.items():
            torch.testing.assert_close(found[name], one)
    again = Net()
    again.load_state_dict(nets[1].state_dict())
    [store] = OneProcess("a").stores()
    resumed = DistributedOptimizer(cls(again.parameters(), lr=0.01), store, model=again, update="server")
    resumed.load_state_dict(saved)
    train(nets[0], alone, range(3, 6))
    train(again, resumed, range(3, 6))
    for one, other in zip(nets[0].parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(other, one)


def test_options_are_those_of_the_optimizer_after_its_state_was_loaded() -> None:
    [store] = OneProcess("a").stores()
    net = torch.nn.Linear(2, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), store, model=net, update="server")
    optimizer.param_groups[0]["lr"] = 0.25
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert store.options()[0]["lr"] == 0.25
