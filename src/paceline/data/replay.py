"""Replays the log of a job's membership: who was in each round, with which samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.data.ledger import epoch_order
from paceline.errors import LaunchError
from paceline.scheduler.journal import FILE_NAME
from paceline.wire import messages as m


@dataclass(frozen=True)
class Step:
    """A round of the workers that step together.

    Attributes:
        round: its number, from 1.
        epoch: epoch of the sampler.
        parts: by rank of the workers that counted in it, the samples of each.
    """

    round: int
    epoch: int
    parts: dict[int, list[int]]


class Replay:
    """The log of one job.

    Args:
        lines: those of its file.

    Attributes:
        changes: the changes of the membership, each with the time in seconds since 1970.

    Raises:
        ValueError: a line is none of such a log.
    """

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.changes: list[tuple[float, m.Change]] = []
        self._dealt: list[m.Dealt] = []
        for line in filter(None, map(bytes.strip, lines)):
            said = msgspec.json.decode(line)
            if "change" in said:
                self.changes.append((float(said["unix"]), _message(said["change"], m.Change)))
            else:
                self._dealt.append(_message(said["dealt"], m.Dealt))

    @classmethod
    def of(cls, folder: Path) -> Replay:
        """Return the log in a job's folder.

        Raises:
            LaunchError: there is none.
        """
        path = folder / FILE_NAME
        try:
            return cls(path.read_bytes().splitlines())
        except FileNotFoundError:
            raise LaunchError(
                f"{folder} has no log of membership: the scheduler of this job ran on another host, or with "
                "PACELINE_RECORDER=0"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
            raise LaunchError(f"{path} cannot be read: {error}") from error

    @property
    def samplers(self) -> list[str]:
        """Names of the samplers that have dealt to workers in lock step, in the order of their first batches."""
        return list(dict.fromkeys(one.sampler for one in self._dealt))

    def length(self, sampler: str) -> int:
        """Return the number of samples of a sampler's data."""
        return next(one.length for one in self._dealt if one.sampler == sampler)

    @property
    def last_round(self) -> int:
        """The last round of any worker that has left or died."""
        return max((one.round for _, one in self.changes if one.kind in ("left", "died")), default=0)

    def counts(self, rank: int, round: int) -> bool:
        """Tell whether a worker counted in a round."""
        there = False
        for _, one in self.changes:
            if rank not in one.workers:
                continue
            if one.kind in ("starts", "joins") and one.round < round:
                there = True
            elif one.kind in ("left", "died") and one.round < round:
                there = False
        return there

    def steps(self, sampler: str = "") -> Iterator[Step]:
        """Yield the rounds in which a sampler has dealt, in order; by default that of the only one.

        Raises:
            ValueError: there is no such sampler, or there are several and none is named.
        """
        name = sampler or (self.samplers[0] if len(self.samplers) == 1 else "")
        if name not in self.samplers:
            raise ValueError(f"there is no sampler {name!r} in this log; it has {', '.join(self.samplers) or 'none'}")
        words = {one.round: one for one in self._dealt if one.sampler == name}  # a later word on a round counts more
        rounds = sorted(words)
        for round in range(rounds[0], self.last_round + 1):
            word = words[rounds[bisect_right(rounds, round) - 1]]
            if not (word.samples and word.round < round):
                parts = {rank: _samples(word, round, start, stop) for rank, start, stop in word.columns}
                yield Step(round, word.epoch, {rank: one for rank, one in parts.items() if self.counts(rank, round)})


Said = TypeVar("Said", m.Change, m.Dealt)


def _message(fields: Mapping[str, object], kind: type[Said]) -> Said:
    return msgspec.convert([fields[name] for name in kind.__struct_fields__], kind)


@lru_cache(maxsize=2)
def _order(length: int, seed: int, epoch: int, shuffle: bool) -> NDArray[np.int64]:
    return epoch_order(length, seed, epoch, shuffle)


def _samples(word: m.Dealt, round: int, start: int, stop: int) -> list[int]:
    if word.samples:
        return word.samples[start:stop]
    order = _order(word.length, word.seed, word.epoch, word.shuffle)
    first = word.first + (round - word.round) * word.stride
    return [int(order[first + column]) for column in range(start, stop)]
