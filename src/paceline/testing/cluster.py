"""What the clusters of this package have in common: they start in steps, and end in the reverse order."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class StepwiseStart(ABC):
    """A context that starts something in steps. What has been started ends at the exit, and when a step fails."""

    @abstractmethod
    def _open(self, stack: contextlib.ExitStack) -> None:
        """Start everything; ``stack`` ends it."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
