"""Jobs on Hadoop YARN: a service of its Services API (Hadoop 3.1), with a container per process of the job.

| module | runs in |
|---|---|
| ``yarn_backend``, ``service`` | the launcher |
| ``paceline.launch.remote.shell`` | a child of the launcher, one per process of the job |
| ``hub`` | a child of the launcher |
| ``container`` | the containers; the hub has its channel |

YARN starts containers, but gives no way into them. So every container connects to the hub, on the launcher's machine,
and waits. The launcher's remote shells ask the hub for a container by name; then an agent runs in it. Everything else
is as on hosts: see :mod:`paceline.launch.remote`.

| state of a container | next |
|---|---|
| connects | the hub has its name and both have proved that they hold the key: waits; the hub is gone: ends |
| waits | a remote shell asks for it: serves; the connection ends: connects |
| serves | the remote shell's input ends: the agent ends its processes, then connects; the connection ends: the same |

``SILENCE_S`` of the agents exceeds the connection's keepalive, so a network that is cut ends a container either way.
"""
