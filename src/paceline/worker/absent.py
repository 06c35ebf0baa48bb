"""The processes that a request has waited for in vain: for the error of its deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from paceline.errors import PacelineError
from paceline.net.call import Call
from paceline.wire import messages as m

logger = logging.getLogger(__name__)


def whom_it_waits_for(
    late: Call, ask: Callable[[int, Sequence[m.Request]], Sequence[m.Body | None]], rank: int
) -> str:
    """Ask who holds up a push, a norm, a barrier or a gather; returns a text for the error.

    The story of the push goes to the log, at level DEBUG.

    Args:
        late: the request.
        ask: asks the peer of a channel, and the scheduler for its status, and returns the answers; it may raise.
        rank: this worker's rank.
    """
    request = late.request if late.seq else None
    questions: list[m.Request] = []
    if isinstance(request, m.Push):
        questions = [m.AskMissing(request.store, request.entries[0])]
    elif isinstance(request, m.AskNorm):
        questions = [m.AskMissing(request.store, entry) for entry in request.entries]
    elif isinstance(request, m.Meet):
        questions = [m.AskNotMet(request.group, request.number, request.members)]
    elif isinstance(request, m.Enter | m.Gather):
        questions = [m.AskAbsent(request.barrier)]
    else:
        return ""
    try:
        *answers, status = ask(late.channel, questions)
    except PacelineError as error:
        return f" ({error})"
    assert isinstance(status, m.Status)
    found = [one for one in answers if isinstance(one, m.Missing)]
    missing = sorted({rank for one in found for rank in one.workers})
    for story in (one.story for one in found if one.story):
        logger.debug("worker %d: %s", rank, story)
    return "; it waits for " + (", ".join(_workers_of(status, missing)) or "nobody")


def _workers_of(status: m.Status, ranks: Sequence[int]) -> list[str]:
    found = []
    for member, state in zip(status.members, status.states, strict=True):
        if member.role == "worker" and member.rank in ranks:
            where = f"worker {member.rank} on {member.host} (pid {member.pid})"
            heard = f"sent its last heartbeat {state.silent_s:.1f} s ago"
            found.append(f"{where}, which is at round {state.round} and {heard}")
    return found
