"""``paceline up``: its dialogue, with checks and measurements that answer at once."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from paceline.cli import main, up
from paceline.cli.launch import TerminatedError
from paceline.errors import LaunchError
from paceline.hetero import WorkerRound
from paceline.hetero.files import report_text, steps_line
from paceline.launch import Host
from paceline.launch.link_rates import KEY_VARIABLE, MARK
from paceline.launch.remote.host_checks import Finding

ABOUT = {"version": "3.11.7", "cores": 4, "python": "/usr/bin/python3"}
FACTS = {"versions": {"paceline": "1.0", "torch": "2.13.0"}, "shared": True}
UP = ["up", "-H", "h1,h2,h3"]
SCRIPT = ["--", sys.executable, "train.py"]


class World:
    """What the hosts of a test are like, and what was started there."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"h1": 0.1, "h2": 0.1, "h3": 0.1}
        self.least_s: dict[int, float] = {}
        """By number of hosts, seconds that a step takes every worker there at least."""
        self.problems: dict[str, list[str]] = {}
        self.store, self.batches = "dist_sync", [32] * 20
        self.measured: list[list[str]] = []
        self.environ: Mapping[str, str] = {}
        self.ran: list[list[str]] = []
        self.ends: Callable[[str], None] = lambda what: None

    def output_of(self, words: Sequence[str], what: str, environ: Mapping[str, str], *rest: Any) -> str:
        """Answer as a measuring job."""
        self.measured.append(list(words))
        self.environ = environ
        self.ends(what)
        hosts = words[words.index("-H") + 1].strip(",").split(",") if "-H" in words else ["127.0.0.1"]
        if "links" in what:
            pairs = [(one, other) for one in range(len(hosts)) for other in range(one + 1, len(hosts))]
            return "\n".join(f"[worker 0] {MARK}{json.dumps([*pair, 1e8, 1e-4])}" for pair in pairs)
        each = int(words[1]) // len(hosts)
        slots = [int(host.partition("slots=")[2] or each) for host in hosts]
        dealt = [host.split()[0] for host, count in zip(hosts, slots, strict=True) for _ in range(count)]
        times = [max(self.seconds.get(host, 0.1), self.least_s.get(len(hosts), 0.0)) for host in dealt]
        steps = [[WorkerRound(size, one, max(times) - one) for size in self.batches] for one in times]
        lines = [f"{host}:0 {one}\n{steps_line(rounds)}" for host, one, rounds in zip(dealt, times, steps, strict=True)]
        report = report_text(lines, 0.0, 1000, self.store)
        return "\n".join(f"[worker 0] {line}" for line in report.splitlines())

    def doctor(self, hosts: Sequence[Host], *rest: Any, **more: Any) -> World:
        self.hosts = hosts
        return self

    def run(self) -> list[Finding]:
        """Answer as the doctor."""
        self.ends("hosts")
        return [
            Finding(host, {} if host.name in self.problems else ABOUT, {} if host.name in self.problems else FACTS,
                    problems=self.problems.get(host.name, []))
            for host in self.hosts
        ]  # fmt: skip

    def launch(self, name: str, words: Sequence[str]) -> int:
        self.ran.append(list(words))
        return 7


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()
    monkeypatch.setattr(up, "output_of", found.output_of)
    monkeypatch.setattr(up, "Doctor", found.doctor)
    monkeypatch.setattr(up.launch, "run", found.launch)
    return found


def answer(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Be a terminal at which these lines are typed."""
    left = list(lines)

    class Keyboard:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return left.pop(0)

    monkeypatch.setattr(sys, "stdin", Keyboard())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


def test_without_a_terminal_it_prints_plan_and_command_and_runs_nothing(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.seconds["h3"] = 1.0
    assert main([*UP, *SCRIPT]) == 0
    out = capsys.readouterr().out
    assert world.ran == []
    assert "expected: 640 samples/s" in out
    assert "h3    -544            not worth having" in out
    assert "paceline launch -n 2 -s 2 -H h1,h2 --" in out
    stages = ["hosts: 3 of 3 can be used", "measuring the links", "measuring 20 rounds", "plan:", "command:"]
    places = [out.index(stage) for stage in stages]
    assert places == sorted(places)
    assert max(map(len, out.replace(sys.executable, "python").splitlines())) <= 80


def test_mean_batch_is_rounded(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.batches = [32] * 11 + [31]
    assert main([*UP, *SCRIPT]) == 0
    assert "  h1          1   31.8  " in capsys.readouterr().out


def test_yes_runs_exactly_the_printed_command(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--yes", "-i", "eth1", "--max-restarts", "2", "--env", "A=a b"]
    assert main([*UP, *words, "--", sys.executable, "train.py", "--lr", "0.1"]) == 7, "the job's exit code"
    printed = capsys.readouterr().out.partition("command:\n")[2].replace("\\\n", "")
    assert world.ran == [shlex.split(printed)[2:]]
    assert world.ran[0] == [
        "-n", "3", "-s", "3", "-H", "h1,h2,h3", "-i", "eth1", "--max-restarts", "2",
        "--env", "A=a b", "--", sys.executable, "train.py", "--lr", "0.1",
    ]  # fmt: skip


@pytest.mark.parametrize(("typed", "runs"), [("y\n", 1), ("yes\n", 1), ("n\n", 0), ("\n", 0), ("", 0)])
def test_at_a_terminal_it_asks(world: World, monkeypatch: pytest.MonkeyPatch, typed: str, runs: int) -> None:
    answer(monkeypatch, typed)
    assert main([*UP, *SCRIPT]) == (7 if runs else 0)
    assert len(world.ran) == runs


def test_host_that_cannot_be_used_is_left_out_only_if_the_user_agrees(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world.problems["h2"] = ["host h2 did not answer: is it up, and does a firewall let ssh through?"]
    assert main([*UP, "--yes", *SCRIPT]) == 2, "--yes does not agree to that"
    out = capsys.readouterr().out
    assert "h2: host h2 did not answer: is it up" in out
    assert "not without h2: repair it, take it out of -H, or give --leave-out" in out
    assert world.measured == []
    answer(monkeypatch, "n\n")
    assert main([*UP, *SCRIPT]) == 2
    answer(monkeypatch, "y\n", "y\n")
    assert main([*UP, *SCRIPT]) == 7
    assert main([*UP, "--leave-out", "--yes", *SCRIPT]) == 7
    assert [words[words.index("-H") + 1] for words in world.ran] == ["h1,h3", "h1,h3"]


def test_no_host_that_can_be_used_ends_it(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.problems |= {name: ["no"] for name in ("h1", "h2", "h3")}
    assert main([*UP, "--leave-out", *SCRIPT]) == 2
    assert "no host can be used" in capsys.readouterr().out


def test_clock_that_differs_is_said_and_stops_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Finding(Host("h1"), ABOUT, FACTS, problems=["its clock differs"], harmless=["its clock differs"])
    monkeypatch.setattr(world, "run", lambda: [late])
    assert main(["up", "-H", "h1,", "--yes", *SCRIPT]) == 7


def test_measuring_jobs_are_the_job_itself_for_some_rounds(world: World) -> None:
    words = ["--rounds", "9", "--log-dir", "logs", "--max-restarts", "1", "--staleness", "3", "-o", "python=/p"]
    assert main([*UP, *words, "--yes", "--yes", *SCRIPT]) == 7
    of_links, of_rounds = world.measured
    assert of_links[:6] == ["-n", "3", "-s", "0", "-H", "h1,h2,h3"]
    assert of_links[6:10] == ["-o", "python=/p", "--env", KEY_VARIABLE]
    assert KEY_VARIABLE not in world.environ, "it is only for the measure of links"
    assert of_rounds[:6] == ["-n", "3", "-s", "3", "-H", "h1,h2,h3"]
    assert "--log-dir" not in of_rounds
    assert "--max-restarts" not in of_rounds
    assert of_rounds[6:8] == ["--staleness", "3"]
    assert {"PACELINE_PROFILE=-", "PACELINE_PROFILE_ROUNDS=9"} <= set(of_rounds)
    assert of_rounds[-3:] == SCRIPT
    assert world.ran[0][6:8] == ["--log-dir", "logs"], "the job has it"


def test_job_that_is_only_forecast_is_measured_before_it_is_planned(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.seconds["h3"], world.least_s[2] = 1.0, 0.16
    assert main([*UP, "--yes", *SCRIPT]) == 7
    out = capsys.readouterr().out
    assert "measuring 20 rounds of the script, 3 workers and 3 servers" in out
    assert "measuring 20 rounds of the script, 2 workers and 2 servers" in out
    assert "expected: 400 samples/s" in out, "not 640: two workers were measured"
    assert world.measured[-1][:6] == world.ran[0][:6] == ["-n", "2", "-s", "2", "-H", "h1,h2"]


def test_job_that_was_forecast_too_fast_is_not_run(world: World) -> None:
    world.seconds["h3"], world.least_s[2] = 0.2, 0.2
    assert main([*UP, "--yes", *SCRIPT]) == 7
    assert world.measured[-1][:2] == ["-n", "2"]
    assert world.ran[0][:2] == ["-n", "3"], "480 samples/s, and 320 without h3"


def test_few_plans_are_measured_and_the_fastest_of_them_is_taken(world: World) -> None:
    world.seconds |= {f"h{one}": 0.1 * 1.7**one for one in range(1, 9)}
    world.least_s = {count: 100.0 * count for count in range(1, 7)} | {7: 6.0}
    assert main(["up", "-H", ",".join(world.seconds), "--yes", *SCRIPT]) == 7
    sizes = [int(words[1]) for words in world.measured[1:]]
    assert sizes[0] == 8
    assert len(set(sizes)) == len(sizes) == 4
    assert world.ran[0][1] == "7", "37.3 samples/s; 36.7 with all"


def test_workers_per_host_are_those_of_the_hostfile_or_the_option(world: World) -> None:
    assert main(["up", "-H", "h1 slots=2,h2", "--yes", *SCRIPT]) == 7
    assert world.ran[-1][:6] == ["-n", "3", "-s", "2", "-H", "h1 slots=2,h2 slots=1"]
    assert main(["up", "-H", "h1,h2", "--nproc-per-node", "2", "--yes", *SCRIPT]) == 7
    assert world.ran[-1][:6] == ["-n", "4", "-s", "2", "-H", "h1,h2"]


def test_without_hosts_it_is_this_machine(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--nproc-per-node", "2", "--yes", "--", sys.executable, "-c", "pass"]) == 7
    assert len(world.measured) == 1, "there are no links"
    assert world.ran == [["-n", "2", "-s", "1", "--", sys.executable, "-c", "pass"]]
    assert "adds" not in capsys.readouterr().out


def test_script_of_dist_auto_gets_the_option_that_measures_for_it(world: World) -> None:
    world.store = "dist_auto"
    assert main([*UP, "--yes", *SCRIPT]) == 7
    assert world.ran[0][6:8] == ["--groups", "auto"]


def test_json_is_the_only_thing_on_stdout(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.seconds["h3"] = 1.0
    assert main([*UP, "--json", *SCRIPT]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["command"][:2] == ["paceline", "launch"]
    assert found["plan"]["hosts"] == ["h1", "h2"]
    assert found["plan"]["samples_per_s"] == pytest.approx(640, rel=0.01)
    assert [one["left_out"] for one in found["measured"]] == [False, False, True]
    assert "plan:" in err


@pytest.mark.parametrize("stage", ["hosts", "the measure of links", "the measuring job"])
@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (TerminatedError, 143)])
def test_interrupt_at_any_stage_ends_it(
    world: World, capsys: pytest.CaptureFixture[str], stage: str, error: type[BaseException], code: int
) -> None:
    def end(what: str) -> None:
        if what == stage:
            raise error

    world.ends = end
    assert main([*UP, "--yes", *SCRIPT]) == code
    assert "was interrupted; nothing of it is left running" in capsys.readouterr().out
    assert world.ran == []


def test_script_that_pushes_nothing_is_said_to(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(up, "output_of", lambda *given: "[worker 0] trained")
    assert main(["up", "-H", "h1,", *SCRIPT]) == 1
    assert "nothing was measured: the script ended before 20 rounds, or pushes nothing" in capsys.readouterr().err


def test_failed_measurement_ends_it_with_its_words(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(what: str) -> None:
        if what == "the measuring job":
            raise LaunchError("worker 1 failed")

    world.ends = fail
    assert main([*UP, *SCRIPT]) == 1
    assert "paceline up: worker 1 failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "2"], "--nproc-per-node, say how many workers"),
        (["--ddp"], "use: paceline launch --ddp"),
        (["--groups", "auto"], "writes --groups auto where"),
        (["--config", "job.toml"], "takes its options on the command line"),
        (["--launcher", "k8s"], "paceline up runs jobs with local, ssh, mpi"),
        (["--rounds", "1"], "at least 2"),
        (["--dry"], "unknown option"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    world: World, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", *words, *SCRIPT]) == 2
    assert message in capsys.readouterr().err
    assert world.measured == []


def test_command_is_needed(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "-H", "h1,h2"]) == 2
    assert "there is no command to run" in capsys.readouterr().err
