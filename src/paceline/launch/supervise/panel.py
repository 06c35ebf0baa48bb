"""Lines that stay under the output on a terminal.

The cursor rests at the start of the row above the panel, where the next output begins. So output erases the panel below
it, a terminal that is made narrower and wraps the panel's lines anew changes nothing above it, and no mode of the
terminal is left changed at any moment: a launcher that is killed leaves the panel's text, and nothing else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from paceline.observe.table import Size

#: Time between two drawings under output that comes in floods.
_REST_S = 0.05

_ERASE = b"\r\x1b[J"
_CUT, _WRAP = b"\x1b[?7l", b"\x1b[?7h"

#: Codes that move the cursor to other rows, or change the terminal. Colours, and erasing in the own row, stay.
_MOVES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-JL-ln-~]|\x1b[78DEHMc]|[\v\f]")


def obeys_codes(environ: Mapping[str, str]) -> bool:
    """Tell whether the terminal, if there is one, obeys codes that move the cursor."""
    return environ.get("TERM", "dumb") != "dumb"


class Panel:
    """The panel of one terminal. It returns bytes; its owner alone writes to the terminal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: Sequence[bytes] = ()
        self._is_drawn = False
        self._drawn_at = 0.0

    def size(self) -> Size:
        """Return the columns, and the lines that the panel may have: a third of the terminal, ten if it has them."""
        try:
            columns, lines = os.get_terminal_size(self._fd)
        except OSError:  # it was closed, and SIGHUP is on its way
            return Size(80)
        lines = lines or 24
        return Size(columns or 80, min(max(10, lines // 3), max(lines - 2, 0)))

    @property
    def due(self) -> float | None:
        """When the panel must be drawn again after a flood of output; None: it is drawn, or empty."""
        return self._drawn_at + _REST_S if self._lines and not self._is_drawn else None

    def show(self, lines: Sequence[bytes], now: float) -> bytes:
        """Replace the lines."""
        self._lines = lines
        return self._drawing(now)

    def redraw(self, now: float) -> bytes:
        """Draw the panel if it is due."""
        return self._drawing(now) if self.due is not None and now >= self.due else b""

    def under(self, data: bytes, now: float) -> bytes:
        r"""Return output with the panel under it: whole lines, of which the last may end with ``\r``."""
        above = (_ERASE if self._is_drawn and self._is_in_foreground() else b"") + data
        self._is_drawn = False
        return above + (self._drawing(now) if now >= self._drawn_at + _REST_S else b"")

    def close(self) -> bytes:
        """Remove the panel."""
        was_drawn, self._lines, self._is_drawn = self._is_drawn, (), False
        return _ERASE if was_drawn and self._is_in_foreground() else b""

    def _drawing(self, now: float) -> bytes:
        was_drawn, self._drawn_at = self._is_drawn, now
        if not self._is_in_foreground():
            self._lines, self._is_drawn = (), False
            return b""
        self._lines = self._lines[: self.size().lines]
        self._is_drawn = bool(self._lines)
        if not self._lines:
            return _ERASE if was_drawn else b""
        return b"%s\r\n\x1b[J%s%s\r\x1b[%dA" % (_CUT, b"\r\n".join(self._lines), _WRAP, len(self._lines))

    def _is_in_foreground(self) -> bool:
        """Tell whether this process may draw: a job of the shell in the background (``&``) may not."""
        try:
            return bool(os.tcgetpgrp(self._fd) == os.getpgrp())
        except OSError:  # not the terminal of this session
            return True


def without_moves(text: bytes) -> bytes:
    """Return a line of a process without codes that move the cursor to other rows."""
    return _MOVES.sub(b"", text)


def one_row(line: bytes) -> bytes:
    r"""Return a line that ends with ``\r`` so that it takes one row only: it is overwritten."""
    return _CUT + line + _WRAP
