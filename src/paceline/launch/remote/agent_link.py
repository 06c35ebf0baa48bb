"""The connection of a launcher and the agent of one host: lines of JSON, and the launcher's end of it."""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paceline.host.own_time import OwnTime
from paceline.launch import processes
from paceline.launch.plan import ProcessName
from paceline.launch.supervise.child import ENDING, Child
from paceline.launch.supervise.events import event_of, process_name

#: The agent's first bytes. All output of a login shell comes before them.
MAGIC = b"\x01paceline agent 1\n"

#: Interval of the launcher's pings, and silence after which the other end counts as lost.
PING_S, SILENCE_S = 2.0, 60.0

#: Longest time between two looks at the clock that counts in full. In the rest the own process did not run.
LONGEST_TURN_S = 2 * PING_S

_READ_BYTES = 256 * 1024
_ERROR_LINES = 20

#: Bytes of a line, and of what comes before the first one, that are kept: a host may never end its output.
_LONGEST_LINE, _NOISE_BYTES = 16 << 20, 4096

#: What an agent says of its host, by name: in its first line, and to ``paceline doctor``.
_ABOUT = {"python": str, "version": str, "cores": int, "host": str, "reached_at": str, "clock": float, "pid": int}
_FACTS = {"versions": dict, "address": str, "problem": str, "shared": bool}
_VERSIONS = {"paceline": str, "torch": str}

#: Signs in the output of ssh that no answer came in time, or that the server has closed the connection at once.
_UNANSWERED = ("timed out", "banner exchange", "kex_exchange_identification")


# ---- lines of JSON between launcher and agent ------------------------------------------------------------------------


def encode(*words: Any) -> bytes:
    """Return one line."""
    return json.dumps(words).encode() + b"\n"


def text(data: bytes) -> str:
    """Return any bytes as text that :func:`data` turns back."""
    return data.decode("utf-8", "surrogateescape")


def data(text: str) -> bytes:
    """Return the bytes of :func:`text`."""
    return text.encode("utf-8", "surrogateescape")


def members(given: Iterable[list[Any]]) -> list[ProcessName]:
    """Return members, whom JSON has as lists.

    Raises:
        TypeError: they are none.
    """
    return [process_name(one) for one in given]


class AgentLines:
    """Collects bytes and gives back whole lines, decoded; everything before the ``magic`` bytes is noise."""

    def __init__(self, magic: bytes = b"") -> None:
        self._magic, self._pending = magic, b""
        self.noise = b""
        """The last bytes before the magic bytes."""

    def feed(self, more: bytes) -> list[list[Any]]:
        """Take in bytes and return the lines they complete.

        Raises:
            ValueError: a line is not a JSON list, or too long.
        """
        self._pending += more
        if self._magic:
            before, found, after = self._pending.partition(self._magic)
            self.noise = before[-_NOISE_BYTES:]
            if not found:
                self._pending = self.noise
                return []
            self._magic, self._pending = b"", after
        *lines, self._pending = self._pending.split(b"\n")
        if len(self._pending) > _LONGEST_LINE:
            raise ValueError(f"a line of more than {_LONGEST_LINE >> 20} MiB is not one of the agent's protocol")
        return [_line(line) for line in lines]


def _line(line: bytes) -> list[Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # lists in lists without an end
        found = None
    if not isinstance(found, list) or not found:
        raise ValueError(f"{line[:80]!r} is not a line of the agent's protocol")
    return found


def _is_said_by_agents(line: list[Any]) -> bool:
    """Tell whether a line has the words and types of one from an agent; its processes may be unknown ones.

    Raises:
        TypeError: an event or a process in it has other fields.
    """
    match line:
        case ["out", str(), int(), 1 | 2, str()] | ["closed", str(), int(), 1 | 2] | ["pong"] | ["refused", str()]:
            return True
        case ["address", str() as address, int() as port]:  # they come into the environment of all processes
            return address.isprintable() and port in range(65536)
        case ["hello", dict() as about]:
            return _has(about, _ABOUT) and _are_texts(about.get("addresses"))
        case ["facts", dict() as facts, int() as port]:
            return _has(facts, _FACTS) and _has(facts["versions"], _VERSIONS) and port in range(65536)
        case ["reached", dict() as reached]:
            return _are_texts(list(reached.values()))
        case ["signalled", int() as signum]:
            return signum in ENDING
        case ["living", list() as left]:
            members(left)
            return True
    return event_of(line) is not None


def _has(found: Mapping[str, Any], kinds: Mapping[str, type]) -> bool:
    return all(isinstance(found.get(name), kind) for name, kind in kinds.items()) and math.isfinite(
        found.get("clock", 0.0)
    )


def _are_texts(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(one, str) for one in found)


# ---- the launcher's end ----------------------------------------------------------------------------------------------


class AgentLink:
    """A remote shell that runs an agent, its pipes, and the agent's data about its host.

    ``register`` is called in the new process, ``take`` with each line of the agent, which has the words and types of
    one, and ``say`` with each line that the remote shell wrote to stderr.
    """

    def __init__(
        self,
        host: str,
        argv: Sequence[str],
        selector: selectors.BaseSelector,
        register: Callable[[], None],
        take: Callable[[AgentLink, list[Any]], None],
        say: Callable[[str], None],
    ) -> None:
        self.host = host
        self.about: dict[str, Any] = {}
        """The agent's first message; empty before."""
        self.address = ""
        """Where the host is reached; empty until it said so."""
        self.port = 0
        self.errors: deque[str] = deque(maxlen=_ERROR_LINES)
        """Last lines that the remote shell wrote to stderr."""
        self._selector, self._take, self._say = selector, take, say
        self._child = Child(argv, os.environ, register, feeds_stdin=True)
        self._out, self._err = self._child.pipes()
        self._in: int | None = self._child.stdin()
        self._lines, self._err_text = AgentLines(MAGIC), b""
        self._unsent = b""
        self._open = {self._out, self._err}
        self.heard_at = self._pinged_at = now = time.monotonic()
        """When the host was heard last, or this link was made."""
        self._own_time = OwnTime(now, LONGEST_TURN_S)
        selector.register(self._out, selectors.EVENT_READ, self._read)
        selector.register(self._err, selectors.EVENT_READ, self._read_errors)

    @property
    def code(self) -> int | None:
        """Exit code of the remote shell, None while it runs."""
        return self._child.code if self._child.ended() else None

    @property
    def was_unanswered(self) -> bool:
        """Whether the remote shell, which has ended, got no answer from the host, or was turned away by a busy one."""
        return any(sign in line for line in self.errors for sign in _UNANSWERED)

    @property
    def noise(self) -> str:
        """The host's output instead of an agent's greeting."""
        return self._lines.noise.decode(errors="replace").strip()

    def send(self, *words: Any) -> None:
        """Send a line. Lines to a host that is gone are dropped: its end is seen elsewhere."""
        if self._in is not None:
            self._unsent += encode(*words)
            self._flush()

    def ping(self, now: float) -> float:
        """Ping if it is time; return when the next one is due."""
        if not self.about:
            return now + PING_S
        if now >= self._pinged_at + PING_S:
            self._pinged_at = now
            self.send("ping")
        return self._pinged_at + PING_S

    def is_silent(self, now: float) -> bool:
        """Tell whether the agent has been silent for too long; called in every turn."""
        self.heard_at += self._own_time.lost_s(now)
        return bool(self.about) and now > self.heard_at + SILENCE_S

    def hang_up(self) -> None:
        """End the agent's stdin: it kills its processes and exits."""
        if self._in is not None:
            if self._unsent:
                self._selector.unregister(self._in)
            self._in = None
            self._child.close_stdin()

    def kill(self) -> None:
        """Kill the remote shell: it has not reached an agent, and may be stuck."""
        processes.send(signal.SIGKILL, {self._child.pid})

    def refuse(self, why: str) -> None:
        """End the remote shell, whose output is not that of an agent. Its rest is not read."""
        self.errors.append(why)
        self._end(self._out)
        self.kill()

    def drain(self) -> None:
        """Read the rest in the pipes. Does not wait."""
        for _ in range(64):
            if not (self._out in self._open and self._read()):
                break
        if self._err in self._open:
            self._read_errors()

    def close(self) -> None:
        """Let go of pipes and process."""
        self.hang_up()
        for fd in list(self._open):
            self._end(fd)
        self._child.release()

    def _flush(self) -> None:
        if self._in is None:
            return
        had = self._in in self._selector.get_map()
        try:
            self._unsent = self._unsent[os.write(self._in, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the remote shell has ended
            self._unsent = b""
        if bool(self._unsent) != had:
            if had:
                self._selector.unregister(self._in)
            else:
                self._selector.register(self._in, selectors.EVENT_WRITE, self._flush)

    def _read(self) -> bool:
        more = self._next(self._out)
        if not more:
            return False
        self.heard_at = time.monotonic()
        try:
            lines = self._lines.feed(more)
        except ValueError as error:
            self.refuse(str(error))
            return True
        for line in lines:
            if self._out in self._open:
                self._take_checked(line)
        return True

    def _take_checked(self, line: list[Any]) -> None:
        try:
            is_right = _is_said_by_agents(line)
        except TypeError:
            is_right = False
        if is_right:
            self._take(self, line)
        else:
            self.refuse(f"{json.dumps(line)[:80]} is not a line of the agent's protocol, or of another version's")

    def _read_errors(self) -> None:
        more = self._next(self._err)
        *lines, self._err_text = (self._err_text + (more or b"\n" * bool(self._err_text))).split(b"\n")
        self._err_text = self._err_text[-_NOISE_BYTES:]
        for line in lines:
            text = line.decode(errors="replace").strip("\r")
            if text:
                self.errors.append(text)
                if self.about:
                    self._say(f"{self.host}: {text}")

    def _next(self, fd: int) -> bytes:
        """Return the next bytes; nothing at the end, and if there are none now."""
        try:
            more = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return b""
        if not more:
            self._end(fd)
        return more

    def _end(self, fd: int) -> None:
        if fd in self._open:
            self._open.discard(fd)
            self._selector.unregister(fd)
