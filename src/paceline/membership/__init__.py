"""Who is in the job: ranks, barriers, liveness, and where keys are. Pure: the time is an argument."""

from paceline.membership.actions import Action, Answer, Finish, describe
from paceline.membership.machine import LEAVE_TIMEOUT_S, Membership

__all__ = ["LEAVE_TIMEOUT_S", "Action", "Answer", "Finish", "Membership", "describe"]
