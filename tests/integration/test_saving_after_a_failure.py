"""After the death of a server a script can still save the weights that it has, and knows of which round they are."""

import contextlib
import os
import signal
import sys
import threading
import time

import pytest
import torch

from paceline import DistributedOptimizer, Module, gluon, kvstore
from paceline.errors import PacelineError, PeerDiedError
from paceline.mx.context import cpu
from paceline.testing import LocalJob, listen, tell
from tests.clusters import programs

WAYS = {"shared": {}, "tcp": {"shared_memory": False, "unix_sockets": False}}


# ---- what runs in the workers --------------------------------------------------------------------------------------


def network(rows=False):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 300), torch.nn.BatchNorm1d(300), torch.nn.ReLU(), torch.nn.Linear(300, 1)]
    return torch.nn.Sequential(*layers)


def optimize(kind, update):
    """Train until the server is killed; return what can be read afterwards."""
    model = network()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), kind, model=model, update=update
    )
    rank = optimizer.kvstore.rank
    known = {}
    caught = "nothing"
    try:
        for step in range(100000):
            if step == 3:
                tell("training")
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            known = {optimizer.round: checksum(dict(model.named_parameters()))}
    except PeerDiedError as error:
        caught = str(error)
    state = model.state_dict()
    result = {
        "rank": rank, "caught": caught, "round": optimizer.round, "known": known,
        "read": checksum({name: state[name] for name, _ in model.named_parameters()}),
        "finite": all(bool(value.isfinite().all()) for value in state.values()),
        "again": len(model.state_dict()), "evaluated": bool(model.eval()(torch.randn(2, 64)).isfinite().all()),
    }  # fmt: skip
    try:
        result["optimizer"] = len(optimizer.state_dict()["state"])
    except PacelineError as error:
        result["optimizer"] = str(error)
    optimizer.kvstore.close()  # nobody waits for this worker any more
    return result


def train_gluon(kind, on_store):
    net = gluon.replicate(network(), [cpu(0)])
    trainer = gluon.Trainer(net, "sgd", {"learning_rate": 0.01, "momentum": 0.9}, kind, update_on_kvstore=on_store)
    known, caught = {}, "nothing"
    try:
        for step in range(100000):
            if step == 3:
                tell("training")
            net(torch.randn(8, 64)).square().sum().backward()
            trainer.step(8)
            known = {trainer.round: checksum({name: one.data() for name, one in net.collect_params().items()})}
    except PeerDiedError as error:
        caught = str(error)
    state = net.state_dict()
    net.eval()
    names = list(net.collect_params())
    return {
        "caught": caught, "round": trainer.round, "known": known, "read": checksum({n: state[n] for n in names}),
    }  # fmt: skip


def fit_module(prefix):
    """Fit, and save in ``finally``, as public scripts do; return the epoch that was saved and the files."""
    module = Module(network(), cpu(0), loss=lambda output, label: (output - label).square().mean(1))
    rank = int(os.environ["PACELINE_RANK"])
    batches = [(torch.randn(8, 64), torch.randn(8, 1))] * 5
    caught = "nothing"

    def after_epoch(end):
        if end.epoch == 0:
            tell("training")

    try:
        try:
            module.fit(batches, eval_metric="loss", epoch_end_callback=after_epoch, kvstore="dist_sync", num_epoch=9999)
        finally:
            module.save_checkpoint(f"{prefix}-{rank}", 7)
    except PeerDiedError as error:
        caught = str(error)
    loaded = Module.load(f"{prefix}-{rank}", 7, network())
    return [caught, module.trainer.round, checksum(loaded.net.state_dict()) == checksum(module.net.state_dict())]


def pull_after_the_death():
    store = kvstore.create("dist_sync")
    store.init(["a", "b", "c"], [torch.zeros(1000)] * 3)
    store.pushpull(["a", "b", "c"], [torch.ones(1000) for _ in range(3)])
    tell("training")
    assert listen() == "killed"
    errors = []
    for key in ("a", "b", "c"):
        for _ in range(2):
            try:
                store.pull(key, torch.zeros(1000))
            except PeerDiedError as error:
                errors.append(str(error))
    store.close()
    return errors


def tear_the_weights():
    """Train a network of many steps; after the failure read it, and return the trainer's round and what came."""
    net = gluon.replicate(torch.nn.Sequential(*(torch.nn.Linear(1200, 1200) for _ in range(4))), [cpu(0)])
    trainer = gluon.Trainer(net, "sgd", {"learning_rate": 0.01}, "dist_sync", update_on_kvstore=True)
    for _ in range(2):
        net(torch.randn(2, 1200)).square().sum().backward()
        trainer.step(4)
    net(torch.randn(2, 1200)).square().sum().backward()
    if trainer.kvstore.rank == 1:  # pushes all but the keys of the last layer, then waits
        store = trainer.kvstore
        keys = [key for key in net.collect_params() if not key.startswith("3.")]
        store.push(keys, [net.collect_params()[key].grad() for key in keys])
        tell("half")
        listen()
        return None
    watched = net.replicas[0].get_parameter("1.weight")
    threading.Thread(target=tell_of_a_change, args=(watched, watched._version), daemon=True).start()
    with contextlib.suppress(PeerDiedError):
        trainer.step(4)
    try:
        net.state_dict()
    except PacelineError as error:
        return [trainer.round, str(error)]
    return [trainer.round, "nothing"]


def tell_of_a_change(tensor, version):
    while tensor._version == version:
        time.sleep(0.001)
    tell("copied")


def checksum(tensors):
    return {name: one.detach().double().abs().sum().item() for name, one in tensors.items()}


# ---- what is read ----------------------------------------------------------------------------------------------------


def killed_in_training(job, function, *arguments):
    workers = job.start_all(function, *arguments)
    assert [worker.heard() for worker in workers] == ["training"] * 2
    job.servers[1].kill(signal.SIGKILL)
    return [(worker.result(60), worker.output) for worker in workers]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "update"), [("dist_sync", "worker"), ("dist_sync", "server"), ("dist_async", "server")]
)
def test_model_of_an_optimizer_can_be_read(kind, update, way):
    with LocalJob(2, 2, timeout_s=60, bigarray_bound=1000, **WAYS[way]) as job:
        results = killed_in_training(job, optimize, kind, update)
    for result, output in results:
        assert "server 1 on 127.0.0.1 died" in result["caught"]
        assert result["round"] >= 2
        assert result["known"] == {str(result["round"]): result["read"]}
        assert result["finite"]
        assert result["evaluated"]
        assert output.count(f"the weights that are read now are those of round {result['round']}") == 1
        if update == "worker":
            assert result["optimizer"] == 6
        else:
            assert "the optimizer's state was on the servers and is lost" in result["optimizer"]
            assert "server 1 on 127.0.0.1 died" in result["optimizer"]


@pytest.mark.parametrize(("kind", "on_store"), [("dist_sync", True), ("dist_sync", False), ("dist_async", True)])
def test_network_of_a_trainer_can_be_read(kind, on_store):
    with LocalJob(2, 2, timeout_s=60, bigarray_bound=1000) as job:
        results = killed_in_training(job, train_gluon, kind, on_store)
    for result, output in results:
        assert "server 1 on 127.0.0.1 died" in result["caught"]
        assert result["known"] == {str(result["round"]): result["read"]}
        assert output.count(f"are those of round {result['round']}, the last that is complete here") == 1


def test_module_saves_a_checkpoint_in_finally(tmp_path):
    with LocalJob(2, 2, timeout_s=60, bigarray_bound=1000) as job:
        results = killed_in_training(job, fit_module, str(tmp_path / "net"))
    for (caught, round, is_equal), _ in results:
        assert "server 1 on 127.0.0.1 died" in caught
        assert round >= 5
        assert is_equal


def test_pull_of_a_store_stays_an_error():
    with LocalJob(2, 2, timeout_s=60) as job:
        workers = job.start_all(pull_after_the_death)
        assert [worker.heard() for worker in workers] == ["training"] * 2
        job.servers[1].kill(signal.SIGKILL)
        job.scheduler.wait(30)  # it ends when all members know
        for worker in workers:
            worker.tell("killed")
        for worker in workers:
            errors = worker.result(60)
            assert len(errors) == 6
            assert all("server 1 on 127.0.0.1 died" in text for text in errors)


def test_weights_that_are_half_there_are_an_error_that_names_them():
    with LocalJob(2, 2, timeout_s=60) as job:
        workers = job.start_all(tear_the_weights)
        assert [worker.heard() for worker in workers] == ["copied", "half"]
        job.servers[1].kill(signal.SIGKILL)
        round, text = workers[0].result(60)
    assert round == 2
    assert "of 8 weights have the values of round 3, but those of" in text
    assert "'3.weight', '3.bias' are still of round 2" in text
    assert "server 1 on 127.0.0.1 died" in text


# ---- jobs ------------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, torch
from paceline import DistributedOptimizer
from paceline.errors import PeerDiedError

model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 1))
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), {kind!r}, model=model)
store, rank = optimizer.kvstore, optimizer.kvstore.rank

def save():
    torch.save({{"model": model.state_dict(), "round": optimizer.round}}, f"{folder}/{{rank}}.pt")

def train():
    for step in range(100000):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        if step == 1:
            store.session.gather("one round is done", b"")
        if step == 5 and rank == 0:
            os.kill(store.session.servers[1].pid, signal.SIGKILL)

{shape}
"""
SHAPES = {
    "except": """
try:
    train()
except PeerDiedError:
    save()
    sys.exit(3)
""",
    "finally": """
try:
    train()
finally:
    save()
    store.close()
""",
    "except RuntimeError and raise": """
try:
    train()
except RuntimeError:
    save()
    raise
""",
    "exit in a finally": """
code = 0
try:
    try:
        train()
    finally:
        save()
except Exception as error:
    print("ended by", type(error).__name__)
    code = 3
store.close()
sys.exit(code)
""",
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_script_that_saves_what_it_has_finds_it_in_its_file(shape, kind, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(kind=kind, folder=tmp_path, shape=SHAPES[shape]))
    words = ["-m", "paceline", "launch", "-n", "2", "-s", "2", "--grace", "20"]
    words += ["--env", "PACELINE_BIGARRAY_BOUND=1000", "--", sys.executable, script]
    ended = programs.run(words, timeout_s=300)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 128 + signal.SIGKILL, output
    assert "server 1" in output
    for rank in (0, 1):
        saved = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert saved["round"] >= (5 if rank == 0 else 1)
        assert all(bool(value.isfinite().all()) for value in saved["model"].values())
        code = 3 if "exit" in shape or shape == "except" else 76
        assert f"worker {rank}" in output
        assert f"exit code {code}" in output
