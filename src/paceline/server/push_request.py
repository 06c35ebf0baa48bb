"""A push at its server, from its arrival until it is answered.

| state | event | next |
|---|---|---|
| open | `waits`: a slot has taken a part of it | open |
| open | `release` after the last entry is taken | waiting; answered if every slot has released it already |
| open | an entry cannot be taken | answered, with that error, by the handler of requests |
| waiting | `waits`: a slot it waits for is cut | waiting |
| waiting | `release`: a slot has done its part | waiting; answered after the last |
| open, waiting | its asker is answered with an error | answered |
| answered | `release`, an error | answered: nothing is sent twice |

A push that comes again before its answer is a new request, which takes the place of the first one in every slot. The
first is then never answered: nobody waits for it any more.

What breaks the guarantees: a slot that forgets a request without `release` or an error (its worker waits until its
timeout), and a `waits` that is missing (the answer is sent before all updates are made).
"""

from __future__ import annotations

import abc
from typing import Any, TypeAlias

from paceline.server.members import Asker
from paceline.server.merge import Notes
from paceline.wire import messages as m

Known: TypeAlias = tuple[m.KnownRange, Any]
"""A range as its worker knows it after the answer, and its frame; None: the values are in the worker's memory."""


class PushRequest(abc.ABC):
    """A push, or a sum of pushes, that is not answered yet.

    Args:
        asker: gets the answer.
        worker: whose push it is; of a sum, the first worker behind it.
        want: the answer brings new values.
        shared: the values are written to the worker's memory.
        knows: the answer says what the worker knows after it, because the store compresses pulls.

    Attributes:
        known: what the answer says that the worker knows; None where it says nothing of that.
        absent: ranges of which the answer says that nobody had a gradient.
        notes: those that all slots have; None before the first slot is released.
    """

    def __init__(self, asker: Asker, worker: int, want: bool = True, shared: bool = False, knows: bool = False) -> None:
        self.asker, self.worker, self.want, self.shared = asker, worker, want, shared
        self.known: list[Known] | None = [] if knows else None
        self.absent: set[m.Span] = set()
        self.notes: Notes | None = None
        self._unreleased = 1  # the request itself, until all its entries are taken

    @abc.abstractmethod
    def answer(self) -> None:
        """Send the answer; all slots have released the push."""

    def waits(self, releases: int = 1) -> None:
        """Wait for more releases."""
        self._unreleased += releases

    def release(self) -> None:
        """Note that one slot has done its part, or that all entries are taken; answer after the last."""
        self._unreleased -= 1
        if self._unreleased == 0 and not self.asker.is_answered:
            self.answer()
