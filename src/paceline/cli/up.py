"""``paceline up``: from a list of hosts to a running job, in one dialogue.

| stage | runs |
|---|---|
| hosts | the checks of ``paceline doctor``, on all hosts |
| links | :mod:`paceline.launch.link_rates`, a worker on each host, no servers |
| rounds | the user's script as ``paceline profile`` runs it, all workers, a server on each host |
| plan | :mod:`paceline.sim.hosts_plan`, and the rounds again on the hosts and servers that it plans |
| run | the printed command line |
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TextIO

from paceline.cli import launch, launch_options, up_text
from paceline.cli.options import Option, Parser, UsageError, agrees, split_command, usage_errors, words_of
from paceline.cli.running import ask
from paceline.errors import LaunchError, PacelineError
from paceline.hetero.files import parse_report
from paceline.launch import Host, JobSpec, Machine, backend, check_unread, runtime
from paceline.launch.link_rates import KEY_VARIABLE, parse_links
from paceline.launch.remote import RemoteRequest, agent_here, copy_all, explain
from paceline.launch.remote.host_checks import Doctor, Finding
from paceline.launch.supervise.child import die_with_parent
from paceline.launch.supervise.panel import obeys_codes
from paceline.net.security import new_job_key
from paceline.observe.table import duration, plural
from paceline.sim.hosts_plan import MEASURES_FIRST, HostPlanner, HostsPlan, Links, PlannedJob

ROUNDS = 20

#: Rounds before them that are not measured.
_WARM_UP = 3

#: Plans that are measured at most. The fastest one that was measured is then taken.
_MOST_PLANS = 3

#: For each step of the checks of hosts, and for the measure of all links.
_CHECK_S, _LINKS_S = 20.0, 300.0

#: How often the progress of a measuring job is asked for, and how many lines of a failed one are shown.
_TICK_S, _SHOWN_LINES = 1.0, 30

_OWN = (
    Option(("-y", "--yes"), "run the planned job without a question", section="up"),
    Option(("--rounds",), f"rounds to measure (default: {ROUNDS})", "ROUNDS", int, least=2, section="up"),
    Option(("--all-hosts",), "leave out no host that can be used, however little it adds", section="up"),
    Option(("--leave-out",), "leave out hosts that cannot be used, without a question", section="up"),
    Option(
        ("--measure-timeout",), "how long the script may take for its rounds (default: 600)", "SECONDS", float,
        positive=True, section="up",
    ),
    Option(("--json",), "print the plan as one JSON object; everything else goes to stderr", section="up"),
)  # fmt: skip

#: Options of ``paceline launch`` that this command finds by itself, or that have no use here.
_FOUND = {
    "--num-workers": "the hosts' slots=, or --nproc-per-node, say how many workers each host has; the rest is planned",
    "--num-servers": "paceline up finds how many servers are best",
    "--group": "paceline up measures each host; for worker groups use paceline launch",
    "--groups": "paceline up measures by itself, and writes --groups auto where the script needs it",
    "--config": "paceline up takes its options on the command line",
    "--dry-run": "nothing runs without a yes: without a terminal, or with the answer no, it only prints the plan",
    "--ddp": "a DDP script makes no pushes that could be timed; use: paceline launch --ddp",
    "--shares": "it is for DDP scripts; use: paceline launch --ddp --shares measured",
    "--no-torchrun-env": "it is for scripts without a store; paceline up needs one",
}
_TAKEN = tuple(option for option in launch_options.OPTIONS if option.flags[-1] not in _FOUND)
OPTIONS = (*_OWN, *_TAKEN)

#: Options that the measuring jobs do without.
_ONLY_IN_THE_JOB = ("--log-dir", "--max-restarts", "--dashboard", "--report")
_OF_HOSTS = ("-H", "--nproc_per_node")
_LAUNCHERS = ("local", "ssh", "mpi")

USAGE = "paceline up [-H HOSTS] [options] [--] command ..."

DESCRIPTION = """\
From hosts to a running job: check the hosts, measure 20 rounds of the script on all of them and the links between them,
and plan hosts, servers and what to expect. Prints the command line, asks, and runs it. Without -H it is this machine.
Other options are those of paceline launch."""

EPILOG = """\
Hosts that would make the job slower, or no faster, are left out and named. A host that cannot be used is left out only
if you agree. Where there is no terminal nothing is asked: it prints plan and command line, and runs it with --yes only.

examples:
  paceline up -- python train.py
  paceline up -H h1,h2,h3 -- python train.py --kv-store dist_sync
  paceline up -H hosts --sync-dst-dir /tmp/train --yes -- python train.py

exit code:
  that of the job; 0 if you do not want it; 2 for a wrong command line, and for hosts that cannot be used and that you
  do not want to leave out; 1 if the measurement failed; 130 after Ctrl-C."""

_ADVICE = launch_options.ADVICE | {
    flag: f"leave it out: {why}"
    for option in launch_options.OPTIONS
    if (why := _FOUND.get(option.flags[-1]))
    for flag in {flag.replace("_", "-") for flag in option.flags}
}


def run(name: str, words: Sequence[str]) -> int:
    """Run ``paceline up`` and return the exit code."""
    ours, command = split_command(words, OPTIONS)
    options = Parser(name, OPTIONS, USAGE, DESCRIPTION, EPILOG, _ADVICE).parse(ours)
    dialogue = Dialogue(options, ours, command)
    try:
        return dialogue.run()
    except (KeyboardInterrupt, launch.TerminatedError) as error:
        dialogue.say("\npaceline up was interrupted; nothing of it is left running")
        return 128 + (error.signum if isinstance(error, launch.TerminatedError) else signal.SIGINT)


class Dialogue:
    """One use of ``paceline up``; ``words`` are the options as they were given."""

    def __init__(self, options: argparse.Namespace, words: Sequence[str], command: Sequence[str]) -> None:
        self._options, self._command = options, list(command)
        self._out: TextIO = sys.stderr if options.json else sys.stdout
        self._rounds = options.rounds or ROUNDS
        self._words = words_of(words, OPTIONS, lambda one: one in _TAKEN and one.flags[0] not in _OF_HOSTS)
        self._spec = self._first_spec()
        self._planned: list[str] = []

    def _first_spec(self) -> JobSpec:
        given = self._options
        slots = ["--nproc-per-node", str(given.nproc_per_node or 1)]
        hosts = ["-H", given.hosts] if given.hosts is not None else []
        parser = Parser("up", launch_options.OPTIONS, USAGE, DESCRIPTION, EPILOG, launch_options.ADVICE)
        parsed = parser.parse([*self._words, *hosts, *slots])
        parsed.launcher = parsed.launcher or ("ssh" if hosts else "local")
        if parsed.launcher not in _LAUNCHERS:
            raise UsageError(f"--launcher {parsed.launcher}: paceline up runs jobs with {', '.join(_LAUNCHERS)}")
        self._launcher = parsed.launcher
        with usage_errors():
            return launch.job_spec(parsed, self._command)

    def run(self) -> int:
        """Ask and answer until the job has run, or is not wanted."""
        findings = self._check()
        self.say(up_text.shown_findings(findings))
        hosts = [one.host for one in findings if not one.obstacles]
        if len(hosts) < len(findings) and not self._goes_on_without(findings, hosts):
            return 2
        if len(hosts) > 1 and find_spec("simpy") is None:  # said now, not after minutes of measuring
            raise LaunchError("plans of several hosts need simpy: pip install 'paceline[sim]'")
        links = self._measure_links(hosts)
        planner = self._measure_rounds(hosts, len(hosts), links)
        plan = self._measured_plan(planner, links)
        self._planned = self.command_of(plan, planner)
        for text in (up_text.shown_measures(planner, self._rounds), up_text.shown_plan(plan, planner)):
            self.say(f"\n{text}")
        self.say(f"\n{up_text.shown_command(self._planned)}")
        if self._options.json:
            print(json.dumps(up_text.as_json(findings, planner, plan, self._planned)), flush=True)
        if not self._options.yes and not self._agrees("run it?"):
            return 0
        return launch.run("launch", self._planned)

    def say(self, text: str) -> None:
        """Print."""
        print(text, file=self._out, flush=True)

    # ---- questions -------------------------------------------------------------------------------------------------

    def _agrees(self, question: str) -> bool:
        """Ask; where there is no terminal the answer is no."""
        return sys.stdin.isatty() and self._out.isatty() and agrees(f"\n{question}", self._out)

    def _goes_on_without(self, findings: Sequence[Finding], hosts: Sequence[Host]) -> bool:
        absent = ", ".join(one.host.name for one in findings if one.obstacles)
        if not hosts:
            self.say("no host can be used")
            return False
        if self._options.leave_out or self._agrees(f"go on without {absent}?"):
            return True
        self.say(f"not without {absent}: repair it, take it out of -H, or give --leave-out")
        return False

    # ---- hosts, links, rounds --------------------------------------------------------------------------------------

    def _check(self) -> list[Finding]:
        chosen = backend(self._launcher)
        with usage_errors():
            request = chosen.plan(self._spec, Machine.here())
            check_unread(self._launcher, self._spec)
        chosen.check(request)
        command: Callable[[Host], Sequence[str]] = _agent_here
        uncopied: dict[str, str] = {}
        if isinstance(request, RemoteRequest):
            command, uncopied = request.command, copy_all(request.copies)
        doctor = Doctor(self._spec.hosts, command, explain, _CHECK_S, shares=not self._spec.sync)
        findings = doctor.run()
        for finding in findings:
            if finding.host.name in uncopied and not finding.facts:
                why = f"host {finding.host.name}: {uncopied[finding.host.name]}"
                finding.problems[:] = [f"the directory could not be copied: {why}"]
        return findings

    def _measure_links(self, hosts: Sequence[Host]) -> Links:
        """Return the rate of each pair of hosts."""
        if len(hosts) == 1:
            return {}
        self.say(f"\nmeasuring the links of {len(hosts)} hosts")
        where = words_of(self._words, _TAKEN, lambda one: one.section == "hosts")
        size = ["-n", str(len(hosts)), "-s", "0", "-H", self._host_list(hosts, [1] * len(hosts))]
        words = [*size, *where, "--env", KEY_VARIABLE, "--", sys.executable, "-P", "-m", "paceline.launch.link_rates"]
        environ = os.environ | {KEY_VARIABLE: new_job_key()}
        text = output_of(words, "the measure of links", environ, _LINKS_S, lambda pid: None)
        names = [host.name for host in hosts]
        return {(names[one], names[other]): rate for (one, other), rate in parse_links(text).items()}

    def _measured_plan(self, planner: HostPlanner, links: Links) -> HostsPlan:
        """Return a plan whose job was measured, too, not only forecast from the job of all hosts."""
        keep_all = self._options.all_hosts
        for _ in range(_MOST_PLANS):
            plan = planner.plan(keep_all=keep_all)
            if planner.knows(plan.job):
                return plan
            planner.learn(self._measure_rounds(self._hosts_of(plan.job), plan.job.servers, links))
        return planner.plan(keep_all=keep_all, only_known=True)

    def _measure_rounds(self, hosts: Sequence[Host], servers: int, links: Links) -> HostPlanner:
        """Run the script for some rounds, with servers on the first hosts."""
        slots = [_slots(host) for host in hosts]
        self.say(f"\nmeasuring {plural(self._rounds, 'round', 'rounds')} of the script, "
                 f"{plural(sum(slots), 'worker', 'workers')} and {plural(servers, 'server', 'servers')}")  # fmt: skip
        kept = words_of(self._words, _TAKEN, lambda one: one.flags[-1] not in _ONLY_IN_THE_JOB)
        settings = {"PROFILE": "-", "PROFILE_ROUNDS": str(self._rounds), "GROUPS": "auto"}
        given = [word for name, text in settings.items() for word in ("--env", f"PACELINE_{name}={text}")]
        words = [*self._size(hosts, servers), *kept, *given, "--", *self._spec.command]
        deadline_s, began = self._options.measure_timeout or 600.0, time.monotonic()
        text = output_of(words, "the measuring job", os.environ, deadline_s, self._progress())
        self._clear()
        self.say(f"measured in {duration(time.monotonic() - began)}")
        report = parse_report(text)
        if report is None:
            raise LaunchError(
                f"nothing was measured: the script ended before {self._rounds} rounds, or pushes nothing to a store; "
                "--rounds N measures fewer"
            )
        by_rank = [host.name for host, count in zip(hosts, slots, strict=True) for _ in range(count)]
        return HostPlanner(report, by_rank, links, servers)

    def _size(self, hosts: Sequence[Host], servers: int) -> list[str]:
        slots = [_slots(host) for host in hosts]
        size = ["-n", str(sum(slots)), "-s", str(servers)]
        return [*size, *(["-H", self._host_list(hosts, slots)] if self._launcher != "local" else [])]

    def _host_list(self, hosts: Sequence[Host], slots: Sequence[int]) -> str:
        given = self._options.interface  # stays an option
        named = [replace(host, interface="") if host.interface == given else host for host in hosts]
        return up_text.host_list(named, slots)

    def command_of(self, plan: HostsPlan, planner: HostPlanner) -> list[str]:
        """Return the words of the planned job, after ``paceline launch``."""
        groups = ["--groups", "auto"] if planner.report.store_type in MEASURES_FIRST else []
        size = self._size(self._hosts_of(plan.job), plan.job.servers)
        return [*size, *groups, *self._words, "--", *self._spec.command]

    def _hosts_of(self, job: PlannedJob) -> list[Host]:
        by_name = {host.name: host for host in self._spec.hosts}
        return [by_name[name] for name in job.hosts]

    # ---- progress --------------------------------------------------------------------------------------------------

    def _progress(self) -> Callable[[int], None]:
        """Return a function that shows the round of the slowest worker, on a terminal."""
        whole = self._rounds + _WARM_UP

        def show(pid: int) -> None:
            if not (sys.stderr.isatty() and obeys_codes(os.environ)):
                return
            try:
                record = next((one for one in runtime.jobs() if one.pid == pid and one.scheduler), None)
                states = ask(record).status.states if record is not None else []
            except PacelineError:
                return  # it starts, or has ended
            least = min((one.round for one in states if one.round), default=0)
            text = f"round {min(least, whole)} of {whole}" if least else "starting"
            print(f"\r\x1b[K  {text}", end="", file=sys.stderr, flush=True)

        return show

    def _clear(self) -> None:
        if sys.stderr.isatty() and obeys_codes(os.environ):
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _slots(host: Host) -> int:
    return 1 if host.slots is None else host.slots


def _agent_here(host: Host) -> list[str]:
    return agent_here()


# ---- the jobs that measure -------------------------------------------------------------------------------------------


def output_of(
    words: Sequence[str], what: str, environ: Mapping[str, str], deadline_s: float, tick: Callable[[int], None]
) -> str:
    """Run ``paceline launch`` and return all that it printed. However this ends, nothing of it is left running.

    ``tick`` is called now and then with its process id; errors call it ``what``.

    Raises:
        LaunchError: it failed, with its last lines; or took too long.
        launch.TerminatedError: SIGTERM came.
    """
    with tempfile.TemporaryFile() as out:
        launcher = subprocess.Popen(
            [sys.executable, "-P", "-m", "paceline", "launch", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,  # Ctrl-C comes once, from here
            preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
        )
        with launch.sigterm_raises():
            try:
                code = _wait(launcher, deadline_s, tick)
            finally:
                _end(launcher)
        out.seek(0)
        text = out.read().decode(errors="replace")
    if code is None:
        raise LaunchError(f"{what} did not end within {deadline_s:g} s; its last lines:\n{_last(text)}")
    if code:
        raise LaunchError(f"{what} failed with exit code {code}; its last lines:\n{_last(text)}")
    return text


def _wait(launcher: subprocess.Popen[bytes], deadline_s: float, tick: Callable[[int], None]) -> int | None:
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        try:
            return launcher.wait(_TICK_S)
        except subprocess.TimeoutExpired:
            tick(launcher.pid)
    return None


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Interrupt a launcher that still runs, and wait until it has ended its processes; Ctrl-C makes it kill them."""
    while launcher.poll() is None:
        launcher.send_signal(signal.SIGINT)
        try:
            launcher.wait()
        except (KeyboardInterrupt, launch.TerminatedError):
            continue


def _last(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines()[-_SHOWN_LINES:])
