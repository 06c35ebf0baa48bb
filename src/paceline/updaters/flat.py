"""Interface of updaters of stored values."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.layout.ranges import Ranges
from paceline.updaters.spec import StepOptions


@dataclass(frozen=True)
class Piece:
    """A part of one key inside a stored flat value."""

    key: str | int
    start: int
    """First element inside the stored value."""
    length: int
    shape: tuple[int, ...] = ()
    """Shape of the key when the piece is the whole key, else empty."""
    offset: int = 0
    """First element inside the key."""

    def within(self, start: int, stop: int) -> Piece | None:
        """Return the part of the piece in ``[start, stop)``, with positions counted from ``start``."""
        first, last = max(self.start, start), min(self.start + self.length, stop)
        if first >= last:
            return None
        whole = last - first == self.length
        return Piece(
            self.key, first - start, last - first, self.shape if whole else (), self.offset + first - self.start
        )


State = dict[str, torch.Tensor]


class FlatUpdater(abc.ABC):
    """Updates one stored flat value from merged gradients. Not thread-safe: one caller per value.

    Args:
        value: 1-D tensor, updated in place.
        pieces: its pieces, in order.
    """

    def __init__(self, value: torch.Tensor, pieces: Sequence[Piece]) -> None:
        self.value = value
        self.pieces = tuple(pieces)

    @property
    def is_lazy(self) -> bool:
        """Whether :meth:`update_rows` does not change the other rows."""
        return False

    @abc.abstractmethod
    def update(self, merged: torch.Tensor, scale: float, options: StepOptions | None, absent: Ranges = ()) -> None:
        """Apply one merged push.

        Args:
            merged: 1-D tensor like the value; its content may be overwritten unless ``scale`` is 1.
            scale: factor that turns ``merged`` into the gradient.
            options: options at this step; None means the options of the last step.
            absent: ranges of whole pieces, but not all, for which no worker had a gradient: zeros in ``merged``. They
                and their state are not changed, as with a parameter whose ``grad`` is None.
        """

    def update_nothing(self) -> None:  # noqa: B027 - most have nothing to do
        """Handle a push in which no worker had a gradient of any piece. By default it has no effect."""

    def skip(self) -> None:  # noqa: B027 - most have nothing to do
        """Handle a push that must not be applied. By default it has no effect."""

    def value_was_set(self, start: int, stop: int) -> None:  # noqa: B027 - most keep no copy
        """Handle that ``value[start:stop]`` was set from outside. By default it does nothing."""

    def update_rows(self, merged: torch.Tensor, scale: float, options: StepOptions | None) -> None:
        """Apply one merged push of some rows of the only stored key. By default the other rows count as zero.

        Args:
            merged: row-sparse, [rows, elements of a row], coalesced.
            scale: as in :meth:`update`.
            options: as in :meth:`update`.
        """
        self.update(merged.to_dense().view(-1), scale, options)

    @abc.abstractmethod
    def split(self, at: int) -> tuple[FlatUpdater, FlatUpdater]:
        """Return updaters of ``value[:at]`` and ``value[at:]`` with this one's state.

        They share its memory: their values and states are views. After that this updater must not be used.
        """

    def join(self, right: FlatUpdater, value: torch.Tensor, pieces: Sequence[Piece]) -> FlatUpdater | None:
        """Return one updater with the states of this one and its right neighbour. After that neither must be used.

        It is the reverse of :meth:`split`. No copy is made if the states are adjacent in memory, as after a split;
        else they are copied once. None if one updater would not do the same as the two; both are unchanged.

        Args:
            right: updates the elements after this one's.
            value: 1-D tensor, the values of both.
            pieces: its pieces, in order.
        """
        return None

    def state(self, piece: Piece) -> State:
        """Return the state of one piece: 1-D tensors of its length, and 0-d tensors for the whole piece."""
        return {}

    def load_state(self, piece: Piece, state: State) -> None:
        """Set the state of one piece."""
        if state:
            raise ValueError(
                f"{type(self).__name__} has no state, but one was given for key {piece.key!r}: {', '.join(state)}"
            )

    def cut(self, at: int) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """Return the pieces before and after position ``at``."""
        left = [part for piece in self.pieces if (part := piece.within(0, at))]
        right = [part for piece in self.pieces if (part := piece.within(at, self.value.numel()))]
        return tuple(left), tuple(right)
