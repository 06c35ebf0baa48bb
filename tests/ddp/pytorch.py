"""``python -m tests.ddp.pytorch``: PyTorch's own tests of process groups and DDP, over paceline and over Gloo.

PyTorch ships them for a backend whose name it reads when they are imported, and leaves out what that one cannot do.
So each is taken as it is written for Gloo, and those that Gloo leaves out as they are written for MPI. Over paceline,
``init_process_group("gloo")`` opens our backend, as in ``paceline launch --ddp``. Each test is run by the code that
PyTorch has for its processes, in a job of its own.

Needs ``expecttest``, which PyTorch's tests import.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

from paceline.testing import LocalJob, WorkerFailedError
from paceline.testing.job import common_environment
from tests.clusters.fork_server import ForkServer

_MODULE = "torch.testing._internal.distributed.distributed_test"

#: Backends for which tests are written.
_WRITTEN_FOR = ("gloo", "mpi")

_WORDS = "wants the words of Gloo's error; that ours names the ranks is tested in test_backend.py"

#: Tests that pass over Gloo and not over paceline, and why that is right.
CANNOT = {
    "test_get_backend": "wants the name gloo, and the name of the backend is paceline",
    "test_monitored_barrier_gloo": _WORDS,
    "test_monitored_barrier_gloo_rank_0_timeout": _WORDS,
    "test_monitored_barrier_gloo_subgroup": _WORDS,
}

#: How a test ended (passed, failed, skipped), and why.
Outcome = list[str]


def _base() -> Any:
    return importlib.import_module(_MODULE).DistributedTest._DistTestBase


def list_tests() -> None:
    """Print all tests, with the reason why PyTorch leaves one out."""
    found = {name: getattr(_base(), name) for name in sorted(dir(_base())) if name.startswith("test_")}
    print(json.dumps({name: getattr(one, "__unittest_skip_why__", "") for name, one in found.items()}))


# ---- in a worker -----------------------------------------------------------------------------------------------------


class _Kept(logging.Handler):
    """Keeps what PyTorch's runner says about a test that it skips."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def run_test(name: str, backend: str, file_name: str) -> Outcome:
    """Run a test as one of its processes; returns how it ended, and why."""
    from multiprocessing import Pipe

    from torch.testing._internal import common_distributed

    module = importlib.import_module(_MODULE)
    module.BACKEND = "gloo"  # type: ignore[attr-defined]
    rank = int(os.environ["PACELINE_RANK"])
    os.environ["RANK"] = str(rank)
    if backend == "paceline":
        from paceline.ddp import backend as ours

        ours.register()
        ours.replace_init()
    module.Barrier.sync.__func__.__defaults__ = (None, 60)  # PyTorch's 10 s are few on a busy machine
    kept, (parent, child) = _Kept(), Pipe()
    common_distributed.logger.addHandler(kept)
    kind = type("Test", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})
    try:
        kind._run(rank, name, file_name, child)  # type: ignore[attr-defined]
    except SystemExit as end:
        code = end.code
    if code == 0:
        return ["passed", ""]
    if code == common_distributed.MultiProcessTestCase.TEST_ERROR_EXIT_CODE:
        return ["failed", parent.recv()]
    known = {one.exit_code: one.message for one in common_distributed.TEST_SKIPS.values()}
    return ["skipped", next(iter(kept.texts), known.get(code, str(code)))]


# ---- the runner ------------------------------------------------------------------------------------------------------


def _environment(options: argparse.Namespace, written_for: str) -> dict[str, str]:
    own = {"BACKEND": written_for, "WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1"}
    return common_environment() | own | {"TEMP_DIR": tempfile.gettempdir()}


def _listed(options: argparse.Namespace, written_for: str) -> dict[str, str]:
    command = [sys.executable, "-m", "tests.ddp.pytorch", "--list"]
    found = subprocess.run(command, env=_environment(options, written_for), check=True, capture_output=True, text=True)
    tests: dict[str, str] = json.loads(found.stdout.splitlines()[-1])
    return tests


class _Runner:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.listed = {one: _listed(options, one) for one in _WRITTEN_FOR}
        self._server = cache(lambda one: ForkServer(_environment(options, one), [_MODULE]))

    def outcome(self, name: str, backend: str) -> Outcome:
        """Run a test, as it is written for the first backend for which it is not left out."""
        first: Outcome = []
        for written_for in _WRITTEN_FOR:
            why = self.listed[written_for][name]
            found = ["skipped", why] if why else self._run(name, backend, written_for)
            first = first or found
            if found[0] != "skipped":
                return found
        return first

    def _run(self, name: str, backend: str, written_for: str) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            for one in ("barrier", "test_dir", "init_dir"):
                (Path(folder) / one).mkdir()
            extra = {"TEMP_DIR": folder, "INIT_METHOD": f"file://{folder}/init_dir/shared_init_file"}
            job = LocalJob(self._options.ranks, 1, environment=_environment(self._options, written_for) | extra)
            job.start_process = partial(_fork, self._server(written_for))  # type: ignore[misc]
            try:
                with job:
                    found = job.run(run_test, name, backend, f"{folder}/file", timeout_s=self._options.timeout)
            except (WorkerFailedError, TimeoutError) as error:
                return ["failed", str(error)]
        for wanted in ("failed", "skipped"):
            for kind, why in found:
                if kind == wanted:
                    return [kind, why]
        return ["passed", ""]


def _fork(server: ForkServer, argv: Any, env: Any, output: int, guardian: Any, pass_fds: Any) -> Any:
    return server.fork(argv, env, output, guardian.fd, pass_fds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.ddp.pytorch", description=__doc__)
    parser.add_argument("names", nargs="*", default=["*"], help="patterns of the tests' names (default: all)")
    parser.add_argument("--backends", nargs="+", default=["paceline", "gloo"], choices=["paceline", "gloo"])
    parser.add_argument("--ranks", type=int, default=4, help="processes of each test (default: 4)")
    parser.add_argument("--parallel", type=int, default=1, help="tests at a time (default: 1)")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds that a test may take (default: 180)")
    parser.add_argument("--keep", type=Path, help="file of outcomes: a line of JSON for each; these are not run again")
    parser.add_argument("--list", action="store_true", help="only list the tests")
    return parser.parse_args()


def _read(path: Path | None) -> dict[tuple[str, str], Outcome]:
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    return {(name, backend): outcome for name, backend, outcome in map(json.loads, lines)}


def main() -> int:
    """Run the tests; the exit code is 0 if those that fail over paceline, and pass over Gloo, are :data:`CANNOT`."""
    options = _arguments()
    if options.list:
        list_tests()
        return 0
    runner, done = _Runner(options), _read(options.keep)
    names = [name for name in runner.listed["gloo"] if any(fnmatch(name, one) for one in options.names)]
    wanted = [(name, backend) for name in names for backend in options.backends]

    def one(which: tuple[str, str]) -> None:
        began = time.monotonic()
        done[which] = runner.outcome(*which)
        print(f"{time.monotonic() - began:6.1f} s {which[1]:9}{which[0]}: {done[which][0]}", flush=True)
        if options.keep is not None:
            with options.keep.open("a") as file:
                file.write(json.dumps([*which, done[which]]) + "\n")

    with ThreadPoolExecutor(options.parallel) as pool:
        list(pool.map(one, [which for which in wanted if which not in done]))
    return _report({which: done[which] for which in wanted})


def _report(done: dict[tuple[str, str], Outcome]) -> int:
    for why, number in Counter(why for kind, why in done.values() if kind == "skipped").most_common():
        print(f"{number:4} skipped: {why}")
    wrong = [name for (name, backend), (kind, _) in done.items()
             if backend == "paceline" and (kind == "failed") != (name in CANNOT)
             and done.get((name, "gloo"), ["passed"])[0] == "passed"]  # fmt: skip
    for name in wrong:
        print(f"\n---- {name}\n{done[name, 'paceline'][1][-3000:] or 'passes, and CANNOT says that it does not'}")
    for backend in dict.fromkeys(backend for _, backend in done):
        counts = Counter(kind for (_, whose), (kind, _) in done.items() if whose == backend)
        print(f"{backend}: {', '.join(f'{number} {kind}' for kind, number in sorted(counts.items()))}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
