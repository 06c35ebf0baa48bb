"""Files of speeds, groups, data sharding and measured steps; the settings of measurements and choice of ``dist_auto``.

A speeds file has a line per worker in order of rank: its name (a rank, a host or ``host:slot``) and the seconds that a
step of the same work takes it. Blank lines and text after ``#`` do not count::

    node1:0   0.060
    node1:1   0.062
    node2:0   0.240
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from paceline.hetero.choose import Choice
from paceline.hetero.groups import Groups
from paceline.hetero.measured import Measured, WorkerRound, measured_of
from paceline.hetero.step_noise import StepNoise
from paceline.hetero.step_speed import Speed

#: Times of a step that are believed: sums and ratios of them stay numbers.
_SHORTEST_S, _LONGEST_S = 1e-9, 1e9


def parse_speeds(text: str) -> dict[str, float]:
    """Return the seconds per step by the worker's name, in order of rank.

    Raises:
        ValueError: a line is not a name and a positive number, a name occurs twice, or there are none.
    """
    speeds: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) != 2 or not _is_time(words[1]):
            shown = textwrap.shorten(line, 100)
            raise ValueError(f"line {number}: {shown!r} is not 'NAME SECONDS', as in 'node1:0 0.25'")
        if words[0] in speeds:
            raise ValueError(f"line {number}: {words[0]!r} occurs twice; name workers by rank or host:slot")
        speeds[words[0]] = float(words[1])
    if not speeds:
        raise ValueError("there are no lines 'NAME SECONDS'")
    return speeds


def steps_line(steps: Sequence[WorkerRound]) -> str:
    """Return a worker's steps as a line: samples, seconds and waited seconds of each."""
    return json.dumps([[one.samples, round(one.seconds, 7), round(one.waited_s, 7)] for one in steps])


def steps_text(lines: Sequence[str], update_s: float, *, hands_out: bool) -> str:
    """Return a file of all workers' steps, which are results of :func:`steps_line`, in order of rank."""
    steps = [json.loads(line) for line in lines]
    return json.dumps({"steps": steps, "update_s": update_s, "hands_out": hands_out})


def parse_steps(text: str) -> Measured:
    """Return the measurements in a file of steps.

    Raises:
        ValueError: the text is no such file, or a worker has no steps.
    """
    try:
        table = json.loads(text)
        steps = [[WorkerRound(*map(float, one)) for one in worker] for worker in table["steps"]]
        batch = int(max(one.samples for worker in steps for one in worker))
        return measured_of(steps, batch, float(table["update_s"]), hands_out=bool(table["hands_out"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no file of measured steps: {error!r}") from error


#: Begins each line of a report.
REPORT_MARK = "paceline-profile "


@dataclass(frozen=True)
class Report:
    """The rounds of a job that ``paceline up`` has measured."""

    names: tuple[str, ...]
    """``host:local_rank`` of each worker, in order of rank."""
    steps: tuple[tuple[WorkerRound, ...], ...]
    """The same rounds of each worker."""
    update_s: float
    """Seconds of an update on the servers; 0: not known."""
    elements: int
    """Elements of the model."""
    store_type: str


def report_text(workers: Sequence[str], update_s: float, elements: int, store_type: str) -> str:
    """Return what worker 0 prints about a job: a short line for each worker, and one about all.

    ``workers`` are each one's line of the speeds file, and after it the result of :func:`steps_line`.
    """
    parts = [one.split("\n") for one in workers]
    lines = [json.dumps([speed.split()[0], json.loads(steps)]) for speed, steps in parts]
    job = json.dumps({"update_s": update_s, "elements": elements, "store": store_type})
    return "\n".join(REPORT_MARK + one for one in (*lines, job))


def parse_report(text: str) -> Report | None:
    """Return the report in a job's output, which has other lines too; None: there is none."""
    lines = (line.partition(REPORT_MARK)[2] for line in text.splitlines())
    found = [json.loads(line) for line in lines if line]
    if not found:
        return None
    *workers, job = found
    steps = [tuple(WorkerRound(*map(float, one)) for one in rounds) for _, rounds in workers]
    least = min(map(len, steps))
    names = tuple(str(name) for name, _ in workers)
    common = tuple(one[:least] for one in steps)
    return Report(names, common, float(job["update_s"]), int(job["elements"]), str(job["store"]))


def choice_text(choice: Choice) -> str:
    """Return a choice as one line of JSON."""
    return msgspec.json.encode(choice).decode()


def parse_choice(text: str, num_workers: int) -> Choice:
    """Return the choice of :func:`choice_text`.

    Raises:
        ValueError: the text is none, or does not fit to so many workers.
    """
    try:
        choice = msgspec.json.decode(text, type=Choice)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{text!r} is not what dist_auto should do: {error}") from error
    choice.policy.check(num_workers)
    return choice


def measured_text(measured: Measured) -> str:
    """Return measurements as one line of JSON."""
    noise = measured.noise
    table = {
        "workers": [[_short(one.fixed_s), _short(one.per_sample_s)] for one in measured.workers],
        "batch": measured.batch,
        "noise": [_short(noise.jitter), _short(noise.spike_share), _short(noise.spike_factor)],
        "exchange_s": _short(measured.exchange_s),
        "update_s": _short(measured.update_s),
        "hands_out": measured.hands_out,
    }
    return json.dumps(table, separators=(",", ":"))


def parse_measured(text: str, num_workers: int) -> Measured:
    """Return the measurements that :func:`measured_text` has written.

    Raises:
        ValueError: the text is not that, or is about another number of workers.
    """
    try:
        table = json.loads(text)
        workers = tuple(Speed(_number(fixed), _number(slope)) for fixed, slope in table["workers"])
        noise = StepNoise(*map(_number, table["noise"]))
        times = _number(table["exchange_s"]), _number(table["update_s"])
        measured = Measured(workers, int(table["batch"]), noise, *times, bool(table["hands_out"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is not what was measured for dist_auto: {error!r}") from error
    if len(workers) != num_workers:
        raise ValueError(f"{len(workers)} workers were measured for dist_auto, and the job has {num_workers}")
    if measured.batch < 1 or min(one.fixed_s + one.per_sample_s for one in workers) <= 0:
        raise ValueError(f"{text!r} is not what was measured for dist_auto: batches and steps cannot be empty")
    return measured


def _short(number: float) -> float:
    return float(f"{number:.5g}")


def _number(value: float) -> float:
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{value} is not a finite number of 0 or more")
    return number


def _is_time(text: str) -> bool:
    try:
        return _SHORTEST_S <= float(text) <= _LONGEST_S
    except ValueError:
        return False


def groups_text(groups: Groups, speeds: Mapping[str, float]) -> str:
    """Return a groups file: one group per line, the fastest first, with its mean time as a comment."""
    names, times = list(speeds), list(speeds.values())
    lines = []
    for group in groups:
        mean = sum(times[rank] for rank in group) / len(group)
        lines.append(f"{' '.join(names[rank] for rank in group)}  # {mean:.4g} s per step\n")
    return "".join(lines)


def sharding_text(seconds: Sequence[float]) -> str:
    """Return a data sharding file: "begin end" for each rank, parts of the data in proportion to speed."""
    total = sum(1 / one for one in seconds)
    ends = [sum(1 / one for one in seconds[: rank + 1]) / total for rank in range(len(seconds) - 1)]
    bounds = [0.0, *(round(end, 6) for end in ends), 1.0]
    return "".join(f"{begin:.6g} {end:.6g}\n" for begin, end in pairwise(bounds))
