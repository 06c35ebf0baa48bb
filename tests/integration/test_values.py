"""What three workers push is what two servers hold, in every form that keys and values can have."""

import hashlib
import time

import pytest
import torch

from paceline import kvstore
from paceline.testing import LocalJob

WORKERS, ROUNDS = 3, 5
SHAPES = ((2, 3), (1200, 1200))
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


# ---- what runs in the workers: every scenario returns what the test compares -----------------------------------------


def sum_of_ranks(name, rate):
    """Push rank + 1 with the updater `add`; return the smallest and largest element after every round, by key."""
    store = kvstore.create("dist_sync")
    store.set_updater("add", rate=rate)
    ints = name == "float32"
    keys = [3, 99] if ints else ["small", "big"]
    store.init(keys, [torch.ones(shape, dtype=DTYPES[name]) for shape in SHAPES])
    seen = []
    for _ in range(ROUNDS):
        store.push(keys, [torch.full(shape, store.rank + 1.0, dtype=DTYPES[name]) for shape in SHAPES])
        outs = [torch.zeros(shape, dtype=DTYPES[name]) for shape in SHAPES]
        store.pull(keys, outs)
        seen.append([[float(out.min()), float(out.max())] for out in outs])
    return seen


def forms():
    """Lists, lists of lists, device lists, pushpull and broadcast; all of one store without an updater."""
    store = kvstore.create("dist_sync")
    mine = float(store.rank + 1)
    store.init("one", torch.zeros(4))
    store.init(["a", "b"], [torch.zeros(3), torch.zeros(2, 2)])
    found = {}

    store.push("one", [torch.full((4,), mine), torch.full((4,), 10.0)])
    outs = [torch.zeros(4), torch.zeros(4)]
    store.pull("one", outs)
    found["device values"] = [out.tolist() for out in outs]

    store.push(["a", "b"], [[torch.full((3,), mine)] * 2, [torch.full((2, 2), 2 * mine)] * 3])
    a, b = torch.zeros(3), torch.zeros(2, 2)
    store.pull(["b", "a"], [[b], [a]])
    found["lists of lists"] = [a.tolist(), b.tolist()]

    value = torch.full((3,), mine)
    store.pushpull("a", value)
    found["pushpull in place"] = value.tolist()
    out, value = torch.zeros(3), torch.full((3,), mine)
    store.pushpull("a", value, out)
    found["pushpull"] = [value.tolist(), out.tolist()]
    found["priority"] = out.tolist()

    given, outs = torch.full((5,), 7.0 * mine), [torch.zeros(5), torch.zeros(5)]
    store.broadcast("new", given, outs)
    found["broadcast"] = [given.tolist(), *(one.tolist() for one in outs)]

    kept = torch.full((5,), mine)
    store.push("new", kept)
    kept.fill_(-1.0)
    out = torch.zeros(5)
    store.pull("new", out)
    found["the caller's tensor is not kept"] = out.tolist()

    store.init("scalar", torch.tensor(1.0))
    scalar = torch.tensor(mine)
    store.pushpull("scalar", scalar)
    found["0-d"] = scalar.item()
    return found


def arrival(order):
    """Push numbers whose sum depends on the order, with workers held back in the given order; return the bits."""
    store = kvstore.create("dist_sync")
    store.init("x", torch.zeros(1000))
    generator = torch.Generator().manual_seed(store.rank)
    found = []
    for _ in range(4):
        value = torch.randn(1000, generator=generator) * 10 ** (4 * store.rank)
        # Delays that differ by far more than a push takes put the arrivals in order; nothing depends on their size.
        time.sleep(0.1 * order.index(store.rank))
        store.pushpull("x", value)
        found.append(hashlib.sha256(value.numpy().tobytes()).hexdigest())
    return found


def compressed(with_pushpull):
    """Push 0.7, threshold 0.5, three times: the residual carries over."""
    store = kvstore.create("dist_sync")
    store.set_updater("add")
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.init("x", torch.zeros(130))
    seen = []
    for _ in range(3):
        out = torch.zeros(130)
        if with_pushpull:
            store.pushpull("x", torch.full((130,), 0.7), out)
        else:
            store.push("x", torch.full((130,), 0.7))
            store.pull("x", out)
        seen.append(sorted(set(out.tolist())))
    return seen


def master_weights(multi_precision):
    """Add 2**-12 sixteen times to a float16 of 1.0: each alone is lost in rounding."""
    store = kvstore.create("dist_sync")
    from paceline.updaters import make_spec

    store.set_spec(make_spec("sgd", lr=1.0, multi_precision=multi_precision))
    store.init("x", torch.ones(8, dtype=torch.float16))
    out = torch.zeros(8, dtype=torch.float16)
    for _ in range(16):
        store.push("x", torch.full((8,), -(2.0**-12) / WORKERS, dtype=torch.float16))
    store.pull("x", out)
    return out.tolist()


def multipliers_and_rates():
    """A rate set between two rounds counts from the next one on."""
    store = kvstore.create("dist_sync")
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("x", torch.zeros(2))
    out, seen = torch.zeros(2), []
    for rate in (1.0, 0.5, 0.25):
        store.set_options([{"lr": rate}])
        store.pushpull("x", torch.full((2,), -1.0), out)
        seen.append(out[0].item())
    return seen


def counters():
    """Three rounds of the one key of a store: a server without keys does not count."""
    store = kvstore.create("dist_sync")
    store.set_optimizer("sgd", learning_rate=0.5)
    store.init("x", torch.zeros(3))
    for _ in range(3):
        store.pushpull("x", torch.ones(3))
    store.barrier()
    stats = store.stats()
    return [stats["updates"], stats["step_mass"], sorted(stats["data_mass"].values())]


def errors():
    """Refusals of wrong calls: [type, text], by what is wrong; the store works on afterwards."""
    store = kvstore.create("dist_sync")
    store.init("x", torch.zeros(3))
    calls = {
        "unknown key": lambda: store.push("y", torch.zeros(3)),
        "initialised twice": lambda: store.init("x", torch.zeros(3)),
        "wrong shape": lambda: store.push("x", torch.zeros(4)),
        "integers": lambda: store.init("i", torch.zeros(3, dtype=torch.int64)),
        "unknown optimizer": lambda: store.set_optimizer("adamm"),
        "option": lambda: store.set_optimizer("adam", momentumm=0.9),
        "callable": lambda: store.set_updater(lambda key, merged, stored: None),
        "unknown command": lambda: store.send_command_to_servers("pnig"),
        "unknown type": lambda: kvstore.create("dist_snyc"),
    }
    found = {}
    for what, call in calls.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - the test looks at what it is
            found[what] = [type(error).__name__, str(error)]
    store.barrier()
    found["after"] = float(_summed(store))
    found["ping"] = store.send_command_to_servers("ping", "hello")
    return found


def _summed(store):
    out = torch.zeros(3)
    store.pushpull("x", torch.ones(3), out)
    return out[0]


def run_all():
    found = {f"sum {name}": sum_of_ranks(name, rate) for name, rate in RATES.items()}
    found |= {"forms": forms(), "rates": multipliers_and_rates()}
    found["arrival"] = [arrival(list(order)) for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0))]
    found["2bit push"], found["2bit pushpull"] = compressed(False), compressed(True)
    found["master"], found["no master"] = master_weights(True), master_weights(False)
    found["counters"], found["errors"] = counters(), errors()
    return found


RATES = {"float32": 2.0, "float16": 2.0, "bfloat16": 0.25, "float64": 0.125}


# ---- the tests -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    with LocalJob(WORKERS, 2, timeout_s=60) as job:
        return job.run(run_all)


@pytest.mark.parametrize("name", RATES)
def test_pushed_ranks_add_up_round_by_round(found, name):
    n, rate = WORKERS, RATES[name]
    for worker in found:
        for i, keys in enumerate(worker[f"sum {name}"]):
            expected = n * (n + 1) * rate / 2 * (i + 1) + 1
            if name == "bfloat16":
                expected = float(torch.tensor(expected).to(torch.bfloat16))
            assert keys == [[expected, expected]] * len(SHAPES)


def test_values_of_devices_and_workers_are_summed(found):
    for worker in found:
        forms = worker["forms"]
        assert forms["device values"] == [[36.0] * 4] * 2
        assert forms["lists of lists"] == [[12.0] * 3, [[36.0] * 2] * 2]
        assert forms["the caller's tensor is not kept"] == [6.0] * 5
        assert forms["0-d"] == 6.0


def test_pushpull_brings_the_sum_into_out_or_into_the_value(found):
    for rank, worker in enumerate(found):
        assert worker["forms"]["pushpull in place"] == [6.0] * 3
        assert worker["forms"]["pushpull"] == [[rank + 1.0] * 3, [6.0] * 3]


def test_broadcast_brings_the_values_of_worker_0(found):
    for rank, worker in enumerate(found):
        assert worker["forms"]["broadcast"] == [[7.0 * (rank + 1)] * 5, [7.0] * 5, [7.0] * 5]


def test_order_of_arrival_does_not_change_a_bit(found):
    digests = {tuple(one) for worker in found for one in worker["arrival"]}
    assert len(digests) == 1


def test_2bit_sends_thresholds_and_keeps_the_rest(found):
    # 0.7 each: 0.5 is sent and 0.2 kept; 0.9: 0.5 and 0.4; 1.1: 0.5 and 0.6. Three workers add to 1.5 a round.
    for worker in found:
        assert worker["2bit push"] == [[1.5], [3.0], [4.5]]
        assert worker["2bit pushpull"] == [[1.5], [3.0], [4.5]]


def test_master_weights_keep_what_half_precision_loses(found):
    for worker in found:
        assert worker["master"] == pytest.approx([1 + 16 * 2.0**-12] * 8, abs=2.0**-11)
        assert worker["no master"] == [1.0] * 8


def test_counters_are_per_key_however_many_servers_there_are(found):
    assert all(worker["counters"] == [3.0, 1.5, [3.0] * WORKERS] for worker in found)


def test_a_new_rate_counts_from_the_next_round_on(found):
    assert all(worker["rates"] == [3.0, 4.5, 5.25] for worker in found)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("unknown key", "KeyMismatchError", "'y' is not initialised"),
        ("initialised twice", "KeyMismatchError", "'x' is initialised already"),
        ("wrong shape", "ValueError", "has shape (3,), but the given value has (4,)"),
        ("integers", "TypeError", "not int64"),
        ("unknown optimizer", "ValueError", "did you mean 'adam'"),
        ("option", "TypeError", "has no option 'momentumm'"),
        ("callable", "TypeError", "--allow"),
        ("unknown command", "ValueError", "ping"),
        ("unknown type", "ValueError", "did you mean 'dist_sync'"),
    ],
)
def test_wrong_calls_are_refused_with_the_remedy(found, what, kind, words):
    for worker in found:
        assert worker["errors"][what][0] == kind
        assert words in worker["errors"][what][1]


def test_refusals_change_nothing(found):
    for worker in found:
        assert worker["errors"]["after"] == float(WORKERS)
        assert worker["errors"]["ping"] == ["hello", "hello"]
