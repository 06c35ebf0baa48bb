"""Messages to frames and back; whatever is damaged is refused as damaged."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.wire import FramingError, decode, encode, framing, protocol
from paceline.wire import messages as m
from paceline.wire.limits import MAX_FRAMES, MAX_HEADER_BYTES, MAX_NUMEL, MAX_RANK

quick = settings(max_examples=60, deadline=None)
KINDS: tuple[type[m.Message], ...] = m.REQUESTS + m.REPLIES
REQUESTS = set(m.REQUESTS)


def values_of(kind: msgspec.inspect.Type) -> st.SearchStrategy[object]:
    """Everything that fits a field, from the field's own type."""
    info = msgspec.inspect
    match kind:
        case info.NoneType():
            return st.none()
        case info.BoolType():
            return st.booleans()
        case info.IntType():
            return st.integers(-(2**63) if kind.ge is None else kind.ge, 2**63 - 1 if kind.le is None else kind.le)
        case info.FloatType():
            return st.floats(kind.ge, kind.le, allow_nan=False)
        case info.LiteralType():
            return st.sampled_from(kind.values)
        case info.StrType(pattern=str()):
            return st.from_regex(kind.pattern, fullmatch=True).filter(lambda one: len(one) <= (kind.max_length or 64))
        case info.StrType():
            return st.text(max_size=min(20, kind.max_length or 20))
        case info.BytesType():
            return st.binary(max_size=20)
        case info.ListType():
            return st.lists(values_of(kind.item_type), max_size=min(3, kind.max_length or 3))
        case info.DictType():
            return st.dictionaries(values_of(kind.key_type), values_of(kind.value_type), max_size=3)
        case info.TupleType():
            return st.tuples(*map(values_of, kind.item_types))
        case info.UnionType():
            return st.one_of([values_of(one) for one in kind.types])
        case info.StructType():
            return structs(kind.cls)
    raise AssertionError(f"no values for {kind}")


def structs(cls: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    described = msgspec.inspect.type_info(cls)
    assert isinstance(described, msgspec.inspect.StructType)
    values = {field.name: values_of(field.type) for field in described.fields}
    if cls is m.Status:  # a state for each member
        pairs = st.lists(st.tuples(structs(m.Member), structs(m.MemberState)), max_size=3)
        both = pairs.map(lambda found: [list(one) for one in zip(*found, strict=True)] or [[], []])
        return both.flatmap(lambda found: st.builds(cls, **values | {
            "members": st.just(found[0]), "states": st.just(found[1])
        }))  # fmt: skip
    return st.builds(cls, **values)


BODIES = st.sampled_from(KINDS).flatmap(structs)


def test_every_message_has_its_own_tag() -> None:
    tags = [cls.__struct_config__.tag for cls in KINDS]
    assert len(set(tags)) == len(tags)
    assert all(isinstance(tag, int) for tag in tags)


def test_body_is_a_request_or_a_reply() -> None:
    assert REQUESTS.isdisjoint(m.REPLIES)
    tagged = [
        cls for cls in vars(m).values() if isinstance(cls, type) and issubclass(cls, m.Message) and cls is not m.Message
    ]
    assert {cls for cls in tagged if cls.__struct_config__.tag is not None} == set(KINDS)


@pytest.mark.parametrize("cls", KINDS)
@settings(max_examples=6, deadline=None)
@given(data=st.data(), seq=st.integers(0, 2**63 - 1), acked=st.integers(0, 2**63 - 1))
def test_every_message_comes_back_as_it_was(cls: type[m.Message], data: st.DataObject, seq: int, acked: int) -> None:
    body = data.draw(structs(cls))
    frames = [encode(seq, acked, body), b"payload", bytearray(3)]  # type: ignore[arg-type]
    envelope, payload = decode(frames)
    assert envelope == m.Envelope(seq, acked, body)  # type: ignore[arg-type]
    assert type(envelope.body) is cls
    assert list(payload) == frames[1:]


@quick
@given(BODIES, st.data())
def test_truncated_message_is_refused(body: m.Body, data: st.DataObject) -> None:
    header = encode(1, 0, body)
    with pytest.raises(FramingError):
        decode([header[: data.draw(st.integers(0, len(header) - 1))]])


@quick
@given(BODIES, st.binary(min_size=1, max_size=9))
def test_trailing_bytes_are_refused(body: m.Body, tail: bytes) -> None:
    with pytest.raises(FramingError):
        decode([encode(1, 0, body) + tail])


@quick
@given(BODIES, st.integers(0, 2**32))
def test_mutated_message_is_refused_or_another_message(body: m.Body, seed: int) -> None:
    chance = random.Random(seed)
    header = bytearray(encode(1, 0, body))
    for _ in range(60):
        damaged = bytearray(header)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            envelope, _ = decode([damaged])
        except FramingError:
            continue
        assert isinstance(envelope.body, KINDS)


@quick
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_noise_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(FramingError):
        decode(frames)


@quick
@given(st.integers(5_000, 200_000))
def test_deep_nesting_is_refused(depth: int) -> None:
    with pytest.raises(FramingError):
        decode([b"\x93\x01\x00" + b"\x91" * depth])


def test_length_that_promises_gigabytes_is_refused_at_once() -> None:
    with pytest.raises(FramingError):
        decode([b"\x93\x01\x00\x98\x18\xa1s\xdd\xff\xff\xff\xff"])
    with pytest.raises(FramingError):
        decode([b"\x93\x01\x00\x92\x0b\xdb\xff\xff\xff\xff"])


@pytest.mark.parametrize(
    "body",
    [
        m.Heartbeat(-1),
        m.Heartbeat(2**63),
        m.Claim("king", 0, b""),
        m.Claim("worker", -2, b""),
        m.Claim("worker", MAX_RANK + 1, b""),
        m.Claim("worker", 0, b"x" * 65),
        m.Enter("x" * 1025),
        m.Bye("x" * 65_537),
        m.SetUpdater("s", b"x" * ((1 << 20) + 1)),
        m.Pull("s", [m.Entry(0, 0, 0, MAX_NUMEL + 1, 0)], False),
        m.Lookup("s", ["x" * 1025]),
        m.Probe(list(range(65_537))),
    ],
    ids=lambda body: type(body).__name__,
)
def test_field_beyond_its_limit_makes_the_message_refused(body: m.Body) -> None:
    try:
        header = encode(1, 0, body)
    except OverflowError:
        return
    with pytest.raises(FramingError, match="not a message"):
        decode([header])


def test_unknown_tag_and_extra_fields_are_refused() -> None:
    damaged: tuple[object, ...] = (
        [1, 0, [99]],
        [1, 0, [50, 1]],
        [1, 0, [50], -1],
        [1, 0, [50], 4, 5],
        [1, 0],
        {},
        7,
        None,
        [1, 0, 50],
    )
    for raw in damaged:
        with pytest.raises(FramingError):
            decode([msgspec.msgpack.encode(raw)])


def test_number_of_frames_is_limited() -> None:
    header = encode(1, 0, m.Done())
    with pytest.raises(FramingError, match="0 frames"):
        decode([])
    assert len(decode([header, *[b""] * MAX_FRAMES])[1]) == MAX_FRAMES
    with pytest.raises(FramingError, match="frames"):
        decode([header, *[b""] * (MAX_FRAMES + 1)])


def test_size_of_frames_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FramingError, match="a header of"):
        decode([bytes(MAX_HEADER_BYTES + 1)])
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 8)
    decode([encode(1, 0, m.Done()), bytes(8)])
    with pytest.raises(FramingError, match="a frame of 9 bytes"):
        decode([encode(1, 0, m.Done()), bytes(9)])


@quick
@given(BODIES)
def test_number_that_does_not_fit_is_refused(body: m.Body) -> None:
    raw = msgspec.msgpack.decode(encode(1, 0, body))
    assume(raw[2])
    for bad in ([-1, 0, raw[2]], [1, "0", raw[2]], [1.5, 0, raw[2]]):
        with pytest.raises(FramingError):
            decode([msgspec.msgpack.encode(bad)])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0])
def test_figures_that_are_no_amounts_are_refused(wrong: float) -> None:
    beat = m.Heartbeat(7, account=m.AccountReport([m.Window(5, 1, wrong, [])]))
    for body in (beat, m.Heartbeat(7, step_s=wrong)):
        with pytest.raises(FramingError):
            decode([encode(1, 0, body)])


def test_another_field_of_a_message_makes_another_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bye(m.Message, tag=m.Bye.__struct_config__.tag):
        other: m.Number

    def digest() -> bytes:
        return framing._digest_of_fields.__wrapped__()

    before = digest()
    assert protocol() == bytes([m.PROTOCOL]) + before
    with monkeypatch.context() as change:
        change.setattr(m, "Bye", Bye)
        assert digest() != before
    assert digest() == before


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_trace_for_an_impossible_time_is_refused(seconds: float) -> None:
    with pytest.raises(FramingError):
        decode([encode(1, 0, m.AskTrace(1, 1, seconds, 0))])


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("field", ["since", "until", "unix", "offset", "error"])
def test_events_of_an_impossible_clock_are_refused(field: str, seconds: float) -> None:
    told = msgspec.structs.replace(m.TraceEvents(1, 0.0, 0.0, 0.0, 0.0, 0.0, 0, b""), **{field: seconds})
    with pytest.raises(FramingError):
        decode([encode(1, 0, m.Heartbeat(1, trace=told))])


@pytest.mark.parametrize("host", ["\x1b[2J", "a\nb", "a\r", "\x9b1m", "\x7f", "\0"])
def test_host_names_have_no_characters_that_a_terminal_obeys(host: str) -> None:
    hello = m.Hello("job", "worker", 0, 0, "host", "id", 1, "", 1, 1)
    for field in ("host", "host_id"):
        with pytest.raises(FramingError):
            decode([encode(1, 0, msgspec.structs.replace(hello, **{field: host}))])
    decode([encode(1, 0, msgspec.structs.replace(hello, host="<b>Müller's 日本 \u2028</b>"))])


MEMBER = m.Member("worker", 0, 0, "h", "h", 1, "", b"")
STATE = m.MemberState(7, 1.0, 0.1, 0, 0, 0, "live", "0 12", 0.1)


@pytest.mark.parametrize("wrong", [
    {"verdicts": ["worker 1 is slow\x1b]52;c;aGk=\x07"]}, {"auto": ["a\nb"]},
    {"told": [m.Told("worker", 1, 1.0, "\x9b1m")]},
    *({"states": [msgspec.structs.replace(STATE, **{field: value})]} for field, value in [
        ("phase", "live\n"), ("phase", "\x1b[2J"), ("waits_for", "0 x"), ("waits_for", "1 " * 9),
        ("waits_for", "9" * 5000), ("pace", math.nan), ("silent_s", math.inf),
        ("recent", [m.Window(0, 1, 1.0, [])] * 2),
    ]),
])  # fmt: skip
def test_status_that_a_terminal_would_obey_or_a_table_cannot_show_is_refused(wrong: dict[str, Any]) -> None:
    status = m.Status([MEMBER], [STATE], [], ["Müller's choice"], ["<b>"])
    decode([encode(1, 0, status)])
    with pytest.raises(FramingError):
        decode([encode(1, 0, msgspec.structs.replace(status, **wrong))])


def test_status_without_a_state_for_each_member_is_refused() -> None:
    status = m.Status([], [], [])
    status.members.append(MEMBER)
    with pytest.raises(FramingError, match="1 members with 0 states"):
        decode([encode(1, 0, status)])


def test_status_may_have_many_workers_that_are_waited_for() -> None:
    state = msgspec.structs.replace(STATE, waits_for=" ".join(map(str, range(10_000))))
    decode([encode(1, 0, m.Status([MEMBER], [state], []))])


@pytest.mark.parametrize("role", ["", "worker\n", "Worker", "workers", "server "])
def test_role_that_there_is_not_is_refused(role: str) -> None:
    with pytest.raises(FramingError):
        decode([encode(1, 0, m.Claim(role, 0, b""))])


def test_range_of_a_bucket_is_cut_at_its_ends() -> None:
    one = m.Span(2, 5, 10, 20)
    assert (one.place, one.stop) == ((2, 5), 30)
    assert one.part(0, 15) == m.Span(2, 5, 10, 5)
    assert one.part(15, 99) == m.Span(2, 5, 15, 15)
    assert one.overlaps(m.Span(2, 5, 29, 1))
    assert not one.overlaps(m.Span(2, 5, 30, 1))
    assert not one.overlaps(m.Span(2, 5, 0, 10))


def parts_of(kind: Any, seen: set[Any]) -> Iterator[Any]:
    """Yield a type of msgspec's, and all types inside of it."""
    if isinstance(kind, msgspec.inspect.StructType):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
    yield kind
    inner = [getattr(kind, name, None) for name in ("item_type", "key_type", "value_type")]
    inner += [*getattr(kind, "types", ()), *getattr(kind, "item_types", ())]
    inner += [field.type for field in getattr(kind, "fields", ())]
    for one in inner:
        if one is not None:
            yield from parts_of(one, seen)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_text_and_list_of_a_message_has_a_limit(kind: type[m.Message]) -> None:
    """A list of empty lists takes 60 times as much memory as the bytes of its message."""
    parts = list(parts_of(msgspec.inspect.type_info(kind), set()))
    assert [one for one in parts if getattr(one, "max_length", 0) is None] == []
