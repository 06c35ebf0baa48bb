"""States of samplers that hand out unequal parts of an epoch. Each kind can go on from a state of the other.

A state of a pool names the positions that are left. A state of shares names the index of the next sample, and the
positions that come again at the end (:mod:`paceline.data.handed_out`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.data.sampler import State, check_kind, check_settings
from paceline.hetero.sample_pool import positions
from paceline.layout.ranges import Ranges, everything, joined


@dataclass(frozen=True)
class SharePosition:
    """Where shares go on."""

    epoch: int
    row: int
    """Global batches that were handed out."""
    first: int
    """Index of the first sample that is left."""
    again: list[int]
    shares: list[int]


def left_of(state: Mapping[str, Any], settings: State) -> tuple[int, Ranges]:
    """Return the epoch of a state, and the positions that it leaves; none: all.

    Args:
        state: state of a pool or of shares.
        settings: settings of the sampler that goes on: the order of an epoch follows from them.

    Raises:
        ValueError: it was taken in mid-epoch of other data or another order, or it makes no sense.
    """
    check_kind(state, "epoch", "length")
    epoch, length = int(state["epoch"]), int(state["length"])
    if "left" in state:
        left: Ranges = tuple((int(start), int(stop)) for start, stop in state["left"])
    else:
        place = place_of(state, settings)
        again = place.again[max(0, place.first - length) :]
        left = joined([(place.first, length), *((position, position + 1) for position in again)])
    if epoch < 0 or not left or joined(left) != left or left[0][0] < 0 or left[-1][1] > length:
        raise ValueError(f"the state names positions {list(left)} of epoch {epoch} of {length} samples")
    if left == everything(length):
        return epoch, ()
    check_settings(state, settings)
    return epoch, left


def place_of(state: Mapping[str, Any], settings: State) -> SharePosition:
    """Return where shares go on.

    Args:
        state: state of shares or of a pool.
        settings: settings of the sampler that goes on; in mid-epoch those of the state must be the same.
    """
    if "left" in state:
        epoch, left = left_of(state, settings)
        return (
            SharePosition(epoch, 1, state["length"], positions(left), [])
            if left
            else SharePosition(epoch, 0, 0, [], [])
        )
    check_kind(state, "epoch", "length", "batch", "global_batch_size", "shares")
    again, size, length = [int(one) for one in state.get("again", ())], state["global_batch_size"], state["length"]
    if state["batch"] or again:
        check_settings(state, settings)
    if not all(0 <= one < length for one in again):
        raise ValueError(f"the state names samples beyond the {length} of the data")
    rows = -(-(length + len(again)) // size)
    if state["epoch"] < 0 or not 0 <= state["batch"] <= (state.get("first", 0) or rows):
        raise ValueError(f"the state names batch {state['batch']}; an epoch has {rows}")
    first = min(state.get("first", state["batch"] * size), length + len(again))
    return SharePosition(state["epoch"], state["batch"], first, again, state["shares"])
