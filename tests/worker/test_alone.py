"""The watch of a worker: what it tells of its training, and when."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from paceline.config import Settings
from paceline.data import ShardedSampler, batches
from paceline.errors import DeadlineError
from paceline.testing.job import common_environment
from paceline.wire import messages as m
from paceline.worker import alone
from paceline.worker.alone import Watch


class Session:
    """Stands for a worker's session."""

    rank = 1

    def __init__(self) -> None:
        self.round = 0
        self.told: list[m.Training] = []
        self.is_heard = True

    def ask_scheduler(self, body: Any, what: str) -> Any:
        self.told.append(body)

    def wait(self, calls: Sequence[Any], timeout_s: float) -> None:
        assert timeout_s > 0
        if not self.is_heard:
            raise DeadlineError("nobody answers")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    monkeypatch.setattr(alone, "JUDGE_AFTER_S", 0.0)
    one = Watch(Settings(num_workers=2, rank=1))
    one.session = Session()
    yield one
    one.exchanged = True
    one.finish()


def told(watch: Watch) -> list[m.Training]:
    """Return what was told, without the losses."""
    if watch._thread is not None:
        watch._thread.join()
    assert isinstance(watch.session, Session)
    return [msgspec.structs.replace(one, losses=[]) for one in watch.session.told]


def test_plain_steps_are_told_once_and_again_at_the_end(watch: Watch) -> None:
    watch.store = "dist_sync"
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2)).backward()
        optimizer.step()
    assert told(watch) == [m.Training(1, "dist_sync", steps=1, passes=1)]
    watch.finish()
    assert told(watch)[1:] == [m.Training(1, "dist_sync", steps=3, passes=3)]


def test_a_later_exchange_is_told_at_the_end(watch: Watch) -> None:
    watch.stepped()
    assert len(told(watch)) == 1
    watch.session.round = 1  # type: ignore[union-attr]
    watch.finish()
    assert [one.exchanged for one in told(watch)] == [False, True]


@pytest.mark.parametrize("how", ["pushes", "reduces"])
def test_a_worker_that_exchanges_tells_nothing_and_is_watched_no_more(watch: Watch, how: str) -> None:
    if how == "pushes":
        watch.session.round = 1  # type: ignore[union-attr]
    watch.exchanged = how == "reduces"
    for _ in range(alone.MAX_INPUTS):
        watch.stepped()
        assert watch._events is not None
    watch.stepped()
    assert watch._events is None
    watch.finish()
    assert told(watch) == []


def test_passes_without_a_step_count_when_they_are_many_or_the_job_ends(watch: Watch) -> None:
    for _ in range(31):
        watch.pass_begins(torch.ones(()))
    assert told(watch) == []
    watch.pass_begins(torch.ones(()))
    assert told(watch) == [m.Training(1, passes=32)]


@pytest.mark.parametrize(("changes", "is_told"), [(True, True), (False, False)])
def test_weights_that_change_without_a_step_of_the_optimizer(watch: Watch, changes: bool, is_told: bool) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    watch.weights = alone.SomeWeights([torch.ones(1), param])
    watch.exchanged = True  # the gradients are merged
    for _ in range(5):
        watch.pass_begins(torch.ones(()))
        param.data += changes
    watch.finish()
    assert [(one.unstepped, one.wrapped) for one in told(watch)[:1]] == [(True, True)] * is_told


def test_a_long_accumulation_of_a_distributed_optimizer_is_no_training_alone(watch: Watch) -> None:
    watch.weights = alone.SomeWeights([torch.nn.Parameter(torch.ones(3))])
    for _ in range(100):
        watch.pass_begins(torch.ones(()))
    assert told(watch) == []


def test_a_worker_that_nobody_hears_says_it_itself(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    watch.session.is_heard = False  # type: ignore[union-attr]
    watch._settings = Settings(num_workers=2, rank=0)
    watch.session.rank = 0  # type: ignore[misc,union-attr]
    watch.stepped()
    watch.finish()
    assert "worker 0 trains alone, and no gradient is exchanged: the script makes no store" in caplog.text


# ---- samples ---------------------------------------------------------------------------------------------------------


DATA = TensorDataset(torch.arange(24.0).reshape(12, 2))


def train(watch: Watch, loader: Iterable[Any], use: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
    """Train as a loop whose model is watched and whose gradients are merged."""
    watch.exchanged = True
    model = torch.nn.Linear(2, 1)
    for (inputs,) in loader:
        used = use(inputs)
        watch.note_inputs([used])
        model(used).sum().backward()


def test_a_loader_that_walks_all_samples_is_told_after_the_first_inputs(watch: Watch) -> None:
    for _ in DataLoader(DATA, batch_size=4):  # a validation before the training
        pass
    next(iter(DataLoader(DATA)))
    validation = DataLoader(DATA, sampler=ShardedSampler(12, 4, 0))
    loader = DataLoader(DATA, batch_size=2)
    for step, _ in enumerate(loader):
        if not step:
            assert len(list(validation)) == 3
        train(watch, [(torch.full((1, 2), float(step)),)])
    [one] = told(watch)
    assert (one.passes, one.exchanged, one.samples, one.order) == (4, True, 12, 1)
    assert one.data
    assert len(one.inputs) == alone.MAX_INPUTS == m.MAX_INPUTS
    assert watch._events is None
    assert not watch.wants_inputs


def test_a_job_that_ends_early_tells_its_samples_then(watch: Watch) -> None:
    train(watch, DataLoader(DATA, batch_size=6))
    assert told(watch) == []
    watch.finish()
    assert [(one.samples, len(one.inputs)) for one in told(watch)] == [(12, 2)]


def test_losses_of_the_first_passes_are_told_where_they_can_be_read(watch: Watch) -> None:
    for losses in ([torch.tensor(1.0)], torch.eye(2).to_sparse(), torch.tensor(1.0), torch.tensor(3.0)):
        watch.pass_begins(losses)
    watch.stepped()
    assert isinstance(watch.session, Session)
    one = watch.session.told[-1]
    assert len(one.losses) == 2
    assert len(set(one.losses)) == 1


@pytest.mark.parametrize(
    "loader", [DataLoader(DATA, batch_size=1, sampler=DistributedSampler(DATA, 2, 0)), [(torch.ones(1, 2),)] * 5]
)
def test_divided_samples_and_always_the_same_are_not_told(watch: Watch, loader: Iterable[Any]) -> None:
    train(watch, loader, lambda inputs: torch.ones(1, 2))
    watch.finish()
    assert told(watch) == []


def test_what_cannot_be_looked_at_is_not_compared(watch: Watch) -> None:
    class Strange:
        """An iterator of no known loader."""

    strange = Strange()
    watch.loader_begins(strange)
    watch.note_inputs([torch.eye(2).to_sparse()])
    train(watch, [(torch.full((1, 2), float(one)),) for one in range(4)])
    watch.finish()
    assert told(watch) == []


def test_walks_of_batches_in_memory_are_noted_and_inputs_only_of_a_watched_process(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one, wants in ((watch, True), (None, False)):
        monkeypatch.setattr(alone, "_watch", one)
        assert alone.wants_inputs() == wants
        alone.note_inputs([torch.ones(2)])
        for _ in batches(DATA, batch_size=6):
            watch.pass_begins(torch.ones(()))
    watch.exchanged = True
    watch.finish()
    assert [(one.samples, one.inputs) for one in told(watch)] == [(12, [])]


@pytest.mark.parametrize(
    ("env", "watches"),
    [
        ({"NUM_WORKERS": "2"}, True),
        ({"NUM_WORKERS": "1"}, False),
        ({"NUM_WORKERS": "1", "PROFILE": "-"}, True),
        ({"NUM_WORKERS": "2", "ROLE": "server"}, False),
        ({"NUM_WORKERS": "many"}, False),
    ],
)
def test_workers_of_jobs_of_several_are_watched(
    env: dict[str, str], watches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(f"PACELINE_{name}", value)
    monkeypatch.setattr(alone, "_watch", None)
    alone.note_store("device")
    assert (alone._watch is not None) == watches
    if alone._watch is not None:
        assert alone._watch.store == "device"
        alone._watch.finish()


def test_a_process_that_imports_torch_by_this_module_is_watched() -> None:
    code = "from paceline.worker import alone; print(alone._watch is not None)"
    names = {"SCHEDULER": "tcp://127.0.0.1:1", "INSECURE": "1", "NUM_WORKERS": "2", "NUM_SERVERS": "1", "RANK": "0"}
    env = common_environment() | {f"PACELINE_{name}": value for name, value in names.items()}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
