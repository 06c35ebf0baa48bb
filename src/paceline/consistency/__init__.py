"""The one rule behind every consistency model: whose pushes make an update, how far a worker may run, what it counts.

Pure: no socket, thread, clock or random generator. The servers and the simulator use it unchanged.
"""

from paceline.consistency.groups import parse_groups, resolve_groups
from paceline.consistency.policy import Policy, policy_of
from paceline.consistency.rule import Action, Apply, Drop, Merge, Pushed, Refuse, Release, Repeat, Rule
from paceline.consistency.stats import Stats
from paceline.consistency.weighting import register_weighting, weighting_names

__all__ = [
    "Action",
    "Apply",
    "Drop",
    "Merge",
    "Policy",
    "Pushed",
    "Refuse",
    "Release",
    "Repeat",
    "Rule",
    "Stats",
    "parse_groups",
    "policy_of",
    "register_weighting",
    "resolve_groups",
    "weighting_names",
]
