"""The tutorials are true: their commands, typed in order, print the lines that they show."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import launch
from paceline.cli.app import main
from paceline.launch import JobSpec
from paceline.testing import LocalJob
from tests.docs.pages import ROOT, TEXTS, blocks
from tests.hvd.ranks import Ranks

PAGES = sorted(name for name in TEXTS if name.startswith("docs/tutorials/"))
#: A file that the reader saves: its name, words about it, its text.
_FILE = re.compile(r"Save\s+this\s+as\s+`([\w.]+)`(?:(?!```).)*?\n\n```\w+\n(.*?)```", re.DOTALL)
#: Lines whose numbers say how fast this machine is.
_MEASURED = re.compile(r"\d s$|staleness: ")
TIMEOUT_S = 120.0


def run_script(folder: str, words: list[str]) -> None:
    """Run a script as ``python`` does; in a forked process."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


class ForkedLauncher:
    """Stands for the launcher ``local``: it gets the job that the command line says, and forks the processes."""

    def plan(self, spec: JobSpec, machine: object) -> JobSpec:
        return spec

    def check(self, spec: JobSpec) -> None:
        """Nothing to check: the processes are forked from this one's programs."""

    def submit(self, spec: JobSpec) -> ForkedJob:
        return ForkedJob(spec)


class ForkedJob:
    """A job of forked processes."""

    def __init__(self, spec: JobSpec) -> None:
        assert spec.command[0] == "python"
        self._spec, self._arguments = spec, (os.getcwd(), list(spec.command[1:]))

    def wait(self) -> int:
        """Run the job, print the workers' lines as the launcher does, and return the highest exit code."""
        servers = self._spec.num_workers if self._spec.num_servers is None else self._spec.num_servers
        codes, outputs = self._with_servers(servers) if servers else run_ranks(self._spec.num_workers, self._arguments)
        for rank, output in enumerate(outputs):
            print("".join(f"[worker {rank}] {line}\n" for line in output.splitlines()), end="")
        return max(codes)

    def _with_servers(self, servers: int) -> tuple[list[int], list[str]]:
        settings: dict[str, Any] = dict(self._spec.settings)
        with LocalJob(self._spec.num_workers, servers, **settings) as job:
            workers = job.start_all(run_script, *self._arguments)
            return [one.wait(TIMEOUT_S) for one in workers], [one.output for one in workers]


def run_ranks(count: int, arguments: tuple[str, list[str]]) -> tuple[list[int], list[str]]:
    """Run a script on ranks without servers; return exit codes and outputs."""
    ranks = Ranks(run_script, count, *arguments)
    return [-1 if code is None else code for code in ranks.codes()], [ranks.output(rank) for rank in range(count)]


def typed(command: str, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> str:
    """Type a command in the current folder and return its output."""
    program, *words = shlex.split(command)
    with patch.context() as one:
        if "--dry-run" not in words:
            one.setattr(launch, "backend", lambda name: ForkedLauncher())
        if program == "python":
            codes, [output] = run_ranks(1, (os.getcwd(), words))
            assert codes == [0], output
            return output
        assert program == "paceline"
        code = main(words)
    output = capture.readouterr().out
    assert code == 0, output
    return output


def commands(page: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a page, each with the lines that are shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in "".join(blocks(page, "console")).splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line != "...":
            found[-1][1].append(line)
    return found


def is_like(seen: str, shown: str) -> bool:
    """Whether lines are alike: integers are equal, others (accuracies) nearly so; a choice has its reasons."""
    if shown.startswith("dist_auto: "):
        return seen.startswith("dist_auto: ")
    if _MEASURED.search(shown):
        seen, shown = (re.sub(r"\{.*\}|[\d.]+", "#", one) for one in (seen, shown))
    number = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
    return number.sub("#", seen) == number.sub("#", shown) and all(
        abs(float(one) - float(other)) <= 0.2
        for one, other in zip(number.findall(seen), number.findall(shown), strict=True)
    )


def missing(seen: list[str], shown: list[str]) -> list[str]:
    """Return the shown lines that were not seen, in this order for each worker."""
    found = []
    places: dict[str, int] = {}
    for line in shown:
        who = line.partition("] ")[0] if line.startswith("[") else ""
        rest = range(places.get(who, 0), len(seen))
        place = next((number for number in rest if is_like(seen[number], line)), None)
        if place is None:
            found.append(line)
        else:
            places[who] = place + 1
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def type_page(page: str, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> list[str]:
    """Save the files of a page, type its commands, and return what was seen of each."""
    for name, text in _FILE.findall(TEXTS[page]):
        Path(name).write_text(text)
    outputs = []
    for command, shown in commands(page):
        outputs.append(typed(command, patch, capture))
        assert shown, f"{page} does not show what {command} prints"
        assert missing(outputs[-1].splitlines(), shown) == [], f"{command}\n{outputs[-1]}"
    return outputs


Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("page", [page for page in PAGES if not page.endswith(("unequal.md", "allreduce.md"))])
def test_commands_show_what_the_page_shows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, page: str
) -> None:
    assert type_page(page, monkeypatch, capsys)


def test_two_ranks_have_the_losses_of_one_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    _, one, two = type_page("docs/tutorials/allreduce.md", monkeypatch, capsys)
    losses = [[float(text) for text in re.findall(r"last batch ([\d.]+)", output)] for output in (one, two)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


def test_unequal_workers_end_as_the_page_says(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    equal, measured, groups, bounded, chosen = type_page("docs/tutorials/unequal.md", monkeypatch, capsys)
    samples = [list(map(int, re.findall(r"(\d+) samples in", one))) for one in (equal, measured, groups, bounded)]
    assert [abs(one - other) < 4 for one, other in (samples[0], samples[3])] == [True, True]
    assert samples[1][0] > samples[1][1]
    assert [sum(one) for one in samples] == [2 * 1437] * 4, "each sample was trained on once per epoch"
    stale = [re.findall(r"staleness: \{(.*)\}", one)[0] for one in (equal, measured, bounded)]
    ages = [re.findall(r"(\d+):", one) for one in stale]
    assert ages[:2] == [["1"]] * 2
    assert int(ages[2][-1]) > 1
    assert "dist_auto: " in chosen


def test_every_page_is_reached_from_the_readme() -> None:
    assert [page for page in PAGES if f"({page})" not in TEXTS["README.md"]] == []
    assert len(PAGES) == 5
    assert all((ROOT / page).exists() for page in PAGES)
