"""Start a job: what the user asks for (spec) becomes processes (plan), which a backend runs and supervises.

Nothing here imports torch, so a launcher starts in a moment and needs little memory on the machine it runs on.
"""

from paceline.launch.backends import BACKENDS, Backend, backend
from paceline.launch.plan import Late, Member, Plan, ProcessSpec
from paceline.launch.planner import Machine, make_plan
from paceline.launch.render import describe
from paceline.launch.spec import Graces, JobSpec

__all__ = [
    "BACKENDS",
    "Backend",
    "Graces",
    "JobSpec",
    "Late",
    "Machine",
    "Member",
    "Plan",
    "ProcessSpec",
    "backend",
    "describe",
    "make_plan",
]
