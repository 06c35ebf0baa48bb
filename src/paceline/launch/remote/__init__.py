"""Processes on other hosts: an agent per host, which the launcher reaches as it would reach a remote shell.

The launcher starts ``paceline agent`` on each host with a command line of the backend's choosing (ssh, mpirun, srun)
and talks with it over that command's stdin and stdout, in lines of JSON (``lines.py``):

| to the agent | |
|---|---|
| ``["address", interfaces, targets]`` | answered by ``address`` or ``refused``; checks the interfaces |
| ``["environ", {name: value}]`` | what every process inherits on top of the agent's own environment |
| ``["start", role, rank, argv, env]`` | answered by ``started`` or ``not_started``; secrets travel here only |
| ``["look", [[role, rank], ...]]`` | answered by ``runs`` for each |
| ``["signal", number, [[role, rank], ...]]`` | to processes and all that they started |
| ``["ended", role, rank, code]`` | for the scheduler: how a process of another host ended |
| ``["runs", role, rank, CPU seconds]`` | for the scheduler: a process of another host runs |
| ``["facts", interface, witness]``, ``["reach", [[host, address, port], ...]]`` | for ``paceline doctor`` |
| ``["ping"]`` | answered by ``pong`` |

| from the agent | |
|---|---|
| ``["hello", {...}]`` | first line after ``MAGIC``: interpreter, cores, how it was reached |
| ``["address", address, port]`` | where this host is reached, a free port |
| ``["refused", reason]`` | an interface does not exist |
| ``["started", role, rank, place]``, ``["not_started", role, rank, reason, code]`` | |
| ``["out", role, rank, stream, text]``, ``["closed", role, rank, stream]`` | output |
| ``["exited", role, rank, code]``, ``["stopped", [[role, rank], ...]]`` | |
| ``["living", [[role, rank], ...]]`` | which of the ended processes have left something running |
| ``["runs", role, rank, CPU seconds]`` | of a process, with all that it has started |
| ``["ready", address]``, ``["complete"]``, ``["over"]`` | what the scheduler says |
| ``["lost", role, rank, reason, goes on]`` | what it says of a failure |

**Ends.** An agent whose stdin ends, or that hears nothing for ``SILENCE_S``, exits, and its guardian kills what it
started. The launcher's end of that stdin closes when the launcher ends, however it ends: the remote shell's client dies
with it. A launcher that hears nothing from a host for ``SILENCE_S`` counts the host as lost.

``SILENCE_S`` must exceed ``PING_S`` several times, and ``stall_timeout_s`` of the job: then the scheduler, which knows
more, names the cause first when a network fails. The time in which an end did not run is no silence of the other one.
"""

from paceline.launch.remote.crew import HostCommand, RemoteCrew
from paceline.launch.remote.job import RemoteJob, RemoteRequest, agent_script, forwarded

__all__ = ["HostCommand", "RemoteCrew", "RemoteJob", "RemoteRequest", "agent_script", "forwarded"]
