"""Tables of text, and the size that a text may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.host.plain_text import plain


class Size(NamedTuple):
    """How many columns and lines a picture may have; no limit of lines: 0."""

    columns: int
    lines: int = 0


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with aligned columns; numbers stand to the right.

    Control characters are shown as text.
    """
    rows = [[plain(cell) for cell in row] for row in rows]
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(_is_number(cell) for cell in column[1:]) and len(column) > 1 for column in columns]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def quantity(size: float) -> str:
    """Return bytes in a unit that fits: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def duration(seconds: float) -> str:
    """Return a time in a unit that fits: ``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def plural(count: int, one: str, many: str) -> str:
    """Return a count with its noun."""
    return f"{count} {one if count == 1 else many}"


def _is_number(cell: str) -> bool:
    return cell == "" or cell[0].isdigit()
