"""One job with one fault."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

import paceline
from paceline.config import Settings

SOURCES = str(Path(paceline.__file__).parents[1])
SCRIPT = str(Path(__file__).with_name("worker.py"))

PHASES = ("start", "joined", "rounds", "mid-round", "barrier", "end")
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGSTOP": signal.SIGSTOP}
#: What a worker does to itself.
DEEDS = ("raise", "exit3", "SystemExit3", "os._exit3", "os._exit0", "leave")

START_TIMEOUT_S, STALL_TIMEOUT_S = 40.0, Settings.stall_timeout_s
#: From the fault to the end of the launcher: silence (or a start that is given up), survivors, SIGTERM, SIGKILL, slack.
DEADLINE_S = START_TIMEOUT_S + STALL_TIMEOUT_S + 6.0 + 5.0 + 5.0 + 20.0


@dataclass(frozen=True)
class Trial:
    """What goes wrong, where and when.

    Attributes:
        workers: of the job.
        servers: of the job.
        role: of the culprit.
        rank: of the culprit.
        fault: a signal or a deed.
        phase: of worker 0, or of the culprit if it is a worker.
        delay_s: between the start of the phase and a signal.
        slow: a culprit takes 1.5 s to end.
        catch: workers catch paceline's errors and end with exit code 1.
        seed: of the moment of a deed.
    """

    workers: int
    servers: int
    role: str
    rank: int
    fault: str
    phase: str
    delay_s: float
    slow: bool
    catch: bool
    seed: int


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        problem: empty if all is well.
        seconds: from the fault to the launcher's end.
        code: of the launcher.
        output: of the launcher.
        missed: the fault did not come before the end of the culprit, or of the job.
    """

    problem: str
    seconds: float
    code: int | None
    output: str
    missed: bool = False

    @property
    def kind(self) -> str:
        """Return what went wrong in a word: ``hung``, ``left running``, ``wrong``; empty if all is well."""
        if not self.problem:
            return ""
        return next((kind for kind, begin in _KINDS.items() if self.problem.startswith(begin)), "wrong")


#: How a problem of each kind begins; all others are ``wrong``: the wrong process was named, or none.
_KINDS = {"hung": "no end within", "left running": "left running"}


def draw(seed: int, workers: int = 3, servers: int = 2) -> Trial:
    """Draw a trial; the same for the same arguments."""
    chance = random.Random(seed)
    role = chance.choice(["worker", "worker", "worker", "server", "scheduler"])
    rank = chance.randrange({"worker": workers, "server": servers, "scheduler": 1}[role])
    fault = chance.choice([*SIGNALS, *DEEDS] if role == "worker" else list(SIGNALS))
    phase = chance.choice(PHASES)
    slow, catch = chance.random() < 0.3, chance.random() < 0.3
    return Trial(workers, servers, role, rank, fault, phase, chance.random(), slow, catch, seed)


def run(trial: Trial, folder: Path, patience: float = 1.0) -> Outcome:
    """Run a job and judge how it ended.

    Args:
        trial: what goes wrong.
        folder: of the job.
        patience: how many times as long as usual everything may take, on a machine that is busy.
    """
    folder.mkdir(parents=True)
    (folder / "trial.json").write_text(json.dumps(asdict(trial)))
    mark = f"BLAME_MARK={uuid.uuid4()}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    env |= dict([mark.split("=")]) | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    env |= {"PACELINE_TIMEOUT_S": f"{60 * patience:g}"}
    sizes = ["-n", str(trial.workers), "-s", str(trial.servers), "--start-timeout", f"{START_TIMEOUT_S}"]
    argv = [sys.executable, "-m", "paceline", "launch", *sizes, "--", sys.executable, SCRIPT, str(folder)]
    with open(folder / "output", "wb") as output:
        launcher = subprocess.Popen(argv, env=env, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
    began, missed, code = time.monotonic(), False, None
    try:
        reached = _wait_for_phase(trial, folder, launcher, patience)
        began = time.monotonic()
        if trial.fault in SIGNALS:
            time.sleep(trial.delay_s)
            began = time.monotonic()
            missed = not reached or not _signal(trial, mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = launcher.wait(DEADLINE_S * patience)
        if trial.fault in DEEDS:  # a busy host may fail the job before: its processes did not start in time
            missed = code is not None and not (folder / "deed").exists()
    finally:
        launcher.kill()
        launcher.wait()
    seconds, text = time.monotonic() - began, (folder / "output").read_text(errors="replace")
    left = _processes(mark)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return Outcome(_problem(trial, code, text, list(left.values())), seconds, code, text, missed)


def _wait_for_phase(trial: Trial, folder: Path, launcher: subprocess.Popen[bytes], patience: float) -> bool:
    rank = trial.rank if trial.role == "worker" else 0
    until = time.monotonic() + 4 * START_TIMEOUT_S * patience
    while not (folder / f"{trial.phase}-{rank}").exists():
        if launcher.poll() is not None or time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _signal(trial: Trial, mark: str) -> bool:
    """Send the signal; return whether it reached the process before its end."""
    wanted = {f"PACELINE_ROLE={trial.role}", f"PACELINE_RANK={trial.rank}"}
    found = [pid for pid, variables in _environments(mark) if wanted <= variables]
    return any(hit(pid, SIGNALS[trial.fault]) for pid in found[:1])


def hit(pid: int, signum: int) -> bool:
    """Send a signal; return whether it reached the process before its end.

    A process that exits, and one that its parent has not removed yet, can be sent a signal, and nothing comes of it. So
    it is stopped first, which the kernel shows.
    """
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        os.kill(pid, signal.SIGSTOP)
        while (state := psutil.Process(pid).status()) != psutil.STATUS_STOPPED:
            if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return False
            time.sleep(0.001)
        if signum != signal.SIGSTOP:
            os.kill(pid, signum)
            os.kill(pid, signal.SIGCONT)
        return True
    return False


def _environments(mark: str) -> list[tuple[int, set[str]]]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = set((entry / "environ").read_bytes().decode(errors="replace").split("\0"))
            if mark in variables:
                found.append((int(entry.name), variables))
    return found


def _processes(mark: str) -> dict[int, str]:
    return {
        pid: next((v for v in variables if v.startswith("PACELINE_ROLE=")), "")
        for pid, variables in _environments(mark)
    }


def named(text: str) -> str:
    """Return whom the launcher's last block names."""
    found = re.findall(r"^(scheduler|(?:worker|server) \d+) failed: ", text, re.MULTILINE)
    return str(found[-1]) if found else ""


def _problem(trial: Trial, code: int | None, text: str, left: list[str]) -> str:
    culprit = "scheduler" if trial.role == "scheduler" else f"{trial.role} {trial.rank}"
    if code is None:
        return f"no end within {DEADLINE_S:g} s"
    if left:
        return f"left running: {', '.join(left)}"
    if trial.fault == "leave" and trial.phase != "start":
        return "" if code == 0 else f"a leave failed the job with {code}; named: {named(text)!r}"
    if code == 0:
        # All workers were done already: then the launcher only warns.
        warned = re.search(rf"but (?:.*, )?{culprit}(?:, .*)? did not leave within", text)
        warned = warned or re.search(rf"{culprit} is terminated: stopped", text)
        return "" if warned else "the job ended with exit code 0"
    return "" if named(text) == culprit else f"named {named(text)!r} instead of {culprit!r}"
