"""Messages to records on a stream of bytes, and back.

A message is a list of frames. On the wire it is

1. a record of fixed size: bytes of the head, number of frames, and the head as far as it has room;
2. the head: the size of each frame, with a mark where the frame is always sealed, then all small frames; the part
   without room in the first record is another one;
3. each large frame: in chunks that are records of their own where it is protected, else as it is.

The first frame is the message's body, the request or answer itself: it is always protected, whatever its size. Only
those after it, which are tensors, may travel as they are, unless they are marked (:class:`SealedFrame`). A length is
authenticated before it is used, so a changed length is noticed at once.

Copies of a large frame outside of the kernel: none without protection. With it a chunk is encrypted into one warm
buffer, from which the kernel copies; at the receiver it comes to one warm buffer and is decrypted to its place. A frame
for which the receiver has no memory is read and thrown away: the connection goes on, and the asker gets an error.
"""

from __future__ import annotations

import functools
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import Any

import numpy as np

from paceline.errors import ProtocolError
from paceline.net.aead import Cipher
from paceline.net.base import Frames, LostFrame, SealedFrame, sealed
from paceline.net.claims import Allowance
from paceline.wire.limits import MAX_FRAME_BYTES, MAX_FRAMES

#: Frames below this travel in the head, as long as there is room.
SMALL_BYTES = 16 * 1024
HEAD_ROOM_BYTES = 64 * 1024

#: Plain bytes of the first record of a message, which zeros fill up. Most messages beside tensors have no more.
FIRST_BYTES = 256

#: Plain bytes of one record of a large frame: fits a core's own cache.
CHUNK_BYTES = 1024 * 1024

#: In the middle of a large frame so many bytes must come in so many seconds, or the connection counts as broken: bytes
#: that were left out on the way would be waited for until a deadline. The slowest network is faster; what a member
#: sends now and then to ask after its requests is not. It must exceed a usual pause of the sender.
STALL_S, STALL_BYTES = 10, 4096

_READ_AHEAD_BYTES = 64 * 1024

_COUNTS = struct.Struct("<II")
_BODY = 0
#: Bit of a size whose frame is a :class:`SealedFrame`.
_MARK = 1 << 63


class ClosedError(Exception):
    """The other side closed the connection."""


class StalledError(ProtocolError):
    """A large frame does not go on."""


def size_of(frame: Any) -> int:
    """Return the bytes of a frame."""
    return len(frame) if isinstance(frame, bytes) else int(memoryview(frame).nbytes)


def copy_of(frame: Any) -> bytes | SealedFrame:
    """Return the same bytes in memory that nobody changes; those of a marked frame are marked."""
    return sealed(frame.copy()) if isinstance(frame, SealedFrame) else bytes(frame)


def in_head(sizes: Iterable[int]) -> list[bool]:
    """Tell of each frame whether it travels in the head. Both sides work it out alike."""
    room = HEAD_ROOM_BYTES
    found = []
    for size in sizes:
        small = size < SMALL_BYTES and size <= room
        room -= size if small else 0
        found.append(small)
    return found


def _held(frame: bytearray | memoryview, is_marked: bool) -> bytearray | memoryview | SealedFrame:
    """Return a frame that was received; who passes a marked one on seals it, too."""
    return sealed(np.asarray(frame, np.uint8)) if is_marked else frame


class WireTraffic:
    """Bytes that this process has exchanged over the network, for its status.

    Attributes:
        parts: parts of large frames that were sent or received; this grows while a message is under way, too.
    """

    def __init__(self) -> None:
        self.sent = self.received = self.parts = 0
        self._lock = threading.Lock()

    def note_part(self) -> None:
        """Count a part of a large frame."""
        with self._lock:
            self.parts += 1

    def note(self, sent: int = 0, received: int = 0) -> None:
        """Count a message."""
        with self._lock:
            self.sent += sent
            self.received += received


traffic = WireTraffic()


class RecordSender:
    """The sending side of a connection.

    Args:
        cipher: cipher of this direction.
        encrypts: tensors are protected too.
    """

    def __init__(self, cipher: Cipher, encrypts: bool) -> None:
        self._cipher, self._encrypts = cipher, encrypts

    @functools.cached_property
    def _buffer(self) -> memoryview:
        return memoryview(bytearray(CHUNK_BYTES + self._cipher.overhead))

    def pieces(self, frames: Sequence[Any], sizes: Sequence[int]) -> Iterator[bytes | memoryview]:
        """Return the bytes to send for a message, in order; each piece is good until the next one is asked for."""
        small = in_head(sizes)
        marked = [size | _MARK * isinstance(frame, SealedFrame) for frame, size in zip(frames, sizes, strict=True)]
        head = b"".join([struct.pack(f"<{len(sizes)}Q", *marked), *compress(frames, small)])
        start = _COUNTS.pack(len(head), len(sizes)) + head
        first = self._cipher.seal(start[:FIRST_BYTES].ljust(FIRST_BYTES, b"\0"))
        yield first if len(start) <= FIRST_BYTES else first + self._cipher.seal(start[FIRST_BYTES:])
        for index, frame in enumerate(frames):
            if not small[index]:
                is_sealed = self._encrypts or index == _BODY or marked[index] >= _MARK
                yield from self._large(memoryview(frame).cast("B"), is_sealed)

    def _large(self, frame: memoryview, is_sealed: bool) -> Iterator[memoryview]:
        for start in range(0, len(frame), CHUNK_BYTES):
            plain = frame[start : start + CHUNK_BYTES]
            if is_sealed:
                record = self._buffer[: len(plain) + self._cipher.overhead]
                self._cipher.seal_into(plain, record)
                yield record
            else:
                yield plain
            traffic.note_part()


class Intake:
    """Reads a socket: small things from a buffer, large ones straight to where they belong.

    Args:
        sock: in blocking mode.
        allowance: what the peer may send.

    Attributes:
        start: first byte of the buffer that is not used.
        end: end of the bytes in the buffer.
        is_network: the bytes come from another host, or may do so.
        allowance: what the peer may send.
        began: when the last message was read.
    """

    def __init__(self, sock: socket.socket, allowance: Allowance | None = None) -> None:
        self._socket, self.is_network = sock, sock.family != socket.AF_UNIX
        self.allowance, self.began = allowance or Allowance(), time.monotonic()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", STALL_S, 0))
        self._buffer = memoryview(bytearray(_READ_AHEAD_BYTES))
        self.start = self.end = 0

    def exactly(self, size: int) -> Any:
        """Return so many bytes, good until the next call.

        Raises:
            ClosedError: the connection ended before.
            ProtocolError: the peer has not said who it is, and is silent for too long.
        """
        if size > _READ_AHEAD_BYTES:
            large = memoryview(bytearray(size))
            self.fill(large)
            return large
        if self.end - self.start < size:
            self._make_room()
        while self.end - self.start < size:
            try:
                got = self._socket.recv_into(self._buffer[self.end :])
            except BlockingIOError:  # nothing to read for STALL_S: a member need not speak
                got = -1
            if not got:
                raise ClosedError
            self.end += max(0, got)
            if self.end - self.start < size:
                self._check(self.allowance.refuses_silence(time.monotonic() - self.began))
        found = self._buffer[self.start : self.start + size]
        self.start += size
        return found

    def check_size(self, size: int) -> None:
        """Refuse a message that is larger than the peer may send.

        Raises:
            ProtocolError: it is.
        """
        self._check(self.allowance.refuses_size(size))

    def _check(self, refusal: str) -> None:
        if refusal:
            raise ProtocolError(refusal)

    def has(self, size: int) -> bool:
        """Return whether so many bytes are there. Takes in those that have come, as far as there is room.

        Raises:
            ClosedError: the connection ended before.
        """
        if self.end - self.start < size <= _READ_AHEAD_BYTES:
            self._make_room()
            try:
                got = self._socket.recv_into(self._buffer[self.end :], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            if not got:
                raise ClosedError
            self.end += got
        return self.end - self.start >= size

    def _make_room(self) -> None:
        """Move the bytes that are there to the front of the buffer."""
        held = self.end - self.start
        self._buffer[:held] = self._buffer[self.start : self.end]
        self.start, self.end = 0, held

    def fill(self, target: memoryview) -> None:
        """Read until a buffer is full.

        Raises:
            ClosedError: the connection ended before.
            StalledError: next to nothing came for :data:`STALL_S`.
        """
        done = min(len(target), self.end - self.start)
        target[:done] = self._buffer[self.start : self.start + done]
        self.start += done
        while done < len(target):
            start = time.monotonic()
            try:
                got = self._socket.recv_into(target[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                got = -1
            if not got:
                raise ClosedError
            done += max(0, got)
            if got >= STALL_BYTES:
                traffic.note_part()
            if done < len(target) and got < STALL_BYTES and time.monotonic() - start >= STALL_S:
                raise StalledError(f"a large frame did not go on for {STALL_S} s; bytes were left out on the way")


class RecordReceiver:
    """The receiving side of a connection.

    Args:
        cipher: cipher of this direction.
        encrypts: tensors are protected too.
        intake: source of the bytes.

    Attributes:
        size: bytes of the last message.
        is_large: it has a large frame, or the message that has begun does.
        has_begun_large: a message has begun that :meth:`take_small` does not add.
    """

    def __init__(self, cipher: Cipher, encrypts: bool, intake: Intake) -> None:
        self._cipher, self._encrypts, self._intake = cipher, encrypts, intake
        self._head_bytes = self._rest_bytes = self._count = self.size = 0
        self._first = b""
        self._sizes: Sequence[int] = ()
        self._marks: Sequence[bool] = ()
        self._frames: list[Any] = []
        self.is_large = self.has_begun_large = False

    @functools.cached_property
    def _buffer(self) -> memoryview:
        return memoryview(bytearray(CHUNK_BYTES + self._cipher.overhead))

    @functools.cached_property
    def _scratch(self) -> memoryview:
        return memoryview(bytearray(CHUNK_BYTES))

    def message(self) -> list[Any]:
        """Return the next message's frames, after waiting for them.

        Raises:
            ClosedError: the connection ended.
            TamperedError: a record was changed on the way.
            StalledError: a large frame does not go on.
            ProtocolError: sizes that no correct sender uses.
        """
        if not self._sizes:
            self._begin()
        for index, size in enumerate(self._sizes):
            if self._frames[index] is None:
                self._frames[index] = self._large(index, size)
        return self._end()

    def take_small(self, found: list[Frames], most: int) -> None:
        """Add the messages that are there to an empty list, up to one with a large frame. Does not wait.

        If such a message has begun, or one that may be large, :attr:`has_begun_large` is set, and :meth:`message`
        returns it. If fewer than ``most`` are added, only the kernel may have more.

        Raises:
            Exception: as :meth:`message` does; the messages before it are added.
        """
        intake, overhead = self._intake, self._cipher.overhead
        while len(found) < most and (not found or self._head_bytes or intake.start < intake.end):
            if not self._head_bytes:
                if not intake.has(FIRST_BYTES + overhead):
                    break
                self._read_first()
            if self._rest_bytes and not intake.has(self._rest_bytes + overhead):
                self.has_begun_large = self._rest_bytes + overhead > _READ_AHEAD_BYTES
                break
            self._begin()
            if self.is_large:
                self.has_begun_large = True
                break
            found.append(self._end())

    def _read_first(self) -> None:
        """Read the first record of a message."""
        first = self._open(FIRST_BYTES)
        head_bytes, count = _COUNTS.unpack_from(first)
        if not 1 <= count <= MAX_FRAMES + 1 or not 8 * count <= head_bytes <= 8 * count + HEAD_ROOM_BYTES:
            raise ProtocolError(f"a message of {count} frames with a head of {head_bytes} bytes")
        self._intake.check_size(head_bytes)
        self._head_bytes, self._count = head_bytes, count
        self._first, self._rest_bytes = first[_COUNTS.size :], max(0, _COUNTS.size + head_bytes - FIRST_BYTES)

    def _begin(self) -> None:
        """Read a message up to its large frames, which are None so far."""
        if not self._head_bytes:
            self._read_first()
        head = self._first + self._open(self._rest_bytes) if self._rest_bytes else self._first[: self._head_bytes]
        marked, content = struct.unpack_from(f"<{self._count}Q", head), memoryview(head)[8 * self._count :]
        marks, sizes = [size >= _MARK for size in marked], [size % _MARK for size in marked]
        small = in_head(sizes)
        if max(sizes) > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {max(sizes)} bytes; at most {MAX_FRAME_BYTES} are possible")
        if sum(compress(sizes, small)) != len(content):
            raise ProtocolError("a head whose size does not fit its frames")
        self._intake.check_size(sum(sizes))
        frames: list[Any] = []
        start = 0
        for index, size in enumerate(sizes):
            # Writable, and a copy of its own: servers sum in the frames that came first.
            frames.append(_held(bytearray(content[start : start + size]), marks[index]) if small[index] else None)
            start += size if small[index] else 0
        self._head_bytes, self._sizes, self._marks, self._frames = 0, sizes, marks, frames
        self.is_large = not all(small)

    def _end(self) -> list[Any]:
        """Return the message that was read."""
        frames, self.size = self._frames, sum(self._sizes)
        self._sizes, self._frames, self.has_begun_large = (), [], False
        self._intake.began = time.monotonic()
        if self._intake.is_network:
            traffic.note(received=self.size)
        return frames

    def _open(self, size: int) -> bytes:
        return self._cipher.open(self._intake.exactly(size + self._cipher.overhead))

    def _large(self, index: int, size: int) -> Any:
        is_sealed = self._encrypts or index == _BODY or self._marks[index]
        try:
            frame = np.empty(size, np.uint8).data
        except MemoryError:
            self._read_chunks(size, None, is_sealed)
            return LostFrame.of(size)
        if is_sealed:
            self._read_chunks(size, frame, is_sealed)
        else:
            self._intake.fill(frame)
        return _held(frame, self._marks[index])

    def _read_chunks(self, size: int, frame: memoryview | None, is_sealed: bool) -> None:
        """Read a frame chunk by chunk; without a place for it, each chunk replaces the one before."""
        overhead = self._cipher.overhead if is_sealed else 0
        for start in range(0, size, CHUNK_BYTES):
            length = min(CHUNK_BYTES, size - start)
            plain = self._scratch[:length] if frame is None else frame[start : start + length]
            record = self._buffer[: length + overhead]
            self._intake.fill(record)
            if is_sealed:
                self._cipher.open_into(record, plain)
