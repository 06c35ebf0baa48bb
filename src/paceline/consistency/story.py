"""The last events of a slot, as sentences: for errors and failed tests.

A rule notes each event as a flat tuple (its kind, then numbers), which costs one append. Text is made only on request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from itertools import islice
from typing import Any, TypeAlias

from paceline.naming import workers_text

#: Kind, then the arguments of its sentence.
Event: TypeAlias = tuple[Any, ...]

#: Events that a rule keeps.
KEPT = 32


def new_events() -> deque[Event]:
    """Return a ring for the events of one slot."""
    return deque(maxlen=KEPT)


def joined_events(left: deque[Event], right: deque[Event]) -> deque[Event]:
    """Return the events of two slots that become one: the longer story, marked where the other one differs."""
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    joined = longer.copy()
    if longer != shorter:
        joined.append(("join",))
    return joined


def sentences(events: Collection[Event], last: int) -> list[str]:
    """Return a sentence for each of the last events, oldest first."""
    return [_SENTENCES[kind](*details) for kind, *details in islice(events, max(0, len(events) - last), None)]


def _push(worker: int, round: int, samples: float, read: int, version: int, cohort: int) -> str:
    behind = f", {version - read} behind" if version > read else ""
    return f"worker {worker} pushed round {round} ({samples:g} samples, read version {read}{behind}): cohort {cohort}"


def _drop(worker: int, round: int, read: int, version: int) -> str:
    return f"worker {worker} pushed round {round} (read version {read}, {version - read} behind): dropped as too old"


def _repeat(worker: int, round: int) -> str:
    return f"worker {worker} sent round {round} again"


def _apply(cohort: int, workers: tuple[int, ...], samples: float, staleness: int, weight: float, version: int) -> str:
    made_of = f"{workers_text(workers)}, {samples:g} samples, staleness {staleness}, weight {weight:g}"
    return f"cohort {cohort} is complete ({made_of}): version {version}"


def _release(workers: tuple[int, ...], version: int) -> str:
    return f"answered {workers_text(workers)} with version {version}"


_SENTENCES: dict[str, Callable[..., str]] = {
    "push": _push,
    "drop": _drop,
    "repeat": _repeat,
    "apply": _apply,
    "release": _release,
    "pull": lambda worker, version: f"worker {worker} pulled version {version}",
    "pause": lambda worker: f"worker {worker} came to a barrier",
    "go away": lambda worker: f"worker {worker} went away",
    "come back": lambda worker, phase: f"worker {worker} came back in phase {phase}",
    "open": lambda: "all live workers are at the barrier: it opens",
    "regroup": lambda worker, generation: f"worker {worker} moved to the groups of generation {generation}",
    "rejoin": lambda worker, phase: f"worker {worker} joined again, as another process, in phase {phase}",
    "grace": lambda cohort: f"cohort {cohort} has enough pushes and waits for others for a while",
    "over": lambda cohort: f"the time of grace of cohort {cohort} ended",
    "leave": lambda worker: f"worker {worker} left",
    "join": lambda: "this range was joined with its neighbour, which had other events before",
}
