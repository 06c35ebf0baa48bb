"""Pushes that wait for their answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.wire import messages as m


@dataclass(eq=False)
class Pending:
    """A push that is not answered yet."""

    worker: int
    want: bool
    shared: bool
    finish: Callable[[Pending], None]
    """Called with this when the last slot has released the worker."""
    fail: Callable[[Exception], None]
    told: list[tuple[m.Told, Any]] = field(default_factory=list)
    """What the answer brings, with its frames, in a store that compresses pulls."""
    absent: set[tuple[int, int, int, int]] = field(default_factory=set)
    """(block, bucket, start, length) of what the answer says that nobody had a gradient for."""
    remaining: int = 0
    """Slots that have not released the worker; one that broke never does, so that ``finish`` is not called."""
    failed: bool = False

    def break_off(self, error: Exception) -> None:
        """Answer with an error, once."""
        if not self.failed:
            self.failed = True
            self.fail(error)
