"""Local steps against models of them that are written out, and against training in one process."""

import functools
import logging
import math
import time

import pytest
import torch
from torch import distributed, nn

import paceline
from paceline import DistributedOptimizer, kvstore
from paceline.consistency import Policy
from paceline.hetero.local_period import Period
from paceline.hetero.local_plan import ExchangeCost
from paceline.optim.auto_period import AutoPeriod
from paceline.optim.local_choices import LocalChoices
from paceline.testing import LocalJob
from paceline.testing.one_process import OneProcess
from paceline.updaters import DelayedNesterov
from tests.docs.pages import blocks

PLAIN = {"lr": 1.0, "momentum": 0.0}


MOMENTUM, UNEQUAL = ("SGD", {"lr": 0.05, "momentum": 0.9}), (6, 2)
#: Options of a job, and of its replay.
WRITTEN_OUT = {
    "nesterov": {"local_steps": 3},
    "momentum, unequal batches": {"local_steps": 2, "inner": MOMENTUM, "sizes": UNEQUAL},
    "fragments": {"local_steps": 4, "fragments": 2},
    "outer sgd": {"local_steps": 4, "outer": {"lr": 0.5, "momentum": 0.0}},
    **{
        f"late, {blend}": {"local_steps": 4, "fragments": 2, "delay": 1, "blend": blend}
        for blend in (0.0, 0.5, 1.0, None)
    },
}
ONE = {"one step": {"local_steps": 1, "outer": PLAIN, "sizes": UNEQUAL}, "lock step": {"sizes": UNEQUAL}}
STEPS = 9
SPARSE = {"type": "chunktopk", "k": 2, "chunk": 16, "leg": "both"}
RESUMED = {
    "uncompressed": {},
    "int4 both ways": {"compression": {"type": "int4", "leg": "both"}},
    "sparse": {"compression": SPARSE},
}
MODES = {"dist_async": {}, "dist_ssync": {"staleness": 2}, "dist_gsync": {"groups": [[0], [1]]}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Weights and buffers of worker 0 after each step, by case."""
    with LocalJob(2, 2) as running:
        return running.run(train_all, str(tmp_path_factory.mktemp("torch") / "group"))[0]


@pytest.fixture(scope="module")
def together_by_mode():
    with LocalJob(2, 1) as running:
        return running.run(all_modes)


def train_all(group):
    found = {name: train("dist_sync", STEPS, **options) for name, options in {**WRITTEN_OUT, **ONE}.items()}
    for name, options in RESUMED.items():
        found["whole, " + name], found["parts, " + name] = resumed(1, **options), resumed(2, **options)
    return {**found, "ended": ends_within_a_period(), "as torch": as_torch(group)}


def train_alone():
    alone = net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(alone, 0, step).backward()
        optimizer.step()
    return train("dist_sync", 5, local_steps=2, outer=PLAIN)[-1][0], listed(weights(alone))


def all_modes():
    return {kind: together(kind) for kind in MODES}


def as_torch(group):
    """Train by each line of the page that brings a loop of torch here; return the weights."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    lines, found = blocks("docs/slow-networks.md", "python")[1:], []
    for line in lines:
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, 0.1)
        nn.init.constant_(model.bias, 0.0)
        names = {"model": model, "torch": torch, "paceline": paceline}
        names |= {"PostLocalSGDOptimizer": PostLocalSGDOptimizer, "PeriodicModelAverager": PeriodicModelAverager}
        rank = kvstore.create("dist_sync").rank
        if "Periodic" in line:
            distributed.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=2)
        exec(line, names)
        for step in range(16):
            names["optimizer"].zero_grad()
            loss_of(model, rank, step).backward()
            names["optimizer"].step()
        found.append(listed(weights(model)))
    distributed.destroy_process_group()
    return found


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def batch(rank, step, size=4):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, 3, generator=generator), torch.randn(size, 2, generator=generator)


def loss_of(model, rank, step, size=4):
    inputs, targets = batch(rank, step, size)
    return nn.functional.mse_loss(model(inputs), targets)


def weights(model):
    return [one.detach().clone() for one in model.parameters()]


def buffers(model):
    return [one.clone() for one in model.buffers() if one.is_floating_point()]


def listed(tensors):
    return [one.flatten().tolist() for one in tensors]


def farthest(ours, theirs):
    return max(abs(one - other) for a, b in zip(ours, theirs, strict=True) for one, other in zip(a, b, strict=True))


def train(kind, steps, inner=("SGD", {"lr": 0.1}), sizes=(4, 4), **options):
    """Train; return the weights and the buffers after each step."""
    store = kvstore.create(kind)
    model = net(store.rank)  # rank 0's are used
    own = getattr(torch.optim, inner[0])(model.parameters(), **inner[1])
    optimizer = DistributedOptimizer(own, store, model=model, samples=sizes[store.rank], **options)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, store.rank, step, sizes[store.rank]).backward()
        optimizer.step()
        found.append((listed(weights(model)), listed(buffers(model))))
    store.barrier()
    optimizer.close()
    return found


def replay(steps, period, inner=("SGD", {"lr": 0.1}), sizes=(4, 4), outer=None, fragments=1, delay=0, blend=None):
    """Return the weights of worker 0 after each step: DiLoCo in one process, written out."""
    total = sum(sizes)
    models = [net(), net()]
    optimizers = [getattr(torch.optim, inner[0])(model.parameters(), **inner[1]) for model in models]
    outer = {"lr": 0.7, "momentum": 0.9, "nesterov": True} if outer is None else outer
    anchor, moments = weights(models[0]), [torch.zeros_like(one) for one in weights(models[0])]
    means = buffers(models[0])
    mine = [list(range(number, len(anchor), fragments)) for number in range(fragments)]
    late, found = [], []
    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step - 1, sizes[rank]).backward()
            optimizer.step()
        for _, part, new, sent in [one for one in late if one[0] == step]:
            _blend(models, part, new, blend, sent)
        since = (step - 1) % period + 1
        for number, part in enumerate(mine):
            if since != math.ceil(period * (number + 1) / fragments):
                continue
            for index in part:
                deltas = [anchor[index] - list(model.parameters())[index].detach() for model in models]
                delta = sum(size * one for size, one in zip(sizes, deltas, strict=True)) / total
                moments[index] = outer.get("momentum", 0) * moments[index] + delta
                down = delta + outer["momentum"] * moments[index] if outer.get("nesterov") else moments[index]
                anchor[index] = anchor[index] - outer["lr"] * down
            new = {index: anchor[index].clone() for index in part}
            if number == fragments - 1:
                means = [
                    sum(size * one for size, one in zip(sizes, ones, strict=True)) / total
                    for ones in zip(*map(buffers, models), strict=True)
                ]
            if delay:
                late.append((step + delay, part, new, [weights(model) for model in models]))
            else:
                _blend(models, part, new, 0.0)
                if number == fragments - 1:
                    for model in models:
                        for buffer, mean in zip(
                            [b for b in model.buffers() if b.is_floating_point()], means, strict=True
                        ):
                            buffer.copy_(mean)
        found.append((listed(weights(models[0])), listed(buffers(models[0]))))
    return found


def _blend(models, part, new, blend, sent=()):
    with torch.no_grad():
        for rank, model in enumerate(models):
            for index in part:
                param = list(model.parameters())[index]
                if blend is None:
                    param.add_(new[index] - sent[rank][index])
                else:
                    param.copy_(blend * param + (1 - blend) * new[index])


@pytest.mark.parametrize("case", WRITTEN_OUT)
def test_weights_and_buffers_are_those_of_diloco_written_out(trained, case):
    options = dict(WRITTEN_OUT[case])
    expected = replay(STEPS, options.pop("local_steps"), **options)
    for ours, theirs in zip(trained[case], expected, strict=True):
        assert farthest(ours[0], theirs[0]) < 1e-6
        assert options.get("delay") or farthest(ours[1], theirs[1]) < 1e-6


def test_one_local_step_of_sgd_is_lock_step(trained):
    for ours, theirs in zip(trained["one step"], trained["lock step"], strict=True):
        assert farthest(ours[0], theirs[0]) < 1e-6


@pytest.mark.parametrize("case", RESUMED)
def test_resumed_training_is_that_of_one_that_went_on(trained, case):
    assert trained["whole, " + case] == trained["parts, " + case]


def test_last_steps_count_when_workers_exchange_them(trained):
    expected = replay(6, 4)[-1]
    assert farthest(trained["ended"], expected[0]) > 1e-4


def test_loop_of_torch_that_comes_here_as_the_page_says_has_the_same_weights(trained):
    theirs, ours = trained["as torch"]
    assert farthest(ours, theirs) < 1e-6


def test_one_worker_whose_progress_is_applied_as_it_is_trains_as_without_us():
    with LocalJob(1, 1) as running:
        [[ours, theirs]] = running.run(train_alone)
    assert ours == theirs


@pytest.mark.parametrize("kind", MODES)
def test_workers_of_other_modes_train_together(together_by_mode, kind):
    for losses in together_by_mode:
        assert losses[kind][-1] < 0.5 * losses[kind][0]


def together(kind):
    """Fit one problem; return the losses over all samples at the start and the end."""
    store = kvstore.create(kind, **MODES[kind])
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    everything = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    targets = everything @ torch.tensor([[1.0], [-2.0], [0.5]])
    outer = None if kind == "dist_async" else {"lr": 0.5}
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), store, model=model, local_steps=4, outer=outer
    )
    losses = [nn.functional.mse_loss(model(everything), targets).item()]
    mine = slice(store.rank, None, 2)
    for _ in range(24):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(everything[mine]), targets[mine]).backward()
        optimizer.step()
    losses.append(nn.functional.mse_loss(model(everything), targets).item())
    store.barrier()
    return losses


def asynchronous(outer):
    """Two workers push deltas one by one, not in turn; return what each of them reads."""
    stores = (job := OneProcess("aa")).stores(Policy("each"))
    for store in stores:
        store.set_optimizer(outer([torch.nn.Parameter(torch.zeros(1))]))
    for store in stores:
        store.init("w", torch.zeros(1))
    found, value = [], torch.zeros(1)
    for rank, delta in ((0, 1.0), (1, 2.0), (1, 0.5), (0, 4.0)):
        stores[rank].push("w", torch.tensor([delta]))
        job.deliver_all()
        stores[rank].pull("w", value)
        found.append(value.item())
    return found


def test_asynchronous_workers_share_the_momentum_of_one_step():
    choices = LocalChoices(Period(steps=8), {"lr": 0.5, "momentum": 0.5, "nesterov": True})
    delayed = functools.partial(DelayedNesterov, lr=0.5, momentum=0.5, every=2)
    assert asynchronous(delayed) == [-0.25, -1.125, -1.25, -3.0]
    own = LocalChoices(Period(steps=8)).optimizer([torch.nn.Parameter(torch.zeros(1))], 4, "each")
    assert (type(own), own.defaults) == (DelayedNesterov, {"lr": 0.7, "momentum": 0.9, "every": 4})
    weight = momentum = 0.0
    ahead = []
    for delta in (1.0, 2.0, 0.5, 4.0):
        momentum = 0.5 * momentum + delta
        weight -= 0.5 * momentum
        ahead.append(weight - 0.5 * 0.5 * momentum)
    found = asynchronous(lambda params: choices.optimizer(params, 2, "each"))
    assert found == ahead, "workers start from the weights that momentum will lead to"


def by_speed():
    """Worker 1 takes four times as long for a step; return the steps that each takes in its periods, and the end."""
    model = net()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), "dist_sync", model=model, local_steps="12 by speed",
        compression="fp16",
    )  # fmt: skip
    rank, steps = optimizer.kvstore.rank, []
    for _ in range(10):
        taken = 0
        while not taken or optimizer._merging._progress.taken:
            time.sleep(0.04 if rank else 0.01)
            optimizer.zero_grad()
            loss_of(model, rank, taken).backward()
            optimizer.step()
            taken += 1
        steps.append(taken)
    optimizer.close()
    return steps, listed(weights(model))


def test_slow_worker_takes_fewer_steps_and_has_the_weights_of_all():
    with LocalJob(2, 1) as running:
        (fast, ours), (slow, theirs) = running.run(by_speed)
    assert (fast[0], slow[0]) == (12, 12)
    assert max(slow[-3:]) < min(fast[-3:])
    assert ours == theirs


SLOW_BYTE_S = {"dist_sync": 2e-3, "dist_async": 1e-5}


def automatic():
    """Train on a link that seems slow at first; return the plans, steps of periods, weights and log lines, by store."""
    lines = []
    logging.getLogger("paceline.optim.auto_period").addHandler(_Lines(lines))
    AutoPeriod.note = lambda self, travel_s, own_s: self._told.append(ExchangeCost(1e-4 * (travel_s > 0), 0.0))
    found = {}
    for kind, byte_s in SLOW_BYTE_S.items():
        AutoPeriod._probe = lambda self, byte_s=byte_s: (0.0, byte_s)
        torch.manual_seed(0)
        model = nn.Linear(100, 10)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), kind, model=model, local_steps="auto"
        )
        merging, periods, plans = optimizer._merging, [], []
        while len(periods) < 4:
            optimizer.zero_grad()
            model(torch.ones(4, 100)).square().mean().backward()
            time.sleep(0.01)
            optimizer.step()
            if not merging._progress.taken:
                periods.append(merging._progress.steps)
                plans.append([merging._auto.plan.steps, merging._auto.plan.codec, merging._delay])
        outer = merging.outer[0].defaults
        found[kind] = [plans, periods, listed(weights(model)), [outer["lr"], outer["momentum"]]]
        optimizer.exchange_now()
        found[kind][2] = listed(weights(model))
        optimizer.kvstore.barrier()
        optimizer.close()
    return found, lines


class _Lines(logging.Handler):
    def __init__(self, lines):
        super().__init__()
        self.lines = lines

    def emit(self, record):
        self.lines.append(record.getMessage())


def test_auto_plans_with_all_workers_and_follows_the_link():
    with LocalJob(2, 1) as running:
        (first, lines), (second, none) = running.run(automatic)
    plans, periods, ours, outer = first["dist_sync"]
    assert [plans, ours, outer] == [second["dist_sync"][0], second["dist_sync"][2], [1.0, 0.0]]
    assert plans[0][1] == "chunktopk"
    assert plans[0][0] > 1
    assert periods[0] == 5
    assert plans[-1][0] < plans[0][0], "the link is quick"
    assert first["dist_async"][0][0][1] == ""
    assert none == []
    assert lines[0].startswith("local_steps='auto': periods of ")
    assert ", chunktopk both ways, answers up to " in lines[0]


def resumed(times, **options):
    """Train 8 steps in so many parts, each with a new optimizer; return the weights."""
    model, state, step = net(), None, 0
    for _ in range(times):
        optimizer = DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=0.01), "dist_sync", model=model, local_steps=2, **options
        )
        if state is not None:
            optimizer.load_state_dict(state)
        for _ in range(8 // times):
            optimizer.zero_grad()
            loss_of(model, optimizer.kvstore.rank, step).backward()
            optimizer.step()
            step += 1
        state = optimizer.state_dict()
        optimizer.close()
    return listed(weights(model))


def ends_within_a_period():
    model = net()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), "dist_sync", model=model, local_steps=4
    )
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, optimizer.kvstore.rank, step).backward()
        optimizer.step()
    optimizer.exchange_now()
    optimizer.close()
    return listed(weights(model))


def test_codecs_of_local_steps_need_servers():
    model = net()
    with pytest.raises(ValueError, match="no servers"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), "local", local_steps=2, compression="int4")
