"""Every consistency model, observed from outside while one worker is slow."""

import hashlib
import os
import time

import pytest
import torch

import paceline
from paceline import kvstore
from paceline.errors import ConfigError, DeadlineError
from paceline.testing import LocalJob

WORKERS, BOUND, FAST_ROUNDS, SLOW_ROUNDS = 4, 2, 30, 12
SLOWNESS_S = 0.03
GROUPS = [[0, 1], [2, 3]]


# ---- what runs in the workers --------------------------------------------------------------------------------------


def note(log, *words):
    """Append a line with the time, in one write: the lines of all workers are in order."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (" ".join(map(str, (time.monotonic(), *words))) + "\n").encode())
    os.close(fd)


def step(store, value, log, number, slow):
    """Make a round; write down when it starts and ends, and what was read."""
    if slow:
        time.sleep(SLOWNESS_S)  # this is the slowness that the tests are about
    note(log, store.rank, "starts", number, "-")
    store.pushpull("w", torch.ones_like(value), value)
    note(log, store.rank, "ends", number, hashlib.sha256(value.numpy().tobytes()).hexdigest())


def new_store(kind, log, **options):
    store = kvstore.create(kind, **options)
    store.set_optimizer("sgd", learning_rate=0.01)
    store.init(["w", "end"], [torch.zeros(500), torch.zeros(1)])
    store.barrier()
    return store


def finish(store):
    """Leave, so that nobody waits for who is done; worker 0 waits for the others and returns the counters."""
    if store.rank != 0:
        store.close()
        return {}
    store.barrier()
    stats = store.stats()
    store.close()
    return {"staleness": stats["staleness"]}


def run_bounded(log):
    """As many rounds for everybody: who is fast must wait for worker 3."""
    store, value = new_store("dist_ssync", log, staleness=BOUND), torch.zeros(500)
    for number in range(1, SLOW_ROUNDS + 1):
        step(store, value, log, number, slow=store.rank == WORKERS - 1)
    return finish(store)


def run_groups(log, staleness=None):
    """The second group is slow, and makes fewer rounds."""
    store, value = new_store("dist_gsync", log, groups=GROUPS, staleness=staleness), torch.zeros(500)
    slow = store.rank in GROUPS[1]
    for number in range(1, (SLOW_ROUNDS if slow else FAST_ROUNDS) + 1):
        step(store, value, log, number, slow=store.rank == GROUPS[1][0])
    return finish(store)


def run_bounded_groups(log):
    """Both groups make as many rounds as the slow one."""
    store, value = new_store("dist_gsync", log, groups=GROUPS, staleness=BOUND), torch.zeros(500)
    for number in range(1, SLOW_ROUNDS + 1):
        step(store, value, log, number, slow=store.rank == GROUPS[1][0])
    return finish(store)


def run_unbounded(kind, log, **options):
    store, value = new_store(kind, log, **options), torch.zeros(500)
    slow = store.rank == WORKERS - 1
    for number in range(1, (SLOW_ROUNDS if slow else FAST_ROUNDS) + 1):
        step(store, value, log, number, slow)
    return finish(store)


def without_optimizer():
    store = kvstore.create("dist_async")
    store.init("w", torch.zeros(3))
    try:
        store.push("w", torch.ones(3))
        store.pull("w", torch.zeros(3))
    except ConfigError as error:
        return str(error)
    return ""


def run_all(logs):
    return {
        "dist_ssync": run_bounded(f"{logs}/dist_ssync"),
        "dist_gsync": run_groups(f"{logs}/dist_gsync"),
        "bounded dist_gsync": run_bounded_groups(f"{logs}/bounded-dist_gsync"),
        "dist_async": run_unbounded("dist_async", f"{logs}/dist_async"),
        "dist_ksync": run_unbounded("dist_ksync", f"{logs}/dist_ksync", k=2),
        "without optimizer": without_optimizer(),
    }


# ---- the tests -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def found(logs):
    with LocalJob(WORKERS, 2, timeout_s=60) as job:
        return job.run(run_all, str(logs))


def events(path):
    """Return (rank, word, round, digest) in the order of time."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(int(line[1]), line[2], int(line[3]), line[4:]) for line in sorted(lines, key=lambda line: float(line[0]))]


def largest_lead(path):
    """Return how many rounds a worker that may go on is ahead of the slowest, at most.

    The slowest counts as done with a round that it has started: it writes that down after its pause, right before the
    push. So the lead is never seen larger than it is.
    """
    started = dict.fromkeys(range(WORKERS), 0)
    lead = 0
    for rank, word, number, _ in events(path):
        if word == "starts":
            started[rank] = number
        else:
            lead = max(lead, number - min(started.values()))
    return lead


@pytest.mark.usefixtures("found")
def test_no_worker_is_further_ahead_than_the_bound(logs):
    assert largest_lead(logs / "dist_ssync") == BOUND


@pytest.mark.usefixtures("found")
def test_bounded_groups_keep_to_the_bound(logs):
    assert largest_lead(logs / "bounded-dist_gsync") == BOUND


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("kind", ["dist_gsync", "dist_async", "dist_ksync"])
def test_fast_workers_run_ahead_where_there_is_no_bound(logs, kind):
    assert largest_lead(logs / kind) > BOUND


@pytest.mark.usefixtures("found")
def test_members_of_a_group_read_the_same_weights_in_every_round(logs):
    read = {}
    for rank, word, number, digest in events(logs / "dist_gsync"):
        if word == "ends":
            read[rank, number] = digest
    for first, second in GROUPS:
        rounds = sorted(number for rank, number in read if rank == first)
        assert rounds
        assert [read[first, number] for number in rounds] == [read[second, number] for number in rounds]
    assert read[0, SLOW_ROUNDS] != read[2, SLOW_ROUNDS], "the groups are at different places"


@pytest.mark.parametrize("kind", ["dist_ssync", "dist_gsync", "dist_async"])
def test_staleness_is_reported(found, kind):
    staleness = {int(age): number for age, number in found[0][kind]["staleness"].items()}
    assert max(staleness) > 1
    assert sum(staleness.values()) >= SLOW_ROUNDS


def test_updates_are_counted_as_the_model_merges(found):
    total = (WORKERS - 1) * FAST_ROUNDS + SLOW_ROUNDS
    expected = {
        "dist_ssync": WORKERS * SLOW_ROUNDS,
        "dist_gsync": FAST_ROUNDS + SLOW_ROUNDS,
        "dist_async": total,
    }
    counted = {kind: sum(found[0][kind]["staleness"].values()) for kind in (*expected, "dist_ksync")}
    # Two pushes make an update, until the slow worker is the only one left.
    assert total // 2 <= counted.pop("dist_ksync") < total
    assert counted == expected


def test_a_store_without_optimizer_says_that_it_needs_one(found):
    for worker in found:
        assert "needs an optimizer" in worker["without optimizer"]
        assert "set_optimizer" in worker["without optimizer"]


def open_early():
    """Rank 0 alone has opened the store when all come to a barrier, and pushes after the others."""
    store = paceline.kvstore.create("dist_sync")
    if store.rank == 0:
        store.init("a", torch.zeros(3))
    store.barrier()
    if store.rank != 0:
        store.init("a", torch.zeros(3))
    got = []
    for _ in range(3):
        if store.rank != 0:
            store.push("a", torch.ones(3))
        store.session.gather("test/others-have-pushed", b"")
        if store.rank == 0:
            store.push("a", torch.ones(3))
        out = torch.zeros(3)
        store.pull("a", out=out)
        got.append(out.tolist())
    return got


def test_a_barrier_before_all_have_opened_the_store_keeps_the_workers_in_step():
    with LocalJob(3, 2, timeout_s=60) as job:
        assert job.run(open_early) == [[[3.0] * 3] * 3] * 3


def miss_a_barrier():
    """Rank 0 gives a barrier up, goes on, and pushes after the others."""
    store = paceline.kvstore.create("dist_sync")
    store.init("a", torch.zeros(3))
    if store.rank == 0:
        with pytest.raises(DeadlineError, match="worker 1"):
            store.barrier()
    store.session.gather("test/given-up", b"", timeout_s=60)
    if store.rank == 1:
        store.push("a", torch.ones(3))
    store.session.gather("test/pushed", b"")
    if store.rank == 0:
        store.push("a", torch.ones(3))
    out = torch.zeros(3)
    store.pull("a", out=out)
    return out.tolist()


def test_worker_that_gives_a_barrier_up_is_waited_for_again():
    with LocalJob(2, 2, timeout_s=3) as job:
        assert job.run(miss_a_barrier) == [[2.0] * 3] * 2
