"""Start a job: a job spec (the user's request) becomes a job plan (processes), which a backend runs.

Nothing here imports torch, so a launcher starts fast and needs little memory.
"""

from paceline.launch.backends import BACKENDS, Backend, Job, backend, check_unread, names
from paceline.launch.host_list import Host, parse_host_list, parse_hosts, with_default_interface
from paceline.launch.job_spec import Graces, JobSpec
from paceline.launch.plan import JobPlan, Late, ProcessName, ProcessSpec, describe
from paceline.launch.planner import Machine, make_plan
from paceline.launch.worker_groups import WorkerGroup, group_from_table, parse_group

__all__ = [
    "BACKENDS",
    "Backend",
    "Graces",
    "Host",
    "Job",
    "JobPlan",
    "JobSpec",
    "Late",
    "Machine",
    "ProcessName",
    "ProcessSpec",
    "WorkerGroup",
    "backend",
    "check_unread",
    "describe",
    "group_from_table",
    "make_plan",
    "names",
    "parse_group",
    "parse_host_list",
    "parse_hosts",
    "with_default_interface",
]
