"""One simulated job: the servers' rule, and workers that take time to compute, send and receive.

A round of a worker::

    compute ──► push on its link and the servers' ──► merge on the server ──► rule ──► update ──► answer on both links

With a period it computes several steps in a round, on weights of its own, and some more while the answer is on its way.

All servers are equal, with 1/S of every key on each. So one of them stands for all: it has 1/S of the bytes and of the
work. A message takes as long as the slower of the worker's link and its share of the server's.

The rule is :class:`paceline.consistency.Rule`, the one that servers run. Its actions are carried out in order; the
time of an update passes before the answers that follow it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.consistency import Apply, Drop, Grace, Merge, Policy, Release, Rule, Stats, new_rule
from paceline.hetero import Measured, Shares, SpeedMeter, WorkerRound, measured_of
from paceline.hetero.local_period import Pace, Period, Progress
from paceline.hetero.local_plan import ELEMENT_BYTES
from paceline.hetero.measured import ROUNDS, sizes
from paceline.sim.problem import OwnData, Problem
from paceline.sim.resources import Processor, SharedLink, call_later, new_environment
from paceline.sim.simulated_cluster import SimulatedCluster

Vector = NDArray[np.float64]
ShareKind = Literal["equal", "data", "measured", "pool"]


@dataclass(frozen=True)
class SimulatedTraining:
    """How a simulated job trains."""

    policy: Policy
    shares: ShareKind = "equal"
    """``equal``: equal batches of equal parts of the data; ``data``: equal batches of parts in proportion to speed;
    ``pool``: equal batches from one queue; ``measured``: batches by measured speed, of a constant global batch, from
    one queue."""
    batch: int = 32
    """Samples per round and worker; with ``measured``, the mean over workers."""
    skew: float = 0.0
    """Part of the data that is divided in order of its classes, where workers have data of their own."""
    lr: float = 0.1
    rounds: int | None = None
    """Rounds of every worker."""
    seconds: float | None = None
    """End of the job in simulated time."""
    target: float | None = None
    """Accuracy at which to stop: the mean of three evaluations in a row."""
    evaluate_s: float = 0.0
    """Simulated time between evaluations; 0: never."""
    seed: int = 0
    keep_steps: bool = False
    """Keep how long each worker computes and waits in each of its rounds."""
    period: Period | None = None
    """Local steps of a round; None: a round is one step, and pushes its gradient."""
    delay: int = 0
    """Local steps for which the answer is not waited for."""
    outer: tuple[float, float] = (0.7, 0.9)
    """With local steps: learning rate and Nesterov's momentum with which servers apply what workers have done."""
    codec: str = ""
    """Codec of pushes and answers; empty: none. It takes no time and loses nothing."""


@dataclass
class Result:
    """The result of a simulated job."""

    seconds: float = 0.0
    """Simulated time."""
    rounds: list[int] = field(default_factory=list)
    """Finished rounds per worker."""
    samples: float = 0.0
    """Samples whose gradients were pushed and answered."""
    curve: list[tuple[float, float]] = field(default_factory=list)
    """(simulated time, accuracy)."""
    target_s: float | None = None
    """When the target was reached."""
    stats: Stats = field(default_factory=Stats)
    """Counters of the rule: updates, staleness, weights, data per worker."""
    step_mass: float = 0.0
    """Sum of weight times learning rate over all updates."""
    network_bytes: float = 0.0
    computing: float = 0.0
    """Share of the time in which a worker computes, as a mean over workers."""
    steps: list[list[WorkerRound]] = field(default_factory=list)
    """With ``keep_steps``: each worker's finished rounds."""

    @property
    def staleness(self) -> Counter[int]:
        """How many updates had which staleness."""
        return self.stats.staleness

    @property
    def samples_per_s(self) -> float:
        """Throughput."""
        return self.samples / self.seconds if self.seconds else 0.0


def simulate(cluster: SimulatedCluster, plan: SimulatedTraining, problem: Problem | None = None) -> Result:
    """Run a job under a simulated clock. Without a problem to learn, only times count.

    Raises:
        ValueError: the plan has no end, or its policy does not fit the number of workers.
        MissingExtraError: simpy is not installed.
    """
    if plan.rounds is None and plan.seconds is None:
        raise ValueError("a simulated job needs an end: rounds or seconds")
    return _Job(new_environment(), cluster, plan, problem or Problem()).run()


@dataclass(frozen=True)
class _Sent:
    """A push that is not answered yet."""

    gradient: Vector
    """Or what the worker has done in its period: its old weights less the new ones."""
    live: Vector
    """Its weights at the push."""
    samples: float
    seconds: float
    """That it has computed for it, since it began."""
    begun: float


class _Worker:
    """One worker: its weights, and how far it is."""

    def __init__(self, weights: Vector, period: Period) -> None:
        self.anchor = self.live = self.gradient = weights
        """The weights of the last answer, this worker's own, and the gradient of its last step."""
        self.progress = Progress(period, 1, None, 0.0)
        self.pushed: _Sent | None = None
        self.rounds = self.ahead = 0
        """Pushes, and steps since the last one."""
        self.waits = self.is_due = False
        """Whether it waits for the answer, and whether a further push does."""
        self.computed_s = self.step_s = 0.0
        """Seconds that it has computed in all, and in a mean step of its last period."""
        self._samples = self._seconds = self._begun = 0.0
        self._steps = 0

    def step(self, samples: float, seconds: float, lr: float) -> None:
        """Step on its own gradient."""
        self.computed_s += seconds
        self._samples, self._seconds, self._steps = self._samples + samples, self._seconds + seconds, self._steps + 1
        self.live = self.live - lr * self.gradient

    def push(self, is_local: bool) -> None:
        """Push what it has done, or the gradient of its only step."""
        change = self.anchor - self.live if is_local else self.gradient
        self.pushed = _Sent(change, self.live, self._samples, self._seconds, self._begun)
        self.step_s = self._seconds / self._steps
        self._samples, self._seconds, self._steps, self.ahead = 0.0, 0.0, 0, 0
        self.rounds += 1

    def take(self, weights: Vector, now: float) -> None:
        """Take an answer, and keep what it has done since its push."""
        assert self.pushed is not None
        self.live = weights + (self.live - self.pushed.live)
        self.anchor, self.pushed, self._begun = weights, None, now


class _Job:
    def __init__(self, environment: Any, cluster: SimulatedCluster, plan: SimulatedTraining, problem: Problem) -> None:
        self._environment, self._cluster, self._plan, self._problem = environment, cluster, plan, problem
        count = len(cluster.workers)
        self._rule: Rule = new_rule(plan.policy, count)
        self._rng = np.random.default_rng([plan.seed, 0])
        self._shares_one_queue = plan.shares in ("pool", "measured")
        self._shares = Shares(plan.batch * count, [1.0] * count) if plan.shares == "measured" else None
        self._meters = [SpeedMeter() for _ in range(count)]
        self._into, self._out_of = (SharedLink(environment, cluster.bandwidth) for _ in range(2))
        self._server = Processor(environment)
        self._size = cluster.model_bytes * ELEMENT_BYTES.get(plan.codec, 4.0) / 4.0
        self._weights = problem.initial()
        self._moment = 0.0 * self._weights
        self._rate = (plan.lr, 0.0) if plan.period is None else plan.outer
        """The servers' learning rate and momentum."""
        self._source = self._make_source() if len(self._weights) else None
        """The data; None: there is nothing to learn."""
        self._sums: dict[int, list[Any]] = {}
        self._workers = [_Worker(self._weights, plan.period or Period(1)) for _ in cluster.workers]
        self._done = environment.event()
        self._left = 0
        self._result = Result(steps=[[] for _ in range(count)])

    def run(self) -> Result:
        for worker in range(len(self._cluster.workers)):
            self._go_on(worker)
        if self._plan.evaluate_s:
            self._evaluate()
        if self._plan.seconds is not None:
            call_later(self._environment, self._plan.seconds, self._stop)
        self._environment.run(self._done)
        result = self._result
        result.seconds, result.rounds = self._environment.now, list(self._rule.answered)
        result.stats, result.step_mass = self._rule.stats, self._rule.stats.weight_sum * self._rate[0]
        if result.seconds:
            result.computing = sum(one.computed_s for one in self._workers) / len(self._workers) / result.seconds
        result.network_bytes = (self._into.bytes + self._out_of.bytes) * self._cluster.servers
        return result

    def _make_source(self) -> OwnData:
        """Return the parts of the data that workers take from; with a pool, one part for all."""
        plan, machines = self._plan, self._cluster.workers
        if self._shares_one_queue:
            return OwnData(self._problem.length, [1.0], plan.seed)
        by_speed = [1 / machine.speed.seconds(plan.batch) for machine in machines]
        weights = by_speed if plan.shares == "data" else [1.0] * len(machines)
        return OwnData(self._problem.length, weights, plan.seed, self._problem.labels, plan.skew)

    # ---- a worker's round --------------------------------------------------------------------------------------------

    def _go_on(self, worker: int) -> None:
        """Take the next step, unless an answer is waited for or all rounds are done."""
        one = self._workers[worker]
        is_last = one.rounds == self._plan.rounds
        if one.pushed is not None and (is_last or one.ahead >= self._plan.delay):
            one.waits = True
        elif is_last:
            # After the actions that are being carried out: the rule takes one event at a time.
            self._environment.timeout(0).callbacks.append(lambda _: self._leave(worker))
        else:
            one.ahead += 1
            self._compute(worker)

    def _compute(self, worker: int) -> None:
        one, plan = self._workers[worker], self._plan
        count = plan.batch if self._shares is None else self._shares.samples[worker]
        if self._source is not None:
            indices = self._source.next(0 if self._shares_one_queue else worker, count)
            one.gradient = self._problem.gradient(one.live, indices)
        seconds = self._cluster.workers[worker].speed.seconds(count) * self._noise()
        if self._shares is not None:
            self._meters[worker].add(count, seconds)
        call_later(self._environment, seconds, partial(self._stepped, worker, count, seconds))

    def _stepped(self, worker: int, samples: int, seconds: float) -> None:
        one = self._workers[worker]
        one.step(samples, seconds, self._plan.lr)
        if not one.progress.step(self._environment.now, partial(self._pace, worker)):
            self._go_on(worker)
        elif one.pushed is None:
            self._push(worker)
        else:
            one.waits = one.is_due = True

    def _pace(self, worker: int) -> Pace:
        steps = [one.step_s for one in self._workers]
        return Pace(steps[worker], min(filter(None, steps), default=0.0))

    def _noise(self) -> float:
        cluster, noise = self._cluster, 1.0
        if cluster.jitter:
            noise = float(self._rng.lognormal(0.0, cluster.jitter))
        if cluster.spike_probability and self._rng.random() < cluster.spike_probability:
            noise *= cluster.spike_factor
        return noise

    def _push(self, worker: int) -> None:
        self._workers[worker].push(is_local=self._plan.period is not None)
        self._send(self._into, worker, partial(self._arrive, worker))
        self._go_on(worker)

    def _send(self, link: SharedLink, worker: int, then: Any) -> None:
        """Send a message of all keys over a worker's link and the servers'; the slower one counts."""
        at_least = self._cluster.latency_s + self._size / self._cluster.workers[worker].bandwidth
        ends_at = self._environment.now + at_least
        size = self._size / self._cluster.servers
        link.send(size, lambda: call_later(self._environment, ends_at - self._environment.now, then))

    # ---- the server --------------------------------------------------------------------------------------------------

    def _arrive(self, worker: int) -> None:
        self._server.work(self._cluster.merge_s / self._cluster.servers, partial(self._decide, worker))

    def _decide(self, worker: int) -> None:
        self._perform(self._rule.push(worker, self._rule.pushed[worker] + 1, self._sent(worker).samples))

    def _leave(self, worker: int) -> None:
        self._left += 1
        self._perform(self._rule.leave(worker))
        if self._left == len(self._cluster.workers):
            self._stop()

    def _perform(self, actions: Sequence[Any]) -> None:
        """Carry out the rule's actions. Values change at once; answers leave when the update's time has passed."""
        for action in actions:
            if isinstance(action, Merge):
                if self._source is not None:
                    self._merge(action)
            elif isinstance(action, Apply):
                if self._source is not None:
                    self._apply(action)
                self._server.work(self._cluster.update_s / self._cluster.servers, lambda: None)
            elif isinstance(action, Grace):
                call_later(self._environment, self._plan.policy.grace_s, partial(self._end_grace, action.cohort))
            elif isinstance(action, Release):
                if self._shares is not None:
                    self._revise()
                self._server.work(0.0, partial(self._answer, action.workers, self._weights))
            else:
                assert isinstance(action, Drop), action

    def _end_grace(self, cohort: int) -> None:
        self._perform(self._rule.end_grace(cohort))

    def _merge(self, action: Merge) -> None:
        total = self._sums.setdefault(action.cohort, [0.0, 0])
        sent = self._sent(action.worker)
        total[0] = total[0] + sent.samples * sent.gradient
        total[1] += sent.samples

    def _apply(self, action: Apply) -> None:
        total, samples = self._sums.pop(action.cohort)
        lr, momentum = self._rate
        self._moment = momentum * self._moment + total / samples
        self._weights = self._weights - lr * action.weight * (total / samples + momentum * self._moment)

    def _sent(self, worker: int) -> _Sent:
        sent = self._workers[worker].pushed
        assert sent is not None
        return sent

    def _answer(self, workers: Sequence[int], weights: Vector) -> None:
        for worker in workers:
            self._send(self._out_of, worker, partial(self._end_round, worker, weights))

    def _end_round(self, worker: int, weights: Vector) -> None:
        one, sent = self._workers[worker], self._sent(worker)
        self._result.samples += sent.samples
        if self._plan.keep_steps:
            waited = self._environment.now - sent.begun - sent.seconds
            self._result.steps[worker].append(WorkerRound(sent.samples, sent.seconds, waited))
        one.take(weights, self._environment.now)
        waits, one.waits = one.waits, False
        if one.is_due:
            one.is_due = False
            self._push(worker)
        elif waits:
            self._go_on(worker)

    def _revise(self) -> None:
        assert self._shares is not None
        speeds = {worker: self._meters[worker].speed() for worker in self._shares.samples}
        self._shares.revise({worker: speed for worker, speed in speeds.items() if speed is not None})

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        result, plan = self._result, self._plan
        result.curve.append((self._environment.now, self._problem.accuracy(self._weights)))
        last = [accuracy for _, accuracy in result.curve[-3:]]
        if plan.target is not None and len(last) == 3 and sum(last) / 3 >= plan.target:
            result.target_s = self._environment.now
            self._stop()
        else:
            call_later(self._environment, plan.evaluate_s, self._evaluate)

    def _stop(self) -> None:
        if not self._done.triggered:
            self._done.succeed()


def measure(cluster: SimulatedCluster, batch: int = 32, rounds: int = ROUNDS, seed: int = 0) -> tuple[Measured, float]:
    """Return what some rounds in lock step show of a simulated cluster, and how long they take in seconds.

    Only facts that a real job has are used: how long each worker computes and waits in each round, and the time of an
    update, of which servers know their speed.

    Raises:
        MissingExtraError: simpy is not installed.
    """
    steps: list[list[WorkerRound]] = [[] for _ in cluster.workers]
    seconds = 0.0
    for number, (size, some) in enumerate(groupby(sizes(batch, rounds))):
        plan = SimulatedTraining(
            Policy("all"), batch=size, rounds=len(list(some)), seed=2 * seed + number, keep_steps=True
        )
        result = simulate(cluster, plan)
        seconds += result.seconds
        for kept, more in zip(steps, result.steps, strict=True):
            kept.extend(more)
    return measured_of(steps, batch, cluster.update_s / cluster.servers), seconds
