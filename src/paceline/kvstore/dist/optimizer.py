"""Sets the updater that servers run for a store, and its options, which are sent with pushes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paceline.layout.keys import Key, Keys, checked_table
from paceline.kvstore.base import OptimizerLike
from paceline.kvstore.dist.store_lifecycle import StoreLifecycle
from paceline.kvstore.options import Schedule, in_force, own_class, plain_keys, schedule_of
from paceline.updaters import (
    KeyOptions,
    Options,
    StepOptions,
    UpdaterSpec,
    check_numbers,
    is_whole_tensor,
    make_spec,
)
from paceline.wire import messages as m
from paceline.worker.key_states import check_states, set_states
from paceline.worker.key_table import KeyTable
from paceline.worker.session import Session


class ServerOptimizer:
    """Sets the updater on the servers, and the options that are sent with every push.

    Attributes:
        spec: the updater that a push runs.
        encoded: the options that every push carries; empty: those of the spec.
    """

    def __init__(self, session: Session, name: str, lifecycle: StoreLifecycle, table: KeyTable) -> None:
        self._session, self._name = session, name
        self._lifecycle, self._table = lifecycle, table
        self.spec, self.encoded = UpdaterSpec(), b""
        self._groups: Sequence[Options] = ()
        self._keys: Mapping[Key, KeyOptions] | None = None
        self._schedule: Schedule | None = None

    @property
    def replaces(self) -> bool:
        """Whether a push replaces the stored value: no optimizer or updater was set."""
        return self.spec.name == "assign"

    def set(self, optimizer: OptimizerLike, options: dict[str, Any]) -> None:
        """Set an optimizer with its options; collective. An ``lr_scheduler`` stays in the worker."""
        schedule = schedule_of(options)
        self.set_spec(make_spec(optimizer, **plain_keys(options)))
        self._schedule = schedule

    def set_spec(self, spec: UpdaterSpec) -> None:
        """Set the updater; collective. Rank 0's updater is used. The same one keeps its state.

        Raises:
            ValueError: the servers reject it; on every worker, with the same text.
        """
        self._send(spec, fresh=False)
        self.spec, self._groups, self._keys = spec, (), None
        if self.encoded:  # servers keep the updater of an equal spec, with the options that it got last
            self._encode()
        self._lifecycle.barrier()

    def _send(self, spec: UpdaterSpec, fresh: bool) -> None:
        blocks = self._table.blocks.values()
        parts = [(block, part) for block in blocks for bucket in block.layout.buckets for part in bucket.parts]
        if is_whole_tensor(spec.name) and any(part.length != block.numel(part.key) for block, part in parts):
            raise ValueError(f"optimizer {spec.name!r} needs whole tensors, but keys are split; set it before init")
        self._lifecycle.open()
        if self._table.keys:  # the old updater applies all earlier pushes of all workers
            self._lifecycle.wait_for_own_requests()
            self._lifecycle.barrier()
        refused = b""
        if self._session.is_lead:
            body = m.SetUpdater(self._name, msgspec.msgpack.encode(spec), fresh)
            try:
                self._lifecycle.ask_all_servers(body, f"setting optimizer {spec.name!r}")
            except (ValueError, TypeError) as error:
                refused = str(error).encode()
        reason = next(filter(None, self._session.gather(f"{self._name}/updater", refused)), b"")
        if reason:
            raise ValueError(reason.decode())

    def set_options(self, groups: Sequence[Options] = (), keys: Mapping[Key, KeyOptions] | None = None) -> None:
        """Set options of param groups and keys; they are sent with every push from now on."""
        if groups and keys is None and groups == self._groups:
            return  # as in most steps
        check_numbers(groups, keys)
        self._groups = copy.deepcopy(list(groups)) or self._groups  # a caller may change its lists in place
        self._keys = self._keys if keys is None else checked_table(keys)
        self._encode()

    def _encode(self) -> None:
        table = None if self._keys in (None, self.spec.keys) else dict(self._keys or {})
        self.encoded = msgspec.msgpack.encode(StepOptions(list(self._groups), table))

    @property
    def groups(self) -> Sequence[Options]:
        """The options per param group that were given."""
        return self._groups or self.spec.groups

    def options(self) -> list[Options]:
        """Return the current options, per param group."""
        try:
            return in_force(self.groups, own_class(self.spec))
        except (ImportError, ValueError):  # only servers load it
            return in_force(self.groups, None)

    # ---- state -----------------------------------------------------------------------------------------------------

    def set_states(self, states: Mapping[Key, Mapping[str, Any]]) -> None:
        """Set the optimizer's state of keys, after this worker's own pushes are applied; checks all of it before."""
        check_states(self._table, states, self.spec)
        self._lifecycle.wait_for_own_requests()
        set_states(self._session, self._name, self._table, states)

    def replace_states(self, states: Mapping[Key, Mapping[str, Any]]) -> None:
        """Set the optimizer's state of keys, and forget that of all others; collective. ``states`` are one worker's."""
        self._send(self.spec, fresh=True)
        self._lifecycle.barrier()
        if states:
            self.set_states(states)
        self._lifecycle.barrier()

    # ---- pushes ----------------------------------------------------------------------------------------------------

    def before_push(self, key: Keys) -> None:
        """Set the learning rate of a push of keys, if a schedule is set."""
        if self._schedule is not None:
            self.set_options(self._schedule.groups(key, self.groups))

