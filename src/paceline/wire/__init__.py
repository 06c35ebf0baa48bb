"""The wire between the roles: messages, framing, limits, and exactly-once requests. Pure."""

from paceline.wire.framing import PROTOCOL_BYTES, FramingError, decode, decode_request, encode, protocol
from paceline.wire.sequence import Inbox, Outbox, Size

__all__ = [
    "PROTOCOL_BYTES",
    "FramingError",
    "Inbox",
    "Outbox",
    "Size",
    "decode",
    "decode_request",
    "encode",
    "protocol",
]
