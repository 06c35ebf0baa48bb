"""A job that saves, ends and goes on elsewhere is a job without a break, bit for bit."""

import errno
import hashlib
import os
import re
import shutil
import signal
import threading

import pytest
import torch
from torch import nn

import paceline
from paceline import DistributedOptimizer, kvstore
from paceline.errors import CheckpointError
from paceline.gluon import Trainer, backward, replicate
from paceline.kvstore.checkpoint import collective, tensor_file
from paceline.mx.context import cpu
from paceline.testing import LocalJob, listen, tell

WORKERS, BREAK, STEPS = 2, 5, 10
TWO_BIT = {"type": "2bit", "threshold": 0.02}
#: Both legs work element by element, so that another number of servers changes nothing.
BOTH = [TWO_BIT, {"type": "fp16", "leg": "pull"}]


# ---- what runs in the workers --------------------------------------------------------------------------------------


def save_while_each_call_fails(path, failing_rank):
    """Save a checkpoint again and again, and let one more call of a worker fail each time.

    Returns for each save whether it raised, and the step of what can be loaded then.
    """
    job = ByOptimizer()
    job.step()
    calls = [getattr(os, name) for name in ("open", "fsync", "scandir", "unlink", "replace", "close", "fstat", "lstat")]
    ended, made = [], [len(calls)]
    while made[-1] >= len(ended):
        paceline.save(path, job.model, job.optimizer, step=2 * len(ended))
        with pytest.MonkeyPatch.context() as patch:
            made.append(0)
            for call in calls if job.store.rank == failing_rank else ():
                patch.setattr(os, call.__name__, failing_at(call, len(ended) + 1, made))
            try:
                paceline.save(path, job.model, job.optimizer, step=2 * len(ended) + 1)
                raised = False
            except CheckpointError:
                raised = True
        made[-1] = int(job.store.session.gather("calls", str(made[-1]).encode(), 60.0)[failing_rank])
        step, _ = paceline.load(path, job.model, job.optimizer)
        ended.append((raised, step - 2 * len(ended)))
    return ended


def failing_at(call, which, made):
    """Return a call of the operating system, one of whose calls by this thread fails."""
    thread = threading.get_ident()

    def tried(*args, **options):
        if threading.get_ident() == thread:
            made[-1] += 1
            if made[-1] == which:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*args, **options)

    return tried


def digest(tensors):
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest()


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 30), nn.BatchNorm1d(30), nn.Dropout(0.3), nn.Linear(30, 3))


class ByOptimizer:
    """DistributedOptimizer."""

    store_type, update, codec = "dist_sync", "worker", None

    def __init__(self):
        self.model = new_model()
        inner = self.inner(self.model.parameters())
        self.optimizer = DistributedOptimizer(
            inner, self.store_type, model=self.model, update=self.update, compression=self.codec
        )
        self.store = self.optimizer.kvstore
        torch.manual_seed(100 + self.store.rank)

    def inner(self, params):
        return torch.optim.Adam(params, lr=0.02)

    def step(self):
        self.optimizer.zero_grad()
        labels = torch.randint(0, 3, (16,))
        nn.functional.cross_entropy(self.model(torch.randn(16, 10)), labels).backward()
        self.optimizer.step()

    def digest(self):
        return digest(self.model.state_dict().values())


class OnServers(ByOptimizer):
    update = "server"


class WithCodec(ByOptimizer):
    codec = TWO_BIT

    def inner(self, params):
        return torch.optim.SGD(params, lr=0.5, momentum=0.9)


class WithCodecsOnServers(WithCodec):
    update, codec = "server", BOTH


class Asynchronous(ByOptimizer):
    store_type, update = "dist_async", "server"


class ByTrainer:
    """Gluon's Trainer, with the optimizer on the servers or in the workers."""

    on_store, codec = True, BOTH

    def __init__(self):
        self.model = replicate(nn.Sequential(*(one for one in new_model() if not list(one.buffers()))), [cpu(0)])
        options = {"lr": 0.5, "momentum": 0.9}
        self.optimizer = Trainer(
            self.model, "sgd", options, "dist_sync", compression_params=self.codec, update_on_kvstore=self.on_store
        )
        self.store = self.optimizer.kvstore
        torch.manual_seed(100 + self.store.rank)

    def step(self):
        inputs, labels = torch.randn(16, 10), torch.randint(0, 3, (16,))
        backward([nn.functional.cross_entropy(self.model.replicas[0](inputs), labels, reduction="sum")])
        self.optimizer.step(16 * self.store.num_workers)

    def digest(self):
        return digest(self.model.replicas[0].parameters())


class ByTrainerOnWorkers(ByTrainer):
    # Merged gradients that are pulled compressed start anew with the job; they would not be the same bits.
    on_store, codec = False, TWO_BIT


KINDS = {
    "worker": ByOptimizer,
    "server": OnServers,
    "worker, codec": WithCodec,
    "server, codecs": WithCodecsOnServers,
    "trainer": ByTrainer,
    "trainer on workers": ByTrainerOnWorkers,
}
CODED = [way for way, kind in KINDS.items() if kind.codec is not None]


def train(folder):
    """All steps without a break; a checkpoint is written in the middle."""
    found = {}
    for way, kind in KINDS.items():
        job = kind()
        for step in range(STEPS):
            if step in (BREAK - 1, BREAK):  # files of the first go when the second is there
                paceline.save(f"{folder}/{way}", job.model, job.optimizer, step=step, extra={"rank": job.store.rank})
            job.step()
        found[way] = job.digest()
    return found


def train_again(folder):
    """The second half, from what is on disk."""
    found = {}
    for way, kind in KINDS.items():
        job = kind()
        step, extra = paceline.load(f"{folder}/{way}", job.model, job.optimizer)
        loaded = job.digest()
        for _ in range(step, STEPS):
            job.step()
        found[way] = [job.digest(), step, extra["rank"], loaded]
    return found


def try_to_load(path, way="worker, codec"):
    """Load what is damaged for one worker; return what is said, and whether anything changed."""
    job = KINDS[way]()
    job.step()
    before = job.digest()
    try:
        paceline.load(path, job.model, job.optimizer)
    except CheckpointError as error:
        unchanged = job.digest() == before
        job.step()
        return [str(error), unchanged, job.digest()]
    return None


def try_to_save(good, bad):
    """Save to places that some workers do not have, and at unlike steps; then train on as if nothing had been."""
    job, said = WithCodec(), []
    job.step()
    paceline.save(good, job.model, job.optimizer, step=1)
    rank = job.store.rank
    wrong = [(bad if rank == 1 else good, 2), (bad if rank == 0 else good, 2), (good, 2 + rank)]
    for path, step in wrong:
        try:
            paceline.save(path, job.model, job.optimizer, step=step)
        except CheckpointError as error:
            said.append(str(error))
    job.step()
    return [said, job.digest()]


def load_and_take_two_steps(path):
    loaded, job = load_only(path), WithCodec()
    job.step()
    job.step()
    return loaded, job.digest()


def save_after_two_steps(path):
    """Worker 0 takes its steps when the others have taken theirs, and save or are about to."""
    model = nn.Linear(3, 2)
    store = kvstore.create("dist_ksync", k=2)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), store, model=model)
    if store.rank == 0:
        tell("ready")
        listen(60)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    if store.rank != 0:
        tell("stepped")
    paceline.save(path, model, optimizer, step=2)
    return 2


def save_for_ever(path):
    job = WithCodec()
    for step in range(1, 10_000):
        job.step()
        paceline.save(path, job.model, job.optimizer, step=step)
        if step == 2:
            tell("twice")


def save_and_die(path):
    """Save twice; the second time worker 0 ends as soon as it has written the common file."""
    job, write = WithCodec(), collective.write_common
    for step in (1, 2):
        job.step()
        if step == 2 and job.store.rank == 0:
            collective.write_common = lambda *args: (write(*args), os.kill(os.getpid(), signal.SIGKILL))
        try:
            paceline.save(path, job.model, job.optimizer, step=step)
        except CheckpointError as error:
            return str(error)
    return "saved"


def load_only(path):
    job = WithCodec()
    step, _ = paceline.load(path, job.model, job.optimizer)
    reference = WithCodec()
    for _ in range(step):
        reference.step()
    return [step, job.digest() == reference.digest()]


def save_while_unlike_far(path):
    """Worker 1 goes on after worker 0's last step; what both then have, and what a new optimizer gets from the file."""
    job = Asynchronous()
    job.step()
    job.store.barrier()
    for _ in range(3 * job.store.rank):
        job.step()
    mine = job.digest()
    paceline.save(path, job.model, job.optimizer, step=4)
    again = Asynchronous()
    paceline.load(path, again.model, again.optimizer)
    return [mine, again.digest()]


# ---- the tests -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def unbroken(folder):
    with LocalJob(WORKERS, 1, timeout_s=60, bigarray_bound=100) as job:
        return job.run(train, str(folder))


@pytest.fixture(scope="module")
def resumed(folder, unbroken):
    # Values are cut in the same places: the last bits of an optimizer on the servers depend on where vectors end.
    with LocalJob(WORKERS, 2, timeout_s=60, bigarray_bound=100, shared_memory=False) as job:
        return job.run(train_again, str(folder))


@pytest.mark.parametrize("way", KINDS)
def test_training_goes_on_as_if_there_had_been_no_break(unbroken, resumed, way):
    assert [worker[way][0] for worker in resumed] == [worker[way] for worker in unbroken]
    assert [worker[way][1:3] for worker in resumed] == [[BREAK, 0], [BREAK, 1]]


def test_a_checkpoint_is_one_file_and_one_of_each_other_worker(folder, unbroken):
    for way in KINDS:
        names = sorted(path.name for path in folder.iterdir() if path.name.partition(".")[0] == way)
        assert len(names) == 2
        assert names[0] == way
        assert names[1].startswith(f"{way}.rank1.")


@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers_goes_on(folder, unbroken, workers):
    with LocalJob(workers, 1, timeout_s=60) as job:
        found = job.run(train_again, str(folder))
        output = "".join(worker.output for worker in job.workers)
    for way in KINDS:
        assert len({worker[way][0] for worker in found}) == 1
        assert len({worker[way][3] for worker in found}) == 1
        assert [worker[way][2] for worker in found] == [0, 1, 0][:workers]
    assert output.count("worker 2: no residuals were saved for it (2 workers saved)") == len(CODED) * (workers == 3)
    assert output.count("residuals of workers 1 to 1 are lost") == len(CODED) * (workers == 1)


DAMAGES = {"lost": "there is no file", "of another step": "is of another save .step 7.*step 5", "flipped": "damaged"}


def damaged(folder, path, damage):
    """Copy a checkpoint, and damage worker 1's file of the copy."""
    path.mkdir()
    for name in ("worker, codec", *(one.name for one in folder.glob("worker, codec.rank1.*"))):
        shutil.copy(folder / name, path / name)
    [part] = path.glob("worker, codec.rank1.*")
    if damage == "lost":
        part.unlink()
    elif damage == "flipped":
        part.write_bytes(part.read_bytes()[:-1] + bytes([part.read_bytes()[-1] ^ 1]))
    else:
        tensor_file.write(part, "a training job of one worker", {}, {"step": 7})
    return str(path / "worker, codec")


def try_to_load_all(paths):
    return [try_to_load(path) for path in paths]


def test_a_checkpoint_without_all_its_files_is_refused_by_all(folder, unbroken, tmp_path):
    paths = [damaged(folder, tmp_path / damage, damage) for damage in DAMAGES]
    with LocalJob(WORKERS, 1, timeout_s=60) as job:
        workers = job.run(try_to_load_all, paths)
    for said, *found in zip(DAMAGES.values(), *workers, strict=True):
        for text, unchanged, _ in found:
            assert unchanged
            assert "worker, codec.rank1." in text
        assert re.search(said, found[1][0])
        assert found[0][0].startswith("worker 1 failed at reading files of workers")
        assert found[0][2] == found[1][2]


def test_a_save_that_fails_on_one_worker_fails_on_all_and_changes_nothing(tmp_path):
    good, bad = tmp_path / "job", tmp_path / "none" / "job"
    with LocalJob(WORKERS, 1, timeout_s=60) as job:
        found = job.run(try_to_save, str(good), str(bad))
    (first, second, unlike), others = found[0][0], found[1][0]
    assert "worker 1 failed at files of workers" in first
    assert "there is no folder" in first
    assert "there is no folder" in others[0]
    assert "there is no folder" in second
    assert "worker 0 failed at the common file" in others[1]
    assert unlike == others[2] == "the workers are at different steps: 2, 3; save at the same one"
    assert len(list(tmp_path.iterdir())) == 2
    with LocalJob(WORKERS, 1, timeout_s=60) as job:
        loaded, unbroken = zip(*job.run(load_and_take_two_steps, str(good)), strict=True)
    assert loaded == ([1, True],) * 2
    assert {worker[1] for worker in found} == set(unbroken)


def test_a_save_does_not_wait_for_a_worker_whose_push_waits_for_those_who_save(tmp_path):
    with LocalJob(3, 1, timeout_s=20) as job:
        workers = job.start_all(save_after_two_steps, str(tmp_path / "job"))
        assert [worker.heard() for worker in workers] == ["ready", "stepped", "stepped"]
        workers[0].tell("go on")
        assert [worker.result() for worker in workers] == [2] * 3


@pytest.mark.parametrize("rank", range(WORKERS))
def test_a_job_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path, rank):
    with LocalJob(WORKERS, 1, timeout_s=60) as job:
        workers = job.start_all(save_for_ever, str(tmp_path / "job"))
        assert workers[rank].heard(120) == "twice"
        workers[rank].kill(signal.SIGKILL)
    with LocalJob(WORKERS, 1, timeout_s=60) as job:
        found = job.run(load_only, str(tmp_path / "job"))
    assert found[0] == found[1]
    assert found[0][0] >= 2
    assert found[0][1]


def test_where_workers_do_not_wait_for_each_other_the_servers_weights_are_saved(tmp_path):
    with LocalJob(WORKERS, 1, timeout_s=60) as job:
        (first, loaded), (last, also_loaded) = job.run(save_while_unlike_far, str(tmp_path / "job"))
    assert first != last
    assert loaded == also_loaded == last


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_whichever_call_fails_one_of_two_saves_can_be_loaded_by_all(failing_rank, tmp_path):
    with LocalJob(WORKERS, 1) as job:
        first, second = job.run(save_while_each_call_fails, str(tmp_path / "job"), failing_rank)
    assert first == second, "both workers say the same"
    assert len(first) > 5
    assert set(map(tuple, first)) == {(True, 0), (False, 1)}


def test_worker_0_that_dies_after_its_part_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    with LocalJob(WORKERS, 1, on_worker_death="continue") as job:
        workers = job.start_all(save_and_die, str(tmp_path / "job"))
        assert "worker 0 left the job and took no part" in workers[1].result()
    with LocalJob(WORKERS, 1) as job:
        assert job.run(load_only, str(tmp_path / "job")) == [[2, True]] * 2
