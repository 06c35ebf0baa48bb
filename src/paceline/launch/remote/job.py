"""A job on several hosts, supervised from here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from paceline.launch.plan import JobPlan, Late
from paceline.launch.remote.crew import Explain, HostCommand, RemoteCrew
from paceline.launch.supervise.again import run_again
from paceline.launch.supervise.supervisor import Supervisor, Surroundings
from paceline.net.security import new_job_key

#: Exit codes of the script below.
NO_DIRECTORY, NO_PYTHON = 91, 92

_SCRIPT = f"""cd "$1" || exit {NO_DIRECTORY}
test -z "$2" || export PYTHONPATH="$2"
shift 2
for python in "$@"; do
  if command -v "$python" >/dev/null 2>&1; then exec "$python" -m paceline agent; fi
done
echo "not found: $*" >&2
exit {NO_PYTHON}"""

#: Variables of the launcher's shell that processes on other hosts get as well: these, and those with the prefixes.
_FORWARDED = frozenset({"LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_ALL", "TZ"})
_PREFIXES = (
    "PACELINE_", "MXNET_", "PS_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMBA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_",
    "PYTHON", "CUBLAS_", "HF_", "WANDB_", "AWS_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
)  # fmt: skip


def agent_script(given: str, own: str, directory: str, pythonpath: str) -> list[str]:
    """Return the command that runs an agent in a directory. It has no secrets: they travel on the agent's stdin.

    Args:
        given: interpreter that the user names, and no other; empty: the first of these that the host has.
        own: the launcher's interpreter.
        directory: of the job.
        pythonpath: on the host.
    """
    return ["sh", "-c", _SCRIPT, "paceline", directory, pythonpath, *([given] if given else [own, "python3", "python"])]


def forwarded(environ: Mapping[str, str], owned: frozenset[str]) -> dict[str, str]:
    """Return the variables of the launcher's shell that go to other hosts, without those that the launcher sets."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in _FORWARDED or name.startswith(_PREFIXES)) and name not in owned
    }


@dataclass(frozen=True)
class RemoteRequest:
    """What a backend with agents runs."""

    plan: JobPlan
    python: str
    """The launcher's interpreter."""
    command: HostCommand
    """Gives the command that runs an agent on a host."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """What every process inherits on top of its agent's environment."""
    sync: tuple[tuple[str, ...], ...] = ()
    """Commands that run before the start, side by side, one per host."""


class RemoteJob:
    """A job on several hosts; it runs while :meth:`wait` does.

    Args:
        request: what to run.
        explain: a remote shell's end.
        prepare: runs before the start; raises ``LaunchError``.
    """

    def __init__(self, request: RemoteRequest, explain: Explain, prepare: Callable[[], None] | None = None) -> None:
        self._request, self._explain, self._prepare = request, explain, prepare
        self.id = request.plan.job_id

    def wait(self) -> int:
        """Run the job and return its exit code.

        Raises:
            LaunchError: a host cannot be used; nothing runs.
        """
        if self._prepare is not None:
            self._prepare()
        return run_again(self._run, self._request.plan.max_restarts)

    def cancel(self) -> None:
        """Do nothing: the job ends with :meth:`wait`."""

    def logs(self) -> Iterator[str]:
        """Give nothing: :meth:`wait` has shown everything."""
        return iter(())

    def _run(self, restart: int) -> Supervisor:
        known = {Late.RESTART: str(restart)}
        if self._request.plan.needs(Late.JOB_KEY):
            known[Late.JOB_KEY] = new_job_key()
        return Supervisor(self._request.plan, known, lambda _: {}, self._crew)

    def _crew(self, around: Surroundings) -> RemoteCrew:
        one = self._request
        return RemoteCrew(around, one.plan, one.python, one.command, self._explain, os.environ, one.environ)
