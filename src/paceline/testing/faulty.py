"""Processes with faults; ``python -m paceline.testing.faulty server`` is a role of ``python -m paceline`` with them."""

from __future__ import annotations

import os
import runpy
import sys
from functools import partial
from typing import Any

from paceline import config
from paceline.net import call, client
from paceline.server import merge as accumulate
from paceline.server import process as server
from paceline.testing.faults import Chance, FaultyHub, FaultyListener, asked_for
from paceline.worker import current


def install(who: str) -> None:
    """Replace the ends of the transport of this process, e.g. ``worker 1``, by faulty ones, if there are faults."""
    faults = asked_for()
    if faults is None:
        return
    chance = Chance(faults, who)

    def result_after_pause(self: accumulate.Accumulator, *arguments: Any, **options: Any) -> Any:
        chance.pause()
        return result(self, *arguments, **options)

    result = accumulate.Accumulator.result
    for owner, name, value in (
        (current, "SocketHub", partial(FaultyHub, chance=chance)),
        (server, "SocketHub", partial(FaultyHub, chance=chance)),
        (server, "SocketListener", partial(FaultyListener, chance)),
        (server, "IDLE_S", faults.probe_after_s),
        (client, "CHECK_INTERVAL_S", faults.probe_after_s),
        (call, "PROBE_AFTER_S", faults.probe_after_s),
        (accumulate.Accumulator, "result", result_after_pause),
    ):
        getattr(owner, name)  # a name that is gone is an error, and not a network without faults
        setattr(owner, name, value)


if __name__ == "__main__":
    install(f"{sys.argv[1]} {os.environ[config.variable('rank')]}")
    runpy.run_module("paceline", run_name="__main__", alter_sys=True)
