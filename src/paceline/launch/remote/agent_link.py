"""The connection of a launcher and the agent of one host: lines of JSON, and the launcher's end of it."""

from __future__ import annotations

import json
import math
import os
import select
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

#: First byte of a line that the next one continues.
_CONTINUED = b"+"

#: First word of the line that a login shell executes which has not run the command. To an agent it means nothing.
_TYPED = b"exec "

#: How long a host may take to greet before the command is typed.
_TYPE_AFTER_S = 5.0

#: Bytes of a line, and of what comes before the first one, that are kept: a host may never end its output.
_LONGEST_LINE, _NOISE_BYTES = 16 << 20, 4096

#: What an agent says of its host, by name: in its first line, and to ``paceline doctor``.
_ABOUT = {"python": str, "version": str, "cores": int, "host": str, "reached_at": str, "clock": float, "pid": int}
_FACTS = {"versions": dict, "shared": bool}
_VERSIONS = {"paceline": str, "torch": str}

#: Signs in the output of ssh that no answer came in time, or that the server has closed the connection at once.
_UNANSWERED = ("timed out", "banner exchange", "kex_exchange_identification")


# ---- lines of JSON between launcher and agent ------------------------------------------------------------------------


def encode(*words: Any) -> bytes:
    """Return one line."""
    return json.dumps(words).encode() + b"\n"


def pieces(line: bytes) -> list[bytes]:
    """Return a line as lines of at most ``PIPE_BUF`` bytes: such a write to a pipe succeeds as a whole, or not at all.

    So two processes can write lines into one pipe.
    """
    most = select.PIPE_BUF - len(_CONTINUED) - 1
    starts = range(0, len(line) - 1, most)
    parts = [line[start : start + most] for start in starts[:-1]]
    return [*(_CONTINUED + part + b"\n" for part in parts), line[starts[-1] :]]


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
        self._magic, self._pending, self._begun = magic, b"", b""
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
        whole = [line for line in map(self._joined, lines) if line is not None]
        if len(self._pending) + len(self._begun) > _LONGEST_LINE:
            raise ValueError(f"a line of more than {_LONGEST_LINE >> 20} MiB is not one of the agent's protocol")
        return [_line(line) for line in whole]

    def _joined(self, piece: bytes) -> bytes | None:
        """Return the line that a piece completes; None: it is continued, or was typed for a shell."""
        if piece.startswith(_TYPED):
            return None
        if piece.startswith(_CONTINUED):
            self._begun += piece[len(_CONTINUED) :]
            return None
        line, self._begun = self._begun + piece, b""
        return line


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
        self._child, self._command = Child(argv, os.environ, register, feeds_stdin=True), argv[-1]
        self._out, self._err = self._child.pipes()
        self._in: int | None = self._child.stdin()
        self._lines, self._err_text = AgentLines(MAGIC), b""
        self._unsent: deque[bytes] = deque()
        """Lines of at most ``PIPE_BUF`` bytes."""
        self._open = {self._out, self._err}
        self.heard_at = now = time.monotonic()
        """When the host was heard last, or this link was made."""
        self.type_at = now + _TYPE_AFTER_S
        """When the command is typed, if no agent greets before."""
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
            self._unsent += pieces(encode(*words))
            self._flush()

    def ask_address(self, interfaces: Sequence[str], links: Iterable[AgentLink], ports: str) -> None:
        """Ask the host for its address towards the others, which have greeted; interface and ports may be chosen."""
        targets = [target for one in links if one is not self for target in one._targets()]
        self.send("address", list(interfaces), targets, ports)

    def _targets(self) -> list[str]:
        """Return what may reach the host: how we reached it, its name, its addresses."""
        reached = str(self.about["reached_at"])
        name = self.host.rpartition("@")[2]
        return [*([reached] if reached else []), name, *map(str, self.about["addresses"])]

    def type_command(self, now: float) -> None:
        """Type the command if it is time: a login shell's files may have started a shell that waits for one.

        It is one word only where a login shell gets it.
        """
        if now >= self.type_at:
            self.type_at = math.inf
            if self._in is not None and not self.about and " " in self._command:
                self._unsent.append(_TYPED + os.fsencode(self._command) + b"\n")
                self._flush()

    def keep_alive(self, ping: Callable[[int], None]) -> None:
        """Have the pipe to the agent pinged from now on."""
        if self._in is not None:
            ping(self._in)

    def is_silent(self, now: float) -> bool:
        """Tell whether the agent has been silent for too long; called in every turn."""
        self.heard_at += self._own_time.lost_s(now)
        return bool(self.about) and now > self.heard_at + SILENCE_S

    def hang_up(self) -> None:
        """End the agent's stdin: it kills its processes and exits."""
        if self._in is not None:
            if self._unsent:
                self._selector.unregister(self._in)
                self._unsent.clear()
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
            while self._unsent:
                os.write(self._in, self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # the remote shell has ended
            self._unsent.clear()
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
