"""Events of a job, how agents and the scheduler write them, and the actions that the lifecycle answers with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, get_origin, get_type_hints

from paceline.launch.plan import ProcessName


@dataclass(frozen=True)
class Started:
    """A process runs."""

    member: ProcessName
    place: str = ""
    """Its process id, and its host if that is another one, as lines for the user name them."""


@dataclass(frozen=True)
class NotStarted:
    """A process could not be started; ``code`` is the job's exit code then."""

    member: ProcessName
    reason: str
    code: int = 1


@dataclass(frozen=True)
class Ready:
    """The scheduler listens at an address."""

    address: str = ""


@dataclass(frozen=True)
class Exited:
    """A process ended; ``code`` is its exit code, 128 + n after signal n."""

    member: ProcessName
    code: int
    detail: str = ""
    """Its engine's words about that end."""


@dataclass(frozen=True)
class Stopped:
    """These processes, and no others, are stopped (SIGSTOP) now."""

    members: frozenset[ProcessName]


@dataclass(frozen=True)
class Unheard:
    """The hosts of these processes, and of no others, have not been heard for a while; signals may not arrive there."""

    members: frozenset[ProcessName]


@dataclass(frozen=True)
class Lost:
    """The scheduler says which process failed first, or which worker has died without ending the job."""

    member: ProcessName
    reason: str
    goes_on: bool = False
    """The others go on."""


@dataclass(frozen=True)
class TakenOver:
    """The scheduler says that a process counts which has taken over from a worker that has died."""

    member: ProcessName


@dataclass(frozen=True)
class Left:
    """The scheduler says that a worker under notice has left the job: its exit code does not matter any more."""

    member: ProcessName


@dataclass(frozen=True)
class Complete:
    """The scheduler says that all members have joined: the job has started."""


@dataclass(frozen=True)
class Alone:
    """The scheduler says which workers train without having joined, and which line of the script is missing."""

    text: str


@dataclass(frozen=True)
class Over:
    """The scheduler says that all workers have said goodbye: servers and scheduler are not needed any more."""


@dataclass(frozen=True)
class StatusSaid:
    """The scheduler says how all members do.

    Attributes:
        text: a ``Status`` of :mod:`paceline.wire.messages` as JSON; empty: it is too long for the pipe.
    """

    text: str


@dataclass(frozen=True)
class Runs:
    """A process runs, and has used so much CPU time, in seconds, with all that it has started.

    Attributes:
        is_ready: it runs now, or waits for a processor or a disk.
    """

    member: ProcessName
    cpu_s: float
    is_ready: bool = False


@dataclass(frozen=True)
class Interrupted:
    """The launcher got a signal."""

    signum: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = (
    Started | NotStarted | Ready | Exited | Stopped | Unheard | Lost | TakenOver | Left | Complete | Alone | Over
    | StatusSaid | Runs | Interrupted | Tick
)  # fmt: skip

#: The events that agents and the scheduler report, by the first word of their lines.
_WORDS: dict[str, type[Any]] = {
    "started": Started, "not_started": NotStarted, "ready": Ready, "exited": Exited, "stopped": Stopped, "lost": Lost,
    "taken_over": TakenOver,
    "left": Left, "complete": Complete, "alone": Alone, "over": Over, "status": StatusSaid, "runs": Runs,
}  # fmt: skip

#: By the same word, the fields of the event and the types that JSON may give them.
_TYPES: dict[str, list[tuple[str, Any]]] = {
    word: [(name, (float, int) if hint is float else get_origin(hint) or hint)
           for name, hint in get_type_hints(kind).items()]
    for word, kind in _WORDS.items()
}  # fmt: skip

#: Largest number in an event.
_MOST = 2**53


def words_of(event: Event) -> list[Any]:
    """Return an event as JSON has it: its word, then its fields."""
    word = next(word for word, kind in _WORDS.items() if isinstance(event, kind))
    values = [getattr(event, field.name) for field in fields(event)]
    return [word, *(sorted(value) if isinstance(value, frozenset) else value for value in values)]


def event_of(words: Sequence[Any]) -> Event | None:
    """Return the event of :func:`words_of`, None if the words are none.

    Raises:
        TypeError: it has other fields.
    """
    word, *values = words
    if not isinstance(word, str) or word not in _WORDS:
        return None
    kind = _WORDS[word]
    if values and isinstance(values[0], list):
        values[0] = frozenset(map(process_name, values[0])) if kind is Stopped else process_name(values[0])
    event: Event = kind(*values)
    for name, types in _TYPES[word]:
        value = getattr(event, name)
        if not isinstance(value, types) or (isinstance(value, float | int) and not abs(value) <= _MOST):
            raise TypeError(f"{name} of {word!r} cannot be {value!r:.80}")
    return event


def process_name(words: Any) -> ProcessName:
    """Return a process, which JSON has as a list.

    Raises:
        TypeError: it is none.
    """
    match words:
        case [str() as role, int() as rank]:
            return ProcessName(role, rank)
    raise TypeError(f"{words!r} is no process")


@dataclass(frozen=True)
class StartProcesses:
    """Start these processes, in order, until one cannot be started."""

    members: tuple[ProcessName, ...]


@dataclass(frozen=True)
class Signal:
    """Send a signal to these processes and everything they started."""

    signum: int
    members: tuple[ProcessName, ...]


@dataclass(frozen=True)
class Look:
    """Find out how much CPU time these processes have used; a :class:`Runs` for each follows, now or later."""

    members: tuple[ProcessName, ...]


@dataclass(frozen=True)
class ShowLine:
    """Show a line to the user."""

    text: str


@dataclass(frozen=True)
class JobEnded:
    """The job is over."""

    code: int


Action: TypeAlias = StartProcesses | Signal | Look | ShowLine | JobEnded
