"""Requests on the state and the counters of a store, and commands that users register."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Protocol, TypeAlias

from paceline.config import Settings
from paceline.server.asker import Asker, Handlers, Result
from paceline.server.hosted import Stores
from paceline.server.state import get_state, set_state
from paceline.transport.base import Frames
from paceline.wire import messages as m


class CommandContext(Protocol):
    """What a command may use of its server."""

    settings: Settings
    stores: Stores


CommandFn: TypeAlias = Callable[[CommandContext, str], str]

_COMMANDS: dict[str, CommandFn] = {}


def register_command(name: str, function: CommandFn) -> None:
    """Make ``KVStore.send_command_to_servers(name, body)`` possible; runs in the server process.

    Args:
        name: of the command.
        function: gets the server's context and the body; what it returns is sent back.

    Raises:
        ValueError: the name is taken.
    """
    if name in _COMMANDS:
        raise ValueError(f"a server command named {name!r} is registered already")
    _COMMANDS[name] = function


def _set_log_level(context: CommandContext, body: str) -> str:
    logging.getLogger("paceline").setLevel(body.upper())
    return body.upper()


register_command("ping", lambda context, body: body)
register_command("log_level", _set_log_level)


class Commands:
    """Handles requests on state and counters, and registered commands.

    Args:
        context: of the server.
    """

    def __init__(self, context: CommandContext) -> None:
        self._context, self._stores = context, context.stores
        self.of_workers: Handlers = {
            m.GetState: self._get_state,
            m.SetState: self._set_state,
            m.AskStats: self._stats,
            m.Command: self._command,
        }

    def _get_state(self, asker: Asker, body: m.GetState, frames: Frames) -> Result:
        return get_state(self._stores[body.store].own, asker.rank, body.entries)

    def _set_state(self, asker: Asker, body: m.SetState, frames: Frames) -> Result:
        set_state(self._stores[body.store].own, asker.rank, body.items, frames)
        return m.Done()

    def _stats(self, asker: Asker, body: m.AskStats, frames: Frames) -> Result:
        return m.StatsAre(json.dumps(self._stores[body.store].own.report()))

    def _command(self, asker: Asker, body: m.Command, frames: Frames) -> Result:
        if body.head not in _COMMANDS:
            raise ValueError(f"unknown server command {body.head!r}; known are {', '.join(sorted(_COMMANDS))}")
        return m.Answer(_COMMANDS[body.head](self._context, body.body))
