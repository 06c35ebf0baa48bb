"""Requests of every kind, and broken ones that are made of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from paceline import compression
from paceline.net.memory import SharedTensor
from paceline.observe.account import SERVER_PARTS, WORKER_PARTS
from paceline.observe.events import RECORD
from paceline.updaters import KeyOptions, StepOptions, make_spec
from paceline.wire import messages as m

NUMEL = 1000

#: A body and its payload; and all frames, with the encoded body first.
Message = tuple[m.Body, Sequence[Any]]
Frames = list[Any]

ODD_VALUES = (
    None, True, -1, 0, 1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 0.0, float("nan"), float("inf"), -1e308,
    "", "fuzz", "x" * 2000, "\0", b"", b"\xff" * 70, [], [[]], [1, 2, 3], [2**32, 2**32], {}, {"a": 1},
)  # fmt: skip

#: Texts that are no UTF-8, as encoded: no text of Python becomes one.
NO_UTF8 = tuple(
    msgspec.Raw(bytes([0xA0 + len(text)]) + text) for text in (b"\xff", b"ok\xed\xb3\xbf", b"\xc3", b"\x80w")
)


# ---- valid messages --------------------------------------------------------------------------------------------------


def of_stores(store: str, member: m.Member, shared: Sequence[SharedTensor]) -> list[Message]:
    """Return requests on stores, in an order in which a server takes those that are not for others."""
    values = np.zeros(NUMEL, np.float32).tobytes()
    codec = compression.make({"type": "2bit", "threshold": 0.5})
    assert codec is not None
    coded = bytes(codec.encode(torch.ones(NUMEL), codec.new_state(NUMEL), round=1))
    entry = m.Entry(0, 0, 0, NUMEL, 0)
    parts = [m.Entry(0, 0, 0, 400, 0), m.Entry(0, 0, 400, 600, 0)]
    rows, ids = m.Entry(1, 0, 0, NUMEL, 0), np.array([3, 17]).tobytes()
    state = m.StateItem(0, 0, 0, NUMEL, "exp_avg", "float32", [NUMEL])
    spec = msgspec.msgpack.encode(make_spec("adam", lr=0.1))
    options = msgspec.msgpack.encode(StepOptions([{"lr": 0.05}], {"a": KeyOptions(0, 0.5)}))
    packed = msgspec.msgpack.encode(codec.params())

    def push(round: int, entries: Sequence[m.Entry], frames: Sequence[Any], **more: Any) -> Message:
        entries = [msgspec.structs.replace(one, round=round) for one in entries]
        return m.Push(store, entries, 4.0, options, **{"coded": False, "want": True, "shared": False} | more), frames

    return [
        (m.OpenStore(store, "each", [], 0, -1, "none", False), []),
        (m.Init(store, 0, "float32", [m.BucketSpec(0, NUMEL, ["a", 7], [400, 600], [[400], [20, 30]])]), [values]),
        (m.SetUpdater(store, spec), []),
        (m.SetCompression(store, packed), []),
        (m.SetCompression(store, packed, "pull"), []),
        (m.MapArena(store, 0, member.pid, *(file.fd for file in shared), 4 * NUMEL, [0]), []),
        (m.AskValues(store, 0), []),
        push(1, [entry], [values]),
        push(2, [entry], [coded], coded=True),
        push(3, [entry], [], shared=True),
        push(4, parts, [values[:1600], values[1600:]]),
        push(5, parts, [], shared=True, want=False),
        push(6, parts, [values[:1600], b""], absent=[m.Span(0, 0, 400, 600)], note=b"note"),
        (m.Init(store, 1, "float32", [m.BucketSpec(0, NUMEL, ["rows"], [NUMEL], [[20, 50]])], "changed"), [values]),
        push(1, [rows], [ids, values[:400]], rows=True),
        (m.PullRows(store, rows), [ids]),
        (m.Pull(store, [entry], False), []),
        (m.Pull(store, parts, True), []),
        (m.GetState(store, [entry]), []),
        (m.SetState(store, [state]), [values]),
        (m.SetState(store, [msgspec.structs.replace(state, shape=[2**47, 2**47, 0])]), [b""]),
        (m.SetState(store, [msgspec.structs.replace(state, name="unsent", dtype="float64")]), [values * 2]),
        (m.SetValues(store, parts), [values[:1600], values[1600:]]),
        (m.OpenStore(f"{store} clipped", "all", [], 0, -1, "none", True, clip_norm=1.0), []),
        (m.Init(f"{store} clipped", 0, "float32", [m.BucketSpec(0, 9, ["c"], [9], [[9]])]), [values[:36]]),
        (m.AskNorm(f"{store} clipped", [m.Entry(0, 0, 0, 9, 1)]), []),
        (m.Commit(f"{store} clipped", [m.Entry(0, 0, 0, 9, 1)], 0.5), []),
        (m.AskStats(store), []),
        (m.AskMissing(store, entry), []),
        (m.Pause(store), []),
        (m.Away(store), []),
        (m.Back(store, 1), []),
        (m.Regroup(store, 1, [[0]]), []),
        (m.ForwardBuckets(store, 2, "float32", [m.ForwardedBucket(0, 10, 1)]), []),
        (m.PushSum(store, [entry], [m.Share(0, 4.0, [1])], 1.0, options, notes=[(0, b"note")]), [values]),
        (m.OnBehalf(member.rank, m.Pause(store)), []),
        (m.Leave(f"{store} left"), []),
    ]


def of_meetings(member: m.Member) -> list[Message]:
    """Return requests of process groups of torch.distributed."""
    alone, pair = [member.rank], sorted([0, member.rank])
    return [
        (m.Meet("fuzz", 1, alone, "gather", [-1, member.rank]), [b"to all", b"to me"]),
        (m.Meet("fuzz", 2, pair, "gather", [-1]), [b"to nobody yet"]),
        (m.TakeAny("fuzz"), []),
        (m.AskNotMet("fuzz", 2, pair), []),
        (m.GiveUp("fuzz"), []),
        (m.UseBoard("set", ["a", "b"], [b"1", b"text"]), []),
        (m.UseBoard("get", ["a", "b"], []), []),
        (m.UseBoard("get", ["never there"], []), []),
        (m.UseBoard("forget", ["never there"], []), []),
        (m.UseBoard("add", ["a"], [b"2"]), []),
        (m.UseBoard("swap", ["b"], [b"text", b"other"]), []),
        (m.UseBoard("check", ["b"], []), []),
        (m.UseBoard("count", [], []), []),
        (m.UseBoard("delete", ["b"], []), []),
    ]


def of_members(store: str, member: m.Member) -> list[Message]:
    """Return requests to the scheduler, and those that any listener takes."""
    key = m.KeySpec("a", [20, 50], 0)
    block = m.BlockSpec(0, "float32", [key, m.KeySpec(7, [3], 1)], [0], [1.0], 1000, "balanced", False)
    windows = [m.Window(1, 3, 12.0, [10] * len(WORKER_PARTS), 5)] * 3
    account = m.AccountReport(windows, [1] * 8, [(0, 1, 3)], 1, [(1, 3)], (1000, 2), True, True)
    of_server = m.AccountReport([m.Window(1, 3, 12.0, [10] * len(SERVER_PARTS))], [1] * 8, [(1, 2, 3)])
    records = b"".join(RECORD.pack(number, 0.5, 1, 2, 3, 4, number % 9, number) for number in range(1, 9))
    full = m.Heartbeat(
        7, [m.Sighting("server", 9, "R", 1.0)], 1 << 30, 5, 6, [(0, 3)], 0.1, 0.1, 4.0, m.Spread(9, 1, 3.0, 0.1),
        account, [m.WorkerStep(store, 3, [("a", 1.0, 0.1)], m.StepBatch("given", 4.0, "4 x 2", "why"))],
        [m.ReportedFigures(3, 4.0, {"loss": 0.5, "acc": 1.0})], m.StepsLeft(3, 9, 1.5),
        m.TraceEvents(1, 0.0, 1.0, 2.0, 3.0, 0.1, 0, records),
    )  # fmt: skip
    return [
        (m.Probe([1, 2, 3]), []),
        (m.Claim("worker", member.rank, member.token), []),
        (m.Command("ping", "hello"), []),
        (m.Hello("test", "worker", 1, 1, "h", "i", 1, "", 3, 1, 5.0), []),
        (m.Heartbeat(3), []),
        (full, []),
        (m.Heartbeat(4, account=of_server), []),
        (m.Training(member.rank, "dist_sync", "gloo", True, 3, 4, False, True, 100, b"digest", [1, 2, 3]), []),
        (m.AskTrace(1, 10, 60.0, 0), []),
        (m.AskTrace(2, 1, 0.1, 3), []),
        (m.Bye("gone"), []),
        (m.Enter("b", store, 3, True), []),
        (m.Gather("g", b"said"), []),
        (m.AskAbsent("b"), []),
        (m.TakeSamples("p", 10, 1, 0, 4, 0), []),
        (m.AwaitSamples("p"), []),
        (m.ReturnSamples("p", 1, [(0, 2)]), []),
        (m.TakeSamples("p", 10, 2, 1, 4, 0, 0, 1, [(2, 4), (6, 9)], 3, 1), []),
        (m.AskSamples("p", 1), []),
        (m.Publish(store, [block], True, "free"), []),
        (m.Lookup(store, ["a"]), []),
        (m.Lookup(store, ["never", 9]), []),
        (m.AskStatus(), []),
        (m.Notice("a test", "far away"), []),
        (m.GiveBack("sampler", 1, 5, [1, 2, 3]), []),
        (m.AskGone("a point", "sampler"), []),
        (m.Join(), []),
        (m.Done(), []),
        (m.Unknown([1]), [bytes(4000)]),
    ]


def valid_messages(store: str, member: m.Member, shared: Sequence[SharedTensor]) -> list[Message]:
    """Return requests of every kind, and two messages that are none."""
    return [*of_stores(store, member, shared), *of_meetings(member), *of_members(store, member)]


# ---- mutations: frames in, frames out --------------------------------------------------------------------------------


def flip_bits(rng: random.Random, frames: Frames) -> Frames:
    header = bytearray(frames[0])
    for _ in range(rng.randint(1, 8)):
        header[rng.randrange(len(header))] ^= 1 << rng.randrange(8)
    return [bytes(header), *frames[1:]]


def cut_header(rng: random.Random, frames: Frames) -> Frames:
    return [frames[0][: rng.randrange(len(frames[0]))], *frames[1:]]


def lengthen_header(rng: random.Random, frames: Frames) -> Frames:
    return [frames[0] + rng.randbytes(rng.randint(1, 50)), *frames[1:]]


def odd_field(rng: random.Random, frames: Frames) -> Frames:
    """Put a value of another kind or size somewhere into the structure."""
    return _with_structure(rng, frames, lambda place, index: rng.choice(ODD_VALUES))


def no_utf8(rng: random.Random, frames: Frames) -> Frames:
    return _with_structure(rng, frames, lambda place, index: rng.choice(NO_UTF8))


def swap_fields(rng: random.Random, frames: Frames) -> Frames:
    def other(place: list[Any], index: int) -> object:
        second = rng.randrange(len(place))
        place[index], place[second] = place[second], place[index]
        return place[index]

    return _with_structure(rng, frames, other)


def odd_number(rng: random.Random, frames: Frames) -> Frames:
    return _with_structure(rng, frames, lambda place, index: rng.getrandbits(rng.randint(1, 63)))


def repeated(rng: random.Random, frames: Frames) -> Frames:
    """Make a list some times as long."""

    def longer(place: list[Any], index: int) -> object:
        one = place[index]
        return one * rng.choice((2, 50)) if isinstance(one, list) else one

    return _with_structure(rng, frames, longer)


def drop_field(rng: random.Random, frames: Frames) -> Frames:
    structure = msgspec.msgpack.decode(frames[0])
    del structure[2][rng.randrange(len(structure[2]))]
    return [msgspec.msgpack.encode(structure), *frames[1:]]


def odd_seq(rng: random.Random, frames: Frames) -> Frames:
    structure = msgspec.msgpack.decode(frames[0])
    structure[0] = rng.getrandbits(rng.choice((4, 16, 62)))
    return [msgspec.msgpack.encode(structure), *frames[1:]]


def wrong_frames(rng: random.Random, frames: Frames) -> Frames:
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


def random_bytes(rng: random.Random, frames: Frames) -> Frames:
    return [rng.randbytes(rng.randint(0, 200)) for _ in range(rng.randint(1, 4))]


def unchanged(rng: random.Random, frames: Frames) -> Frames:
    return frames


MUTATIONS: tuple[Callable[[random.Random, Frames], Frames], ...] = (
    flip_bits, flip_bits, cut_header, lengthen_header, odd_field, odd_field, no_utf8, swap_fields, odd_number,
    odd_number, repeated, drop_field, odd_seq, wrong_frames, wrong_frames, random_bytes, unchanged,
)  # fmt: skip


def _with_structure(rng: random.Random, frames: Frames, change: Callable[[list[Any], int], object]) -> Frames:
    """Decode the header, change one random place in its body, encode it again."""
    structure = msgspec.msgpack.decode(frames[0])
    place = structure[2]
    index = rng.randrange(1, len(place)) if len(place) > 1 else 0
    while isinstance(place[index], list) and place[index] and rng.random() < 0.7:
        place = place[index]
        index = rng.randrange(len(place))
    place[index] = change(place, index)
    return [msgspec.msgpack.encode(structure), *frames[1:]]
