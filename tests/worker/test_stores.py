"""The stores of one worker."""

from __future__ import annotations

import gc

from paceline.worker.stores import WorkerStores


class Counting:
    """A store that counts calls."""

    def __init__(self, name: str) -> None:
        self.name, self.elements = name, len(name)
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def go_away(self) -> None:
        self.calls.append("go away")

    def come_back(self) -> None:
        self.calls.append("come back")

    def finish(self) -> None:
        self.calls.append("finish")


def test_only_open_stores_are_paused_and_finished() -> None:
    stores, one, other = WorkerStores(), Counting("a"), Counting("b")
    stores.add(one)
    stores.add(other)
    stores.pause()
    assert stores.elements == 2
    stores.remove(one)
    stores.remove(one)
    stores.pause()
    stores.finish()
    assert one.calls == ["pause"]
    assert other.calls == ["pause", "pause", "finish"]


def test_closed_stores_are_known_while_somebody_holds_them() -> None:
    stores, one = WorkerStores(), Counting("a")
    stores.add(one)
    assert "a" not in stores.closed
    stores.remove(one)
    assert "a" in stores.closed
    assert "" not in stores.closed
    del one
    gc.collect()
    assert "a" not in stores.closed


def test_namespace_that_was_closed_gets_another_name_each_time() -> None:
    stores = WorkerStores()
    for name in ("x", "x#2", "x#3"):
        assert stores.name_for("x") == stores.name_for("x") == name
        store, sibling = Counting(name), Counting(f"{name}/optimizer1")
        for one in (store, sibling):
            stores.add(one)
            stores.remove(one)
    assert stores.name_for("y") == "y"


def test_stores_without_a_namespace_are_numbered_from_the_start_of_each_job() -> None:
    for stores in (WorkerStores(), WorkerStores()):
        assert [stores.name_for(none) for none in (None, "", None)] == ["kv0", "kv1", "kv2"]
