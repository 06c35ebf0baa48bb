"""Saving and resuming in one process; with several workers: tests/integration/test_resume.py."""

import copy
import random
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline import DistributedOptimizer
from paceline.errors import CheckpointError, CheckpointNotFoundError
from paceline.gluon import Trainer, backward, replicate
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.checkpoint import collective, tensor_file
from paceline.mx.context import cpu
from paceline.saving import generators
from paceline.saving.job_state import KIND

TWO_BIT = {"type": "2bit", "threshold": 0.02}


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


class Plain:
    """A torch optimizer by itself."""

    def __init__(self):
        self.model = new_model()
        self.optimizer = self.wrap(torch.optim.Adam(self.model.parameters(), lr=0.05))

    def wrap(self, optimizer):
        return optimizer

    def step(self):
        # All kinds of chance that a loop may use.
        inputs = torch.randn(16, 6) * random.random() + np.random.rand()
        self.optimizer.zero_grad()
        self.model(inputs).square().sum(1).mean().backward()
        self.optimizer.step()

    def bits(self):
        return [one.clone() for one in self.model.state_dict().values()]


class Wrapped(Plain):
    def wrap(self, optimizer):
        return DistributedOptimizer(optimizer, "local", model=self.model)


class WrappedWithCodec(Plain):
    def wrap(self, optimizer):
        return DistributedOptimizer(optimizer, "local", model=self.model, compression=TWO_BIT)


class ByTrainer:
    """Gluon's trainer on two devices, with a codec; the store updates."""

    on_store = True

    def __init__(self):
        self.model = replicate(new_model(), [cpu(0), cpu(1)])
        self.optimizer = Trainer(
            self.model, "adam", {"learning_rate": 0.05}, "local", TWO_BIT, update_on_kvstore=self.on_store
        )

    def step(self):
        inputs = [torch.randn(8, 6) * random.random() for _ in range(2)]
        # One after the other, so that it is the same drawing of chance every time.
        backward([net(one).square().sum() for net, one in zip(self.model.replicas, inputs, strict=True)])
        self.optimizer.step(16)

    def bits(self):
        return [one.clone() for net in self.model.replicas for one in net.parameters()]


class ByTrainerOnDevices(ByTrainer):
    on_store = False


KINDS = [Plain, Wrapped, WrappedWithCodec, ByTrainer, ByTrainerOnDevices]


def seed():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_bit_for_bit(kind, tmp_path):
    whole = kind()
    seed()
    for _ in range(10):
        whole.step()
    first = kind()
    seed()
    for _ in range(5):
        first.step()
    paceline.save(tmp_path / "job", first.model, first.optimizer, step=5, extra={"epoch": 2, "best": torch.ones(2)})
    assert [one.name for one in tmp_path.iterdir()] == ["job"]
    second = kind()
    step, extra = paceline.load(tmp_path / "job", second.model, second.optimizer)
    assert (step, extra["epoch"], extra["best"].tolist()) == (5, 2, [1, 1])
    for _ in range(5):
        second.step()
    for ours, theirs in zip(second.bits(), whole.bits(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rng", [(False, True), (True, False)])
def test_chance_is_left_alone_when_asked(rng, tmp_path):
    job = Plain()
    paceline.save(tmp_path / "job", job.model, job.optimizer, step=0, rng=rng[0])
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    paceline.load(tmp_path / "job", job.model, job.optimizer, rng=rng[1])
    assert torch.equal(torch.rand(3), expected)


def leave_behind(folder, rank, digest):
    """Leave the file of a worker whose save was killed before the common file was written."""
    left = folder / f"job.rank{rank}.{digest}"
    left.write_text("")
    return left


def test_what_a_killed_save_left_goes_with_the_next_save(tmp_path):
    job = Plain()
    left = leave_behind(tmp_path, 1, "0123abcd")
    others = [
        tmp_path / name for name in ("job.rank1", "job.rank1.notes", "other.rank1.0123abcd", "job2.rank1.0123abcd")
    ]
    for other in others:
        other.touch()
    paceline.save(tmp_path / "job", job.model, job.optimizer, step=0)
    assert not left.exists()
    assert all(other.exists() for other in others)


def test_what_a_copy_of_a_checkpoint_lists_stays(tmp_path):
    job = Plain()
    listed, left = leave_behind(tmp_path, 1, "0123abcd"), leave_behind(tmp_path, 1, "4567abcd")
    beside = {"1": {"file": listed.name, "digest": "0123abcd"}}
    tensor_file.write(tmp_path / "best", KIND, {}, {"beside": beside})
    paceline.save(tmp_path / "job", job.model, job.optimizer, step=0)
    assert listed.exists()
    assert not left.exists()


def test_copy_of_a_checkpoint_keeps_its_files_when_either_is_saved_again(tmp_path):
    job = Plain()
    part = leave_behind(tmp_path, 1, "0123abcd")
    for name in ("job", "best"):
        beside = {"1": {"file": part.name, "digest": "0123abcd"}}
        tensor_file.write(tmp_path / name, KIND, {}, {"beside": beside})
    paceline.save(tmp_path / "best", job.model, job.optimizer, step=0)
    assert part.exists()
    shutil.copy(tmp_path / "job", tmp_path / "best")
    paceline.save(tmp_path / "job", job.model, job.optimizer, step=0)
    assert part.exists()
    (tmp_path / "best").unlink()
    paceline.save(tmp_path / "job", job.model, job.optimizer, step=0)
    assert not part.exists()


@pytest.mark.parametrize("listed", ["train.py", "../train.py", "/etc/hostname", 7, None])
def test_checkpoint_that_lists_other_files_brings_an_error_and_removes_none(tmp_path, listed):
    job, script = Plain(), tmp_path / "train.py"
    script.touch()
    hostile = {"beside": {"1": {"file": listed, "digest": "0"}}, "own": None, "step": 0, "workers": 2}
    tensor_file.write(tmp_path / "job", KIND, {}, hostile)
    with pytest.raises(
        CheckpointError, match=r"job lists .* as the file of a worker|its manifest cannot be understood"
    ):
        paceline.load(tmp_path / "job", job.model, job.optimizer)
    paceline.save(tmp_path / "job", job.model, job.optimizer, step=0)
    assert script.exists()


def test_each_worker_removes_only_its_own_leftovers(tmp_path):
    mine, theirs, beyond = (leave_behind(tmp_path, rank, "0123abcd") for rank in (1, 2, 3))
    current = leave_behind(tmp_path, 1, "4567abcd")
    collective._remove_leftovers(tmp_path / "job", KIND, 1, None, set(), {current.name})
    assert [one.exists() for one in (mine, theirs, beyond, current)] == [False, True, True, True]
    collective._remove_leftovers(tmp_path / "job", KIND, 0, 3, set(), {current.name})
    assert [one.exists() for one in (theirs, beyond, current)] == [True, False, True]


def test_saving_draws_no_random_number(tmp_path):
    job = Plain()
    seed()
    expected = (torch.rand(1), random.random(), np.random.rand())
    seed()
    paceline.save(tmp_path / "job", job.model, job.optimizer, step=0)
    assert (torch.rand(1), random.random(), np.random.rand()) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_checkpoint_changes_nothing(kind, tmp_path):
    path, job = tmp_path / "job", kind()
    job.step()
    paceline.save(path, job.model, job.optimizer, step=1)
    good, chance = path.read_bytes(), random.Random(3)
    job.step()
    before = (job.bits(), copy.deepcopy(job.optimizer.state_dict()), torch.get_rng_state())
    for place in [chance.randrange(len(good)) for _ in range(20)]:
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << chance.randrange(8)]) + good[place + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            paceline.load(path, job.model, job.optimizer)
    after = (job.bits(), job.optimizer.state_dict(), torch.get_rng_state())
    assert all(map(torch.equal, before[0], after[0]))
    assert repr(before[1]) == repr(after[1])
    assert torch.equal(before[2], after[2])


ODD = (None, True, -1, 2**70, "x", [], [[]], {}, {"$": "tensor"}, {"$": "tensor", "name": "no"}, {"$": "tuple",
       "items": 3}, {"$": "dict", "items": [[1]]}, {"$": "counter", "items": [[[], 1]]})  # fmt: skip


def changed(manifest, chance):
    """Return a manifest of which one place is left out, or has another value."""
    manifest = place = copy.deepcopy(manifest)
    while True:
        name = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if isinstance(place[name], dict | list) and place[name] and chance.random() < 0.75:
            place = place[name]
        elif chance.random() < 0.3:
            del place[name]
            return manifest
        else:
            place[name] = chance.choice(ODD)
            return manifest


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_that_no_save_has_written_is_refused_or_loaded(kind, tmp_path):
    """A digest tells damage, and not who wrote the file."""
    path, job, chance = tmp_path / "job", kind(), random.Random(5)
    job.step()
    paceline.save(path, job.model, job.optimizer, step=1, extra={"a": [1, (2, 3)]})
    file, refused = tensor_file.read(path, KIND), 0
    for _ in range(40):
        tensor_file.write(path, KIND, file.tensors, changed(file.manifest, chance))
        try:
            paceline.load(path, job.model, job.optimizer)
        except CheckpointError:
            refused += 1
            job = kind()
            job.step()
    assert refused > 10


def torch_state(left, place):
    state = torch.get_rng_state().clone()
    state[8:12] = torch.tensor([left], dtype=torch.int32).view(torch.uint8)
    state[16:24] = torch.tensor([place]).view(torch.uint8)
    return state


STATE = generators.state_of_generators()
KEYS = torch.zeros(624, dtype=torch.uint32)
WRONG_STATES = {
    "python": [(3, torch.tensor([1] * 624 + [10**9]), None), (3, torch.tensor([1]), None), (2, KEYS), None],
    "numpy": [
        ("MT19937", KEYS, 10**9, 0, 0.0),
        ("MT19937", KEYS, 700, 0, 0.0),
        ("MT19937", KEYS, -1, 0, 0.0),
        ("MT19937", KEYS[:9], 0, 0, 0.0),
        ("MT19937", KEYS.long(), 0, 0, 0.0),
        ("MT19937", KEYS, 0, 0, float("nan")),
        ("PCG64", KEYS, 0, 0, 0.0),
        "MT19937",
    ],
    "torch": [torch.get_rng_state()[:-1], torch_state(624, 624), torch_state(-1, 0), torch_state(0, 10**9), "x"],
    "cuda": [None],
}


@pytest.mark.parametrize("name", WRONG_STATES)
def test_state_of_a_generator_that_reads_outside_of_its_table_is_refused_and_changes_nothing(
    name, tmp_path, monkeypatch
):
    job, other = Plain(), Plain()
    job.step()
    for wrong in WRONG_STATES[name]:
        with monkeypatch.context() as patch:
            patch.setattr(generators, "state_of_generators", lambda wrong=wrong: STATE | {name: wrong})
            paceline.save(tmp_path / "job", job.model, job.optimizer, step=1)
        before, weights = copy.deepcopy(generators.state_of_generators()), other.bits()
        with pytest.raises(CheckpointError, match=f"the random generator '{name}' cannot be set"):
            paceline.load(tmp_path / "job", other.model, other.optimizer)
        assert repr(generators.state_of_generators()) == repr(before)
        assert all(map(torch.equal, other.bits(), weights))
    assert paceline.load(tmp_path / "job", job.model, job.optimizer, rng=False).step == 1


def test_other_models_and_optimizers_are_refused_and_change_nothing(tmp_path):
    path, job = tmp_path / "job", Plain()
    paceline.save(path, job.model, job.optimizer, step=1)
    others = {
        "only the checkpoint has '1.weight'": nn.Sequential(nn.Linear(6, 8)),
        "'0.weight' has shape .8, 6. there and .8, 7. here": nn.Sequential(
            nn.Linear(7, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)
        ),
        "only this model has '4.weight'": nn.Sequential(*new_model(), nn.Linear(3, 3)),
    }
    for words, model in others.items():
        before = [one.clone() for one in model.state_dict().values()]
        with pytest.raises(CheckpointError, match=words):
            paceline.load(path, model, torch.optim.Adam(model.parameters()))
        assert all(map(torch.equal, before, model.state_dict().values()))
    with pytest.raises(CheckpointError, match="the state of Adam, but the optimizer is SGD"):
        paceline.load(path, job.model, torch.optim.SGD(job.model.parameters()))
    halves = [{"params": list(one.parameters())} for one in (job.model[0], job.model[1:])]
    with pytest.raises(CheckpointError, match=r"param groups of \[6\] parameters, this one of \[2, 4\]"):
        paceline.load(path, job.model, torch.optim.Adam(halves))
    with pytest.raises(CheckpointNotFoundError, match="there is no file"):
        paceline.load(tmp_path / "nothing", job.model, job.optimizer)
    tensor_file.write(path, "model", {}, {})
    with pytest.raises(CheckpointError, match="holds model, not a training job"):
        paceline.load(path, job.model, job.optimizer)


def test_what_cannot_be_saved_is_named_and_leaves_the_old_checkpoint(tmp_path):
    path, job = tmp_path / "job", Plain()
    paceline.save(path, job.model, job.optimizer, step=1)
    with pytest.raises(TypeError, match="extra/scheduler is function"):
        paceline.save(path, job.model, job.optimizer, step=2, extra={"scheduler": seed})
    with pytest.raises(CheckpointError, match="no folder"):
        paceline.save(tmp_path / "none" / "job", job.model, job.optimizer, step=2)
    assert paceline.load(path, job.model, job.optimizer).step == 1
    assert [one.name for one in tmp_path.iterdir()] == ["job"]


def test_a_codec_that_is_new_starts_without_residuals(tmp_path, caplog):
    path, plain, coded = tmp_path / "job", Wrapped(), WrappedWithCodec()
    plain.step()
    coded.step()
    paceline.save(path, plain.model, plain.optimizer, step=1)
    paceline.load(path, coded.model, coded.optimizer)
    assert "residuals start at 0" in caplog.text
    assert coded.optimizer.kvstore.codec_states() == {}


def test_a_trainer_goes_on_with_its_rates_and_steps(tmp_path):
    def new():
        model = replicate(nn.Linear(2, 1), cpu())
        return model, Trainer(model, "sgd", {"lr_scheduler": lambda step: 1.0 / step})

    model, trainer = new()
    for _ in range(3):
        backward([model(torch.ones(1, 2)).sum()])
        trainer.step(1)
    paceline.save(tmp_path / "job", model, trainer, step=3)
    other, resumed = new()
    paceline.load(tmp_path / "job", other, resumed)
    assert resumed.learning_rate == trainer.learning_rate == pytest.approx(1 / 3)
    backward([other(torch.ones(1, 2)).sum()])
    resumed.step(1)
    assert resumed.learning_rate == pytest.approx(1 / 4)


class OwnCodec(KVStoreBase):
    """A third party's store with a codec of its own, which holds back all that it gets."""

    def __init__(self):
        self.held = {}

    keeps_residuals = True

    def broadcast(self, key, value, out, priority=0):
        pass

    def pushpull(self, key, value, out=None, priority=0):
        for one, devices in zip(key, value, strict=True):
            self.held[one] = self.held.get(one, 0) + devices[0]

    def codec_states(self):
        return {key: {"residual": one.clone()} for key, one in self.held.items()}

    def set_codec_states(self, states):
        self.held = {key: state["residual"].clone() for key, state in states.items()}


def test_residuals_of_a_third_partys_store_are_saved_too(tmp_path):
    def made():
        model = replicate(nn.Linear(3, 2), [cpu(0)])
        return model, Trainer(model, "sgd", {"learning_rate": 0.1}, OwnCodec())

    model, trainer = made()
    backward([model.replicas[0](torch.ones(4, 3)).sum()])
    trainer.step(4)
    paceline.save(tmp_path / "job", model, trainer, step=1)
    other_model, other = made()
    paceline.load(tmp_path / "job", other_model, other)
    assert trainer.kvstore.held.keys() == {"weight", "bias"}
    for key, residual in trainer.kvstore.held.items():
        assert torch.equal(other.kvstore.held[key], residual)
        assert residual.any()
