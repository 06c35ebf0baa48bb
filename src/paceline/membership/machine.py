"""The scheduler's machine: requests and the passing of time go in, answers come out.

A member talks to the scheduler over its *lifeline* (the connection whose loss means its death) and over further
connections, which it claims with its token. The states of a member::

    state     event                                  becomes   answers
    (none)    Hello                                  joining   none, until the last member has joined
    (none)    Hello that is refused                  (none)    RendezvousError
    joining   Hello of the last member               live      Welcome to all; barriers that all workers entered open
    any       Hello again, on its lifeline           (same)    Welcome, once the last member has joined
    (none)    start_timeout_s have counted for it    (ends)    JoinTimeoutError to all, with those that are missing
    live      any request                            live      the request's
    live      its lifeline closes                    closed    none
    closed    a message on the lifeline              live      the request's; none to a probe
    any       silence                                (same)    none; a line in the log if it is long
    any       silence or a proof that is a death     dead      the job fails
    live      Bye                                    left      barriers that waited for it open
    live      Bye with a reason                      dead      the job fails
    live      notice (:mod:`.notices`)               (same)    News: it is to leave; its Bye is not doubted then
    left      it is a server, and ends with 0 early  dead      the job fails

A worker's death is no failure where the others go on: it is *lost* first (:mod:`.losses`), and later requests of it are
answered with its own death.

The states of the job::

    state      event                                 becomes    answers
    starting   the last member has joined            complete   Welcome to all
    starting   half of start_timeout_s again         starting   News to all members, which then wait as long again
    starting   start_timeout_s have counted for one  ending     JoinTimeoutError to all; exit code 1
    any        a member dies                         ending     News to all live members, PeerDiedError to requests that
                                                                wait or come; exit code PEER_FAILED
    complete   a worker dies, and the others go on   complete   News to all live members
    complete   the last worker leaves                ending     News with shutdown to the servers; exit code 0, or
                                                                WORKER_LOST if one has died
    ending     everybody has left, died or closed    over       Finish
    ending     a server is silent for too long       ending     none: the job has succeeded and needs it no more
    ending     LEAVE_TIMEOUT_S later                 over       Finish; FAILED_TIMEOUT_S if a member has died

:mod:`.liveness` decides which proof or silence is a death, :mod:`.joining` how much time counts for a start.

Which timeout must exceed which says docs/failures.md; and a member's own deadline for joining > half of
``start_timeout_s``, after which it hears from the scheduler again. The scheduler calls :meth:`Membership.tick` every
0.2 s; each limit is kept with that precision.

Invariants (:meth:`Membership.check`): no two members share a lifeline; only members wait at barriers; once a
member has died, no request waits.

The guarantees do not hold with:

- A clock that jumps: ``now`` must be monotonic.
- A process of another job that has this job's key and id.
- A proxy that keeps the lifeline of a dead process open, where neither its launcher nor a process of its host reports
  its end: its death is then noticed by silence only.
- A process that holds Python's lock for ``stall_timeout_s``: a live member is taken for dead.
- A process whose connection closed, of which nothing else is known, and that takes longer than ``disconnect_grace_s``
  to connect again: it is taken for dead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.config import Settings
from paceline.host.exitcodes import PEER_FAILED, why_ended
from paceline.host.plain_text import plain_lines
from paceline.membership.accounts import why_damaged
from paceline.membership.advice import Advice
from paceline.membership.effects import Action, Answer, Finish, MemberKey, Waiting, Warn, refuse
from paceline.membership.ending import Ending
from paceline.membership.joining import Starting
from paceline.membership.liveness import Liveness
from paceline.membership.log import MembershipLog
from paceline.membership.losses import Losses, death_reply
from paceline.membership.newcomers import Newcomers
from paceline.membership.notices import Notices
from paceline.membership.replacements import Replacements, former
from paceline.membership.roster import MemberRecord, Roster
from paceline.membership.survivors import Survivors
from paceline.membership.traces import Traces
from paceline.membership.waits import MAY_WAIT, Waits
from paceline.wire import messages as m


class Membership:
    """The members of one job.

    Args:
        settings: numbers of workers and servers, and the time limits.
        now: seconds on the caller's clock.
        new_token: makes the secret by which a member claims its further connections.
        pid: process id of the scheduler; 0: not known.
        host_id: id of the scheduler's host.

    Attributes:
        advice: verdicts, figures of scripts, and the status.
        deaths: the members whose death has ended the job, and those that died after that.
        log: the changes of the membership.
        losses: the workers that the job goes on without.
        notices: the workers that are to leave.
        traces: the trace that is made.
        is_supervised: a launcher reports the exit code of every process with :meth:`ended`.
    """

    def __init__(
        self, settings: Settings, now: float, new_token: Callable[[], bytes], pid: int = 0, host_id: str = ""
    ) -> None:
        self._settings = settings
        self._starting = Starting(settings.start_timeout_s, now)
        self._roster = Roster(settings)
        self.log = MembershipLog()
        self.losses = Losses(settings.on_worker_death)
        self.notices = Notices(self._roster, self.losses)
        self.replacements = Replacements(self._roster, self.losses, self.log)
        self._waits = Waits(settings.num_workers, self._roster, self.losses, self.replacements, self.log)
        self._liveness, self.traces = Liveness(settings, now), Traces()
        self.advice = Advice(settings, self._roster, self._waits, now)
        self._ending = Ending()
        self.deaths = self._ending.deaths
        self._newcomers = Newcomers(self._roster, self._ending, self.replacements, new_token, pid, host_id)
        self._survivors = Survivors(
            self._roster, self.losses, self.replacements, self._newcomers, self._waits, self.log, self._news
        )
        self.is_supervised = False

    # ---- requests --------------------------------------------------------------------------------------------------

    def handle(self, peer: bytes, seq: int, body: m.Body, now: float) -> list[Action]:
        """Carry out one request; returns the answers that are due."""
        self.log.turn(now)
        if isinstance(body, m.Hello):
            return self._hello(peer, seq, body, now)
        if isinstance(body, m.Claim):
            return [self._newcomers.claim(peer, seq, body)]
        key = self._roster.of(peer)
        if isinstance(body, m.AskStatus):  # every holder of the job's key may know
            return [*self.heard(peer, now), Answer(peer, seq, self.status(now))]
        if isinstance(body, m.Training):  # nobody trains alone unsaid, also who has not joined
            return [self.advice.note_training(peer, seq, body, now)]
        if isinstance(body, m.AskTrace):
            return [Answer(peer, seq, self.traces.ask(body, now))]
        if isinstance(body, m.Notice):
            self.notices.ask(peer, seq, body, key)
            return self.heard(peer, now)
        if peer in self._roster.former:
            old = self._roster.former[peer]
            return [Answer(peer, seq, death_reply(former(old, self._roster[old.role, old.rank].member), body))]
        if key is None:
            return [refuse(peer, seq, "this connection belongs to no member; join the job first")]
        record = self._roster[key]
        if record.dead and key[1] in self.losses.deaths and key[0] == "worker":
            return [Answer(peer, seq, death_reply(self.losses.deaths[key[1]], body))]
        return [*self.heard(peer, now), *self._handle(record, key, peer, seq, body, now)]

    def heard(self, peer: bytes, now: float) -> list[Action]:
        """Note any message of a member: its process lives, and if it came on the lifeline, that is connected."""
        if not self.is_member(peer):
            return []
        record = self._roster.of_member(peer)
        if record.peer == peer and record.code is None:
            record.closed_since = None
        return self._liveness.note_heard(record, now)

    def _handle(
        self, record: MemberRecord, key: MemberKey, peer: bytes, seq: int, body: m.Body, now: float
    ) -> list[Action]:
        if isinstance(body, m.Enter | m.Gather) and key[0] == "worker":
            record.round = max(record.round, body.round)
        match body:
            case m.Heartbeat(account=account) if damage := why_damaged(key[0], account, self._settings.num_workers):
                return [refuse(peer, seq, damage)]
            case m.Heartbeat():
                news = self._heartbeat(record, body, now)
                self.advice.note(record.member, body, now)
                self.log.note_dealt(body.dealt)
                more = self._survivors.note(key, body, now) if not self._ending.is_under_way else []
                return [*self._follow_speeds(), Answer(peer, seq, news), *more]
            case m.Bye():
                return [Answer(peer, seq, m.Done()), *self._bye(key, body, now)]
            case m.Publish():
                self.advice.following.note_keys(body)
            case m.GiveBack():
                return [Answer(peer, seq, self.notices.give_back(key[1], body))]
            case m.AskGone():
                return [Answer(peer, seq, self.notices.gone(body))]
            case m.Enter() if key[0] == "worker":
                uneven = self.advice.uneven() if self.complete else []
                return [*uneven, *self._wait(key, peer, seq, body, now)]
        return self._wait(key, peer, seq, body, now)

    def _wait(self, key: MemberKey, peer: bytes, seq: int, body: m.Body, now: float) -> list[Action]:
        if self.deaths and isinstance(body, MAY_WAIT):
            return self._ending.failures_for([Waiting(peer, seq)])
        return [*self._waits.handle(key, peer, seq, body, now), *self._survivors.tell()]

    def _heartbeat(self, record: MemberRecord, beat: m.Heartbeat, now: float) -> m.News:
        record.beat(beat, now)
        for one in beat.seen:
            other = self._roster.get((one.role, one.rank))
            if other is not None and other.member.host_id == record.member.host_id:
                self._liveness.note_state(other, one.state, one.cpu_s, now)
        if beat.trace is not None:
            self.note_trace(record.member, beat.trace, now)
        near = [one.member for one in self._liveness.suspects(self._roster.on_host(record.member.host_id), now)]
        return self._news(record, [m.SilentMember(one.role, one.rank, one.pid) for one in near], now)

    def note_trace(self, member: m.Member, events: m.TraceEvents, now: float) -> None:
        """Take events of a process for the trace."""
        rounds = {(one.member.role, one.member.rank): one.round for one in self._roster.live()}
        self.traces.note(member, events, rounds, now)

    def _follow_speeds(self) -> list[Action]:
        """Tell all workers when other groups fit their speeds."""
        workers, following = self._roster.of_role("worker"), self.advice.following
        before, text = following.groups[0], following.check(workers) if self.complete else ""
        if following.groups[0] > before:
            self.log.regroup(following.groups[1], min(one.round for one in workers if one.live))
        return [Warn(text), *(Answer(one.peer, 0, self._news(one)) for one in workers if one.live)] if text else []

    def is_member(self, peer: bytes) -> bool:
        """Tell whether a connection belongs to a member."""
        return self._roster.of(peer) is not None

    def member_of(self, peer: bytes) -> MemberKey | None:
        """Return the member that a connection belongs to; None: no member's."""
        return self._roster.of(peer)

    def _hello(self, peer: bytes, seq: int, hello: m.Hello, now: float) -> list[Action]:
        answers = self._newcomers.hello(peer, seq, hello, now)
        if self._starting.death is not None and self._roster.of_role("worker"):
            return [*answers, *self._miss(self._starting.death, now)]
        welcomes = self._newcomers.welcome_all(now)
        if not welcomes:
            return answers
        self.log.add("starts", [one.member.rank for one in self._roster.of_role("worker")])
        return [*answers, *welcomes, *self._waits.start()]

    @property
    def complete(self) -> bool:
        """Whether all members have joined."""
        return self._newcomers.complete

    # ---- life and death --------------------------------------------------------------------------------------------

    def lost(self, peer: bytes, now: float) -> None:
        """Note that a connection closed; the member has a moment to come back."""
        key = self._roster.of(peer)
        if key is not None and self._roster[key].peer == peer and self._roster[key].closed_since is None:
            self._roster[key].closed_since = now

    def lifelines(self, now: float) -> list[bytes]:
        """Return the connections whose hosts :meth:`note_host` should tell of before the next :meth:`tick`."""
        return [record.peer for record in self._roster.values() if self._liveness.is_quiet(record, now)]

    def note_host(self, peer: bytes, silent_s: float | None) -> None:
        """Note for how long the kernel of a member's host was not heard; None: not known. Counts for one tick."""
        self._roster.of_member(peer).host_silent_s = silent_s

    def suspects(self, now: float) -> list[MemberRecord]:
        """Return the members whose processes :meth:`note_state` should tell of."""
        return self._liveness.suspects(self._roster.values(), now)

    def note_state(self, suspect: MemberRecord, state: str, cpu_s: float, now: float) -> None:
        """Note the state of a suspect's process, as in /proc, and the CPU time that it has used."""
        self._liveness.note_state(suspect, state, cpu_s, now)

    def tick(self, now: float) -> list[Action]:
        """Note that time has passed."""
        self.log.turn(now)
        actions = [*self.advice.judge(now), *self._measure_in_vain(now)]
        self.advice.settle(now)
        self.traces.tick(now)
        self._starting.forgive(self._liveness.turn(self._roster.values(), now, self.is_supervised))
        for key, record in sorted(self._roster.items(), key=lambda one: one[1].closed_since or one[1].heard):
            reason = self._liveness.why_dead(record, self.complete, now)
            if reason and self.has_succeeded:
                record.dead = True
            elif reason:
                actions += self._die(key, reason, now)
            elif record.live and record.goodbye_since is not None and self._counts_as_left(record, now):
                actions += self._left(record, now)
        actions += self._decide_notices()
        if self._ending.began is None:
            actions += self._liveness.warnings(self._roster.values(), self.complete, now)
            actions += self.advice.uneven() if self.complete else []
        for record in self._roster.values():
            record.host_silent_s = None
        if not self.complete and not self.deaths:
            actions += self._wait_for_missing(now)
        if not self._ending.is_under_way:
            actions += self._survivors.turn(now)
        are_all_gone = all(record.closed_since is not None for record in self._roster.live())
        code = self._ending.exit_code(are_all_gone, bool(self.losses.deaths), now)
        return actions if code is None else [*actions, Finish(code)]

    @property
    def cause(self) -> m.Death | None:
        """The member that failed first, and how."""
        return self._ending.cause

    @property
    def has_succeeded(self) -> bool:
        """Whether all workers have left, or died while the others went on; no other member has died."""
        return self._ending.has_succeeded

    def _die(self, key: MemberKey, reason: str, now: float) -> list[Action]:
        record = self._roster[key]
        record.dead = True
        death = m.Death(key[0], key[1], record.member.host, reason, record.member.incarnation)
        goes_on = record.joining or self._goes_on_without(key)
        return self._survivors.lose(death) if goes_on else self._fail_with(death, now)

    def _goes_on_without(self, key: MemberKey) -> bool:
        """Tell whether the others can go on: there are some, and no task is left that only this worker can do."""
        others = any(one.counts for one in self._roster.of_role("worker"))
        is_well = self.complete and not self._ending.is_under_way
        is_needed = key[1] == 0 and self._waits.directory.has_lookups
        return key[0] == "worker" and others and is_well and not is_needed and self.losses.may_go_on

    def ended(self, role: str, rank: int, code: int, now: float) -> list[Action]:
        """Note that a process has ended, as its launcher says.

        An exit code other than 0 is a failure, also of a member that has said goodbye. ``PEER_FAILED`` says that the
        process lost another one, which is the failure if it is known.
        """
        record = self._roster.get((role, rank))
        if record is None:
            death, is_needed = self._starting.note_ended(role, rank, code), code != 0 or self._roster.of_role("worker")
            return self._miss(death, now) if is_needed and not self.complete else []
        record.code = code
        if record.left and record.notice:
            return [Warn(f"{record} had left, and its process has ended: {why_ended(code)}")] if code else []
        if record.dead or (record.left and code == 0 and (role == "worker" or self._ending.began is not None)):
            return []
        if record.left and code == 0:
            return self._die((role, rank), "it left the job with exit code 0, before the workers did", now)
        if code and (code != PEER_FAILED or not self.deaths):
            return self._die((role, rank), why_ended(code), now)
        if record.goodbye_since is None and record.closed_since is None:
            record.closed_since = now
        return []

    def _miss(self, death: m.Death, now: float) -> list[Action]:
        """End the start: a process has ended before it joined."""
        return [] if self._ending.began is not None else self._fail_with(death, now)

    def _fail_with(self, death: m.Death, now: float) -> list[Action]:
        """Tell all members that the job has failed, once, and answer all requests that wait.

        Further deaths are in the answers to their heartbeats: in a job of hundreds they come in hundreds.
        """
        self._ending.fail(death, now)
        told = self._roster.live() if len(self.deaths) == 1 else []
        actions: list[Action] = [Answer(record.peer, 0, self._news(record)) for record in told]
        if not self.complete:
            actions += self._ending.failures_for(Waiting(record.peer, record.seq) for record in told)
        return actions + self._ending.failures_for(self._waits.clear())

    def note_cpu(self, key: MemberKey, cpu_s: float, now: float, is_ready: bool = False) -> None:
        """Note that a process runs, and how much CPU time it has used since it started, as its launcher says."""
        self._starting.note_cpu(key, cpu_s, now, is_ready)

    def _wait_for_missing(self, now: float) -> list[Action]:
        missing = self._roster.missing()
        late = self._starting.late(missing, now)
        if late:
            return self._nobody_came(late, now)
        if not self._starting.is_word_due(now):
            return []
        text = self._starting.waited_for(missing, now, self.advice.why_alone())
        news = [Answer(record.peer, 0, self._news(record)) for record in self._roster.live()]
        return [*([Warn(text)] if text else []), *news]

    def _nobody_came(self, missing: Sequence[MemberKey], now: float) -> list[Action]:
        text = self._starting.too_late(missing, self.advice.why_alone())
        self._ending.nobody_came(missing, text, now)
        return [Answer(record.peer, record.seq, m.Failed("JoinTimeoutError", text)) for record in self._roster.values()]

    def _measure_in_vain(self, now: float) -> list[Action]:
        """End a job that only measures rounds where workers make none: it would end with the script."""
        why = self.advice.why_alone() if self._settings.profile and self._ending.began is None else ""
        return self._fail_with(m.Death("worker", 0, "", f"nothing can be measured: {why}"), now) if why else []

    def _bye(self, key: MemberKey, bye: m.Bye, now: float) -> list[Action]:
        record = self._roster[key]
        if not record.live:
            return []
        if bye.reason:
            return self._die(key, plain_lines(bye.reason), now)
        record.goodbye_since, record.round = now, max(record.round, bye.round)
        return self._left(record, now) if self._counts_as_left(record, now) else []

    def _decide_notices(self) -> list[Action]:
        actions, told = self.notices.decide(self.complete, self._ending.is_under_way)
        return [*actions, *(Answer(one.peer, 0, self._news(one)) for one in told)]

    def _counts_as_left(self, record: MemberRecord, now: float) -> bool:
        return record.counts_as_left(self.is_supervised, self._settings.disconnect_grace_s, now)

    def _left(self, record: MemberRecord, now: float) -> list[Action]:
        record.left = True
        self.advice.leave(record.member)
        rounds = {record.member.rank: record.round} if record.member.role == "worker" else {}
        self.losses.rounds.update(rounds)
        self.losses.noticed.update(rounds if record.notice else ())
        answers = self._waits.go_on_without(rounds)
        if rounds:
            self.log.add("left", rounds, record.round, record.notice)
        if record.notice:
            answers.append(Warn(f"{record} has left after round {record.round}: {record.notice}"))
        workers = self._roster.of_role("worker")
        if self.complete and self._ending.began is None and not any(one.counts for one in workers):
            self._ending.began = now
            return [*self._tell_servers(), *self.replacements.end(), *self.advice.end(now)]
        return [*self._tell_servers(), *answers] if self.complete else []

    def _tell_servers(self) -> list[Action]:
        return [Answer(one.peer, 0, self._news(one)) for one in self._roster.of_role("server") if one.live]

    def _news(self, to: MemberRecord, suspects: Sequence[m.SilentMember] = (), at: float = 0.0) -> m.News:
        """Return the news for a member."""
        out = sorted(self.losses.rounds.keys() | self.losses.deaths.keys())
        ends, groups = self._ending.began is not None, self.log.groups
        lost, trace = list(self.losses.deaths.values()), self.traces.number
        fastest_s = self._roster.fastest_step_s(at) if at else 0.0
        news = m.News(self.deaths, ends, out, list(suspects), lost, *groups, at, trace, fastest_s)
        news.number = max(0, self.log.generation)
        if to.member.role == "server":
            news.came, news.rejoined = self.replacements.for_servers()
        else:
            news.leave, news.joiners = to.notice, self.replacements.waiting
        return news

    def status(self, now: float) -> m.Status:
        """Return the members, and how each does."""
        status = self.advice.status([*self.losses.deaths.values(), *self.deaths], now)
        status.changes = self.log.shown(now)
        return status

    def check(self) -> None:
        """Assert the invariants."""
        self._roster.check()
        self._waits.check(is_failed=bool(self.deaths))
