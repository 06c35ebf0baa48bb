"""The rule of one slot: a machine that takes pushes, and returns the actions merge, apply and answer.

Effects of events of a worker. It is *idle* (all its pushes are answered) or *waiting* (its last one is not), and may be
*paused* (it waits at a barrier), *away* (it waits for something else) or *gone* (it has left). *Active* workers are
none of these; others wait only for them. ``k`` is the last round that the worker has pushed::

    event           worker is    becomes            actions
    push of k + 1   idle         waiting            Merge or Drop, then settle
    push of k + 1   waiting      (unchanged)        Refuse
    push up to k    idle         (unchanged)        Repeat
    push up to k    waiting      (unchanged)        none: its answer is still to come
    any other push  any          (unchanged)        Refuse
    any push        gone         (unchanged)        Refuse
    pause           not gone     paused             settle; the barrier opens when all that are left are paused
    go away         not gone     away               settle
    come back       not gone     active             settle; its later pushes join cohorts of that phase
    leave           any          gone               settle; the barrier may open
    rejoin          gone         active             settle; its rounds count from 1, in cohorts of that phase
    regroup         idle         (unchanged)        settle; its later pushes join cohorts of its new group
    regroup         waiting      (unchanged)        Refuse
    pull            any          (unchanged)        none; the worker has read this version, its unit's with groups

The end of a cohort's time of grace, which the store tells some time after the action Grace, settles too.

    settle: Apply for each complete cohort, Grace for each that has enough pushes since, and is not complete; then
    Release for all waiting workers that may go on; these become idle.
    The barrier opens: all become active, and the bound counts rounds from here on.

A cohort is open until it is complete, then it is applied and forgotten::

    merge    a push joins               complete when it has                         the worker goes on when
    all      the one open cohort        a push of every active worker                it is applied
    groups   its group's open cohort    a push of every active worker of the group   it is applied
    each     a cohort of its own        this push                                    it is applied (at once)
    first    the first open cohort      K pushes and the end of its time of grace,   no older cohort is open
             without its worker         or one of each active worker
    first,   the one open cohort        K pushes, several of one worker too; when    always
    age set                             all are paused, those it has

With a bound ``s`` a worker goes on only when it is at most ``s`` finished rounds ahead of the slowest active worker.
Groups may change while workers train (:mod:`paceline.consistency.units`). With a bound they may not.

A worker that is paused or away may push: it waits for others then, and they do not wait for it. When it comes back, it
is as far ahead for the bound as the active workers of its unit, with whom it steps from here on.

A worker that rejoins is another process with the rank of one that is gone. Others wait for it as for one that comes
back: from their first rounds in its phase on.

Others wait for a worker that was away from its next *phase* on. A phase begins for each worker between two of its
rounds, the same two at every slot, with :meth:`Rule.come_back`. A cohort has one phase. It waits for the workers of its
unit that are in that phase and not away, and for those that are still to come to it. So it has the same rounds of these
workers at all slots, in whatever order messages arrive, and no two of them wait for each other at two slots.

Invariants (:meth:`Rule.check`): a worker has at most one unanswered push; no worker that may go on is left unanswered;
no complete cohort is left open; no worker has read a version that does not exist; an open cohort counts no worker twice
and, with an age limit, holds no push that is too old.

The guarantees do not hold with:

- Events of one slot that overlap, or an event before the actions of the last one are carried out, in order.
- A worker that pushes again under a new round number: that counts twice. Under the same number it counts once.
- A time of grace that never ends: its cohort waits for a push of each active worker.
- A worker that dies without ``leave``: cohorts wait for it forever. The rule has no clock; deadlines are the askers'.
- A ``pause`` that overtakes the worker's own pushes: cohorts do not wait for them.
- A worker that comes back in its old phase while others push: cohorts of two slots may differ by a round.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

from paceline.consistency.actions import Action, Apply, Drop, Grace, Merge, Pushed, Refuse, Release, Repeat
from paceline.consistency.activity import Activity, Cohort
from paceline.consistency.objections import objection, objection_to_regrouping
from paceline.consistency.policy import Policy
from paceline.consistency.scale import Samples
from paceline.consistency.stats import Stats
from paceline.consistency.story import KEPT, joined_events, new_events, sentences
from paceline.consistency.units import Groups, Units
from paceline.consistency.weighting import find_weighting
from paceline.naming import workers_text


class Rule:
    """Merge, apply, read and bound for one slot: one rule for every consistency model.

    Rounds of a worker count from 1. A worker has at most one unanswered push.

    With an age limit a push that has missed more than ``age`` updates is dropped before it joins a cohort. Its round
    is finished and it is answered as any other, but it raises no version. Merge ``each`` with age R - 1 is then
    Ringmaster ASGD with delay threshold R (Maranjyan, Tyurin and Richtarik, ICML 2025), and ``first`` with age 0
    Rennala SGD with batch size K (Tyurin and Richtarik, NeurIPS 2023): K counts gradients of the current version, of
    which one worker may bring several.
    """

    def __init__(self, policy: Policy, num_workers: int, stats: Stats | None = None) -> None:
        policy.check(num_workers)
        self.policy = policy
        self.stats = Stats() if stats is None else stats
        self.version = 0
        self.live = set(range(num_workers))
        self.paused: set[int] = set()
        """Live workers that wait at a barrier; others do not wait for them."""
        self.away: set[int] = set()
        """Live workers that wait for something else, or are not back yet; others do not wait for them."""
        self.units = Units(policy.unit_of(num_workers))
        self.unit = self.units.of
        """For each worker, the unit that steps together with it."""
        self.pushed = [0] * num_workers
        """Last round that arrived, per worker."""
        self.finished = [0] * num_workers
        """Rounds that count for the bound, per worker."""
        self.answered = [0] * num_workers
        """Last round that was answered, per worker."""
        self.read = [0] * num_workers
        """Version that the worker got last."""
        self._weight = find_weighting(policy.weighting)
        self._samples = Samples(num_workers) if policy.lr_scale == "sample" else None
        self._activity = Activity(self.live, self.paused, self.away, self.units, self.finished)
        self._seen_low = 0
        """Rounds of the slowest active worker when all waiting workers were last looked at."""
        self._open: list[Cohort] = []
        self._next_cohort = 0
        self._events = new_events()

    # ---- events ----------------------------------------------------------------------------------------------------

    def push(self, worker: int, round: int, samples: float = 1.0) -> list[Action]:
        """Take a push; returns the actions, in order."""
        return self.push_sum([Pushed(worker, round, samples)])

    def push_sum(self, pushes: Sequence[Pushed]) -> list[Action]:
        """Take a sum of pushes of workers of one unit as one push; returns the actions, in order."""
        reason = objection(self, pushes)
        return [Refuse(pushes[0].worker, reason)] if reason else self.take(pushes)

    def take(self, pushes: Sequence[Pushed]) -> list[Action]:
        """Take a sum of pushes to which there is no objection, as :meth:`push_sum` does."""
        first = pushes[0]
        if first.round <= self.pushed[first.worker]:
            self._events += [("repeat", one.worker, one.round) for one in pushes]
            answered = all(one.round <= self.answered[one.worker] for one in pushes)
            return [Repeat(first.worker, self.read[first.worker])] if answered else []
        workers = []
        for one in pushes:
            self.pushed[one.worker] = one.round
            workers.append(one.worker)
        # With an age limit, a sum has one worker.
        is_too_old = self.policy.age is not None and self.version - self.read[first.worker] > self.policy.age
        action = self._drop(first) if is_too_old else self._merge(pushes, workers)
        return [action, *self._settle(workers)]

    def _drop(self, push: Pushed) -> Drop:
        self._activity.finish(push.worker, push.round)
        self._events.append(("drop", push.worker, push.round, self.read[push.worker], self.version))
        self.stats.dropped[push.worker] += 1
        return Drop(push.worker, self.version)

    def _merge(self, pushes: Sequence[Pushed], workers: Sequence[int]) -> Merge:
        first = pushes[0]
        cohort = self._cohort_for(workers)
        for one in pushes:
            worker, read = one.worker, self.read[one.worker]
            cohort.join(worker, one.samples, read)
            if self._samples is not None:
                self._samples.note(worker, one.samples)
            self._events.append(("push", worker, one.round, one.samples, read, self.version, cohort.number))
        if self.policy.merge == "first":
            self._activity.finish(first.worker, first.round)
        return Merge(cohort.number, first.worker)

    def leave(self, worker: int) -> list[Action]:
        """Note that a worker has left: others wait for it no more. Its earlier pushes still count."""
        self._events.append(("leave", worker))
        self.live.discard(worker)
        self.paused.discard(worker)
        self.away.discard(worker)
        self._activity.change()
        return self._resume_all() + self._settle()

    def regroup(self, worker: int, generation: int, groups: Groups) -> list[Action]:
        """Let a worker step with another group from its next round on. All slots must get this before that round.

        Args:
            worker: the worker that moves; its pushes are answered.
            generation: number of the groups, from 1; one that the worker has reached already has no effect.
            groups: ranks per group; workers that have left may be missing.
        """
        if generation <= self.units.generation[worker]:
            return []
        reason = objection_to_regrouping(self, worker, groups)
        if reason:
            return [Refuse(worker, reason)]
        self.units.move(worker, generation, groups)
        self._events.append(("regroup", worker, generation))
        self._activity.change()
        return self._settle()

    def pause(self, worker: int) -> list[Action]:
        """Note that a worker enters a barrier: until all have, others do not wait for its pushes.

        Workers need not push equally often between barriers. Without this, those that push more would wait here for
        those that wait at the barrier.
        """
        self._events.append(("pause", worker))
        if worker in self.live:
            self.paused.add(worker)
            self.away.discard(worker)
            self._activity.change()
        return self._resume_all() + self._settle()

    def go_away(self, worker: int) -> list[Action]:
        """Note that others do not wait for a worker's pushes until it comes back, or a barrier has opened.

        For one that is at a barrier they do not wait anyhow.
        """
        self._events.append(("go away", worker))
        if worker in self.live - self.paused:
            self.away.add(worker)
            self._activity.change()
        return self._settle()

    def come_back(self, worker: int, phase: int) -> list[Action]:
        """Note that a worker steps with the workers of its unit that are in a phase, from its next round on.

        All slots must get this before that round, and after the answers to earlier ones.

        Args:
            worker: the worker; it need not have been away.
            phase: one that the worker has reached already has no effect, except that it leaves a barrier.
        """
        before = self._activity.phase[worker]
        if worker not in self.live or (phase <= before and worker not in self.paused):
            return []
        self._activity.come_back(worker, max(phase, before))
        self._events.append(("come back", worker, phase))
        return self._settle()

    def rejoin(self, worker: int, phase: int) -> list[Action]:
        """Note that another process takes the rank of a worker that is gone. Its rounds count from 1.

        All slots must get this before any worker comes back in that phase.

        Args:
            worker: the rank; if it is not gone, this has no effect.
            phase: a new one, in which it steps with the others of its unit.
        """
        if worker in self.live:
            return []
        self.live.add(worker)
        self.away.add(worker)
        self.pushed[worker] = self.finished[worker] = self.answered[worker] = self._activity.level[worker] = 0
        self.read[worker], self._activity.phase[worker] = self.version, phase - 1
        self._activity.change()
        self._events.append(("rejoin", worker, phase))
        return self.come_back(worker, phase)

    def end_grace(self, cohort: int) -> list[Action]:
        """Note that a cohort has waited for further pushes for long enough; returns the actions, in order."""
        for one in self._open:
            if one.number == cohort and one.has_grace:
                one.is_over = True
                self._events.append(("over", cohort))
                return self._settle()
        return []

    def _resume_all(self) -> list[Action]:
        """Open the barrier if all live workers have come to it: all of them are active again."""
        if not self.live <= self.paused:
            return []
        actions = self._settle()
        self.paused.clear()
        self._activity.open()
        self._events.append(("open",))
        return actions

    def readable(self, worker: int) -> int:
        """Return the version that a worker gets when it reads now.

        Members of a group get the version of their group's last answer, whatever other groups did since. A worker that
        is a group by itself gets the newest one.
        """
        if self.policy.merge != "groups" or self.units.is_alone(self.unit[worker]):
            return self.version
        return self.read[worker]

    def pull(self, worker: int) -> int:
        """Note that a worker reads all of the slot now; returns the version that it gets."""
        version = self.readable(worker)
        if self.read[worker] != version:
            self.read[worker] = version
            self._events.append(("pull", worker, version))
        return self.read[worker]

    # ---- questions -------------------------------------------------------------------------------------------------

    def waiting(self) -> list[int]:
        """Return the workers whose push is not answered yet."""
        return [worker for worker in sorted(self.live) if self.pushed[worker] > self.answered[worker]]

    def missing_for(self, worker: int) -> list[int]:
        """Return whose push the answer to a worker's push waits for."""
        waiting = self.waiting()
        if worker not in waiting:
            return []
        held_by = self._held_by(worker)
        if held_by is not None:
            others = self._activity.of_unit(held_by.unit, held_by.phase) - set(held_by.samples)
            # A mate that waits by the bound holds this worker up too: then it is for whom the mate waits.
            held_up = {one for other in others.intersection(waiting) for one in self.missing_for(other)}
            return sorted(others.difference(waiting) or held_up)
        slowest = self._activity.slowest(worker)
        return [
            other
            for other in sorted(self._activity.workers)
            if self._activity.ahead(other) == slowest and other not in waiting
        ]

    def copy(self) -> Rule:
        """Return a rule that goes on where this one stands, with a story and counters of its own."""
        kept = {id(self.stats): self.stats.copy(), id(self.policy): self.policy, id(self._events): self._events.copy()}
        return copy.deepcopy(self, kept)

    def story(self, key: str, last: int = KEPT) -> str:
        """Return a line for each of the last events, oldest first, and one for the present state."""
        return "\n  ".join([f"what happened to {key}:", *sentences(self._events, last), self._present()])

    def _present(self) -> str:
        texts = [f"now version {self.version}"]
        for cohort in self._open:
            has = workers_text(cohort.workers)
            texts.append(f"cohort {cohort.number} has pushes of {has} and {self._wants(cohort)}")
        others = (("unanswered", self.waiting()), ("at a barrier", self.paused), ("away", self.away))
        texts += [f"{what}: {workers_text(workers)}" for what, workers in others if workers]
        gone = set(range(len(self.pushed))) - self.live
        return "; ".join([*texts, f"gone: {workers_text(gone)}"] if gone else texts)

    def _wants(self, cohort: Cohort) -> str:
        if self.policy.merge == "first":
            return f"needs {self._pushes_needed()}"
        required = self._activity.of_unit(cohort.unit, cohort.phase)
        return f"waits for {workers_text(required - set(cohort.samples))}"

    # ---- rules of neighbouring slots -------------------------------------------------------------------------------

    def is_like(self, other: Rule) -> bool:
        """Tell whether another rule of the same policy will do as this one does: both have no open cohort and agree.

        With ``all`` the versions that workers have read do not matter: no worker is ahead. They may differ, as answers
        are read when they are sent.
        """
        return not (self._open or other._open) and self._state == other._state

    def join(self, other: Rule) -> None:
        """Go on for the slot of another rule too, which is like this one; the older version that was read counts."""
        self.read = [min(both) for both in zip(self.read, other.read, strict=True)]
        self._events = joined_events(self._events, other._events)

    @property
    def _state(self) -> tuple[object, ...]:
        """The state that decides later actions, besides open cohorts."""
        read = [] if self.policy.merge == "all" else self.read
        return (
            self.version,
            self.live,
            self.paused,
            self.away,
            self._activity.phase,
            self.pushed,
            self.finished,
            self.answered,
            self._activity.level,
            self.units.of,
            read,
            None if self._samples is None else self._samples.last,
        )

    # ---- cohorts ---------------------------------------------------------------------------------------------------

    def _cohort_for(self, workers: Sequence[int]) -> Cohort:
        first = workers[0]
        unit, phase = (self.unit[first], self._activity.phase[first]) if self.policy.merges_rounds else (-1, 0)
        for cohort in self._open:
            is_theirs = cohort.unit == unit and cohort.phase == phase
            if is_theirs and (self.policy.age is not None or cohort.samples.keys().isdisjoint(workers)):
                return cohort
        cohort = Cohort(self._next_cohort, unit, phase, oldest=self.version)
        self._next_cohort += 1
        self._open.append(cohort)
        return cohort

    def _is_complete(self, cohort: Cohort) -> bool:
        if self.policy.merge == "each":
            return True
        if self.policy.merge == "first":
            waits = self.policy.grace_s and not self._activity.workers <= cohort.samples.keys()
            return cohort.is_over or (self._has_enough(cohort) and not waits)
        required = self._activity.of_unit(cohort.unit, cohort.phase)
        return len(cohort.samples) >= len(required) and required <= cohort.samples.keys()

    def _has_enough(self, cohort: Cohort) -> bool:
        return len(cohort.workers) >= self._pushes_needed()

    def _pushes_needed(self) -> int:
        """Return how many pushes complete a cohort of merge ``first``: none when everybody is at a barrier."""
        if self.policy.age is not None and self._activity.workers:
            return self.policy.first
        return min(self.policy.first, len(self._activity.workers))

    def _settle(self, pushers: Sequence[int] | None = None) -> list[Action]:
        """Apply complete cohorts, and release the workers that these, or the push of ``pushers``, allow to go on."""
        complete = [cohort for cohort in self._open if self._is_complete(cohort)]
        actions: list[Action] = []
        for cohort in complete:
            self._open.remove(cohort)
            actions.append(self._apply(cohort))
        for cohort in self._open if self.policy.grace_s else ():
            if not cohort.has_grace and self._has_enough(cohort):
                cohort.has_grace = True
                self._events.append(("grace", cohort.number))
                actions.append(Grace(cohort.number))
        return actions + self._releases(self._may_be_free(pushers, complete))

    def _may_be_free(self, pushers: Sequence[int] | None, complete: Sequence[Cohort]) -> set[int]:
        """Return the workers whose wait may be over, if they wait: after most pushes these are few."""
        low = 0 if self.policy.bound is None else self._activity.lowest()
        if pushers is None or low != self._seen_low or (complete and self.policy.merge == "first"):
            self._seen_low = low
            return self.live
        found = set(pushers)
        for cohort in complete:
            found.update(cohort.workers)
        return found & self.live

    def _apply(self, cohort: Cohort) -> Apply:
        staleness = self.version - cohort.oldest + 1
        samples = sum(cohort.samples.values())
        weight = self._weight(staleness, self.stats.seen(staleness))
        weight *= 1.0 if self._samples is None else self._samples.part(samples, self.live)
        self.stats.weight_sum += weight
        self.version += 1
        for worker, pushed in cohort.samples.items():
            self.stats.data_mass[worker] += pushed * weight
            if self.policy.merge != "first":
                self._activity.finish(worker, self.pushed[worker])
        ordered = self.policy.merge in ("all", "groups")
        workers = tuple(sorted(cohort.workers) if ordered else cohort.workers)
        self._events.append(("apply", cohort.number, workers, samples, staleness, weight, self.version))
        return Apply(cohort.number, workers, samples, staleness, weight, self.version)

    # ---- answers ---------------------------------------------------------------------------------------------------

    def _releases(self, workers: Collection[int]) -> list[Action]:
        """Release the workers that wait and may go on."""
        ready: dict[int, list[int]] = {}
        for worker in sorted(workers):
            if self.pushed[worker] > self.answered[worker] and self._may_go_on(worker):
                ready.setdefault(self.unit[worker], []).append(worker)
        actions: list[Action] = []
        for unit in map(tuple, ready.values()):
            for worker in unit:
                self.answered[worker] = self.pushed[worker]
                self.read[worker] = self.version
            self._events.append(("release", unit, self.version))
            actions.append(Release(unit, self.version))
        return actions

    def _held_by(self, worker: int) -> Cohort | None:
        """Return the cohort that must be complete before the worker goes on, without regard to the bound."""
        if self.policy.merge == "first":
            # A worker may be one push ahead of the oldest open cohort: each further one would need a merge buffer.
            return self._open[0] if any(worker in cohort.samples for cohort in self._open[1:]) else None
        for cohort in self._open:
            if worker in cohort.samples:
                return cohort
        return None

    def _may_go_on(self, worker: int) -> bool:
        if self._held_by(worker) is not None:
            return False
        if self.policy.bound is None:
            return True
        return self._activity.ahead(worker) - self._activity.slowest(worker) <= self.policy.bound
