"""Processes on other hosts: an agent per host, which the launcher reaches as it would reach a remote shell.

The launcher starts ``paceline agent`` on each host with a command line of the backend's choosing (ssh, mpirun, srun)
and talks with it over that command's stdin and stdout, in lines of JSON (``agent_link.py``):

| to the agent | |
|---|---|
| ``["address", interfaces, targets, ports]`` | answered by ``address`` or ``refused``; checks the interfaces |
| ``["environ", {name: value}]`` | what every process inherits on top of the agent's own environment |
| ``["start", role, rank, argv, env]`` | answered by ``started`` or ``not_started``; secrets travel here only |
| ``["look", [member, ...]]`` | answered by ``runs`` for each; a member is ``[role, rank]`` |
| ``["signal", number, [member, ...]]`` | to processes and all that they started |
| ``["pass_on", number]`` | to those that handle it; SIGTSTP and SIGCONT to all |
| ``["exited", ...]``, ``["runs", ...]`` | for the scheduler: an event of a process of another host |
| ``["status"]``, ``["ends"]`` | for the scheduler: say the status; SIGTERM, which comes next, ends the job |
| ``["facts", witness, ports]``, ``["reach", [[host, address, port], ...]]`` | for ``paceline doctor`` |
| ``["ping"]`` | from the launcher's pinger; answered by ``pong`` |

| from the agent | |
|---|---|
| ``["hello", {...}]`` | first line after ``MAGIC``: interpreter, cores, how it was reached |
| ``["address", address, port]`` | where this host is reached, a free port |
| ``["refused", reason]`` | an interface does not exist |
| ``["out", role, rank, stream, text]``, ``["closed", role, rank, stream]`` | output |
| ``["living", [member, ...]]`` | which of the ended processes have left something running |
| ``["signalled", number]`` | the engine ends the job |
| a word and fields | an event: see :func:`~paceline.launch.supervise.events.words_of` |

**Ends.** An agent whose stdin ends, or that hears nothing for ``SILENCE_S``, exits, and its guardian kills its
processes. The launcher's end of that stdin closes when the launcher ends, however it ends: the remote shell's client
dies with it. A launcher that hears nothing from a host for ``SILENCE_S`` counts the host as lost.

A launcher that is paused is not silent: its pinger (``pinger.py``) goes on. Launcher and pinger write into one pipe, so
a line of more than ``PIPE_BUF`` bytes is sent as several, of which all but the last begin with ``+``.

``SILENCE_S`` must exceed ``PING_S`` several times, and ``stall_timeout_s`` of the job: then the scheduler, which knows
more, names the cause first when a network fails. The time in which an end did not run is no silence of the other one.
"""

from paceline.launch.remote.remote_job import AgentBackend, BrokeredJob, RemoteJob, copy_all, run_all
from paceline.launch.remote.request import (
    RemoteRequest,
    agent_here,
    agent_script,
    explain,
    forwarded,
    kept_back,
    remote_request,
    without_hosts,
)

__all__ = [
    "AgentBackend",
    "BrokeredJob",
    "RemoteJob",
    "RemoteRequest",
    "agent_here",
    "agent_script",
    "copy_all",
    "explain",
    "forwarded",
    "kept_back",
    "remote_request",
    "run_all",
    "without_hosts",
]
