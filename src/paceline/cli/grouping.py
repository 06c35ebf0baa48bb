"""``paceline group``: from measured speeds to a groups file and a data sharding file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

from paceline.cli.options import Option, Parser, UsageError, usage_errors
from paceline.errors import ConfigError
from paceline.hetero import Groups, group_by_speed
from paceline.hetero.files import groups_text, parse_speeds, sharding_text
from paceline.hetero.groups import ALIKE, MAX_GROUPS
from paceline.host.plain_text import plain
from paceline.host.text_files import write_text
from paceline.launch.preflight import read_text
from paceline.sim.plots import check_path, new_figure, save

OPTIONS = (
    Option(("--groups",), "where to write the groups file, for --groups of paceline launch", "FILE"),
    Option(("--data-sharding",), "where to write the parts of the data, for paceline.data.read_spans", "FILE"),
    Option(
        ("--alike",), f"ratio of times up to which machines are alike (default: {ALIKE:g})", "R", float, default=ALIKE
    ),
    Option(
        ("--max-groups",), f"largest number of groups (default: {MAX_GROUPS})", "N", int, default=MAX_GROUPS, least=1
    ),
    Option(("--plot",), "write a picture of the clusters", "FILE"),
)

DESCRIPTION = """\
Group workers by measured speed: agglomerative clustering and k-means, as many groups as have the best Calinski-Harabasz
score, one group when the machines are alike. Prints the groups, the fastest first."""

EPILOG = """\
The speeds file has a line per worker in order of rank: its name (rank, host or host:slot) and the seconds of a step.
paceline.data.SharedBatchSampler(..., shares="measured") measures them; after an epoch, worker 0 can write them:

  lines = [f"{rank} {speed.seconds(32)}\\n" for rank, speed in sorted(sampler.speeds.items())]
  open("speeds", "w").writelines(lines)

example:
  paceline group speeds --groups groups --data-sharding data_sharding --plot clusters.png"""


def run(name: str, words: Sequence[str]) -> int:
    """Run ``paceline group`` and return 0."""
    usage = f"paceline {name} SPEEDS [options]"
    files, options = Parser(name, OPTIONS, usage, DESCRIPTION, EPILOG).parse_named(words)
    if len(files) != 1:
        raise UsageError(f"give one speeds file, not {len(files)}, as in: paceline group speeds --groups groups")
    if options.alike <= 1:
        raise UsageError(f"--alike is {options.alike:g}; it is a ratio above 1")
    _check_outputs(files[0], options)
    speeds = _read(files[0])
    with usage_errors():
        groups = group_by_speed(list(speeds.values()), options.alike, options.max_groups)
    text = groups_text(groups, speeds)
    if options.plot is not None:
        _draw(speeds, groups, options.plot)
    _write(options.groups, text)
    _write(options.data_sharding, sharding_text(list(speeds.values())))
    print(plain(text, "\n"), end="")
    return 0


def _check_outputs(speeds: str, options: argparse.Namespace) -> None:
    """Refuse files that would be written over, before anything is written."""
    flags = ("groups", "data_sharding", "plot")
    paths = [speeds, *(path for flag in flags if (path := getattr(options, flag)) is not None)]
    real = [os.path.realpath(path) for path in paths]
    twice = next((path for path, one in zip(paths, real, strict=True) if real.count(one) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice} is named twice; the speeds and each result need a file of their own")
    if options.plot is not None:
        check_path(options.plot)


def _read(path: str) -> dict[str, float]:
    text = read_text(path, "the speeds file")
    try:
        return parse_speeds(text)
    except ValueError as error:
        raise ConfigError(f"the speeds file {path!r} cannot be used: {error}") from error


def _write(path: str | None, text: str) -> None:
    if path is None:
        return
    try:
        write_text(path, text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _draw(speeds: Mapping[str, float], groups: Groups, path: str) -> None:
    names, times = list(speeds), list(speeds.values())
    figure = new_figure(8, 1 + 0.25 * len(names))
    axes = figure.subplots()
    ranks = [rank for group in groups for rank in group]
    for number, group in enumerate(groups):
        rows = [ranks.index(rank) for rank in group]
        axes.barh(rows, [times[rank] for rank in group], label=f"group {number}")
    axes.set_yticks(range(len(ranks)), [names[rank] for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("seconds per step")
    axes.legend()
    save(figure, path)
