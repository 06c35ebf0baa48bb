"""Turns messages into frames and back: a header of msgpack first, then the payload as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.errors import ProtocolError
from paceline.wire.limits import MAX_FRAME_BYTES, MAX_FRAMES, MAX_HEADER_BYTES
from paceline.wire.messages import Body, Envelope

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


class FramingError(ProtocolError):
    """A message that cannot be read."""


def encode(seq: int, acked: int, body: Body) -> bytes:
    """Return the header frame of a message."""
    return _encoder.encode(Envelope(seq, acked, body))


def decode(frames: Sequence[Any]) -> tuple[Envelope, Sequence[Any]]:
    """Read a message; returns the envelope and its payload frames.

    Args:
        frames: header first, as buffers.

    Raises:
        FramingError: too large, or not a message of this protocol.
    """
    if not 1 <= len(frames) <= MAX_FRAMES + 1:
        raise FramingError(f"a message of {len(frames)} frames; 1 to {MAX_FRAMES + 1} are allowed")
    header = memoryview(frames[0])
    if header.nbytes > MAX_HEADER_BYTES:
        raise FramingError(f"a header of {header.nbytes} bytes; at most {MAX_HEADER_BYTES} are allowed")
    for frame in frames[1:]:
        if memoryview(frame).nbytes > MAX_FRAME_BYTES:
            raise FramingError(f"a frame of {memoryview(frame).nbytes} bytes; at most {MAX_FRAME_BYTES} are allowed")
    try:
        return _decoder.decode(header), frames[1:]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise FramingError(f"not a message of this protocol: {error}") from error
