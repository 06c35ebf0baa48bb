"""The distributed store: one worker's interface to keys on the servers of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import torch

from paceline.layout import arguments as check
from paceline import compression
from paceline.compression import Compression
from paceline.consistency import Policy
from paceline.errors import KeyMismatchError
from paceline.layout.keys import Key, Keys, Values, by_key
from paceline.kvstore.base import KVStore, OptimizerLike, Updater
from paceline.kvstore.checkpoint import collective
from paceline.kvstore.checkpoint import optimizer_states as state_files
from paceline.kvstore.dist.calls import plan_pull, plan_push, pull_as_rows, pull_some_rows
from paceline.kvstore.dist.store_lifecycle import StoreLifecycle
from paceline.kvstore.dist.store_policy import local_merge_of
from paceline.kvstore.dist.optimizer import ServerOptimizer
from paceline.kvstore.options import no_optimizer, refuse_changes
from paceline.net.call import Call
from paceline.layout.tensors import check_initialised
from paceline.updaters import KeyOptions, Options, UpdaterSpec, is_whole_tensor, make_spec
from paceline.wire import messages as m
from paceline.worker.block import WorkerBlock
from paceline.worker.key_states import check_states, get_states, merge_stats, residuals, set_residuals
from paceline.worker.key_table import KeyTable
from paceline.worker.rows import RowTraffic
from paceline.worker.session import Session
from paceline.worker.traffic import Carried, Traffic
from paceline.worker.weight_sums import sums_of

RowAnswer: TypeAlias = Literal["merged", "changed"]


class DistStore(KVStore):
    """Keys on the servers of a job.

    Args:
        store_type: the type as the user wrote it, in lower case.
        session: this worker's connection to the job.
        policy: its rule.
        name: namespace of the keys.
        mean: merge to the mean over samples instead of the sum.
        clip_norm: largest norm of a merged gradient over all keys; 0: no limit. With a limit, every worker calls
            :meth:`clip_round` after its pushes of a round; only then are they applied and answered.
    """

    def __init__(
        self, store_type: str, session: Session, policy: Policy, name: str, mean: bool = False, clip_norm: float = 0.0
    ) -> None:
        self._type, self.session, self.policy, self.name = store_type, session, policy, name
        local_merge = local_merge_of(session, policy)
        self.table = KeyTable(session, name, policy.merge == "all", local_merge)
        self.traffic = Traffic(session, name, self.table.blocks, policy.merges_rounds)
        self.rows = RowTraffic(session, name, self.traffic)
        self.lifecycle = StoreLifecycle(session, name, policy, self.table, self.traffic)
        self._own_mean = mean
        """As it was made: an optimizer that has taken this store itself may have set another merging."""
        self._set_merging(mean, clip_norm)
        self.optimizer = ServerOptimizer(session, name, self.lifecycle, self.table)
        self.samples = 1.0
        """Samples behind the next pushes: their weight in a store that merges to the mean, and in the counters."""
        self._ignored: set[Key] = set()
        self._siblings = 0
        self._is_claimed = False
        self._handed_on = self.traffic.codecs
        """Codecs of stores for further optimizers: not those that an optimizer sets for itself on this one."""
        session.stores.add(self.lifecycle)
        session.notice.listen()

    def _set_merging(self, mean: bool, clip_norm: float) -> None:
        if clip_norm and not self.policy.merges_rounds:
            raise ValueError(f"a {self.type} store has no merged gradient to clip; clip in the worker")
        self.lifecycle.mean, self.traffic.clip_norm = mean, clip_norm

    # ---- properties ------------------------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        """The type as given to ``create``, in lower case."""
        return self._type

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.session.rank

    @property
    def num_workers(self) -> int:
        """Number of workers of the job."""
        return self.session.settings.num_workers

    @property
    def leaving(self) -> bool:
        """See :attr:`KVStoreBase.leaving`: after SIGTERM, ``paceline.notice()`` or ``paceline drain``."""
        return bool(self.session.notice.why)

    def num_dead_nodes(self) -> int:
        """Return the number of members of the job that are known to be dead."""
        return len(self.session.deaths())

    # ---- setting up ------------------------------------------------------------------------------------------------

    def for_optimizer(self, mean: bool | None = None, clip_norm: float = 0.0) -> DistStore:
        """See :meth:`KVStore.for_optimizer`. A new store has its own namespace.

        Raises:
            ValueError: ``clip_norm`` was given, but pushes of one round are not merged.
        """
        ours = self.lifecycle
        wanted = self._own_mean if mean is None else mean, clip_norm
        is_unused = not (self._is_claimed or self.table.keys) and self.optimizer.replaces
        if is_unused and not ours.is_open:
            self._set_merging(*wanted)
        if is_unused and wanted == (ours.mean, self.traffic.clip_norm):
            self._is_claimed, self._handed_on = True, dict(self.traffic.codecs)
            self.table.mixes_kinds = True
            return self
        other = self.sibling("optimizer", *wanted)
        other._is_claimed = True
        for leg, codec in self._handed_on.items():
            other.set_gradient_compression(codec.params() | {"leg": leg})
        return other

    def sibling(
        self, what: str, mean: bool = False, clip_norm: float = 0.0, policy: Policy | None = None
    ) -> DistStore:
        """Return a new store with its own namespace. Every worker calls it in the same order. ``rest``: no pushes."""
        self._siblings += 1
        policy = Policy() if what == "rest" else policy or self.policy
        name = f"{self.name}/{what}{self._siblings}"
        return DistStore(self._type, self.session, policy, name, mean, clip_norm)

    # ---- keys ------------------------------------------------------------------------------------------------------

    def init(self, key: Keys, value: Values) -> None:
        """Initialise keys, once each, with rank 0's values. Only shape and dtype of other workers' values are used."""
        given = by_key(key, value)
        values = {one: devices[0] for one, devices in given.items()}
        check_initialised(values.items())
        for one, devices in given.items():
            if len(devices) > 1:
                raise KeyMismatchError(f"init takes one value per key; {one!r} has {len(devices)}")
            self.table.check_new(one, devices[0])
        self.add_keys(list(values), list(values.values()))

    def add_keys(
        self, keys: Sequence[Key], values: Sequence[torch.Tensor], tags: Sequence[int] = ()
    ) -> list[WorkerBlock]:
        """Initialise keys in one arena per dtype; keys of different tags never share a bucket. For optimizers."""
        for key, value in zip(keys, values, strict=True):
            check.compressible(self.traffic.codecs, key, value.dtype, value.is_sparse)
        self.lifecycle.open()
        return self.table.add(keys, values, tags or [0] * len(keys), whole=is_whole_tensor(self.spec.name))

    def add_row_keys(self, keys: Sequence[Key], values: Sequence[torch.Tensor], answers: RowAnswer) -> None:
        """Initialise keys whose gradients are rows, and whose pushes are answered with rows (``rows``). For optimizers.

        Args:
            keys: new keys.
            values: dense values; with ``merged`` only their shapes and dtypes are used.
            answers: ``merged``: answers are the merged rows of the round, and the servers store no values.
                ``changed``: answers are the changed rows, and the servers store rank 0's values.

        Raises:
            ValueError: ``merged`` in a store whose updates do not merge the pushes of all workers.
        """
        if answers == "merged" and self.policy.merge != "all":
            raise ValueError(f"a {self.type} store has no merged gradient; that needs dist_sync")
        for one, value in zip(keys, values, strict=True):
            self.table.check_new(one, value)
        self.lifecycle.open()
        self.table.add(keys, values, [0] * len(keys), answers)

    # ---- push and pull ---------------------------------------------------------------------------------------------

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """See :meth:`KVStore.push`. ``priority`` is ignored: pushes are sent at once."""
        dense, by_rows = plan_push(self.table, key, value)
        self.optimizer.before_push(key)
        carried = self.carried()
        for place, devices in zip(self.table.locate(list(by_rows)), by_rows.values(), strict=True):
            self.rows.push(place, devices, carried)
        self.traffic.push(*dense, carried)

    def carried(self) -> Carried:
        """Return the arguments of the next push: the weight and the options that were set."""
        return Carried(self.samples, self.samples, options=self.optimizer.encoded)

    def pull(self, key: Keys, out: Values, priority: int = 0, ignore_sparse: bool = True) -> None:
        """See :meth:`KVStore.pull`."""
        dense, rows = plan_pull(self.table, key, out)
        self.traffic.pull(*dense)
        for one, targets in rows.items():
            if ignore_sparse:
                check.note_ignored(one, self._ignored)
            else:
                pull_as_rows(self.table, self.traffic, one, targets)

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push, then pull into ``out`` (into ``value`` itself when ``out`` is None)."""
        target = value if out is None else out
        outs, rows = plan_pull(self.table, key, target)
        self.push(key, value, priority)
        if rows:
            self.pull(key, target, priority, ignore_sparse=False)
        else:
            self.traffic.pull(*outs)

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """Initialise keys with rank 0's values and copy them into ``out``."""
        self.init(key, value)
        self.pull(key, out, priority)

    def row_sparse_pull(self, key: Keys, out: Values, priority: int = 0, row_ids: Values | None = None) -> None:
        """See :meth:`KVStore.row_sparse_pull`. The keys were initialised with row-sparse values.

        Raises:
            ValueError: a key was not, too.
        """
        pull_some_rows(self.table, self.rows, key, out, row_ids)

    def set_values(self, key: Keys, value: Values) -> None:
        """Overwrite stored values, after this worker's own pushes. When it returns, the servers have the values.

        One worker calls it between rounds: while no worker waits for an answer to a push. The other workers get the
        values with their next ``pull`` after a barrier. The optimizer's state is not changed, but float32 masters of
        2-byte values are. There is one dense tensor per key, in its shape.
        """
        self.session.wait(self.send_values(key, value))

    def send_values(self, key: Keys, value: Values) -> list[Call]:
        """Send values as :meth:`set_values` does, and do not wait for the servers; the values must not change until then."""
        (plan, values), by_rows = plan_push(self.table, key, value)
        if by_rows or any(not isinstance(one, torch.Tensor) for one in values):
            raise ValueError("set_values takes one dense value per key")
        return self.traffic.set_values(plan, values)

    def clip_round(self) -> float:
        """Clip the merged gradient of all pushes since the last call; returns its norm before clipping.

        For stores with ``clip_norm``. Every worker calls it after its last push of a round, before it waits.
        """
        return self.traffic.clip()

    # ---- what a push does ------------------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: OptimizerLike, **options: Any) -> None:
        """See :meth:`KVStore.set_optimizer`. Every worker calls it; rank 0's optimizer is used.

        Setting the same optimizer again changes nothing. An ``lr_scheduler`` stays in the worker, and its rates are sent
        with the pushes.
        """
        self.optimizer.set(optimizer, options)

    def set_updater(self, updater: str | Updater, **options: Any) -> None:
        """Set the updater by registered name (``assign``, ``add``). Every worker calls it; rank 0's updater is used.

        Raises:
            TypeError: a callable: servers never run a worker's code.
        """
        if not isinstance(updater, str):
            raise TypeError(
                f"a {self.type} store takes updaters by name, not callables: its servers never run a worker's code. "
                "Use set_updater('add', rate=...), set_optimizer, or a class that servers may load (--allow)"
            )
        self.set_spec(make_spec(updater, **options))

    def set_spec(self, spec: UpdaterSpec) -> None:
        """Set the updater as a spec; collective. The same one keeps its state.

        Raises:
            ValueError: the servers reject it; on every worker, with the same text.
        """
        if spec.name == "assign" and self.policy.merge != "all":
            raise ValueError(f"a {self.type} store needs an optimizer; replacing values only makes sense in dist_sync")
        self.optimizer.set_spec(spec)

    def set_options(self, groups: Sequence[Options] = (), keys: Mapping[Key, KeyOptions] | None = None) -> None:
        """See :meth:`KVStore.set_options`. The options are sent with every push from now on."""
        self._need_optimizer("change")
        refuse_changes(self.spec, groups)
        self.optimizer.set_options(groups, keys)

    def options(self) -> list[Options]:
        """See :meth:`KVStore.options`."""
        self._need_optimizer("read")
        return self.optimizer.options()

    def _need_optimizer(self, verb: str) -> None:
        if self.optimizer.replaces:
            raise no_optimizer(self.type, verb)

    def set_gradient_compression(self, compression_params: Compression) -> None:
        """Compress pushes, pulls or both. Every worker calls it, before its first push.

        Pulls are compressed when the answer to a push brings values. All workers that read the same version get the
        same bytes and hold the same values. Every other pull brings those values uncompressed. Rows are never
        compressed.

        Args:
            compression_params: ``{"type": "2bit", "threshold": 0.5, "leg": "push"}``; ``leg`` is ``push`` (default),
                ``pull`` or ``both``. For different codecs on the two legs give a list of two, or call it twice.

        Raises:
            ValueError: unknown settings, or a leg has another codec already.
            TypeError: a key is not float32 for pulls, or not of 16 or 32 bits for pushes.
        """
        known = self.traffic.codecs
        codecs = compression.by_leg(compression_params)
        for leg, codec in codecs.items():
            if leg in known and codec.params() != known[leg].params():
                raise ValueError(f"store {self.name!r} compresses its {leg} leg with {known[leg].params()} already")
        for block in self.table.blocks.values():
            for key in block.spec.keys:
                check.compressible(codecs, key.name, block.dtype, block.spec.rows)
        for leg, codec in codecs.items():
            self.lifecycle.open()
            body = m.SetCompression(self.name, msgspec.msgpack.encode(codec.params()), leg)
            self.lifecycle.ask_all_servers(body, f"setting compression of the {leg} leg")
            known[leg] = codec

    @property
    def spec(self) -> UpdaterSpec:
        """The updater that a push runs."""
        return self.optimizer.spec

    # ---- state -----------------------------------------------------------------------------------------------------

    def optimizer_states(self) -> dict[Key, dict[str, torch.Tensor]]:
        """Return the optimizer's state of every key, whole, after this worker's own pushes are applied.

        Raises:
            ValueError: the servers run no optimizer.
        """
        self._need_optimizer("read")
        self.lifecycle.wait_for_own_requests()
        return get_states(self.session, self.name, self.table)

    def set_optimizer_states(self, states: Mapping[Key, Mapping[str, Any]]) -> None:
        """Set the optimizer's state of keys on the servers, after this worker's own pushes are applied.

        Raises:
            KeyMismatchError: a key is not initialised. No state changes.
            ValueError: the servers run no optimizer, or a tensor does not have its key's shape. No state changes.
        """
        self._need_optimizer("set")
        self.optimizer.set_states(states)

    def replace_optimizer_states(self, states: Mapping[Key, Mapping[str, Any]]) -> None:
        """Replace the optimizer's state of all keys by worker 0's; other keys begin anew. Every worker calls it.

        Raises:
            CheckpointError: worker 0 raises the error of :meth:`set_optimizer_states`. No state changes.
        """
        mine = states if self.session.is_lead else {}
        collective.agree(self, "comparing states with keys", lambda: check_states(self.table, mine, self.spec))
        self.optimizer.replace_states(mine)

    @property
    def keeps_residuals(self) -> bool:
        """Whether the codec of pushes keeps residuals: it adds the rest that it did not send to the next push."""
        codec = self.traffic.codecs.get("push")
        return codec is not None and codec.uses_residual

    def codec_states(self) -> dict[Key, dict[str, torch.Tensor]]:
        """Return the residuals of this worker's pushes by key: float32, in the key's shape."""
        return residuals(self.table) if self.keeps_residuals else {}

    def set_codec_states(self, states: Mapping[Key, Mapping[str, torch.Tensor]]) -> None:
        """Set the residuals of this worker's pushes; those of other keys become 0."""
        set_residuals(self.table, states)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the optimizer's state, gathered from all servers, to one safetensors file.

        One worker is enough, unless pushes are compressed by a codec with residuals. Then every worker calls it, at the
        same point of its training: worker 0 writes ``fname``, and worker r its residuals to
        ``<fname>.rank<r>.<digest>``. With compressed pulls ``fname`` also holds the residuals of the saving worker's
        pulls (``unsent``): save the weights of the same worker with it.

        Raises:
            CheckpointError: the file cannot be written; an old file is unchanged.
            ValueError: the servers run no optimizer: where workers step, :func:`paceline.save` saves its state.
        """
        self._need_optimizer("save")
        groups = self.optimizer.groups if dump_optimizer else None
        state_files.save(self, fname, self.optimizer_states, optimizer=self.spec.name, groups=groups)

    def load_optimizer_states(self, fname: str) -> None:
        """Read files of ``save_optimizer_states``, with any number of servers. Every worker calls it.

        Worker 0 reads ``fname``, and worker r its own residuals. If worker r has no file, they start at 0, with a
        warning. Other states of codecs (PowerSGD's Q, the round that draws the elements of randomk) are reset.

        Raises:
            CheckpointError: on all workers: a file is missing or damaged, or is of another save. No state changes.
            ValueError: the servers run no optimizer, or another one. No state changes, nor where keys differ.
        """
        self._need_optimizer("load")
        loaded = state_files.load(self, fname, everywhere=False, optimizer=self.spec.name)
        options, mine = loaded.options(len(self.optimizer.groups)), loaded.states or {}
        collective.agree(self, "comparing states with keys", lambda: check_states(self.table, mine, self.spec))
        collective.agree(self, "setting residuals", lambda: state_files.set_residuals(self, loaded.own))
        self.optimizer.replace_states(mine)
        self.set_options(options)

    # ---- the rest --------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all workers of the store have called this; servers do not wait for their pushes meanwhile."""
        self.lifecycle.barrier()

    def tell_step(self, name: str, step: int, weights: Mapping[str, torch.Tensor], batch: m.StepBatch | None) -> None:
        """Let the scheduler compare this worker's weights, if in lock step, and batch with others'. Does not wait."""
        sums = sums_of(weights, step) if weights and self.policy.merge == "all" else []
        if self.num_workers > 1 and (sums or batch is not None):
            self.session.to_tell.step(m.WorkerStep(name, step, sums, batch))

    def send_command_to_servers(self, head: str, body: str = "") -> list[str]:
        """Run a registered server command on every server and return the answers in server order."""
        answers = self.lifecycle.ask_all_servers(m.Command(head, body), f"command {head!r}")
        return [answer.body for answer in answers if isinstance(answer, m.CommandAnswer)]

    def stats(self) -> dict[str, Any]:
        """Return counters over all servers.

        ``updates``, the histogram of their ``staleness`` (exact below 64, then to 3 %), ``step_mass`` (the sum of their
        weights times learning rates), ``data_mass`` (samples per worker that were applied), ``dropped`` (pushes that
        were too old) and ``dropped_by_worker``, ``network_bytes``. All but ``staleness`` and ``network_bytes`` are
        means over slots: one round of all keys counts as one. The servers forget them with the store: call this before
        ``close()``.
        """
        self.lifecycle.open()
        return merge_stats(self.lifecycle.ask_all_servers(m.AskStats(self.name), "counters"))

    def close(self) -> None:
        """Leave the store: servers and workers do not wait for this worker any more. Idempotent.

        A store that this worker never used is left too, because other workers may use it. When all workers have left,
        the servers forget it. Until then a store takes memory on all servers, and here even without a reference to it.
        This worker can still read the values, but do nothing else with the store.
        """
        self.lifecycle.close()
