"""Workers that are to leave while the others go on: who asks for it, who may, and why not. Pure.

| state    | event                                                    | next     | effect                              |
|----------|----------------------------------------------------------|----------|-------------------------------------|
| trains   | it asks, or somebody names it or its host, and it may go | is to go | news to it; the log says why        |
| trains   | the same, and it may not                                 | trains   | the asker gets the reason           |
| is to go | it says goodbye                                          | has left | at once, and not with its exit code |
| has left | its process ends, in whatever way                        | has left | a line where its code is not 0      |

Requests are decided when the scheduler looks around next: the launcher says that it ends the whole job before it sends
SIGTERM to the workers, and that is no notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.membership.effects import Action, Answer, MemberKey, Warn
from paceline.membership.losses import Losses
from paceline.membership.roster import MemberRecord, Roster
from paceline.naming import listed, workers_text
from paceline.wire import messages as m


@dataclass(frozen=True)
class _Asked:
    peer: bytes
    seq: int
    notice: m.Notice
    asker: MemberKey | None


#: Points of loops whose answers are kept: more than workers in lock step are apart.
_MOST_POINTS = 256

#: Samplers of which a worker gives back samples.
_MOST_SAMPLERS = 64


class Notices:
    """The notices of a job, and the samples that workers give back when they leave.

    Attributes:
        is_ending: the launcher ends the job by a signal.
    """

    def __init__(self, roster: Roster, losses: Losses) -> None:
        self._roster, self._losses = roster, losses
        self._asked: list[_Asked] = []
        self._told: list[MemberRecord] = []
        self._given: dict[tuple[int, str], m.GiveBack] = {}
        """By worker and sampler."""
        self._points: dict[str, m.Gone] = {}
        self.is_ending = False

    def ask(self, peer: bytes, seq: int, notice: m.Notice, asker: MemberKey | None) -> None:
        """Note a request, for :meth:`decide`."""
        self._asked.append(_Asked(peer, seq, notice, asker))

    def decide(self, is_complete: bool, ends: bool) -> tuple[list[Action], list[MemberRecord]]:
        """Return the answers to the requests since the last call, and the workers that are to leave from now on.

        ``is_complete``: all members have joined. ``ends``: the job has failed, or is over.
        """
        asked, self._asked = self._asked, []
        why_not = "" if is_complete else "not all processes have joined the job yet; end it (paceline kill)"
        why_not = "the job ends" if ends or self.is_ending else why_not
        actions: list[Action] = []
        told: list[MemberRecord] = []
        for one in asked:
            records, stays, why = self._meant(one)
            why = why_not or why or self._objection(records)
            if why:
                actions.append(Answer(one.peer, one.seq, m.Failed("PacelineError", why)))
                continue
            for record in (record for record in records if not record.notice):
                record.notice = one.notice.why or "no reason was given"
                actions.append(Warn(f"{record} is to leave after its step: {record.notice}"))
                told.append(record)
                self._told.append(record)
            actions.append(Answer(one.peer, one.seq, m.Noticed([record.member.rank for record in records], stays)))
        return actions, told

    def left(self) -> list[m.Member]:
        """Return the workers that have left under notice."""
        return [record.member for record in self._told if record.left]

    def give_back(self, rank: int, given: m.GiveBack) -> m.Reply:
        """Note how far a worker that leaves has come in an epoch of a sampler."""
        key = rank, given.sampler
        if key not in self._given and sum(one == rank for one, _ in self._given) >= _MOST_SAMPLERS:
            return m.Failed("ProtocolError", f"worker {rank} has more than {_MOST_SAMPLERS} samplers")
        self._given[key] = given
        return m.Done()

    def gone(self, asked: m.AskGone) -> m.Gone:
        """Return the workers that are gone at a point of the loop: the first one who asks settles it for all."""
        if asked.point not in self._points:
            workers = self._roster.of_role("worker")
            ranks = sorted(one.member.rank for one in workers if one.gone or (one.left and one.notice))
            rounds, given = self._losses.rounds, self._given
            gone = [m.GoneWorker(rank, rounds.get(rank, 0), given.get((rank, asked.sampler))) for rank in ranks]
            self._points[asked.point] = m.Gone(gone)
            for point in list(self._points)[:-_MOST_POINTS]:
                del self._points[point]
        return self._points[asked.point]

    def _meant(self, one: _Asked) -> tuple[list[MemberRecord], str, str]:
        """Return the workers that a request is about, what stays on their host, and why there are none."""
        target, workers = one.notice.target, self._roster.of_role("worker")
        if not target:
            found = [] if one.asker is None else [self._roster[one.asker]]
            return found, "", "" if found else "name a worker by its rank, or a host"
        if target.isdecimal():
            found = [record for record in workers if record.member.rank == int(target)]
            return found, "", "" if found else f"there is no worker {target}: the job has {len(workers)}"
        there = [record for record in self._roster.values() if record.member.host == target and record.live]
        if not there:
            hosts = listed(dict.fromkeys(record.member.host for record in workers), 8)
            return [], "", f"no process of this job runs on {target!r}; its workers run on {hosts}"
        stay = [record for record in there if record.member.role != "worker"]
        found = [record for record in there if record.member.role == "worker"]
        names = listed(f"{record.member.role} {record.member.rank}" for record in stay)
        stays = f"{names} on {target}: servers cannot leave a job" if stay else ""
        return found, stays, "" if found else f"no worker runs on {target}; {stays}"

    def _objection(self, records: Sequence[MemberRecord]) -> str:
        """Return why workers cannot leave; empty: they can."""
        gone = [record for record in records if not record.live]
        if gone:
            return f"{gone[0]} has {'left' if gone[0].left else 'died'} already"
        if not self._losses.has_stores:
            return (
                "a notice does not apply here: the workers have no store of servers, so all of them are in every step "
                "(hvd, --ddp). End the job instead (paceline kill)"
            )
        stay = [one for one in self._roster.of_role("worker") if one.counts and not one.notice and one not in records]
        if not stay:
            ranks = [record.member.rank for record in records]
            return f"nobody would go on without {workers_text(ranks)}; end the job instead (paceline kill)"
        return ""
