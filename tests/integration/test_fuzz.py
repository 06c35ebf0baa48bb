"""A server takes a flood of broken messages from whoever holds the job key, and serves on as if nothing had been.

``PACELINE_FUZZ_MESSAGES=1000000 pytest tests/integration/test_fuzz.py`` sends a million, in one or two minutes.
"""

import os
import random
import time
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch

from paceline import compression, kvstore
from paceline.net import Security
from paceline.net.client import identity
from paceline.net.memory import SharedTensor
from paceline.net.sockets import SocketHub
from paceline.testing import LocalJob, listen, tell
from paceline.updaters import KeyOptions, StepOptions, make_spec
from paceline.wire import decode, encode
from paceline.wire import messages as m

MESSAGES = int(os.environ.get("PACELINE_FUZZ_MESSAGES", "100000"))
BURST = 1000
GROWTH_BYTES = 64 * 2**20
STORE, NUMEL = "fuzz", 1000

pytestmark = pytest.mark.timeout(180 + MESSAGES // 1000)

ODD_VALUES = (
    None, True, -1, 0, 1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, float("nan"), float("inf"), -1e308,
    "", "fuzz", "x" * 2000, "\0", b"", b"\xff" * 70, [], [[]], [1, 2, 3], [2**32, 2**32], {}, {"a": 1},
)  # fmt: skip


# ---- valid messages ------------------------------------------------------------------------------------------------


def valid_messages(store, member, shared):
    """Return (body, frames) of every request, in an order in which a server takes those that are for servers."""
    values = np.zeros(NUMEL, np.float32).tobytes()
    codec = compression.make({"type": "2bit", "threshold": 0.5})
    coded = bytes(codec.encode(torch.ones(NUMEL), codec.new_state(NUMEL), round=1))
    entry = m.Entry(0, 0, 0, NUMEL, 0)
    parts = [m.Entry(0, 0, 0, 400, 0), m.Entry(0, 0, 400, 600, 0)]
    rows, ids = m.Entry(1, 0, 0, NUMEL, 0), np.array([3, 17]).tobytes()
    state = m.StateItem(0, 0, 0, NUMEL, "exp_avg", "float32", [NUMEL])
    open_store = m.OpenStore(store, "each", [], 0, -1, "none", False)
    bucket = m.BucketSpec(0, NUMEL, ["a", 7], [400, 600], [[400], [20, 30]])
    spec = msgspec.msgpack.encode(make_spec("adam", lr=0.1))
    options = msgspec.msgpack.encode(StepOptions([{"lr": 0.05}], {"a": KeyOptions(0, 0.5)}))
    fds = [file.fd for file in shared]

    def push(round, entries, frames, coded=False, in_place=False, want=True):
        entries = [msgspec.structs.replace(one, round=round) for one in entries]
        return m.Push(store, entries, 4.0, options, coded, want, in_place), frames

    key = m.KeySpec("a", [20, 50], 0)
    block = m.BlockSpec(0, "float32", [key], [0], [], 1000, "balanced", False)
    return [
        (open_store, []),
        (m.Init(store, 0, "float32", [bucket]), [values]),
        (m.SetUpdater(store, spec), []),
        (m.SetCompression(store, msgspec.msgpack.encode(codec.params())), []),
        (m.SetCompression(store, msgspec.msgpack.encode(codec.params()), "pull"), []),
        (m.MapArena(store, 0, member.pid, *fds, 4 * NUMEL, [0]), []),
        (m.AskValues(store, 0), []),
        push(1, [entry], [values]),
        push(2, [entry], [coded], coded=True),
        push(3, [entry], [], in_place=True),
        push(4, parts, [values[:1600], values[1600:]]),
        push(5, parts, [], in_place=True, want=False),
        (m.Init(store, 1, "float32", [m.BucketSpec(0, NUMEL, ["rows"], [NUMEL], [[20, 50]])]), [values]),
        (msgspec.structs.replace(push(1, [rows], [])[0], want=False, rows=True), [ids, values[:400]]),
        (m.PullRows(store, rows), [ids]),
        (m.Pull(store, [entry], False), []),
        (m.Pull(store, parts, True), []),
        (m.GetState(store, [entry]), []),
        (m.SetState(store, [state]), [values]),
        (m.SetState(store, [msgspec.structs.replace(state, shape=[2**47, 2**47, 0])]), [b""]),
        (m.SetState(store, [msgspec.structs.replace(state, name="unsent", dtype="float64")]), [values * 2]),
        (m.Command("ping", "hello"), []),
        (m.AskStats(store), []),
        (m.AskMissing(store, entry), []),
        (m.Probe([1, 2, 3]), []),
        (m.Claim("worker", member.rank, member.token), []),
        (m.Regroup(store, 1, [[0]]), []),
        (m.Leave(f"{store} left"), []),
        (m.Hello("test", "worker", 1, 1, "h", "i", 1, "", 3, 1), []),
        (m.Heartbeat(3), []),
        (m.Bye("gone"), []),
        (m.Enter("b"), []),
        (m.Gather("g", b"said"), []),
        (m.TakeSamples("p", 10, 1, 0, 4, 0), []),
        (m.AwaitSamples("p"), []),
        (m.ReturnSamples("p", 1, [(0, 2)]), []),
        (m.TakeSamples("p", 10, 2, 1, 4, 0, 0, 1, [(2, 4), (6, 9)], 3, 1), []),
        (m.AskSamples("p", 1), []),
        (m.Publish(store, [block]), []),
        (m.Lookup(store, ["a"]), []),
        (m.AskStatus(), []),
        (m.Done(), []),
        (m.Unknown([1]), [values]),
    ]


# ---- mutations: frames in, frames out ------------------------------------------------------------------------------


def flip_bits(rng, frames):
    header = bytearray(frames[0])
    for _ in range(rng.randint(1, 8)):
        header[rng.randrange(len(header))] ^= 1 << rng.randrange(8)
    return [bytes(header), *frames[1:]]


def cut_header(rng, frames):
    return [frames[0][: rng.randrange(len(frames[0]))], *frames[1:]]


def lengthen_header(rng, frames):
    return [frames[0] + rng.randbytes(rng.randint(1, 50)), *frames[1:]]


def odd_field(rng, frames):
    """Put a value of another kind or size somewhere into the structure."""
    return _with_structure(rng, frames, lambda place, index: rng.choice(ODD_VALUES))


def swap_fields(rng, frames):
    def other(place, index):
        second = rng.randrange(len(place))
        place[index], place[second] = place[second], place[index]
        return place[index]

    return _with_structure(rng, frames, other)


def odd_number(rng, frames):
    return _with_structure(rng, frames, lambda place, index: rng.getrandbits(rng.randint(1, 63)))


def drop_field(rng, frames):
    structure = msgspec.msgpack.decode(frames[0])
    del structure[2][rng.randrange(len(structure[2]))]
    return [msgspec.msgpack.encode(structure), *frames[1:]]


def odd_seq(rng, frames):
    structure = msgspec.msgpack.decode(frames[0])
    structure[0] = rng.getrandbits(rng.choice((4, 16, 62)))
    return [msgspec.msgpack.encode(structure), *frames[1:]]


def wrong_frames(rng, frames):
    payload = list(frames[1:])
    kind = rng.randrange(4)
    if kind == 0:
        payload.append(rng.randbytes(rng.randint(0, 100)))
    elif kind == 1:
        payload = payload[:-1]
    elif kind == 2:
        payload = payload * rng.randint(2, 20)
    elif payload:
        payload[rng.randrange(len(payload))] = rng.randbytes(rng.randint(0, 5000))
    return [frames[0], *payload]


def random_bytes(rng, frames):
    return [rng.randbytes(rng.randint(0, 200)) for _ in range(rng.randint(1, 4))]


def unchanged(rng, frames):
    return frames


MUTATIONS = (
    flip_bits, flip_bits, cut_header, lengthen_header, odd_field, odd_field, swap_fields, odd_number, odd_number,
    drop_field, odd_seq, wrong_frames, wrong_frames, random_bytes, unchanged,
)  # fmt: skip


def _with_structure(rng, frames, change):
    """Decode the header, change one random place in its body, encode it again."""
    structure = msgspec.msgpack.decode(frames[0])
    place = structure[2]
    index = rng.randrange(1, len(place)) if len(place) > 1 else 0
    while isinstance(place[index], list) and place[index] and rng.random() < 0.7:
        place = place[index]
        index = rng.randrange(len(place))
    place[index] = change(place, index)
    return [msgspec.msgpack.encode(structure), *frames[1:]]


# ---- the attacker --------------------------------------------------------------------------------------------------


class Flood:
    """Sends messages to a server over connections that hold the job key.

    Args:
        settings: of the job.
        address: of the server.
        member: whom to claim to be; None for a stranger.
    """

    def __init__(self, settings, address, member=None):
        self._security, self._member = Security.of(settings), member
        self._address = address.split()[0]  # a server listens at several
        self.answers = Counter()

    def __enter__(self):
        self._hub = SocketHub(self._security)
        self._channel = self._hub.connect(self._address, identity("fuzz"), "server 0", bulk=True)
        self._seq = 0
        if self._member is not None:
            self.send(m.Claim("worker", self._member.rank, self._member.token), [])
        return self

    def __exit__(self, *_):
        self._hub.close()

    def send(self, body, frames, change=lambda frames: frames):
        self._seq += 1
        self._hub.send(self._channel, change([encode(self._seq, self._seq - 1, body), *frames]))

    def settle(self, timeout_s=120.0):
        """Wait until the server has taken everything sent so far."""
        self._seq += 1
        asked = self._seq
        self._hub.send(self._channel, [encode(asked, 0, m.Probe([2**62]))])
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for _, frames in self._hub.receive(1.0):
                envelope, _ = decode(frames)
                self.answers[type(envelope.body).__name__] += 1
                if isinstance(envelope.body, m.Unknown) and envelope.seq == asked:
                    return
        raise TimeoutError("the server does not answer any more")


def flood(session, member, store, count, rng):
    """Send mutated messages in bursts, each on a new connection; return how many answers of which kind came."""
    address = session.servers[0].address
    shared = [SharedTensor(NUMEL, torch.float32) for _ in range(2)]
    answers = Counter()
    # A stranger claims to be worker 0, whose token only worker 0 and the servers know.
    messages = valid_messages(store, member or session.workers[0], shared)
    for _ in range(0, count, BURST):
        with Flood(session.settings, address, member) as attacker:
            for _ in range(BURST):
                body, frames = rng.choice(messages)
                if isinstance(body, m.Push) and rng.random() < 0.5:
                    entries = [msgspec.structs.replace(one, round=rng.randint(1, 50)) for one in body.entries]
                    body = msgspec.structs.replace(body, entries=entries)
                mutation = rng.choice(MUTATIONS)
                attacker.send(body, frames, lambda frames, mutation=mutation: mutation(rng, frames))
            attacker.settle()
            answers += attacker.answers
    return dict(answers)


def send_valid_ones(session, member):
    """Send every message once as it is: code and libraries that they need are loaded before memory is measured."""
    shared = [SharedTensor(NUMEL, torch.float32) for _ in range(2)]
    with Flood(session.settings, session.servers[0].address, member) as one:
        for body, frames in valid_messages(STORE, member, shared):
            one.send(body, frames)
        one.settle()
        return dict(one.answers)


# ---- what runs in the workers --------------------------------------------------------------------------------------


def witness():
    """Train a round before and a round after."""
    store = new_store()
    found = [one_round(store)]
    tell("trained")
    listen(600)
    value = torch.zeros(100)
    store.pull("w", value)
    found += [value[0].item(), store.stats()["updates"], one_round(store)]
    return found


def attack(count):
    """Leave the training to the others and flood the server: as a stranger, and as the worker that this is."""
    store = new_store()
    store.close()
    found = {}
    member = store.session._lifeline.me
    found["valid"] = send_valid_ones(store.session, member)
    tell("ready")
    listen()
    rng = random.Random(20260)
    start = time.monotonic()
    # What the stranger sends names the store that the witness trains.
    found["stranger"] = flood(store.session, None, store.name, count // 2, rng)
    found["claimed"] = flood(store.session, member, STORE, count // 2, rng)
    found["duration_s"] = time.monotonic() - start
    tell("done")
    return found


def new_store():
    store = kvstore.create("dist_sync")
    store.set_updater("add")
    store.init("w", torch.zeros(100))
    return store


def one_round(store):
    value = torch.ones(100)
    store.pushpull("w", value)
    return value[0].item()


# ---- the tests -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(request):
    with LocalJob(3, 1, timeout_s=60, log_level="ERROR") as job:
        good, bad = [job.start(rank, witness) for rank in (0, 1)], job.start(2, attack, MESSAGES)
        assert [worker.heard() for worker in (*good, bad)] == ["trained", "trained", "ready"]
        before = job.servers[0].rss_bytes()
        bad.tell("go")
        assert bad.heard(max(120.0, MESSAGES / 500)) == "done", job.report()
        grown = job.servers[0].rss_bytes() - before
        for worker in good:
            worker.tell("go on")
        seen = [worker.result() for worker in good]
        return {"good": seen, "bad": bad.result(), "grown": grown, "code": job.servers[0].wait(30)}


def test_the_server_still_serves_a_round(found):
    assert [seen[-1] for seen in found["good"]] == [4.0, 4.0]
    assert found["code"] == 0


def test_nothing_reached_the_state(found):
    assert [seen[:3] for seen in found["good"]] == [[2.0, 2.0, 1.0]] * 2


def test_memory_grows_by_less_than_64_mib(found):
    assert found["grown"] < GROWTH_BYTES


def test_strangers_are_answered_with_refusals_only(found):
    assert set(found["bad"]["stranger"]) <= {"Failed", "Unknown", "Done"}
    assert found["bad"]["stranger"]["Failed"] > MESSAGES // 10


def test_messages_of_a_worker_reach_all_parts_of_the_server(found):
    wanted = {"Done", "Values", "StateIs", "CommandAnswer", "StatsAre", "Missing", "Failed", "Unknown"}
    assert wanted <= set(found["bad"]["valid"])
    assert wanted <= set(found["bad"]["claimed"])
