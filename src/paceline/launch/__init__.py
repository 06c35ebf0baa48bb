"""Start a job: a job spec (what the user asks for) becomes a job plan (processes), which a backend runs.

Nothing here imports torch, so a launcher starts fast and needs little memory.
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
