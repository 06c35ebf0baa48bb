"""A switch for what a process notes about its steps: its account and its flight recorder.

There is none in the product, because both are always on. Servers load this module
(``--allow benchmarks.switch:observe``) and run :func:`observe` as a command; a worker calls :func:`turn`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline import extensions
from paceline.observe import meter, ring


def _nothing(*values: object, **named: object) -> None:
    """Note nothing."""


class NoMeter(meter.Meter):
    """A meter that counts nothing. The times of a server's turns stay: more than the account needs them."""

    def __init__(self) -> None:
        super().__init__(thread=meter.NO_THREAD)

    def enter(self, part: int) -> int:
        return meter.NOTHING

    leave = end_round = end_turn = note_update = note_staleness = came_last = forward_begins = step_ends = _nothing


class _Switch:
    def __init__(self) -> None:
        self._on: tuple[meter.Meter, Callable[..., None]] | None = None
        self._off = NoMeter()

    def turn(self, is_on: bool) -> None:
        """Turn the account and the recorder of this process on or off."""
        if self._on is None:
            self._on = meter.active, ring.note
        if is_on:
            meter.active, ring.note = self._on
        else:
            meter.active, ring.note = self._off, _nothing


turn = _Switch().turn


@extensions.register("command", "observe")
def observe(context: Any, body: str) -> str:
    """Turn them ``on`` or ``off`` in a server."""
    turn(body == "on")
    return body
