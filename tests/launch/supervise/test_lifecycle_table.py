"""The table of transitions in the lifecycle's module is what the machine does."""

from __future__ import annotations

import itertools
import random
import re
import signal

from paceline.host.exitcodes import PEER_FAILED
from paceline.launch import Graces, ProcessName
from paceline.launch.supervise import lifecycle
from paceline.launch.supervise.events import (
    Action,
    Event,
    Exited,
    Interrupted,
    Lost,
    NotStarted,
    Over,
    Ready,
    Runs,
    Started,
    StartProcesses,
    Stopped,
    Tick,
)
from paceline.launch.supervise.lifecycle import JobLifecycle, Phase

SCHEDULER, SERVER, W0, W1 = (
    ProcessName("scheduler", 0),
    ProcessName("server", 0),
    ProcessName("worker", 0),
    ProcessName("worker", 1),
)
JOBS = [(SCHEDULER, SERVER, W0, W1), (SCHEDULER, W0), (W0, W1)]


class Recorded(JobLifecycle):
    """Remembers every phase that it was in."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "phase":
            assert isinstance(value, Phase)
            self.__dict__.setdefault("phases", []).append(value.name)
        super().__setattr__(name, value)


def drawn(chance: random.Random, cycle: JobLifecycle, now: float) -> Event:
    """One event that can happen now."""
    events: list[Event] = [Tick(), Tick(), Interrupted(signal.SIGTERM)]
    events += [Ready()] * 3 if cycle.phase is Phase.STARTING else []
    events += [Exited(one, chance.choice([0, 0, 0, 1, PEER_FAILED])) for one in cycle.alive] * 3
    events += [Lost(chance.choice([W0, W1]), "its connection closed", True)] if cycle.phase is Phase.RUNNING else []
    events += [Over()] if cycle.phase is Phase.RUNNING and SCHEDULER in cycle.alive else []
    events += [Runs(one, chance.choice([0.0, now])) for one in cycle.alive] if cycle.phase is Phase.LEAVING else []
    events += [Lost(chance.choice(list(cycle.members)), "its connection closed"), Stopped(frozenset(cycle.alive))]
    return chance.choice(events)


def walk(seed: int) -> list[str]:
    """Run one job with chance events to its end; returns its phases."""
    chance = random.Random(seed)
    cycle, now = Recorded(chance.choice(JOBS), Graces(), 0.0, chance.random() < 0.3), 0.0

    def start(actions: list[Action]) -> None:
        for member in [one for action in actions if isinstance(action, StartProcesses) for one in action.members]:
            if chance.random() < 0.05:
                start(cycle.handle(NotStarted(member, "cannot be run"), now))
                return
            start(cycle.handle(Started(member), now))

    start(cycle.begin())
    while cycle.phase is not Phase.OVER:
        event = drawn(chance, cycle, now)
        if isinstance(event, Tick) and cycle.deadline is not None:
            now = cycle.deadline
        start(cycle.handle(event, now))
    phases: list[str] = cycle.__dict__["phases"]
    return phases


def test_table_has_exactly_the_transitions_of_the_machine() -> None:
    rows = re.findall(r"^\| (``[A-Z`, ]+``) \| ``([A-Z]+)`` \| ", lifecycle.__doc__ or "", re.MULTILINE)
    table = {(source, target) for sources, target in rows for source in re.findall("[A-Z]+", sources)}
    seen = {pair for seed in range(4000) for pair in itertools.pairwise(walk(seed)) if pair[0] != pair[1]}
    assert seen == table


def test_table_has_every_phase() -> None:
    text = lifecycle.__doc__ or ""
    assert re.findall(r"^\| ``([A-Z]+)`` \| [^|`]+ \|$", text, re.MULTILINE) == [phase.name for phase in Phase]
