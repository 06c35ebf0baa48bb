"""Pools of samples: the scheduler gives out positions of an epoch's order.

=====================  =============================================================================
request                answer
=====================  =============================================================================
``TakeSamples``        ``Samples``: positions, or that the epoch is over, or that there is a wait
``AwaitSamples``       ``Samples`` for the last request of this worker, when there is no wait any more
``ReturnSamples``      ``Done``: others get the samples that this worker has not trained on
``AskSamples``         ``SamplesLeft``: the samples of the epoch that no worker has trained on
=====================  =============================================================================

So a worker learns that it will wait before it does, and can tell the servers not to wait for its pushes. Each answer
says in which generation the last walk has begun: with the first answer of another walk, it tells the servers to wait
for it again. A worker that comes to a barrier says the last round that it has pushed. So when the barrier opens, the
scheduler knows which samples all workers have trained on.
"""

from __future__ import annotations

from paceline.hetero.sample_pool import Answer as PoolAnswer
from paceline.hetero.sample_pool import Given, Pool, PoolOver, Refused, Wait, WalkStart
from paceline.membership.effects import Action, Answer, Waiting, refuse
from paceline.membership.log import MembershipLog
from paceline.wire import messages as m

#: Pools of one job. A job needs one per data set.
MAX_POOLS = 64


class Pools:
    """The pools of a job, by name. The first request makes a pool."""

    def __init__(self, num_workers: int, log: MembershipLog) -> None:
        self._num_workers, self._log = num_workers, log
        self._pools: dict[str, Pool] = {}
        self._waiting: dict[tuple[str, int], Waiting] = {}
        self._ready: dict[tuple[str, int], m.PoolSamples] = {}
        """Answers that came before the worker asked for them."""
        self._left: dict[int, int] = {}
        """Workers that have left or died, and their last rounds."""
        self._given_at: dict[tuple[str, int], float] = {}
        self._walks, self._phase = 0, 0
        """Walks that are over, of all pools, and the generation in which the last one of them was."""
        self.now = 0.0
        """Seconds on the caller's clock."""

    @property
    def exist(self) -> bool:
        """Whether there is a pool."""
        return bool(self._pools)

    def take(self, rank: int, waiting: Waiting, body: m.TakeSamples) -> list[Action]:
        """Give a worker samples, or say that it has to wait."""
        start = WalkStart(body.epoch, tuple(body.left), body.limit, body.order)
        pool = self._pools.get(body.pool)
        if pool is None:
            if len(self._pools) >= MAX_POOLS:
                text = f"a job has at most {MAX_POOLS} pools of samples; walk through one again, or use its name again"
                return [refuse(waiting.peer, waiting.seq, text)]
            if start.objection(body.length):
                return [refuse(waiting.peer, waiting.seq, start.objection(body.length))]
            pool = self._pools[body.pool] = Pool(body.length, self._num_workers, start)
            for worker, last in self._left.items():
                pool.leave(worker, last)
        if pool.length != body.length:
            text = (
                f"pool {body.pool!r} has {pool.length} samples, worker {rank} has {body.length}; use the same data on "
                "all workers, and give samplers of other data a name of their own"
            )
            return [Answer(waiting.peer, waiting.seq, m.Failed("ValueError", text))]
        self._ready.pop((body.pool, rank), None)
        actions: list[Action] = []
        for answer in pool.take(rank, body.number, body.walk, body.count, body.done, body.round, start):
            if answer.worker == rank:
                actions.append(self._answer_to(body.pool, waiting, answer))
            else:
                actions += self._later(body.pool, answer)
        return actions

    def wait(self, rank: int, waiting: Waiting, body: m.AwaitSamples) -> list[Action]:
        """Answer a worker that was told to wait, now or later."""
        key = body.pool, rank
        if key in self._ready:
            return [Answer(waiting.peer, waiting.seq, self._ready[key])]
        if body.pool not in self._pools:
            return [refuse(waiting.peer, waiting.seq, f"there is no pool {body.pool!r} to wait for")]
        self._waiting[key] = waiting
        return []

    def give_back(self, rank: int, waiting: Waiting, body: m.ReturnSamples) -> list[Action]:
        """Take samples back that a worker will not train on."""
        pool = self._pools.get(body.pool)
        if pool is None:
            return [refuse(waiting.peer, waiting.seq, f"there is no pool {body.pool!r} to give samples back to")]
        answers = [*pool.pushed(rank, body.round), *pool.give_back(rank, body.number, tuple(body.ranges))]
        later = [action for one in answers for action in self._later(body.pool, one)]
        return [Answer(waiting.peer, waiting.seq, m.Done()), *later]

    def rest(self, rank: int, waiting: Waiting, body: m.AskSamples) -> list[Action]:
        """Return the samples of an epoch that are not trained on yet."""
        pool = self._pools.get(body.pool)
        left = m.SamplesLeft(False)
        if pool is not None:
            one = pool.rest(rank, body.round)
            held = [(at, list(ranges), self.now - self._given_at[body.pool, at]) for at, ranges in one.held.items()]
            first = pool.start
            left = m.SamplesLeft(True, one.walk, one.epoch, list(one.left), held, first.epoch, list(first.left))
        return [Answer(waiting.peer, waiting.seq, left)]

    def pushed(self, rank: int, round: int) -> list[Action]:
        """Note that a worker has trained on the samples that it took before its last push."""
        answers = [(name, answer) for name, pool in self._pools.items() for answer in pool.pushed(rank, round)]
        return [action for name, answer in answers for action in self._later(name, answer)]

    def leave(self, rank: int, round: int) -> list[Action]:
        """Give the samples of a worker that has left or died after a round to workers that wait."""
        self._left[rank] = round
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if key[1] != rank}
        answers = [(name, answer) for name, pool in self._pools.items() for answer in pool.leave(rank, round)]
        return [action for name, answer in answers for action in self._later(name, answer)]

    def rejoin(self, rank: int, phase: int) -> None:
        """Let another process of a worker that was gone take samples; all step with it from their next samples on."""
        self._left.pop(rank, None)
        self._phase = phase
        for pool in self._pools.values():
            pool.rejoin(rank)

    def clear(self) -> list[Waiting]:
        """Forget the requests that wait; returns them."""
        waiting = list(self._waiting.values())
        self._waiting.clear()
        return waiting

    def _note_walk(self, name: str, pool: Pool) -> None:
        """Let a generation begin if a walk is over since the last call."""
        walks = sum(one.walk for one in self._pools.values())
        if walks > self._walks:
            self._walks = walks
            self._phase = self._log.add("walks", [], why=f"epoch {pool.start.epoch} of pool {name!r}")

    def _later(self, name: str, answer: PoolAnswer) -> list[Action]:
        """Answer a worker that was told to wait before."""
        key = name, answer.worker
        self._ready[key] = self._samples(name, answer)
        waiting = self._waiting.pop(key, None)
        return [] if waiting is None else [Answer(waiting.peer, waiting.seq, self._ready[key])]

    def _answer_to(self, name: str, waiting: Waiting, answer: PoolAnswer) -> Answer:
        if isinstance(answer, Refused):
            return Answer(waiting.peer, waiting.seq, m.Failed(answer.error, answer.reason))
        return Answer(waiting.peer, waiting.seq, self._samples(name, answer))

    def _samples(self, name: str, answer: PoolAnswer) -> m.PoolSamples:
        self._note_walk(name, self._pools[name])
        ranges = list(answer.ranges) if isinstance(answer, Given) else []
        if ranges:
            self._given_at[name, answer.worker] = self.now
        return m.PoolSamples(ranges, isinstance(answer, PoolOver), isinstance(answer, Wait), self._phase)
