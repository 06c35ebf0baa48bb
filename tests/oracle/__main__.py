"""``python -m tests.oracle``: the whole matrix, with a table of what came out."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.testing import Faults
from tests.clusters.fork_server import fork_jobs
from tests.clusters.hosts import why_no_hosts
from tests.oracle.jobs import TRANSPORTS, Outcome, Way, outcomes, reference
from tests.oracle.registry import Fate, Script, all_scripts


@dataclass
class Cell:
    """All repetitions of one script in one way."""

    runs: int = 0
    worst: float = 0.0
    problems: list[str] = field(default_factory=list)
    first: list[object] | None = None

    def add(self, outcome: Outcome, script: Script, way: Way) -> list[str]:
        """Take in one repetition, and return what is wrong with it: it is to be right, and the same as the first."""
        self.runs += 1
        expected = reference(script.name, way.workers, way.devices[0])
        self.worst = max(self.worst, outcome.worst(expected))
        problems = outcome.problems(expected)
        self.first = self.first if self.first is not None else list(outcome.values)
        if not any(outcome.errors) and outcome.values != self.first:
            problems.append("other bits than in the first repetition")
        self.problems += problems
        return problems

    @property
    def text(self) -> str:
        """Return it in a few characters: the worst difference as a part of what is tolerated."""
        return f"[red]{len(self.problems)} wrong[/red]" if self.problems else f"{self.worst:.0e}"


class Matrix:
    """Scripts in rows, ways to run them in columns.

    Args:
        options: of the command line.
        console: where to write.
    """

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options, self._console = options, console
        self.scripts = [
            one for one in all_scripts().values() if any(fnmatch.fnmatch(one.name, name) for name in options.scripts)
        ]
        self.columns = {
            f"{update}\n{transport}\n{workers}": Way(
                workers, transport, options={"update": update}, devices=tuple(options.device)
            )
            for update in options.update
            for transport in options.transport
            for workers in options.workers
        }
        self.cells: dict[tuple[str, str], Cell] = {}
        self.refusals: dict[tuple[str, str], str] = {}
        """What is wrong with each refusal; "" where nothing is."""

    def run(self) -> None:
        """Run everything."""
        equal = sum(len(self._rows("equal", way)) for way in self.columns.values())
        refused = sum(len(self._refused(update)) for update in self._options.update)
        layout = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*layout, console=self._console) as progress:
            task = progress.add_task("oracle", total=self._options.repeat * equal + refused)
            for what in self._runs():
                progress.update(task, advance=1, description=what)

    def _rows(self, fate: Fate, way: Way) -> list[Script]:
        return [one for one in self.scripts if one.fate(way.options["update"]) == fate]

    def _refused(self, update: str) -> list[Script]:
        return [one for one in self.scripts if one.fate(update) != "equal"]

    def _runs(self) -> Iterator[str]:
        for repetition in range(self._options.repeat):
            faults = None if self._options.no_faults else Faults(seed=self._options.seed + repetition)
            for title, way in self.columns.items():
                what = f"{repetition + 1} of {self._options.repeat}: {title.replace(chr(10), ' ')}"
                for name in self._column(title, replace(way, faults=faults)):
                    yield f"{what} {name}"
                if not self._console.is_terminal:
                    self._console.print(what, "done")
        for update in self._options.update:
            for script in self._refused(update):
                self._refuse(script, update)
                yield f"{update} refuses {script.name}"

    def _column(self, title: str, way: Way) -> Iterator[str]:
        rows = self._rows("equal", way)
        for name, outcome in outcomes([one.name for one in rows], way):
            problems = self.cells.setdefault((name, title), Cell()).add(outcome, all_scripts()[name], way)
            self._say(name, title, problems)
            yield name

    def _refuse(self, script: Script, update: str) -> None:
        """Run what is to be an error; on every worker it is."""
        [(_, outcome)] = outcomes([script.name], Way(2, options={"update": update}))
        missing = [f"no error on worker {rank}" for rank, step in enumerate(outcome.steps) if step is None]
        self.refusals[script.name, update] = "; ".join(missing)
        self._say(script.name, f"{update}, to be refused", missing)

    def _say(self, name: str, title: str, problems: list[str]) -> None:
        if problems:
            where = title.replace("\n", " ")
            self._console.print(f"{name}, {where}: {problems[0]}", style="red", markup=False, highlight=False)

    def table(self) -> Table:
        """Return what came out: the worst difference of each cell as a part of what is tolerated."""
        made = Table("script", *self.columns, title="worst difference to one process, as a part of what is tolerated")
        for script in self.scripts:
            cells = [self.cells.get((script.name, title)) for title in self.columns]
            made.add_row(script.name, *(cell.text if cell is not None else "–" for cell in cells))
        return made


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    transports = [one for one in TRANSPORTS if one != "hosts" or not why_no_hosts()]
    parser.add_argument("--transport", nargs="+", choices=list(TRANSPORTS), default=transports)
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--update", nargs="+", choices=["worker", "server"], default=["worker", "server"])
    parser.add_argument(
        "--device", nargs="+", default=["cpu"], help="of each worker; the last one is that of the others"
    )
    parser.add_argument("--repeat", type=int, default=10, help="repetitions, each with other faults")
    parser.add_argument("--no-faults", action="store_true", help="a quiet network and quick processes")
    parser.add_argument("--seed", type=int, default=0, help="of the first repetition")
    parser.add_argument("scripts", nargs="*", default=["*"], help="names or patterns")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run the matrix; returns the exit code."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    matrix, start = Matrix(parsed(arguments), console), time.monotonic()
    matrix.run()
    console.print(matrix.table())
    cells = matrix.cells.values()
    wrong = sum(bool(cell.problems) for cell in cells) + sum(map(bool, matrix.refusals.values()))
    console.print(
        f"{len(matrix.scripts)} scripts, {sum(cell.runs for cell in cells)} runs, {len(matrix.refusals)} refusals in "
        f"{time.monotonic() - start:.0f} s:",
        f"{wrong} wrong" if wrong else "all as in one process, and the same bits every time",
    )
    return int(wrong > 0)


if __name__ == "__main__":
    fork_jobs()
    sys.exit(main(sys.argv[1:]))
