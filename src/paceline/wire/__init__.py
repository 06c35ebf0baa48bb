"""The wire between the roles: messages, framing, limits, and exactly-once requests. Pure."""

from paceline.wire.framing import FramingError, decode, encode
from paceline.wire.sequence import Inbox, Outbox

__all__ = ["FramingError", "Inbox", "Outbox", "decode", "encode"]
