"""Turns messages into frames and back: a header of msgpack first, then the payload as it is."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar, Union

import msgspec

from paceline.errors import ProtocolError
from paceline.host.plain_text import plain
from paceline.wire import messages
from paceline.wire.limits import MAX_FRAME_BYTES, MAX_FRAMES, MAX_HEADER_BYTES, MAX_NAME
from paceline.wire.messages import REPLIES, REQUESTS, Body, Envelope, Request

_encoder = msgspec.msgpack.Encoder()
_numbers = msgspec.msgpack.Decoder(Envelope[msgspec.Raw])
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)

Decoded = TypeVar("Decoded")

_FIELDS_BYTES = 4
#: Size of :func:`protocol`.
PROTOCOL_BYTES = 1 + _FIELDS_BYTES


def protocol() -> bytes:
    """Return the protocol that both sides of a connection must speak: its number, and a digest of all fields.

    A message with another field cannot be read, so a change of one makes another protocol by itself.
    """
    return bytes([messages.PROTOCOL]) + _digest_of_fields()


@functools.cache
def _digest_of_fields() -> bytes:
    found = [one for _, one in sorted(vars(messages).items())]
    structs = [one for one in found if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    fields = [(one.__name__, one.__struct_config__.tag, one.__annotations__) for one in structs]
    return hashlib.sha256(repr(fields).encode()).digest()[:_FIELDS_BYTES]


class FramingError(ProtocolError):
    """A message that cannot be read.

    Attributes:
        seq: its number; 0: that cannot be read either.
        acked: all requests up to here are answered.
    """

    def __init__(self, text: str, frames: Sequence[Any]) -> None:
        super().__init__(text)
        self.seq = self.acked = 0
        with contextlib.suppress(IndexError, *_UNREADABLE):
            envelope = _numbers.decode(frames[0])
            self.seq, self.acked = envelope.seq, envelope.acked


def encode(seq: int, acked: int, body: Body, held: int = 0) -> bytes:
    """Return the header frame of a message.

    Raises:
        ValueError: a text in it is no UTF-8.
    """
    try:
        return _encoder.encode(Envelope(seq, acked, body, held))
    except UnicodeEncodeError as error:
        what, text = type(body).__name__, plain(str(error.object))[:MAX_NAME]
        raise ValueError(f"no message can carry {text!r}, which a {what} has: it is no UTF-8") from None


def _read(decoder: msgspec.msgpack.Decoder[Decoded], frames: Sequence[Any]) -> tuple[Decoded, Sequence[Any]]:
    """Read a message; returns the envelope and its payload frames.

    Raises:
        FramingError: too large, or not a message of this protocol.
    """
    if not 1 <= len(frames) <= MAX_FRAMES + 1:
        raise FramingError(f"a message of {len(frames)} frames; 1 to {MAX_FRAMES + 1} are allowed", frames)
    header = memoryview(frames[0])
    if header.nbytes > MAX_HEADER_BYTES:
        raise FramingError(f"a header of {header.nbytes} bytes; at most {MAX_HEADER_BYTES} are allowed", frames)
    for frame in frames[1:]:
        if memoryview(frame).nbytes > MAX_FRAME_BYTES:
            size = memoryview(frame).nbytes
            raise FramingError(f"a frame of {size} bytes; at most {MAX_FRAME_BYTES} are allowed", frames)
    try:
        return decoder.decode(header), frames[1:]
    except _UNREADABLE as error:
        raise FramingError(f"not a message of this protocol: {error}", frames) from error


_of_any: msgspec.msgpack.Decoder[Envelope[Body]] = msgspec.msgpack.Decoder(
    Envelope[Union[REQUESTS + REPLIES]]  # type: ignore[misc]  # noqa: UP007
)
_of_requests: msgspec.msgpack.Decoder[Envelope[Request]] = msgspec.msgpack.Decoder(
    Envelope[Union[REQUESTS]]  # type: ignore[valid-type]  # noqa: UP007
)

decode = partial(_read, _of_any)
"""Read any message: see :func:`_read`."""

decode_request = partial(_read, _of_requests)
"""Read a request; an answer is none, and raises an error as any message that cannot be read."""
