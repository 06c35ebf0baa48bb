"""A worker's side of a pool of samples: its walks, its requests, and where it goes on."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace

from paceline.data.sampler import State
from paceline.errors import PacelineError
from paceline.hetero.walk import WalkStart
from paceline.ranges import Ranges, everything, without
from paceline.wire import messages as m
from paceline.worker.session import Session

_log = logging.getLogger(__name__)


class Walker:
    """Takes samples of a pool for one worker. Samplers of one name share it.

    Args:
        session: of the worker.
        name: of the pool.
        settings: ``length``, ``seed`` and ``shuffle``: what the order of an epoch follows from.
        limit: samples of all workers after which a walk is over; 0: the end of the epoch.
    """

    def __init__(self, session: Session, name: str, settings: State, limit: int) -> None:
        self._session, self._name, self.settings, self.limit = session, name, settings, limit
        self._length: int = settings["length"]
        order = 1 + settings["seed"] % 2**62 if settings["shuffle"] else 0
        self.following = WalkStart(limit=limit, order=order)
        """The next walk."""
        self.start = self.following
        """The walk under way, or the last one."""
        self.held: Ranges = ()
        """Positions that were taken last."""
        self._walk, self._number = -1, 0
        self._begun = self._before = 0
        """Last rounds that were pushed before the walk, and before the last request."""
        self._is_chosen = False
        """Whether somebody has said what the next walk is."""
        self._returned = False
        """Whether all of the walk that was begun last was given back, so that it comes again."""

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or that comes next when none has begun or another one was chosen."""
        return self.following.epoch if self._walk < 0 or self._is_chosen or self._returned else self.start.epoch

    # ---- a walk ----------------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Begin the next walk; returns its number."""
        if not (self._returned and self.following == self.start):
            self._walk += 1
        self.start, self.following = self.following, self.following.following(self._length)
        self._is_chosen = self._returned = False
        self._begun = self._session.round
        return self._walk

    def take(self, walk: int, count: int) -> Ranges | None:
        """Take samples; None when the walk is over, or another one was begun since.

        While it waits for samples that others hold, no server waits for this worker's pushes.

        Args:
            walk: its number.
            count: of samples, at most.
        """
        if walk != self._walk:
            return None
        start, self._before = self.start, self._session.round
        request = m.TakeSamples(
            self._name, self._length, self._number + 1, walk, count, self._number, self._before,
            start.epoch, list(start.left), start.limit, start.order,
        )  # fmt: skip
        try:
            samples = self._call(request)
        except ValueError:  # what it begins with is not what the others say
            self._walk, self.following = walk - 1, start
            raise
        self._number += 1
        if samples.waits:
            self._session.stores.pause()
            samples = self._call(m.AwaitSamples(self._name))
        self.held = tuple(samples.ranges)
        return None if samples.over else self.held

    def _call(self, request: m.TakeSamples | m.AwaitSamples) -> m.PoolSamples:
        samples = self._session.call_scheduler(request, f"samples of pool {self._name!r}")
        assert isinstance(samples, m.PoolSamples)
        return samples

    def give_back(self, rest: Ranges) -> None:
        """Give back samples that were taken last, and will not be trained on."""
        for start, stop in rest:
            self.held = without(self.held, start, stop)
        self._session.call_scheduler(self._return_of(rest), f"return of samples to pool {self._name!r}")

    def stop(self, walk: int) -> None:
        """Leave a walk before it is over: what no push has followed goes back to the pool.

        A walk that was left before any push comes again.
        """
        if walk != self._walk or self._session.has_left or not self._session.is_own:
            return
        round = self._session.round
        if round == self._begun and not self._is_chosen:
            self.following, self._returned = self.start, True
        rest = self.held if round == self._before else ()
        self.held = ()
        with contextlib.suppress(PacelineError):  # the loop may have been left because the job has failed
            self._session.ask_scheduler(self._return_of(rest), f"return of samples to pool {self._name!r}")

    def _return_of(self, rest: Ranges) -> m.ReturnSamples:
        return m.ReturnSamples(self._name, self._number, list(rest), self._session.round)

    # ---- state -----------------------------------------------------------------------------------------------------

    def choose(self, epoch: int, left: Ranges = ()) -> None:
        """Say what the next walk begins with."""
        self.following = replace(self.following, epoch=epoch, left=() if left == everything(self._length) else left)
        self._is_chosen = True

    def rest(self) -> tuple[int, Ranges]:
        """Return the epoch, and the positions of it that are not trained on yet."""
        found = self._session.call_scheduler(m.AskSamples(self._name, self._session.round), f"pool {self._name!r}")
        assert isinstance(found, m.SamplesLeft)
        own = self._walk + (not (self._returned and self.following == self.start))
        if not found.is_known or (self._is_chosen and found.walk < own):
            return self.following.epoch, self.following.positions(self._length)
        if found.holders:
            _log.warning(
                "in the state of pool %r, the batches that workers %s hold count as not trained on; call "
                "store.barrier() on all workers before state_dict()",
                self._name, ", ".join(map(str, found.holders)),
            )  # fmt: skip
        return found.epoch, tuple(found.left) or everything(self._length)


def walker_of(session: Session, name: str, settings: State, limit: int) -> Walker:
    """Return this worker's side of a pool.

    Raises:
        ValueError: another sampler has the name for other data, or another order.
    """
    found = session.walkers.setdefault(name, Walker(session, name, settings, limit))
    assert isinstance(found, Walker)
    if (found.settings, found.limit) != (settings, limit):
        raise ValueError(
            f"this worker has a pool {name!r} with {found.settings} and stop_every={found.limit or None}; a sampler "
            f"with {settings} and stop_every={limit or None} cannot share it; give it a name of its own: name='...'"
        )
    return found
