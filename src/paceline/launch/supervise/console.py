"""Show the output of a job's processes: every line names its process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import LaunchError
from paceline.host.plain_text import plain
from paceline.launch.plan import ProcessName
from paceline.launch.supervise.lines import LastLines, Line, LineSplitter, Tracebacks
from paceline.launch.supervise.panel import Panel, obeys_codes, one_row, without_moves

OUT, ERR = 1, 2

_COLOURS = {"scheduler": b"35", "server": b"34", "worker": b"32", "launch": b"33"}
_ERASE_REST = b"\x1b[K"

#: Most bytes that wait for a reader. Beyond that processes wait in their own writes, as in a pipe.
_MOST_UNWRITTEN = 1 << 18

_LEADER = ProcessName("worker", 0)


class Outlet:
    """Writes to a terminal, pipe or file that others use as well, without ever waiting for its reader.

    A descriptor that is made non-blocking is so for all processes that share it: the user's shell, ``tee``. So a pipe
    or terminal is opened once more where the system can (``/proc/self/fd``). Where it cannot, as with a socket, a write
    is as long as the kernel promises that it does not wait.

    Attributes:
        fd: the descriptor to wait for.
    """

    def __init__(self, fd: int) -> None:
        self._given, kind = fd, os.fstat(fd).st_mode
        self._may_wait = stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or stat.S_ISSOCK(kind)
        own = None
        if self._may_wait:
            with contextlib.suppress(OSError):
                own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        self.fd = fd if own is None else own

    def write(self, data: memoryview) -> memoryview:
        """Write what can be written now; return the rest.

        Raises:
            OSError: it cannot be written, and never will.
        """
        with contextlib.suppress(BlockingIOError):  # also of a descriptor that another process made non-blocking
            while data and (self.fd != self._given or not self._may_wait or self._is_ready()):
                most = select.PIPE_BUF if self.fd == self._given and self._may_wait else len(data)
                data = data[os.write(self.fd, data[:most]) :]
        return data

    def _is_ready(self) -> bool:
        one = select.poll()
        one.register(self.fd, select.POLLOUT)
        return bool(one.poll(0))

    def release(self) -> None:
        """Close what was opened. Idempotent."""
        if self.fd != self._given:
            os.close(self.fd)
            self.fd = self._given


class Console:
    """Writes to the launcher's own stdout and stderr.

    On a terminal prefixes are coloured and only worker 0's progress bars are shown while they move, because all bars
    share one row; elsewhere every byte is passed on. Under a panel, lines keep their colours and lose what moves the
    cursor to other rows.

    Args:
        fds: targets of the children's stdout (:data:`OUT`) and stderr (:data:`ERR`).
        environ: NO_COLOR switches colours off, TERM=dumb all codes.
        log_dir: folder in which a file per process (``worker-0.log``) takes all that it prints; empty: none.
        has_panel: show a panel where stderr is a terminal that can.

    Attributes:
        panel: the panel, if there is one.

    Raises:
        LaunchError: another job writes into that folder now.
    """

    def __init__(
        self,
        fds: Mapping[int, int] | None = None,
        environ: Mapping[str, str] | None = None,
        log_dir: str = "",
        has_panel: bool = False,
    ) -> None:
        environ = os.environ if environ is None else environ
        self._fds = {OUT: 1, ERR: 2} if fds is None else dict(fds)
        self._terminal = {stream: os.isatty(fd) for stream, fd in self._fds.items()}
        is_dumb = environ.get("TERM") == "dumb"
        self._colour, self._erase_rest = not environ.get("NO_COLOR") and not is_dumb, b"" if is_dumb else _ERASE_REST
        can = has_panel and self._terminal[ERR] and obeys_codes(environ)
        self.panel = Panel(self._fds[ERR]) if can else None
        self._above = self._streams_of_panel() if can else frozenset()
        """Streams that are shown above the panel."""
        self._splitters: dict[tuple[ProcessName, int], LineSplitter] = {}
        self._tails: dict[ProcessName, LastLines] = {}
        self._tracebacks: Tracebacks[ProcessName] = Tracebacks()
        self._gone: set[int] = set()
        self._outlets = {stream: Outlet(fd) for stream, fd in self._fds.items()}
        self._unwritten: deque[tuple[int, memoryview]] = deque()
        """In the order in which it is to appear, also where both streams go to one place."""
        self._log_dir = Path(log_dir) if log_dir else None
        self._files: dict[ProcessName, int] = {}
        self._unwritable: set[ProcessName] = set()
        self._lock = _locked(log_dir) if log_dir else None

    @property
    def broken(self) -> bool:
        """Whether a reader has closed its end (``paceline launch … | head``)."""
        return bool(self._gone)

    @property
    def waits_for(self) -> Outlet | None:
        """Where output waits until somebody reads; None: all is written."""
        return self._outlets[self._unwritten[0][0]] if self._unwritten else None

    @property
    def is_full(self) -> bool:
        """Whether so much output waits that no more should be read from processes."""
        return sum(len(data) for _, data in self._unwritten) > _MOST_UNWRITTEN

    def flush(self) -> None:
        """Write what can be written without waiting."""
        while self._unwritten:
            stream, data = self._unwritten.popleft()
            rest = self._written(stream, data)
            if rest:
                self._unwritten.appendleft((stream, rest))
                return

    def drop(self) -> None:
        """Give up output that waits for a reader, and say so in its place."""
        size = sum(len(data) for _, data in self._unwritten)
        stream = self._unwritten[0][0]
        self._unwritten.clear()
        note = f"\n[launch] {size} bytes of output were dropped: nobody read them\n".encode()
        self._unwritten.append((stream, memoryview(note)))

    def _written(self, stream: int, data: memoryview) -> memoryview:
        """Write what can be written now; return the rest."""
        if stream in self._gone:
            return data[:0]
        try:
            return self._outlets[stream].write(data)
        except OSError as error:
            self._gone.add(stream)
            if not isinstance(error, BrokenPipeError):  # that is no news to whoever wrote `| head`
                self.say(f"{'stdout' if stream == OUT else 'stderr'} cannot be written: {error.strerror}")
            return data[:0]

    def feed(self, member: ProcessName, stream: int, data: bytes) -> None:
        """Show the bytes that a process wrote, line by line."""
        self._log(member, data)
        splitter = self._splitters.setdefault((member, stream), LineSplitter())
        self._show(member, stream, splitter.feed(data))
        if self._terminal[stream] and member == _LEADER and splitter.preview():
            self._write(stream, self._format(member, stream, Line(splitter.preview(), b"\r")))

    def close(self, member: ProcessName, stream: int) -> None:
        """Show the last line of a stream that has ended."""
        self._show(member, stream, self._splitters.pop((member, stream), LineSplitter()).close())
        if stream == ERR:
            self._write(ERR, b"".join(self._format(member, ERR, line) for line in self._tracebacks.close(member)))

    def show_panel(self, lines: Sequence[bytes]) -> None:
        """Replace the lines of the panel."""
        if self.panel is not None:
            self._put(ERR, self.panel.show(lines, time.monotonic()))

    def redraw_panel(self) -> None:
        """Draw the panel again if output has removed it."""
        if self.panel is not None:
            self._put(ERR, self.panel.redraw(time.monotonic()))

    def close_panel(self) -> None:
        """Remove the panel for good."""
        if self.panel is not None:
            self._put(ERR, self.panel.close())
        self.panel, self._above = None, frozenset()

    def release(self) -> None:
        """Let go of stdout and stderr; what is not written by now is lost."""
        for outlet in self._outlets.values():
            outlet.release()

    def close_files(self) -> None:
        """Close the log files, and leave their folder to other jobs."""
        while self._files:
            os.close(self._files.popitem()[1])
        if self._lock is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked child may have the descriptor, too
            os.close(self._lock)
            self._lock = None

    def say(self, text: str) -> None:
        """Show a line of the launcher itself. It may quote a host, so it has no control characters."""
        self._write(ERR, self._format(None, ERR, Line(plain(text, "\n\t").encode(), b"\n")))

    def block(self, data: bytes) -> None:
        """Show a block of whole lines on stderr as it is."""
        self._write(ERR, self._erase_rest + data if self._terminal[ERR] else data)

    def tail(self, member: ProcessName) -> list[bytes]:
        """Return the last lines of a process, stdout and stderr together."""
        return self._tails[member].lines() if member in self._tails else []

    def _log(self, member: ProcessName, data: bytes) -> None:
        """Write to the file of a process. One that cannot be written ends here, and the job goes on."""
        if self._log_dir is None or member in self._unwritable:
            return
        path = self._log_dir / f"{str(member).replace(' ', '-')}.log"
        try:
            if member not in self._files:
                self._files[member] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._files[member], rest) :]
        except OSError as error:
            self._unwritable.add(member)
            self.say(f"{path} cannot be written: {error.strerror}; it has no more of what {member} prints")

    def _show(self, member: ProcessName, stream: int, lines: list[Line]) -> None:
        tail = self._tails.setdefault(member, LastLines())
        shown = []
        for line in lines:
            tail.add(line)
            if line.end == b"\n" or self._moves(member, stream, line):
                shown += self._tracebacks.feed(member, line) if stream == ERR else [line]
        self._write(stream, b"".join(self._format(member, stream, line) for line in shown))

    def _moves(self, member: ProcessName, stream: int, line: Line) -> bool:
        return bool(line.text.strip()) and (member == _LEADER or not self._terminal[stream])

    def _format(self, member: ProcessName | None, stream: int, line: Line) -> bytes:
        text, is_above = line.text, stream in self._above
        if is_above:
            text = without_moves(text)
        prefix = b"[%s] " % (str(member) if member else "launch").encode()
        if not self._terminal[stream]:
            return prefix + text + line.end
        if self._colour:
            prefix = b"\x1b[%sm%s\x1b[0m" % (_COLOURS.get(member.role if member else "launch", b"36"), prefix)
        whole = prefix + text + self._erase_rest
        return (one_row(whole) if is_above and line.end == b"\r" else whole) + line.end

    def _streams_of_panel(self) -> frozenset[int]:
        """Return stderr, and stdout if it is the same terminal."""
        terminals = {stream: os.fstat(fd).st_rdev for stream, fd in self._fds.items() if self._terminal[stream]}
        return frozenset(stream for stream, terminal in terminals.items() if terminal == terminals[ERR])

    def _write(self, stream: int, data: bytes) -> None:
        if data and self.panel is not None and stream in self._above:
            data = self.panel.under(data, time.monotonic())
        self._put(stream, data)

    def _put(self, stream: int, data: bytes) -> None:
        if data:
            self._unwritten.append((stream, memoryview(data)))
        self.flush()


def _locked(folder: str) -> int | None:
    """Return an open descriptor of a folder, which other jobs find in use until it is closed; None: there is none.

    Raises:
        LaunchError: another job uses it.
    """
    fd = None
    with contextlib.suppress(OSError):  # it is no folder, or its file system has no locks
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise LaunchError(
                f"another job writes into {folder} now, and their lines would mix: give each its own --log-dir"
            ) from None
    return fd
