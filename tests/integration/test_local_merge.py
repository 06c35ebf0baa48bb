"""Local merge in real jobs on two hosts with two workers and a server each."""

import hashlib
import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

import paceline
from paceline import DistributedOptimizer, kvstore
from paceline.errors import ConfigError, DeadlineError, PacelineError, PeerDiedError, RemoteError
from paceline.testing import listen, tell
from tests.clusters.hosts import Hosts, HostsJob, why_no_hosts

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "possible")]

WORKERS, NOTICED_WITHIN_S = 4, 5.0
NUMEL, ROUNDS = 100_000, 5
SIZES = (48, 16, 16, 16)
GROUPS = [[0, 1], [2, 3]]
SOURCES = str(Path(paceline.__file__).parents[1])
FAULTY = """
import torch

class Faulty(torch.optim.SGD):
    def step(self, closure=None):
        raise ZeroDivisionError("this optimizer never works")
"""


# ---- what runs in the workers --------------------------------------------------------------------------------------


def routes(store):
    """Return [owner, via] of all routes of a store's pushes, and the servers that share memory."""
    blocks = store.table.blocks.values()
    return [
        sorted({tuple(route) for block in blocks for route in block.routes}),
        sorted({s for b in blocks for s in b.mapped}),
    ]


def digest(values):
    return hashlib.sha256(torch.cat([one.detach().reshape(-1) for one in values]).numpy().tobytes()).hexdigest()


def new_model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5))


def train(model, optimizer, part):
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(96, 20, generator=generator), torch.randint(0, 5, (96,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[part]), targets[part]).backward()
        optimizer.step()


def train_unequal_batches(rank):
    """Return the largest difference to one process that sees all batches, and a digest of the weights."""
    start = sum(SIZES[:rank])
    model, reference = new_model(rank), new_model(0)
    optimizer = DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=3e-3), "dist_sync", model=model, batch_dim=0
    )
    train(model, optimizer, slice(start, start + SIZES[rank]))
    train(reference, torch.optim.Adam(reference.parameters(), lr=3e-3), slice(None))
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    difference = max((one - other).abs().max().item() for one, other in pairs)
    found = [difference, digest(model.parameters()), routes(optimizer.kvstore)]
    optimizer.kvstore.close()
    return found


def exchange_much():
    """Several rounds of keys of both servers, while the test counts what crosses the network."""
    store = kvstore.create("dist_sync")
    store.set_optimizer("sgd", lr=0.1)
    keys = [f"w{index}" for index in range(8)]
    store.init(keys, [torch.zeros(NUMEL)] * 8)
    outs = [torch.zeros(NUMEL) for _ in keys]
    store.pull(keys, outs)
    counted = network_bytes(store)
    tell("ready")
    listen()
    for number in range(ROUNDS):
        chance = torch.Generator().manual_seed(10 * number + store.rank)
        store.push(keys, [torch.randn(NUMEL, generator=chance) for _ in keys])
    for step in store.table.plan(tuple(keys)).steps:
        store.traffic.wait(step)
    tell("done")
    listen()
    counted = network_bytes(store) - counted
    store.pull(keys, outs)
    return [digest(outs), counted]


def network_bytes(store):
    """Read the counter while nobody adds to it."""
    store.barrier()
    counted = store.stats()["network_bytes"]
    store.barrier()
    return counted


def uneven_rounds():
    """Worker r makes r + 1 rounds, comes to a barrier, and makes two more."""
    store = kvstore.create("dist_sync")
    store.set_updater("add")
    keys = ["a", "b"]
    store.init(keys, [torch.zeros(1000), torch.zeros(1000)])
    outs = [torch.zeros(1000), torch.zeros(1000)]
    found = []
    for rounds in (store.rank + 1, 2):
        for _ in range(rounds):
            store.push(keys, [torch.full((1000,), 1.0 + store.rank)] * 2)
        store.barrier()
        store.pull(keys, outs)
        found.append([one.unique().tolist() for one in outs])
    return found


def leave_early():
    """Worker r makes 2 + r rounds and leaves; return what it saw in every round."""
    store = kvstore.create("dist_sync")
    store.set_updater("add")
    store.init(["a", "b"], [torch.zeros(10), torch.zeros(10)])
    seen = []
    for _ in range(2 + store.rank):
        values = [torch.ones(10), torch.ones(10)]
        store.pushpull(["a", "b"], values)
        seen.append([one.unique().tolist() for one in values])
    store.close()
    return seen


def groups_by_host():
    """Each group is on one host: everything that it sends to the other host is a sum."""
    store = kvstore.create("dist_gsync", groups=GROUPS, weighting="none")
    store.set_updater("add")
    store.init(["a", "b"], [torch.zeros(10), torch.zeros(10)])
    for _ in range(3 + store.rank // 2):
        store.pushpull(["a", "b"], [torch.full((10,), 10.0**store.rank)] * 2, [torch.zeros(10), torch.zeros(10)])
    store.barrier()
    # The last round of all shows everybody the same values.
    for rank in range(WORKERS // 2):
        if store.rank // 2 == rank:
            store.push(["a", "b"], [torch.zeros(10)] * 2)
        store.barrier()
    outs = [torch.zeros(10), torch.zeros(10)]
    store.pull(["a", "b"], outs)
    return [routes(store), [one.unique().tolist() for one in outs] if store.rank >= 2 else []]


def rows_and_codes():
    """Rows go to their server directly, encoded pushes too; both in a store whose other keys are merged."""
    store = kvstore.create("dist_sync")
    store.set_updater("add")
    store.init(["dense", "rows"], [torch.zeros(10), torch.zeros(6, 2).to_sparse(1)])
    rows = torch.sparse_coo_tensor([[store.rank]], torch.ones(1, 2), (6, 2), check_invariants=True)
    store.push(["dense", "rows"], [torch.ones(10), rows])
    store.barrier()
    dense, table = torch.zeros(10), torch.zeros(6, 2)
    store.pull(["dense", "rows"], [dense, table])
    coded = kvstore.create("dist_sync")
    coded.set_gradient_compression({"type": "fp16"})
    coded.set_updater("add")
    coded.init(["a", "b"], [torch.zeros(10), torch.zeros(10)])
    values = [torch.full((10,), 0.5), torch.full((10,), 0.25)]
    coded.pushpull(["a", "b"], values)
    return [dense.unique().tolist(), table[:, 0].tolist(), [one.unique().tolist() for one in values]]


def without_shared_memory(rank):
    """Worker 1 gets no shared memory: its gradients travel through the server of its host all the same."""
    if rank == 1:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    store = kvstore.create("dist_sync")
    store.set_updater("add")
    store.init(["a", "b"], [torch.zeros(NUMEL), torch.zeros(NUMEL)])
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for _ in range(2):
        values = [torch.full((NUMEL,), 1.0 + rank)] * 2
        outs = [torch.zeros(NUMEL), torch.zeros(NUMEL)]
        store.pushpull(["a", "b"], values, outs)
    return [routes(store), [one.unique().tolist() for one in outs]]


def refused():
    """What the owner says reaches the workers behind a sum."""
    store = kvstore.create("dist_gsync", groups=[[0, 1, 2, 3]])
    store.init(["a", "b"], [torch.zeros(4), torch.zeros(4)])
    found = []
    for _ in range(2):
        try:
            store.pushpull(["a", "b"], [torch.ones(4), torch.ones(4)])
        except (ConfigError, PacelineError) as error:
            found.append([type(error).__name__, str(error)])
    broken = kvstore.create("dist_sync")
    broken.set_optimizer("faulty:Faulty", lr=1.0)
    broken.init(["a", "b"], [torch.zeros(4), torch.zeros(4)])
    for key in ("a", "b"):
        try:
            broken.pushpull(key, torch.ones(4))
        except RemoteError as error:
            found.append([type(error).__name__, str(error)])
    return found


def all_scenarios(rank):
    return {
        "much": exchange_much(),
        "batches": train_unequal_batches(rank),
        "uneven": uneven_rounds(),
        "leave": leave_early(),
        "groups": groups_by_host(),
        "rows and codes": rows_and_codes(),
        "no shared memory": without_shared_memory(rank),
        "refused": refused(),
    }


def run_all():
    return all_scenarios(int(os.environ["PACELINE_RANK"]))


def train_until_failure():
    """Train for ever; return [error type, text, when] of what ends it."""
    store = kvstore.create("dist_sync")
    store.set_updater("add")
    store.init(["a", "b"], [torch.zeros(1000), torch.zeros(1000)])
    values = [torch.ones(1000), torch.ones(1000)]
    store.pushpull(["a", "b"], values)
    tell("training")
    try:
        while True:
            store.pushpull(["a", "b"], values)
    except PacelineError as error:
        return [type(error).__name__, str(error), time.monotonic()]


def miss_a_deadline():
    """Worker 0 waits for one that does not push: first for its neighbour, then for one of the other host."""
    store = kvstore.create("dist_sync")
    store.set_updater("add")
    store.init(["a", "b"], [torch.zeros(4), torch.zeros(4)])
    [far] = [key for key in ("a", "b") if store.table.locate([key])[0][0].routes[store.table.locate([key])[0][1]].owner]
    found = []
    for late in (1, 3):
        if store.rank != late:
            try:
                store.pushpull(far, torch.ones(4))
            except DeadlineError as error:
                found.append(str(error))
            tell("waited")
        listen()
        if store.rank == late:
            store.pushpull(far, torch.ones(4))
        else:
            store.pull(far, torch.zeros(4))
    return found


# ---- the tests -----------------------------------------------------------------------------------------------------


def job(hosts, **settings):
    # Keys of these sizes are not packed: each server has some.
    return HostsJob(hosts, workers=[2, 2], servers=[1, 1], **{"timeout_s": 60, **settings})


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return by setting: what the workers returned, and the bytes that crossed the network in the first scenario."""
    folder = tmp_path_factory.mktemp("optimizers")
    (folder / "faulty.py").write_text(FAULTY)
    environment = {"PYTHONPATH": os.pathsep.join([SOURCES, str(folder)])}
    results = {}
    for local_merge in (True, False):
        with (
            Hosts(2) as hosts,
            job(hosts, local_merge=local_merge, environment=environment, allow="faulty:Faulty") as running,
        ):
            workers = running.start_all(run_all)
            assert [worker.heard() for worker in workers] == ["ready"] * WORKERS
            before = [host.counters() for host in hosts]
            for worker in workers:
                worker.tell("go")
            assert [worker.heard() for worker in workers] == ["done"] * WORKERS
            crossed = sum((host.counters() - start).sent for host, start in zip(hosts, before, strict=True))
            for worker in workers:
                worker.tell("go on")
            results[local_merge] = [worker.result(120) for worker in workers], crossed
    return results


@pytest.mark.parametrize("local_merge", [True, False])
def test_workers_train_as_one_process_does_and_stay_equal_bit_for_bit(found, local_merge):
    differences, digests, _ = zip(*(worker["batches"] for worker in found[local_merge][0]), strict=True)
    assert max(differences) < 1e-5
    assert len(set(digests)) == 1


def test_weights_are_the_same_bit_for_bit_with_and_without_local_merge(found):
    for what, index in (("batches", 1), ("much", 0)):
        digests = {worker[what][index] for workers, _ in found.values() for worker in workers}
        assert len(digests) == 1


def test_half_the_bytes_cross_the_network(found):
    pushed_and_answered = 2 * ROUNDS * 8 * NUMEL * 4
    for local_merge, copies in ((True, 1), (False, 2)):
        workers, crossed = found[local_merge]
        assert {worker["much"][1] for worker in workers} == {copies * pushed_and_answered}
        assert copies * pushed_and_answered < crossed < 1.15 * copies * pushed_and_answered


def test_who_pushes_through_whom(found):
    for local_merge, workers in ((one, found[one][0]) for one in found):
        for rank, worker in enumerate(workers):
            own = rank // 2
            expected = [[0, own], [1, own]] if local_merge else [[0, 0], [1, 1]]
            assert worker["batches"][2] == [expected, [own]]


@pytest.mark.parametrize("local_merge", [True, False])
def test_rounds_need_not_be_even_before_a_barrier(found, local_merge):
    for worker in found[local_merge][0]:
        # 1 + 2 * 2 + 3 * 3 + 4 * 4, and two rounds of 1 + 2 + 3 + 4 more.
        assert worker["uneven"] == [[[30.0]] * 2, [[50.0]] * 2]


@pytest.mark.parametrize("local_merge", [True, False])
def test_workers_with_more_rounds_go_on_after_the_others_have_left(found, local_merge):
    sums = [4.0, 8.0, 11.0, 13.0, 14.0]
    for rank, worker in enumerate(found[local_merge][0]):
        assert worker["leave"] == [[[value]] * 2 for value in sums[: 2 + rank]]


def test_groups_merge_on_their_hosts(found):
    for rank, worker in enumerate(found[True][0]):
        own = rank // 2
        assert worker["groups"] == [[[[0, own], [1, own]], [own]], [[3 * 11.0 + 4 * 1100.0]] * 2 if own else []]


@pytest.mark.parametrize("local_merge", [True, False])
def test_rows_and_encoded_pushes_go_to_their_servers(found, local_merge):
    for worker in found[local_merge][0]:
        assert worker["rows and codes"] == [[4.0], [1.0, 1.0, 1.0, 1.0, 0.0, 0.0], [[2.0], [1.0]]]


def test_a_worker_without_shared_memory_is_merged_all_the_same(found):
    for rank, worker in enumerate(found[True][0]):
        own = rank // 2
        assert worker["no shared memory"] == [[[[0, own], [1, own]], [] if rank == 1 else [own]], [[20.0], [20.0]]]


def test_what_the_owner_refuses_reaches_every_worker_behind_a_sum(found):
    for worker in found[True][0]:
        first, _, *broken = worker["refused"]
        assert first[0] == "ConfigError"
        assert "call set_optimizer before the first push" in first[1]
        assert len(broken) == 2
        assert all("ZeroDivisionError: this optimizer never works" in text for _, text in broken)


def test_a_deadline_names_who_is_missing_near_and_far():
    with Hosts(2) as hosts, job(hosts, timeout_s=3) as running:
        workers = running.start_all(miss_a_deadline)
        for late in (1, 3):
            assert [worker.heard() for worker in workers if worker is not workers[late]] == ["waited"] * 3
            for worker in workers:
                worker.tell("go on")
        near, far = workers[0].result()
    assert "it waits for worker 1 on 10.77.0.1" in near
    assert "it waits for worker 3 on 10.77.0.2" in far


@pytest.mark.parametrize("victim", ["worker 1", "server 1"])
def test_survivors_of_kill_9_name_the_dead_within_seconds(victim):
    with Hosts(2) as hosts, job(hosts) as running:
        workers = running.start_all(train_until_failure)
        assert [worker.heard() for worker in workers] == ["training"] * WORKERS
        role, rank = victim.split()
        dead = {"worker": workers, "server": running.servers}[role][int(rank)]
        killed = time.monotonic()
        dead.kill(signal.SIGKILL)
        for kind, text, when in [worker.result(30) for worker in workers if worker is not dead]:
            assert kind == PeerDiedError.__name__
            assert f"{victim} on {running.host_of(role, int(rank)).address}" in text
            assert when - killed < NOTICED_WITHIN_S
        others = [one for one in (*running.servers, running.scheduler) if one is not dead]
        assert all(one.wait(30) != 0 for one in others)
