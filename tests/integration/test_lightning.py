"""LightningModules on workers of a job, with Lightning's own Trainer, against one process with the joined batch."""

import functools
import time
import warnings
from pathlib import Path

import pytest

pl = pytest.importorskip("lightning.pytorch")

import torch  # noqa: E402
from lightning.fabric.plugins import TorchCheckpointIO  # noqa: E402
from lightning.fabric.utilities.rank_zero import rank_zero_only  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: E402

from paceline import DistributedOptimizer, kvstore  # noqa: E402
from paceline.errors import PacelineError  # noqa: E402
from paceline.lightning import PacelineEnvironment, PacelineStrategy  # noqa: E402
from paceline.observe import reports, tracking  # noqa: E402
from paceline.observe.job_view import JobView  # noqa: E402
from paceline.testing import LocalJob  # noqa: E402
from paceline.wire import messages as m  # noqa: E402
from paceline.worker.current import current_session  # noqa: E402
from tests.clusters.fork_server import jobs_have  # noqa: E402

SAMPLES, BATCH = 64, 16
CLIPPING = {"gradient_clip_val": 0.2}
#: Of the strategy, for each kind of module or training.
OPTIONS = {"regression": {}, "adversaries": {}, "servers step": {"update": "server"}}


@pytest.fixture(autouse=True, scope="module")
def jobs_have_lightning():
    with jobs_have("lightning.pytorch", "paceline.lightning"):
        yield


# ---- what runs in the workers --------------------------------------------------------------------------------------


class Regression(pl.LightningModule):
    """Two layers, batch statistics left out, a schedule, and a metric that is synchronised."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(self.global_seed())
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
        self.losses = []

    @staticmethod
    def global_seed():
        return 1 + PacelineEnvironment().global_rank()  # workers must start from rank 0's weights

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.losses.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Adversaries(pl.LightningModule):
    """Two optimizers that take turns, by hand."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(6, 6), nn.Linear(6, 1)
        self.losses = []

    def training_step(self, batch, index):
        x, _ = batch
        make, judge = self.optimizers()
        judge.zero_grad()
        self.manual_backward(self.judge(x).pow(2).mean() + (self.judge(self.maker(x).detach()) - 1).pow(2).mean())
        judge.step()
        make.zero_grad()
        self.manual_backward(self.judge(self.maker(x)).pow(2).mean())
        make.step()

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.maker.parameters(), lr=0.01),
            torch.optim.SGD(self.judge.parameters(), lr=0.05),
        )


class CountingIO(TorchCheckpointIO):
    """Counts what this process writes."""

    written = 0

    def save_checkpoint(self, *args, **kwargs):
        self.written += 1
        super().save_checkpoint(*args, **kwargs)


def loader(batch, in_one=False):
    chance = torch.Generator().manual_seed(7)
    data = TensorDataset(
        torch.randn(SAMPLES, 6, generator=chance), torch.randn(SAMPLES, generator=chance)
    )  # fmt: skip
    # Lightning shuffles what it shares out; a share of one is the joined order of all shares.
    return DataLoader(data, batch, sampler=DistributedSampler(data, 1, 0) if in_one else None)


def trainer(strategy, epochs, callbacks=(), **options):
    warnings.filterwarnings("ignore")
    return pl.Trainer(
        strategy=strategy, max_epochs=epochs, accelerator="cpu", devices=1, logger=False, callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks), enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def values_of(module):
    return [param.detach().double().flatten().tolist() for param in module.parameters()]


def fit(kind, directory, options):
    module = Adversaries() if kind == "adversaries" else Regression()
    counter = CountingIO()
    strategy = PacelineStrategy(checkpoint_io=counter, **options)
    rank = strategy.global_rank
    keeper = ModelCheckpoint(Path(directory) / f"rank{rank}", filename="{epoch}", save_top_k=-1)
    more = CLIPPING if kind == "regression" else {}
    one = trainer(strategy, 2, [keeper], **more)
    one.fit(module, loader(BATCH // 2))
    return {
        "ranks": [one.global_rank, one.world_size, one.is_global_zero, rank_zero_only.rank],
        "samples": len(one.train_dataloader.sampler),
        "values": values_of(module),
        "losses": module.losses,
        "written": counter.written,
        "same directory": str(keeper.dirpath),
    }


class Kept(pl.loggers.Logger):
    """Keeps what it is given."""

    name, version = "kept", "1"

    def __init__(self):
        super().__init__()
        self.steps = {}

    def log_metrics(self, metrics, step=None):
        self.steps.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, *args, **kwargs):
        pass


class Reporting(Regression):
    """Reports its loss, and does not end before the scheduler knows of it."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        reports.report(mine=loss)
        deadline = time.monotonic() + 20
        while self.trainer.global_step == 14 and time.monotonic() < deadline:  # the first rounds are in no account
            status = current_session().call_scheduler(m.AskStatus(), "asking for the status")
            if {"throughput/samples_per_sec", "worker/0/mine"} <= tracking.overview(JobView(status))[1].keys():
                break
            time.sleep(0.01)
        return loss


def log_the_job():
    """Return what a logger of rank 0 got, by step, and how far the scheduler knows each worker to be."""
    kept, strategy = Kept(), PacelineStrategy()
    one = pl.Trainer(
        strategy=strategy, max_epochs=4, accelerator="cpu", devices=1, logger=kept, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    one.fit(Reporting(), loader(BATCH))
    status = current_session().call_scheduler(m.AskStatus(), "asking for the status")
    ways = [[state.progress.step, state.progress.total] for state in status.states if state.progress]
    return {str(step): sorted(found) for step, found in kept.steps.items()}, ways


def go_on(checkpoint):
    """Go on from a checkpoint after the first of two epochs."""
    module = Regression()
    trainer(PacelineStrategy(), 2, **CLIPPING).fit(module, loader(BATCH // 2), ckpt_path=checkpoint)
    return values_of(module)


def reduce_and_broadcast():
    strategy = PacelineStrategy()
    rank = strategy.global_rank
    ones = torch.tensor([rank + 1.0, 3.0])
    strategy.barrier("here")
    return {
        "from 1": strategy.broadcast({"path": f"of {rank}", "epoch": rank}, src=1),
        "sum": strategy.reduce(ones, reduce_op="sum").tolist(),
        "mean": strategy.reduce(torch.tensor(rank)).item(),
        "max": strategy.reduce(ones, reduce_op=torch.distributed.ReduceOp.MAX).tolist(),
        "all": strategy.all_gather(ones).tolist(),
        "any": [strategy.reduce_boolean_decision(rank == 1, all=every) for every in (True, False)],
    }


def exchange_after_unequal_steps():
    """Worker 1 takes two more steps than worker 0, each of which needs a push of both, and then both reduce."""
    strategy = PacelineStrategy()
    rank = strategy.global_rank
    store = kvstore.create("dist_ksync", k=2)
    model = nn.Linear(6, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), store, model=model)
    for _ in range(3 + 2 * rank):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    strategy.reduce(torch.tensor(1.0))
    return strategy.broadcast({"steps": 3 + 2 * rank}, 1)


def refuse():
    """What is refused before anything is sent."""
    strategy = PacelineStrategy()
    found = []
    for wrong in (
        lambda: strategy.broadcast(object(), src=strategy.global_rank),
        lambda: strategy.reduce(torch.zeros(1), reduce_op="product"),
        lambda: strategy.all_gather(torch.zeros(1), sync_grads=True),
        lambda: PacelineStrategy(samples=3),
    ):
        try:
            wrong()
        except (TypeError, ValueError) as error:
            found.append(str(error))
    return found


def refuse_then_exchange():
    return refuse(), reduce_and_broadcast()


def fit_twice():
    module = Regression()
    trainer(PacelineStrategy(), 1).fit(module, loader(BATCH // 2))
    try:
        trainer(PacelineStrategy(), 1).fit(module, loader(BATCH // 2))
    except PacelineError as error:
        return str(error)
    return ""


# ---- tests ---------------------------------------------------------------------------------------------------------


@functools.cache
def alone(kind):
    module = Adversaries() if kind == "adversaries" else Regression()
    more = CLIPPING if kind == "regression" else {}
    trainer("auto", 2, **more).fit(module, loader(BATCH, in_one=True))
    return module


def close(one, other):
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Train with two workers, once for each kind: the folder of the checkpoints, and what each worker found."""

    @functools.cache
    def run(kind):
        folder = tmp_path_factory.mktemp("checkpoints")
        with LocalJob(num_workers=2, num_servers=1) as job:
            return folder, job.run(fit, kind, str(folder), OPTIONS[kind])

    return run


@pytest.mark.parametrize("kind", OPTIONS)
def test_module_trains_as_in_one_process_and_only_rank_0_writes(kind, fitted):
    folder, found = fitted(kind)
    expected = alone(kind)
    assert [one["ranks"] for one in found] == [[0, 2, True, 0], [1, 2, False, 1]]
    assert [one["samples"] for one in found] == [SAMPLES // 2] * 2
    for one in found:
        close(one["values"], values_of(expected))
        assert one["losses"] == pytest.approx(expected.losses, rel=1e-5)
    assert [one["written"] for one in found] == [2, 0]
    assert len({one["same directory"] for one in found}) == 1
    assert [path.name for path in folder.iterdir()] == ["rank0"]


def test_training_goes_on_from_a_checkpoint(fitted):
    folder, (whole, _) = fitted("regression")
    with LocalJob(num_workers=2, num_servers=2) as job:
        for values in job.run(go_on, str(folder / "rank0" / "epoch=0.ckpt")):
            close(values, whole["values"])


@pytest.fixture(scope="module")
def exchanged():
    """What two workers found that were refused some calls, and exchange values then."""
    with LocalJob(num_workers=2, num_servers=1) as job:
        return job.run(refuse_then_exchange)


def test_workers_exchange_numbers_and_plain_data(exchanged):
    for _, found in exchanged:
        assert found == {
            "from 1": {"path": "of 1", "epoch": 1},
            "sum": [3.0, 6.0],
            "mean": 0.5,
            "max": [2.0, 3.0],
            "all": [[1.0, 3.0], [2.0, 3.0]],
            "any": [False, True],
        }


def test_workers_may_have_unequal_steps_before_an_exchange():
    with LocalJob(num_workers=2, num_servers=1, timeout_s=20) as job:
        assert job.run(exchange_after_unequal_steps) == [{"steps": 5}] * 2


def test_what_cannot_be_done_is_refused(exchanged):
    for found, _ in exchanged:
        assert len(found) == 4
        for text, part in zip(found, ("plain data only", "'product'", "sync_grads", "sets samples"), strict=True):
            assert part in text


def test_second_fit_of_a_module_is_refused():
    with LocalJob(num_workers=2, num_servers=1) as job:
        assert all("was trained by fit already" in text for text in job.run(fit_twice))


def test_strategy_trains_alone_with_a_store_of_one_process():
    module, expected = Regression(), alone("regression")
    trainer(PacelineStrategy("local"), 2, **CLIPPING).fit(module, loader(BATCH, in_one=True))
    close(values_of(module), values_of(expected))


def test_loggers_get_the_figures_of_the_job_and_the_scheduler_knows_the_last_step():
    with LocalJob(num_workers=1, num_servers=1) as job:
        [[by_step, ways]] = job.run(log_the_job)
    found = {"paceline/throughput/samples_per_sec", "paceline/time/compute_ratio", "paceline/worker/0/mine"}
    assert found <= set(by_step["15"])
    [[step, total]] = ways  # as the last heartbeat said
    assert 0 <= step < total == 16
