"""The walk of all workers through a pool, in one iteration of their samplers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.ranges import Ranges, cut, everything, joined


@dataclass(frozen=True)
class WalkStart:
    """Epoch and positions of a walk; all workers say the same."""

    epoch: int = 0
    left: Ranges = ()
    """Positions of the epoch's order that are not trained on yet; none: all."""
    limit: int = 0
    """Samples of all workers together after which the walk is over; 0: it goes to the end of the epoch."""
    order: int = 0
    """Number of the orders: of another one, the same positions are other samples."""

    def __str__(self) -> str:
        """Return it for an error text."""
        left = f" from position {self.left[0][0]} on" if self.left else ""
        limit = f", {self.limit} samples at a time" if self.limit else ""
        return f"epoch {self.epoch}{left}{limit}, {f'seed {self.order - 1}' if self.order else 'not shuffled'}"

    def positions(self, length: int) -> Ranges:
        """Return the positions that are not trained on yet.

        Args:
            length: samples of the data.
        """
        return self.left or everything(length)

    def objection(self, length: int) -> str:
        """Return its error for so many samples, or an empty string."""
        is_wrong = self.left != joined(self.left) or (self.left and self.left[-1][1] > length)
        return f"positions {list(self.left)} are not ascending ranges within {length} samples" if is_wrong else ""

    def following(self, length: int) -> WalkStart:
        """Return the walk after this one: the rest of the epoch, or the whole next one."""
        _, rest = cut(self.positions(length), self.limit or length)
        return replace(self, left=rest) if rest else replace(self, epoch=self.epoch + 1, left=())
