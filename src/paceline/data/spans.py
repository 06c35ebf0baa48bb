"""The ``data_sharding`` file of MXNet-G: which fraction of the data each worker trains on."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from paceline.data.partition import check_span
from paceline.errors import ConfigError

Span = tuple[float, float]

_log = logging.getLogger(__name__)


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
