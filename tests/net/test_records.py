"""Messages come out of a connection as they went in, and nothing that was done to their bytes passes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ProtocolError, RemoteError
from paceline.net import aead, records
from paceline.net.aead import AesGcm, Cipher, NoCipher, TamperedError
from paceline.net.base import LostFrame, SealedFrame, check_memory, sealed
from paceline.net.records import (
    CHUNK_BYTES,
    ClosedError,
    Intake,
    RecordReceiver,
    RecordSender,
    StalledError,
    in_head,
    traffic,
)

KEY = bytes(range(32))
SIZES = st.lists(
    st.sampled_from([0, 1, 100, 240, 241, 16_383, 16_384, 70_000, CHUNK_BYTES, CHUNK_BYTES + 1]), min_size=1, max_size=8
)


def wire(messages: Sequence[Sequence[bytes]], cipher: Cipher, encrypts: bool) -> list[bytes]:
    """Return what a connection carries, as the pieces in which it is sent."""
    writer = RecordSender(cipher, encrypts)
    return [bytes(piece) for message in messages for piece in writer.pieces(message, list(map(len, message)))]


def read(stream: bytes, count: int, cipher: Cipher, encrypts: bool) -> list[list[bytes]]:
    """Read so many messages from what came over a connection that then ended."""
    ours, theirs = socket.socketpair()

    def feed() -> None:
        with theirs:
            theirs.sendall(stream)

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        reader = RecordReceiver(cipher, encrypts, Intake(ours))
        return [[bytes(frame) for frame in reader.message()] for _ in range(count)]
    finally:
        while ours.recv(1 << 20):
            pass
        ours.close()
        thread.join()


def test_parts_of_a_large_frame_are_counted_while_it_is_under_way() -> None:
    frame, before = filled(3 * CHUNK_BYTES), traffic.parts
    counts = [traffic.parts - before for _ in RecordSender(AesGcm(KEY), False).pieces([b"", frame], [0, len(frame)])]
    assert counts == [0, 0, 1, 2]
    sent = traffic.parts
    assert read(b"".join(wire([[b"", frame]], AesGcm(KEY), True)), 1, AesGcm(KEY), True) == [[b"", frame]]
    assert traffic.parts - sent >= 6


def filled(size: int) -> bytes:
    return (np.arange(size) % 251).astype(np.uint8).tobytes()


@pytest.mark.parametrize(("keyed", "encrypts"), [(True, True), (True, False), (False, False)])
@given(st.lists(SIZES, min_size=1, max_size=4))
@settings(deadline=None, max_examples=30)
def test_messages_come_out_as_they_went_in(keyed: bool, encrypts: bool, messages: list[list[int]]) -> None:
    frames = [[filled(size) for size in sizes] for sizes in messages]
    ciphers = (AesGcm(KEY), AesGcm(KEY)) if keyed else (NoCipher(), NoCipher())
    assert read(b"".join(wire(frames, ciphers[0], encrypts)), len(frames), ciphers[1], encrypts) == frames


@given(st.lists(st.integers(0, 40_000), max_size=30))
def test_what_travels_in_the_head_has_room_there(sizes: list[int]) -> None:
    small = [size for size, is_small in zip(sizes, in_head(sizes), strict=True) if is_small]
    assert sum(small) <= records.HEAD_ROOM_BYTES
    assert all(size < records.SMALL_BYTES for size in small)


MESSAGES = [[b"first", filled(3 * CHUNK_BYTES + 5)], [b"second", filled(2 * CHUNK_BYTES)], [b"third"]]


def flipped(pieces: list[bytes], at: int) -> list[bytes]:
    changed = bytearray(pieces[at])
    changed[len(changed) // 2] ^= 4
    return [*pieces[:at], bytes(changed), *pieces[at + 1 :]]


def repeated(pieces: list[bytes], at: int) -> list[bytes]:
    return [*pieces[: at + 1], *pieces[at:]]


def swapped(pieces: list[bytes], at: int) -> list[bytes]:
    return [*pieces[:at], *pieces[at : at + 2][::-1], *pieces[at + 2 :]]


def left_out(pieces: list[bytes], at: int) -> list[bytes]:
    return [*pieces[:at], *pieces[at + 1 :]]


def shortened(pieces: list[bytes], at: int) -> list[bytes]:
    return [*pieces[:at], pieces[at][:-1], *pieces[at + 1 :]]


@pytest.mark.parametrize("change", [flipped, repeated, swapped, left_out, shortened])
@pytest.mark.parametrize("at", range(7))
def test_what_was_changed_on_the_way_never_comes_out(change: object, at: int) -> None:
    pieces = wire(MESSAGES, AesGcm(KEY), True)
    assert len(pieces) == 9
    stream = b"".join(change(pieces, at))  # type: ignore[operator]
    with pytest.raises((TamperedError, ClosedError)):
        read(stream, 3, AesGcm(KEY), True)


def test_without_protection_of_large_frames_all_else_is_protected() -> None:
    pieces = wire(MESSAGES, AesGcm(KEY), False)
    for at in (0, 5, 8):
        with pytest.raises(TamperedError):
            read(b"".join(flipped(pieces, at)), 3, AesGcm(KEY), False)
    assert read(b"".join(flipped(pieces, 1)), 3, AesGcm(KEY), False) != MESSAGES


def test_the_body_of_a_message_is_protected_whatever_its_size() -> None:
    body, tensor = b"body" * CHUNK_BYTES, filled(2 * CHUNK_BYTES)
    pieces = wire([[body, tensor]], AesGcm(KEY), False)
    assert [b"bodybody" in piece for piece in pieces] == [False] * 7
    assert b"".join(pieces[-2:]) == tensor
    for at in range(5):
        with pytest.raises((TamperedError, ClosedError)):
            read(b"".join(flipped(pieces, at)), 1, AesGcm(KEY), False)
    assert read(b"".join(pieces), 1, AesGcm(KEY), False) == [[body, tensor]]


#: Large, and many small ones, of which the last have no room in the head.
MARKED = [b"body", filled(2 * CHUNK_BYTES), *[b"secret" * 2000] * 7]


def wire_marked(frames: Sequence[bytes]) -> list[bytes]:
    kept = [frames[0], *(sealed(np.frombuffer(frame, np.uint8)) for frame in frames[1:])]
    return [bytes(piece) for piece in RecordSender(AesGcm(KEY), False).pieces(kept, list(map(len, frames)))]


def test_marked_frames_are_protected_whatever_their_size_and_where_they_go_next() -> None:
    pieces = wire_marked(MARKED)
    assert len(pieces) == 5
    assert not any(b"secretsecret" in piece or MARKED[1][:100] in piece for piece in pieces)
    for at in range(5):
        with pytest.raises((TamperedError, ClosedError)):
            read(b"".join(flipped(pieces, at)), 1, AesGcm(KEY), False)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread = threading.Thread(target=theirs.sendall, args=(b"".join(pieces),))
        thread.start()
        found = RecordReceiver(AesGcm(KEY), False, Intake(ours)).message()
        thread.join()
    assert [bytes(frame) for frame in found] == MARKED
    assert [isinstance(frame, SealedFrame) for frame in found] == [False, *[True] * 8]
    assert isinstance(records.copy_of(found[-1]), SealedFrame)


def test_a_frame_of_another_connection_does_not_open() -> None:
    stream = b"".join(wire(MESSAGES, AesGcm(bytes(32)), True))
    with pytest.raises(TamperedError, match="record 0"):
        read(stream, 1, AesGcm(KEY), True)


@pytest.mark.parametrize(
    ("head_bytes", "count"), [(2**32 - 1, 2**32 - 1), (0, 0), (7, 1), (9, 1), (2**31, 1), (8 * 65_538, 65_538)]
)
def test_sizes_that_no_sender_uses_are_refused_unread(head_bytes: int, count: int) -> None:
    head = head_bytes.to_bytes(4, "little") + count.to_bytes(4, "little")
    with pytest.raises(ProtocolError, match=r"a message of|does not fit"):
        read(head + bytes(records.FIRST_BYTES), 1, NoCipher(), False)


def test_frame_beyond_the_limit_is_refused_unread() -> None:
    head = (2**33).to_bytes(8, "little")
    with pytest.raises(ProtocolError, match="a frame of"):
        read(
            (8).to_bytes(4, "little") + (1).to_bytes(4, "little") + head + bytes(records.FIRST_BYTES),
            1,
            NoCipher(),
            False,
        )


def test_keys_change_after_many_records_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aead, "RECORDS_PER_KEY", 3)
    one, two = AesGcm(KEY), AesGcm(KEY)
    sealed = [one.seal(b"%d" % number) for number in range(10)]
    assert [two.open(record) for record in sealed] == [b"%d" % number for number in range(10)]
    fixed = AesGcm(KEY)
    monkeypatch.setattr(aead, "RECORDS_PER_KEY", 1000)
    for record in sealed[:3]:
        fixed.open(record)
    with pytest.raises(TamperedError):
        fixed.open(sealed[3])


def feed_slowly(monkeypatch: pytest.MonkeyPatch, pieces: Sequence[bytes], pause_s: float) -> list[object]:
    """Read a message of a large frame whose bytes come in pieces, with pauses."""
    monkeypatch.setattr(records, "STALL_S", 1)
    ours, theirs = socket.socketpair()

    def feed() -> None:
        for piece in pieces:
            theirs.sendall(piece)
            if done.wait(pause_s):
                return

    done = threading.Event()
    thread = threading.Thread(target=feed)
    thread.start()
    try:
        return RecordReceiver(NoCipher(), False, Intake(ours)).message()
    finally:
        done.set()
        thread.join()
        ours.close()
        theirs.close()


def test_large_frame_of_which_bytes_were_left_out_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = b"".join(wire([[filled(100_000)]], NoCipher(), False))
    with pytest.raises(StalledError, match="did not go on for 1 s"):
        feed_slowly(monkeypatch, [stream[:80_000], *[b"probe"] * 60], 0.1)


def test_pause_between_messages_and_a_slow_network_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = b"".join(wire([[filled(100_000)]], NoCipher(), False))
    slow = [stream[start : start + 8192] for start in range(0, len(stream), 8192)]
    [frame] = feed_slowly(monkeypatch, [b"", b"", b"", *slow], 0.4)
    assert bytes(frame) == filled(100_000)  # type: ignore[call-overload]


@pytest.mark.parametrize(("keyed", "encrypts"), [(True, True), (True, False), (False, False)])
def test_frame_that_has_no_memory_is_left_out_and_all_others_come(
    keyed: bool, encrypts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_large, large, small = filled(3 * CHUNK_BYTES + 5), filled(2 * CHUNK_BYTES), b"small"
    ciphers = (AesGcm(KEY), AesGcm(KEY)) if keyed else (NoCipher(), NoCipher())
    stream = b"".join(wire([[small, too_large, large], [large]], ciphers[0], encrypts))
    empty = np.empty

    def scarce(size: int, dtype: type) -> object:
        if size > 2 * CHUNK_BYTES:
            raise MemoryError
        return empty(size, dtype)

    monkeypatch.setattr(records.np, "empty", scarce)
    assert read(stream, 2, ciphers[1], encrypts) == [[small, b"", large], [large]]


def test_who_waits_for_a_frame_that_has_no_memory_learns_its_size() -> None:
    with pytest.raises(RemoteError, match=r"there is no memory here for a Push: 1\.5 MiB"):
        check_memory([b"", LostFrame.of(3 * 2**19)], "a Push")
    check_memory([b"", b"frame"], "a Push")
