"""Requests on the state and the counters of a store, and commands that users register."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Protocol, TypeAlias

from paceline import extensions
from paceline.config import Settings
from paceline.extensions import register
from paceline.net.base import Frames
from paceline.server.asker import Asker, Handlers, Result
from paceline.server.hosted import HostedStores
from paceline.server.state import get_state, set_state
from paceline.wire import messages as m


class CommandContext(Protocol):
    """What a command may use of its server."""

    settings: Settings
    stores: HostedStores


#: ``command(context, body)``: what it returns is sent back. ``KVStore.send_command_to_servers(name, body)`` runs it.
CommandFn: TypeAlias = Callable[[CommandContext, str], str]


@register("command", "ping")
def _ping(context: CommandContext, body: str) -> str:
    return body


@register("command", "log_level")
def _set_log_level(context: CommandContext, body: str) -> str:
    logging.getLogger("paceline").setLevel(body.upper())
    return body.upper()


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
        run: CommandFn = extensions.find("command", body.head)
        return m.CommandAnswer(run(self._context, body.body))
