"""Cutting N samples into parts: arithmetic that every worker repeats and that always agrees; and files of parts.

A part is described by its *slots*: positions in the epoch's order of the whole data set. As the order is the same on
all workers, disjoint slots are disjoint samples.
"""

from __future__ import annotations

import logging
import math
import operator
import os
from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import SupportsIndex

import numpy as np
from numpy.typing import NDArray

from paceline.collectives.environment import find_place
from paceline.config import from_environment
from paceline.errors import ConfigError
from paceline.worker.current import current_session

Slots = NDArray[np.int64]
Span = tuple[float, float]

_log = logging.getLogger(__name__)


def length_of(data: SupportsIndex | Sized) -> int:
    """Return the number of samples of a data set, which may be given as that number, NumPy's too.

    Raises:
        TypeError: it is no integer, and has no length.
    """
    return len(data) if isinstance(data, Sized) else operator.index(data)


def check_epoch(epoch: SupportsIndex) -> int:
    """Return the number of an epoch as a plain number.

    Raises:
        TypeError: it is no integer.
        ValueError: it is negative.
    """
    number = operator.index(epoch)
    if number < 0:
        raise ValueError(f"epoch is {number}; epochs count from 0")
    return number


def own_part() -> tuple[int, int]:
    """Return the number of workers of the job and this worker's rank; (1, 0) outside of a job.

    Joins the job where the scheduler chooses the ranks.
    """
    from paceline.collectives import world

    if world.is_initialized():
        return world.current().size, world.current().rank
    settings = from_environment()
    if settings.scheduler and settings.role == "worker" and settings.num_workers > 1:
        return settings.num_workers, settings.rank if settings.rank >= 0 else current_session().rank
    place = find_place()
    return place.size, place.rank


def part_of(
    num_parts: int | None, part_index: int | None, own: Callable[[], tuple[int, int]] = own_part
) -> tuple[int, int]:
    """Return the number of parts and the part of this worker; None: as many as the job has workers, and its rank.

    Args:
        num_parts: number of parts, if it is given.
        part_index: the part, if it is given.
        own: returns the number of workers and this worker's rank.

    Raises:
        ValueError: the job has another number of workers, so that its rank is no part.
    """
    if num_parts is not None and part_index is not None:
        return num_parts, part_index
    workers, rank = own()
    if part_index is not None:
        return workers, part_index
    if num_parts is None or num_parts == workers:
        return workers, rank
    if num_parts > 1 and workers > 1:
        raise ValueError(f"num_parts is {num_parts}, and the job has {workers} workers: give part_index too")
    return num_parts, 0


def check_part(num_parts: int, part_index: int) -> None:
    """Refuse a part that does not exist.

    Raises:
        ValueError: ``num_parts`` is below 1, or ``part_index`` is not one of 0 to ``num_parts - 1``.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}; it must be at least 1")
    if not 0 <= part_index < num_parts:
        raise ValueError(f"part_index is {part_index}; with num_parts={num_parts} it is 0 to {num_parts - 1}")


def check_span(span: Span) -> None:
    """Refuse a fraction of the data that does not lie in 0 to 1 or is empty.

    Raises:
        ValueError: the message shows the valid range.
    """
    begin, end = span
    if not 0.0 <= begin < end <= 1.0:
        raise ValueError(f"span ({begin}, {end}) is not a fraction of the data; 0 <= begin < end <= 1 is needed")


def part_bounds(length: int, num_parts: int, part_index: int) -> tuple[int, int]:
    """Return [start, stop) of one of ``num_parts`` contiguous parts; sizes differ by at most 1 (MXNet's MNISTIter)."""
    check_part(num_parts, part_index)
    return length * part_index // num_parts, length * (part_index + 1) // num_parts


def shard_bounds(length: int, num_parts: int, part_index: int) -> tuple[int, int]:
    """Return [start, stop) of one of ``num_parts`` contiguous parts; the first ones get the remainder, one each.

    So 10 samples over 4 parts make 3, 3, 2, 2: MXNet's ``gluon.data.Dataset.shard``.
    """
    check_part(num_parts, part_index)
    size, extra = divmod(length, num_parts)
    start = part_index * size + min(part_index, extra)
    return start, start + size + (part_index < extra)


def span_bounds(length: int, span: Span) -> tuple[int, int]:
    """Return [start, stop) of a fraction; spans that share a boundary share its rounding, so none overlap."""
    check_span(span)
    return round(length * span[0]), round(length * span[1])


def window_slots(length: int, num_parts: int, part_index: int, *, drop_last: bool) -> Slots:
    """Return slots of equally large parts: a part one short borrows its neighbour's first sample (round the end).

    Together the parts cover every slot, and each repeats at most one; with ``drop_last`` none is repeated and
    ``length % num_parts`` slots are left out instead.
    """
    start, _ = part_bounds(length, num_parts, part_index)
    size = length // num_parts if drop_last else -(-length // num_parts)
    return np.arange(start, start + size, dtype=np.int64) % length


def column_slots(length: int, global_batch_size: int, columns: tuple[int, int], *, drop_last: bool) -> Slots:
    """Return the slots of the same columns of every global batch, batch after batch (LB-BSP's division of the work).

    The order is read in rows of ``global_batch_size``; the last row is filled from the beginning, or left out with
    ``drop_last``. Workers with other columns get the same number of rows, however unequal their columns.
    """
    rows = length // global_batch_size if drop_last else math.ceil(length / global_batch_size)
    first = np.arange(rows, dtype=np.int64)[:, None] * global_batch_size
    slots: Slots = (first + np.arange(*columns, dtype=np.int64)).reshape(-1) % length
    return slots


# ---- files of parts --------------------------------------------------------------------------------------------------


def read_spans(path: str | os.PathLike[str], num_workers: int | None = None) -> list[Span]:
    """Read a span per worker: line ``rank + 1`` holds "begin end", two fractions between 0 and 1.

    Blank lines and lines that start with ``#`` do not count. Fractions that overlap or that leave samples to nobody
    are legal and logged as warnings. The format is MXNet-G's ``data_sharding``::

        0   0.3
        0.3 1

    Args:
        path: the file.
        num_workers: when given, the file must have a line for each.

    Returns:
        One (begin, end) per worker, in order of rank.

    Raises:
        ConfigError: the file cannot be read, a line cannot be understood, or there is not one line per worker.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data sharding file {path} cannot be read: {error}") from error
    spans = [
        _parse(text, f"{path}, line {number}")
        for number, text in enumerate(map(str.strip, lines), start=1)
        if text and not text.startswith("#")
    ]
    if not spans or num_workers not in (None, len(spans)):
        wanted = "at least one" if num_workers is None else f"{num_workers}, one per worker"
        raise ConfigError(f"data sharding file {path} has {len(spans)} lines 'begin end'; it needs {wanted}")
    _warn_about_holes(path, spans)
    return spans


def _parse(text: str, where: str) -> Span:
    try:
        begin, end = map(float, text.split())
        check_span((begin, end))
    except ValueError:
        raise ConfigError(
            f"{where}: {text!r} is not 'begin end' with 0 <= begin < end <= 1, for example '0 0.3'"
        ) from None
    return begin, end


def _warn_about_holes(path: str | os.PathLike[str], spans: list[Span]) -> None:
    covered = 0.0
    for begin, end in [*sorted(spans), (1.0, 1.0)]:
        if begin > covered:
            _log.warning("%s: no worker trains on the samples from %g to %g", path, covered, begin)
        elif begin < covered and begin < end:
            _log.warning("%s: several workers train on the samples from %g to %g", path, begin, min(covered, end))
        covered = max(covered, end)


def fractions_of(shares: str | os.PathLike[str] | Sequence[float], num_workers: int) -> list[float]:
    """Return the fraction of each worker with which a job begins.

    Raises:
        ValueError: there is not one per worker.
        ConfigError: the file cannot be used.
    """
    if isinstance(shares, str) and shares in ("equal", "measured"):
        return [1.0] * num_workers
    if isinstance(shares, str | os.PathLike):
        if not os.path.exists(shares):
            raise ConfigError(
                f"shares={os.fspath(shares)!r} is neither 'equal' nor 'measured', nor is there such a file"
            )
        return [end - begin for begin, end in read_spans(shares, num_workers)]
    if len(shares) != num_workers:
        raise ValueError(f"shares {list(shares)} are not one per worker; the job has {num_workers}")
    return [float(one) for one in shares]
