"""Run the plan that argv[1] describes in JSON and exit with its code: the launcher, with roles of a test's choosing.

With ``agents`` workers and the other roles are behind an agent each, as on two hosts. ``silence_s``: of a launcher that
its agents take for dead.
"""

from __future__ import annotations

import json
import os
import sys

from paceline.launch import Graces, Host, JobPlan, Late, ProcessSpec
from paceline.launch.plan import Value
from paceline.launch.remote import RemoteJob, RemoteRequest, agent_link, pinger
from paceline.launch.supervise import supervisor
from paceline.launch.supervise.crew import LocalCrew
from paceline.launch.supervise.supervisor import Supervisor

AGENT = """import sys
from paceline.launch.remote import agent
agent.SILENCE_S = agent.LONGEST_TURN_S = {silence_s}
agent.PING_S = min(agent.PING_S, {silence_s} / 10)
sys.exit(agent.main())
"""


def environment(role: str, joined: bool) -> dict[str, Value]:
    """Return the late values that the scripts of a role may use."""
    if role == "scheduler":
        # A script in the scheduler's place does not say whether the others go on without one that died.
        return {"READY_FD": Late.READY_FD, "ENDED_FD": Late.ENDED_FD, "PACELINE_ON_WORKER_DEATH": "stop"}
    return {"PORT": Late.MASTER_PORT, **({"ADDRESS": Late.SCHEDULER} if joined else {})}


job = json.loads(sys.argv[1])
roles = [role for role, _, _ in job["processes"]]
plan = JobPlan(
    tuple(
        ProcessSpec(
            role, rank, tuple(argv), environment(role, "scheduler" in roles),
            **({"host": "h1" if role == "worker" else "h0"} if job["agents"] else {}),
        )
        for role, rank, argv in job["processes"]
    ),
    graces=Graces(**job["graces"]),
    quiet=job["quiet"],
    **({"hosts": (Host("h0"), Host("h1"))} if job["agents"] else {}),
)  # fmt: skip
silence_s = job["silence_s"] or agent_link.SILENCE_S
supervisor._LONGEST_TURN_S = pinger.PING_S = min(silence_s / 10, agent_link.PING_S)
if job["agents"]:
    agent = [sys.executable, "-c", AGENT.format(silence_s=silence_s)]
    request = RemoteRequest(
        plan, sys.executable, lambda host: agent, explain=lambda host, link: f"the agent of {host} ended"
    )
    sys.exit(RemoteJob(request).wait())
launcher = Supervisor(
    plan, {}, lambda around: LocalCrew(around.selector, around.console, around.register, os.environ, around.take)
)
sys.exit(launcher.run())
