"""One rule for every consistency model: the pushes of an update, the lead of a worker, the weight of stale ones.

Pure: no socket, thread, clock or random generator.
"""

from paceline.consistency.actions import Action, Apply, Drop, Grace, Merge, Pushed, Refuse, Release, Repeat
from paceline.consistency.checked import CheckedRule, check_every_rule, new_rule
from paceline.consistency.groups_file import groups_line, name_ranks, parse_groups, resolve_groups
from paceline.consistency.policy import Policy, policy_of
from paceline.consistency.rule import Rule
from paceline.consistency.stats import Stats
from paceline.consistency.units import Groups, Units
from paceline.consistency.weighting import weighting_names

__all__ = [
    "Action",
    "Apply",
    "CheckedRule",
    "Drop",
    "Grace",
    "Groups",
    "Merge",
    "Policy",
    "Pushed",
    "Refuse",
    "Release",
    "Repeat",
    "Rule",
    "Stats",
    "Units",
    "check_every_rule",
    "groups_line",
    "name_ranks",
    "new_rule",
    "parse_groups",
    "policy_of",
    "resolve_groups",
    "weighting_names",
]
