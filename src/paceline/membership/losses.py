"""Workers that have died or left, and whether the job goes on without those that died.

A dead worker that the job goes on without is first *lost*, then *gone*::

    state   event                                              becomes   effect
    live    dies, and the job may go on                        lost      News to all: servers take it out
    lost    every live server says that it has taken it out    gone      barriers open, others get its samples
    lost    a server dies                                      -         the job fails

So no worker starts a round in which a server still expects the dead one. With the news that it is taken out, a server
says the last round that it has of the worker. The highest of all servers is the worker's last round: samples of that
round count as trained on, those of later rounds do not. Where a death cuts a round in two, so that some servers have
the worker's gradient and others do not, each range's mean is over the workers that brought one.

The job may go on if the setting ``on_worker_death`` says so; where it is empty, if a store was made and none of them is
in lock step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from paceline.membership.effects import describe
from paceline.wire import messages as m


class Losses:
    """The workers that are gone, and their last rounds."""

    def __init__(self, choice: str) -> None:
        self._choice = choice
        self._wishes: set[bool] = set()
        self.deaths: dict[int, m.Death] = {}
        """By rank, the deaths of the workers that the job goes on without."""
        self.rounds: dict[int, int] = {}
        """Last round that counts, by worker that is gone or has left."""
        self.history: list[m.Death | int] = []
        """The deaths without which the job went on, and the ranks in which others counted after that, in order."""
        self.noticed: set[int] = set()
        """Workers that have left under notice."""
        self._found: dict[int, dict[int, int]] = {}
        """Last round at each server that has taken it out, by lost worker that is not gone."""

    def note_store(self, goes_on: bool) -> None:
        """Note whether the workers of a store can go on without one that dies."""
        self._wishes.add(goes_on)

    @property
    def has_stores(self) -> bool:
        """Whether the workers have made a store of servers."""
        return bool(self._wishes)

    @property
    def may_go_on(self) -> bool:
        """Whether the job goes on when a worker dies."""
        return self._wishes == {True} if not self._choice else self._choice == "continue"

    @property
    def is_lock_step(self) -> bool:
        """Whether a store has all workers in lock step."""
        return False in self._wishes

    def rejoin(self, worker: int) -> int:
        """Note that another process has the rank of a worker that was gone, and counts; returns its last round."""
        self.deaths.pop(worker, None)
        self.history.append(worker)
        return self.rounds.pop(worker)

    def add(self, death: m.Death, counted: bool = True) -> None:
        """Note that a worker has died, and that the job goes on; or a process that did not count yet."""
        self.deaths[death.rank] = death
        if counted:
            self.history.append(death)
        self._found[death.rank] = {}

    def taken_out(self, server: int, found: Iterable[tuple[int, int]]) -> None:
        """Note which workers a server waits for no more, each with its last round there."""
        for worker, round in found:
            if worker in self._found:
                self._found[worker][server] = round

    def gone(self, servers: Collection[int]) -> list[int]:
        """Return the lost workers that all these servers have taken out since the last call; they are gone now."""
        found = [worker for worker, rounds in self._found.items() if rounds.keys() >= set(servers)]
        for worker in found:
            rounds = self._found.pop(worker).values()
            self.rounds[worker] = max([*rounds, self.rounds.get(worker, 0)])  # the latter: of the process before
        return found


def death_reply(death: m.Death, body: m.Body) -> m.Reply:
    """Return the reply to a request of a worker that counts as dead."""
    if isinstance(body, m.Heartbeat):
        return m.News([death], False)
    return m.Failed("PeerDiedError", f"{describe(death)}; the others went on without it")
