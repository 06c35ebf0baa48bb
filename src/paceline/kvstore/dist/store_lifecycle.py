"""Lifecycle of a store on the servers: it opens the store, runs its barriers, and leaves it.

| state  | event           | the servers get | next state |
|--------|-----------------|-----------------|------------|
| new    | first use       | ``OpenStore``   | open       |
| new    | ``close()``     | ``OpenStore``, ``Leave`` (the scheduler, too) | closed |
| open   | ``barrier()``   | ``Pause``       | open       |
| open   | ``go_away()``, ``come_back()`` | ``Away``, ``Back`` | open |
| open   | ``follow_groups()`` and other groups fit | ``Regroup`` | open |
| open   | ``close()``     | ``Leave`` (the scheduler, too) | closed |
| any    | ``close()`` after the job has failed | nothing | closed |
| open   | the worker ends | nothing: the scheduler tells them | closed |

Before ``Leave`` a worker waits for its own requests and copies
the values out of the servers' memory. After ``Leave`` the servers continue without this worker.
"""

from __future__ import annotations

import contextlib
from typing import Any

from paceline.config import variable
from paceline.consistency import Policy
from paceline.errors import ConfigError, PacelineError
from paceline.wire import messages as m
from paceline.worker.key_table import KeyTable
from paceline.worker.joining import Part
from paceline.worker.session import Session
from paceline.worker.traffic import Traffic


class StoreLifecycle:
    """Opens a store on all servers, runs its barriers, and leaves it."""

    def __init__(self, session: Session, name: str, policy: Policy, table: KeyTable, traffic: Traffic) -> None:
        self._session, self.name, self._policy, self._table, self._traffic = session, name, policy, table, traffic
        self._barriers = self._generation = 0
        self._is_closed = self._has_left = False
        self._unfinished: BaseException | None = None
        self.is_open = False
        """Whether the store is open on the servers. From then on its merging cannot change."""
        self.mean = False
        """Merge to the mean over samples instead of the sum."""
        self._pauses = 0
        session.joining.add(f"store {name}", Part(self._standing, self._stand))

    def _standing(self) -> Any:
        return {"barriers": self._barriers, "generation": self._generation, "pauses": self._pauses}

    def _stand(self, there: Any) -> None:
        """Be where the others are that have been there before."""
        if there is not None:
            self._barriers, self._generation = there["barriers"], there["generation"]
            self._pauses = there["pauses"]

    @property
    def elements(self) -> int:
        """Number of elements of the values of all keys."""
        return sum(block.values.numel() for block in self._table.blocks.values())

    def open(self) -> None:
        """Open the store on all servers, unless it is open."""
        if self.is_open:
            return
        self._claim_groups()
        self.is_open = True
        policy = self._policy
        bound = -1 if policy.bound is None else policy.bound
        age = -1 if policy.age is None else policy.age
        groups = [list(group) for group in policy.groups]
        body = m.OpenStore(
            self.name, policy.merge, groups, policy.first, bound, policy.weighting, self.mean,
            self._session.settings.merges_locally(policy.merge), self._traffic.clip_norm, age, policy.lr_scale,
            policy.grace_s,
        )  # fmt: skip
        self.ask_all_servers(body, f"opening store {self.name!r}")
        if self._session.stores.phase:
            self._come_back()

    def _claim_groups(self) -> None:
        """Refuse a second store with groups that change: workers that move between rounds of both may wait in a circle.

        Raises:
            ConfigError: there is another one.
        """
        if not self._session.settings.regroup_rounds or self._policy.merge != "groups":
            return
        if self._session.kind.grouped_store not in ("", self.name):
            raise ConfigError(
                f"the groups of store {self._session.kind.grouped_store!r} follow the workers' speeds, so there can be no "
                f"second dist_gsync store, {self.name!r}; close the first one, or let groups stay: "
                f"{variable('regroup_rounds')}=0"
            )
        self._session.trains(grouped_store=self.name)

    def ask_all_servers(self, body: m.Request, what: str) -> list[m.Body]:
        """Send a request to every server and return the answers, in server order."""
        calls = [self._session.ask_server(server, body, what) for server in range(len(self._session.servers))]
        self._session.wait(calls)
        return [call.body for call in calls if call.body is not None]

    def wait_for_own_requests(self) -> None:
        """Wait for the answers to all of this worker's pushes and pulls."""
        sides = [side for block in self._table.blocks.values() for side in block.buckets]
        self._session.wait([call for side in sides for _, call in side.sending])

    def barrier(self) -> None:
        """Wait until all workers that have not left the store have called this.

        Servers do not wait for pushes of a worker that has called it. Some workers may not have opened the store yet.
        Then the servers' barrier does not open by itself: all wait once more, until the others are back.
        """
        self._barriers += 1
        name = f"{self.name}/{self._barriers}"
        self.pause()
        try:
            if self._session.barrier(name, self.name, self._is_at_servers):
                self._come_back()
                self._session.barrier(f"{name}/back", self.name)
        except PacelineError:
            with contextlib.suppress(PacelineError):  # a worker may go on after this error, and is waited for then
                self._come_back()
            raise
        for block in self._table.blocks.values():
            block.fresh = [False] * len(block.fresh)

    def pause(self) -> None:
        """Tell the servers that no worker shall wait for this worker's pushes until all workers have told them this."""
        self._pauses += 1
        if self._is_at_servers:
            self.ask_all_servers(m.Pause(self.name), "entering a barrier")

    def go_away(self) -> None:
        """Tell the servers that no worker shall wait for this worker's pushes until it comes back, or a barrier opens."""
        if self._is_at_servers:
            self.ask_all_servers(m.Away(self.name), "going away")

    def come_back(self) -> None:
        """Tell the servers that others in this worker's phase wait for its pushes, from its next round on."""
        if self._is_at_servers:
            self.wait_for_own_requests()
            self._come_back()

    def _come_back(self) -> None:
        if self._is_at_servers:
            self.ask_all_servers(m.Back(self.name, self._session.stores.phase), "coming back")

    @property
    def section(self) -> tuple[int, int]:
        """Number of the part of the job in which workers in lock step make equally many rounds; it only grows.

        Before a meeting, and while a worker is away, some make rounds that others do not make.
        """
        return self._pauses, self._session.stores.phase

    @property
    def _is_at_servers(self) -> bool:
        return self.is_open and not self._is_closed

    def follow_groups(self) -> None:
        """Step with the group that fits this worker's speed, between two rounds: none of its pushes is in flight.

        All workers do, each when it learns of the groups. Others wait for its first push in the new group.
        """
        generation, groups = self._session.fitting_groups
        if generation <= self._generation:
            return
        policy = self._policy
        if not self.is_open or policy.merge != "groups" or policy.bound is not None or self._traffic.clip_norm:
            return
        self._generation = generation
        self.ask_all_servers(m.Regroup(self.name, generation, groups), f"moving to groups {groups}")

    def close(self) -> None:
        """Leave the store: servers and workers do not wait for this worker any more. Idempotent.

        Does nothing in a forked child. If the job has failed, it only releases what this worker holds.
        """
        if self._is_closed or self._session.has_left or not self._session.is_own:
            return
        if self._session.failure is not None:
            self._release()
            return
        self.open()
        self._is_closed = True
        self.finish()
        self.ask_all_servers(m.Leave(self.name), f"leaving store {self.name!r}")
        self._session.call_scheduler(m.Leave(self.name), f"leaving store {self.name!r}")
        self._release()

    def _release(self) -> None:
        self._is_closed = self._has_left = True
        self._session.close_store(self)
        for block in self._table.blocks.values():
            block.detach()
            block.close()

    def finish(self) -> None:
        """Wait for this worker's own requests, and copy the values out of the servers' memory.

        Raises:
            PacelineError: a request failed, now or in an earlier call.
        """
        if self._has_left:
            return
        if self._unfinished is not None:
            raise PacelineError(f"store {self.name!r} could not be left: {self._unfinished}") from self._unfinished
        try:
            self.wait_for_own_requests()
        except BaseException as error:
            # Process border: after any error, a later call must not tell the others that this worker has finished.
            self._unfinished = error
            raise
        for block in self._table.blocks.values():
            block.detach()  # before servers and workers continue without this worker
