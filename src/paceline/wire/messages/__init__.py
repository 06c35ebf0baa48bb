"""The messages, as msgspec structs. A message with a field outside of its limits is refused."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.wire.messages import fields
from paceline.wire.messages.changes import *  # noqa: F403
from paceline.wire.messages.common import *  # noqa: F403
from paceline.wire.messages.data import *  # noqa: F403
from paceline.wire.messages.fields import *  # noqa: F403
from paceline.wire.messages.forwarding import *  # noqa: F403
from paceline.wire.messages.meeting import *  # noqa: F403
from paceline.wire.messages.membership import *  # noqa: F403
from paceline.wire.messages.notice import *  # noqa: F403
from paceline.wire.messages.pooling import *  # noqa: F403
from paceline.wire.messages.rejoining import *  # noqa: F403
from paceline.wire.messages.status import *  # noqa: F403
from paceline.wire.messages.tracing import *  # noqa: F403
from paceline.wire.messages.training import *  # noqa: F403

#: Raised by hand when messages with the same fields mean something else.
PROTOCOL = 4

REQUESTS: tuple[type[fields.Message], ...] = tuple(fields.Request.__subclasses__())
REPLIES: tuple[type[fields.Message], ...] = tuple(fields.Reply.__subclasses__())
#: By class: the number that says on the wire, and in records of events, which message it is.
TAGS: Mapping[type, int] = {one: tag for one in REQUESTS + REPLIES if isinstance(tag := one.__struct_config__.tag, int)}
