"""``paceline top``: a live picture of a running job in the terminal."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType, TracebackType

from paceline.cli.options import Option, Parser
from paceline.cli.running import SCHEDULER, ask, find
from paceline.errors import LaunchError
from paceline.launch import runtime
from paceline.launch.picture import ORDERS, View, in_order, painted, picture
from paceline.launch.supervise.panel import obeys_codes
from paceline.observe.job_view import JobView
from paceline.observe.table import Size

OPTIONS = (
    Option(("--interval",), "seconds between two pictures (default: 1)", "SECONDS", float, positive=True),
    Option(("--sort",), f"order of the workers: {', '.join(ORDERS)} (default: step)", "ORDER", choices=tuple(ORDERS)),
    Option(("--once",), "print one picture and end"),
    SCHEDULER,
)

#: Time between two looks at the size of the terminal.
_LOOK_S = 0.2

_OPEN, _CLOSE, _HOME, _ERASE_REST, _ERASE_BELOW = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H", "\x1b[K", "\x1b[J"

#: Names of keys that send more than one byte.
_KEYS = {b"\x1b[A": "k", b"\x1bOA": "k", b"\x1b[B": "j", b"\x1bOB": "j", b"\x1b": "x"}


def run(name: str, words: Sequence[str]) -> int:
    """Show a job until it ends."""
    usage = "paceline top [JOB] [options]"
    about = "Watch a running job. Keys: s sorts, up and down select a worker, q or Ctrl-C ends this, not the job."
    job, options = Parser(name, OPTIONS, usage, about).parse_job(words)
    record = find(job, options.scheduler)
    view, interval_s = View(options.sort or "step"), options.interval or 1.0
    try:
        if sys.stdout.isatty() and obeys_codes(os.environ) and not options.once:
            _watch(record, view, interval_s)
            return 0
        while True:
            _print(ask(record), record, view)
            if options.once or not record.is_known_alive:
                return 0
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return 0


def _print(job: JobView, record: runtime.JobRecord, view: View) -> None:
    lines = picture(job, record, time.time(), Size(shutil.get_terminal_size().columns), view)
    if sys.stdout.isatty() and obeys_codes(os.environ):
        print(b"\n".join(painted(lines, os.environ)).decode(), flush=True)
    else:
        print("\n".join(line.plain for line in lines), flush=True)


def _watch(record: runtime.JobRecord, view: View, interval_s: float) -> None:
    """Show a picture that follows keys and the terminal's size. The last one stays when the job ends."""
    last: JobView | None = None
    try:
        with _Terminal() as terminal:
            while last is None or record.is_known_alive:
                last, until = ask(record), time.monotonic() + interval_s
                while (left := until - time.monotonic()) > 0:
                    keys = f"s: sort by {_next(view.order)}  up, down: select a worker  q: quit"
                    terminal.draw(last, record, replace(view, about=(keys,)))
                    key = terminal.key(left)
                    if key == "q":
                        return
                    view = pressed(view, key, last)
    except LaunchError:
        if last is not None:
            _print(last, record, view)
        raise
    _print(last, record, view)


def _next(order: str) -> str:
    names = list(ORDERS)
    return names[(names.index(order) + 1) % len(names)]


def pressed(view: View, key: str, job: JobView) -> View:
    """Return the view after a key: ``s`` sorts, ``j`` and ``k`` select a worker, ``x`` none."""
    ranks = [one.member.rank for one in in_order(job, view.order)]
    if key == "s":
        return replace(view, order=_next(view.order))
    if key == "x":
        return replace(view, selected=None)
    if key not in ("j", "k") or not ranks:
        return view
    step = 1 if key == "j" else -1
    if view.selected not in ranks:
        return replace(view, selected=ranks[0 if step > 0 else -1])
    index = ranks.index(view.selected) + step
    return replace(view, selected=ranks[min(max(index, 0), len(ranks) - 1)])


class _Terminal:
    """The terminal, with a screen of its own and keys that are read at once, for as long as the ``with`` block runs."""

    def __enter__(self) -> _Terminal:
        self._has_keys = sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
        self._size = Size(0)
        self._sigterm = signal.signal(signal.SIGTERM, _terminated)
        if self._has_keys:
            self._before = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
        print(_OPEN, end="", flush=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        print(_CLOSE, end="", flush=True)
        if self._has_keys:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)
        signal.signal(signal.SIGTERM, self._sigterm)

    def draw(self, job: JobView, record: runtime.JobRecord, view: View) -> None:
        self._size = _size()
        lines = painted(picture(job, record, time.time(), self._size, view), os.environ)
        text = f"{_ERASE_REST}\n".join(line.decode() for line in lines)
        print(f"{_HOME}{text}{_ERASE_REST}{_ERASE_BELOW}", end="", flush=True)

    def key(self, left_s: float) -> str:
        """Return the next key, nothing after that time or when the terminal has another size."""
        until = time.monotonic() + left_s
        while _size() == self._size and (left := until - time.monotonic()) > 0:
            if not self._has_keys:
                time.sleep(min(left, _LOOK_S))
            elif select.select([sys.stdin], [], [], min(left, _LOOK_S))[0]:
                return _read_key(sys.stdin.fileno())
        return ""


def _size() -> Size:
    columns, lines = os.get_terminal_size(sys.stdout.fileno())  # COLUMNS does not follow
    return Size(columns or 80, lines or 24)


def _read_key(fd: int) -> str:
    data = os.read(fd, 1)
    if data == b"\x1b" and select.select([fd], [], [], 0)[0]:
        data += os.read(fd, 2)
    return _KEYS.get(data, data.decode(errors="replace")) if data else "q"


def _terminated(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)
