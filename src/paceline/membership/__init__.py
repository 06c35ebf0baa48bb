"""The members of a job: ranks, barriers, liveness, and where keys are. Pure: the time is an argument."""

from paceline.membership.effects import Action, Answer, Finish, Warn, describe, describe_all
from paceline.membership.ending import FAILED_TIMEOUT_S, LEAVE_TIMEOUT_S
from paceline.membership.liveness import GONE, Liveness
from paceline.membership.machine import Membership
from paceline.membership.roster import MemberRecord

__all__ = [
    "FAILED_TIMEOUT_S",
    "GONE",
    "LEAVE_TIMEOUT_S",
    "Action",
    "Answer",
    "Finish",
    "Liveness",
    "MemberRecord",
    "Membership",
    "Warn",
    "describe",
    "describe_all",
]
