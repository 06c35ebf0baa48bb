"""The distributed stores: a worker's side of the parameter server."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import torch

from paceline import arguments as check
from paceline import compression
from paceline.compression import Compression
from paceline.consistency import Policy
from paceline.errors import KeyMismatchError, PacelineError
from paceline.keys import Key, Keys, Values, checked_table, normalise
from paceline.kvstore import codec_files
from paceline.kvstore.base import KVStore, OptimizerLike, Updater
from paceline.kvstore.options import class_of, in_force, plain_keys
from paceline.kvstore.schedule import Schedule, schedule_of
from paceline.tensors import check_initialised
from paceline.updaters import KeyOptions, Options, StepOptions, UpdaterSpec, gradient, is_whole_tensor, make_spec
from paceline.updaters.rows import put_rows, to_rows
from paceline.wire import messages as m
from paceline.worker import states as dist_states
from paceline.worker.block import WorkerBlock
from paceline.worker.key_table import KeyTable
from paceline.worker.overwrite import overwrite
from paceline.worker.planned import planned_pull, planned_push
from paceline.worker.reports import merged
from paceline.worker.row_traffic import RowTraffic, own_bucket
from paceline.worker.session import Session
from paceline.worker.traffic import Traffic

logger = logging.getLogger(__name__)

RowAnswer: TypeAlias = Literal["merged", "changed"]


class DistStore(KVStore):
    """Keys on the servers of a job.

    Args:
        store_type: canonical type, e.g. ``dist_sync``.
        alias: the type as the user wrote it.
        session: this worker's part in the job.
        policy: merge, bound, weighting and age limit.
        name: namespace of the keys.
        mean: merge to the mean over samples instead of the sum.
        clip_norm: the largest norm of a merged gradient over all keys; 0: no limit. With one, every worker calls
            :meth:`clip_round` after its pushes of a round; only then are they applied and answered.
    """

    def __init__(
        self,
        store_type: str,
        alias: str,
        session: Session,
        policy: Policy,
        name: str,
        mean: bool = False,
        clip_norm: float = 0.0,
    ) -> None:
        self._canonical, self._alias, self.session, self.policy, self.name = store_type, alias, session, policy, name
        self._spec = UpdaterSpec()
        self._groups: Sequence[Options] = ()
        self._keys: Mapping[Key, KeyOptions] | None = None
        self._ignored: set[Key] = set()
        self._schedule: Schedule | None = None
        whole, still = (lambda: is_whole_tensor(self._spec.name)), policy.merge == "all"
        self.table = KeyTable(session, name, whole, still, session.relays(policy))
        self.traffic = Traffic(session, name, eager=policy.merges_rounds)
        self.rows = RowTraffic(session, name, self.traffic)
        self._set_merging(mean, clip_norm)
        self._barriers = self._siblings = 0
        self._is_open = self._closed = self._left = self._claimed = False
        self._unfinished: BaseException | None = None
        session.on_close(self._finish)

    def _set_merging(self, mean: bool, clip_norm: float) -> None:
        if clip_norm and not self.policy.merges_rounds:
            raise ValueError(f"a {self.type} store has no merged gradient to clip; clip in the worker")
        self._mean, self.traffic.clip_norm = mean, clip_norm

    # ---- who and what ----------------------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        """The type as given to ``create``, in lower case."""
        return self._alias

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.session.rank

    @property
    def num_workers(self) -> int:
        """Workers of the job."""
        return self.session.settings.num_workers

    def num_dead_nodes(self) -> int:
        """How many members of the job are known to be dead."""
        return len(self.session.deaths())

    # ---- setting up ------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Make the store known to the servers, at the first use."""
        if self._is_open:
            return
        self._is_open = True
        policy = self.policy
        bound = -1 if policy.bound is None else policy.bound
        age = -1 if policy.age is None else policy.age
        groups = [list(group) for group in policy.groups]
        body = m.OpenStore(
            self.name, policy.merge, groups, policy.first, bound, policy.weighting, self._mean,
            self.session.settings.local_merge, self.traffic.clip_norm, age,
        )  # fmt: skip
        self._on_all_servers(body, f"opening store {self.name!r}")

    def for_optimizer(self, mean: bool | None = None, clip_norm: float = 0.0) -> DistStore:
        """See :meth:`KVStore.for_optimizer`. Another store has a namespace of its own.

        Raises:
            ValueError: a largest norm, and pushes of one round are not merged.
        """
        wanted = self._mean if mean is None else mean, clip_norm
        unused = not (self._claimed or self.table.keys) and self._spec.name == "assign"
        if unused and not self._is_open:
            self._set_merging(*wanted)
        if unused and wanted == (self._mean, self.traffic.clip_norm):
            self._claimed = True
            return self
        other = self.sibling("optimizer", *wanted)
        other._claimed = True
        for leg, codec in self.traffic.codecs.items():
            other.set_gradient_compression(codec.params() | {"leg": leg})
        return other

    def sibling(self, what: str, mean: bool = False, clip_norm: float = 0.0) -> DistStore:
        """Return another store with a namespace of its own; every worker makes the same ones in the same order.

        One for the ``rest`` of a model is never pushed to, so it needs no optimizer.
        """
        self._siblings += 1
        policy = Policy() if what == "rest" else self.policy
        name = f"{self.name}/{what}{self._siblings}"
        return DistStore(self._canonical, self._alias, self.session, policy, name, mean, clip_norm)

    def _on_all_servers(self, body: m.Request, what: str) -> list[m.Body]:
        tickets = [self.session.ask_server(server, body, what) for server in range(len(self.session.servers))]
        self.session.wait(tickets)
        return [ticket.body for ticket in tickets if ticket.body is not None]

    # ---- keys ------------------------------------------------------------------------------------------------------

    def init(self, key: Keys, value: Values) -> None:
        """Initialise keys, once each, with rank 0's values; other workers' values only say shape and dtype."""
        keys, values = normalise(key, value)
        check_initialised([(one, devices[0]) for one, devices in zip(keys, values, strict=True)])
        for one, devices in zip(keys, values, strict=True):
            if len(devices) > 1:
                raise KeyMismatchError(f"init takes one value per key; {one!r} has {len(devices)}")
            self.table.check_new(one, devices[0])
        self.add_keys(keys, [devices[0] for devices in values])

    def add_keys(
        self, keys: Sequence[Key], values: Sequence[torch.Tensor], tags: Sequence[int] = ()
    ) -> list[WorkerBlock]:
        """Initialise keys in one arena per dtype; keys of different tags never share a bucket. For front doors."""
        if "pull" in self.traffic.codecs:
            check.float32_for_pulls(keys, [value.dtype for value in values])
        self._open()
        return self.table.add(keys, values, tags or [0] * len(keys))

    def add_row_keys(self, keys: Sequence[Key], values: Sequence[torch.Tensor], answers: RowAnswer) -> None:
        """Initialise keys whose gradients are rows, and whose pushes bring rows back (``rows``). For front doors.

        Args:
            keys: to add.
            values: dense; with ``merged`` only their shapes and dtypes count.
            answers: ``merged``: the merged rows of the round; nothing is stored, so keys of any size cost the servers
                nothing. ``changed``: rank 0's values are stored, and what comes back are the rows that changed.

        Raises:
            ValueError: ``merged`` in a store whose updates are not made of the pushes of all workers.
        """
        if answers == "merged" and self.policy.merge != "all":
            raise ValueError(f"a {self.type} store has no merged gradient; that needs dist_sync")
        for one, value in zip(keys, values, strict=True):
            self.table.check_new(one, value)
        self._open()
        self.table.add(keys, values, [0] * len(keys), answers)

    # ---- push and pull ---------------------------------------------------------------------------------------------

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Send values; device values of one key are summed. Returns before the update is applied.

        ``priority`` orders nothing here: what is pushed leaves at once.
        """
        dense, by_rows = planned_push(self.table, key, value)
        if self._schedule is not None:
            self.set_options(self._schedule.groups(key, self._groups or self._spec.groups))
        for place, devices in zip(self.table.locate(list(by_rows)), by_rows.values(), strict=True):
            self.rows.push(place, devices)
        self.traffic.push(*dense)

    def pull(self, key: Keys, out: Values, priority: int = 0, ignore_sparse: bool = True) -> None:
        """See :meth:`KVStore.pull`."""
        dense, rows = planned_pull(self.table, key, out)
        self.traffic.pull(*dense)
        for one, targets in rows.items():
            if ignore_sparse:
                check.note_ignored(one, self._ignored)
            else:
                self._pull_rows(one, targets)

    def _pull_rows(self, key: Key, targets: Sequence[torch.Tensor]) -> None:
        """Bring the whole value of a key into row-sparse targets."""
        [(block, index)] = self.table.locate([key])
        whole = torch.empty_like(block.value_of(index))
        self.traffic.pull(self.table.plan((key,)), [whole])
        with torch.no_grad():
            for target in targets:
                target.copy_(to_rows(whole).to(target.device, target.dtype))

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push, then pull into ``out`` (into ``value`` itself when ``out`` is None)."""
        target = value if out is None else out
        outs, rows = planned_pull(self.table, key, target)
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
        """Pull only some rows of keys that were initialised with sparse values, after this worker's own pushes.

        Args:
            key: such keys.
            out: a sparse target holds the asked rows afterwards and nothing else; in a dense target of the key's shape
                the asked rows are refreshed and the others stay.
            priority: ignored here.
            row_ids: row numbers of any integer dtype and shape, one tensor per key or per target; repeats are allowed.

        Raises:
            ValueError: no ``row_ids``, numbers outside of the value, another shape, or a key that is not row-sparse.
        """
        if row_ids is None:
            raise ValueError("row_sparse_pull needs row_ids: the numbers of the rows to pull")
        outs, ids = (dict(zip(*normalise(key, one), strict=True)) for one in (out, row_ids))
        places = dict(zip(outs, self.table.locate(list(outs)), strict=True))
        values = {one: block.value_of(index) for one, (block, index) in places.items()}
        check.outputs(values, outs)
        chosen = {one: check.row_ids(one, values[one], ids[one], len(targets)) for one, targets in outs.items()}
        for one, place in places.items():
            if own_bucket(place) is None:
                raise ValueError(f"key {one!r} has no place of its own for rows: initialise it with a sparse value")
        for one, targets in outs.items():
            for target, rows in zip(targets, chosen[one], strict=True):
                put_rows(self.rows.pull(places[one], rows), rows, target)

    def set_values(self, key: Keys, value: Values) -> None:
        """Overwrite stored values: they are in place on the servers when this returns, after this worker's own pushes.

        One worker is enough, outside of any round: while no other worker has pushed what it still waits for. The others
        get the values with their next ``pull`` after a barrier. The optimizer's state stays; float32 masters of 2-byte
        values follow.

        Args:
            key: initialised keys.
            value: one dense tensor per key, in its shape.
        """
        (plan, values), by_rows = planned_push(self.table, key, value)
        if by_rows or any(not isinstance(one, torch.Tensor) for one in values):
            raise ValueError("set_values takes one dense value per key")
        overwrite(self.session, self.name, plan, values, self.traffic.wait)

    def clip_round(self, skip_nonfinite: bool = False) -> float:
        """Clip the merged gradient of what was pushed since the last call; returns its norm before.

        For stores that were made with ``clip_norm``: every worker calls it after the last push of a round and before it
        waits for the answers.

        Args:
            skip_nonfinite: make no update, on any worker's behalf, when the norm is not finite.
        """
        return self.traffic.clip(skip_nonfinite)

    # ---- what a push does ------------------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: OptimizerLike, **options: Any) -> None:
        """See :meth:`KVStore.set_optimizer`. Every worker calls it; rank 0's counts. Same again: nothing changes.

        An ``lr_scheduler`` stays in the worker, and its rates travel with the pushes.
        """
        schedule, before = schedule_of(options), self._schedule
        self.set_spec(make_spec(optimizer, **plain_keys(options)))
        self._schedule = schedule
        if before is not None:
            self.set_options()  # back from its last rate

    def set_updater(self, updater: str | Updater, **options: Any) -> None:
        """Set what a push does, by registered name (``assign``, ``add``). Every worker calls it; rank 0's counts.

        Raises:
            TypeError: a callable: servers never run a worker's code.
        """
        if not isinstance(updater, str):
            raise TypeError(
                f"a {self.type} store takes updaters by name, not callables: its servers never run a worker's code. "
                "Use set_updater('add', rate=...), set_optimizer, or a class that servers may load (--allow-optimizer)"
            )
        self.set_spec(make_spec(updater, **options))

    def set_spec(self, spec: UpdaterSpec) -> None:
        """Set the updater as a spec; collective.

        Raises:
            ValueError: the servers refuse it; on every worker, with the same text.
        """
        if spec.name == "assign" and self.policy.merge != "all":
            raise ValueError(f"a {self.type} store needs an optimizer; replacing values only makes sense in dist_sync")
        if is_whole_tensor(spec.name) and any(_is_split(block) for block in self.table.blocks.values()):
            raise ValueError(f"optimizer {spec.name!r} needs whole tensors, but keys are split; set it before init")
        self._open()
        if self.table.keys:  # what anybody has pushed so far is the business of the updater so far
            self._wait_for_all()
            self.barrier()
        refused = b""
        if self.rank == 0:
            body = m.SetUpdater(self.name, msgspec.msgpack.encode(spec))
            try:
                self._on_all_servers(body, f"setting optimizer {spec.name!r}")
            except (ValueError, TypeError) as error:
                refused = str(error).encode()
        told = next(filter(None, self.session.gather(f"{self.name}/updater", refused)), b"")
        if told:
            raise ValueError(told.decode())
        self._spec, self._groups, self._keys = spec, (), None
        self.traffic.options = b""
        self.barrier()

    def set_options(self, groups: Sequence[Options] = (), keys: Mapping[Key, KeyOptions] | None = None) -> None:
        """See :meth:`KVStore.set_options`. They travel with every push from now on."""
        gradient.check(groups)
        self._groups = list(groups) or self._groups
        self._keys = self._keys if keys is None else checked_table(keys)
        table = None if self._keys in (None, self._spec.keys) else dict(self._keys or {})
        self.traffic.options = msgspec.msgpack.encode(StepOptions(list(self._groups), table))

    def options(self) -> list[Options]:
        """See :meth:`KVStore.options`."""
        if self._spec.name == "assign":
            raise ValueError(f"the {self.type} store has no optimizer whose options it could read; call set_optimizer")
        return in_force(self._groups or self._spec.groups, class_of(self._spec))

    @property
    def samples(self) -> float:
        """Samples behind the next pushes: their weight in a store that merges to the mean, and in the counters."""
        return self.traffic.samples

    @samples.setter
    def samples(self, samples: float) -> None:
        self.traffic.samples = samples

    def set_gradient_compression(self, compression_params: Compression) -> None:
        """Compress pushes, pulls or both; every worker calls it, before its first push.

        What is pulled compressed are the values that come with the answer to a push. All workers that read the same
        version get the same bytes and hold the same values; every other pull brings those values as they are.
        Keys initialised with row-sparse values travel uncompressed where they are pushed by rows.

        Args:
            compression_params: ``{"type": "2bit", "threshold": 0.5, "leg": "push"}``; ``leg`` is ``push`` (default),
                ``pull`` or ``both``. For a codec of its own on each leg, a list of two, or one call for each.

        Raises:
            ValueError: unknown settings, or a leg has another codec already.
            TypeError: pulls are to be compressed, and a key is not float32.
        """
        codecs = compression.by_leg(compression_params)
        for leg, codec in codecs.items():
            known = self.traffic.codecs.get(leg)
            if known is not None and codec.params() != known.params():
                raise ValueError(f"store {self.name!r} compresses its {leg} leg with {known.params()} already")
        if "pull" in codecs:
            for block in self.table.blocks.values():
                check.float32_for_pulls([key.name for key in block.spec.keys], [block.dtype] * len(block.spec.keys))
        for leg, codec in codecs.items():
            self._open()
            body = m.SetCompression(self.name, msgspec.msgpack.encode(codec.params()), leg)
            self._on_all_servers(body, f"setting compression of the {leg} leg")
            self.traffic.codecs[leg] = codec

    @property
    def spec(self) -> UpdaterSpec:
        """What a push does."""
        return self._spec

    # ---- state -----------------------------------------------------------------------------------------------------

    def optimizer_states(self) -> dict[Key, dict[str, torch.Tensor]]:
        """Return the optimizer's state of every key, whole, after this worker's own pushes are applied."""
        self._wait_for_all()
        return dist_states.gather(self.session, self.name, self.table)

    def _wait_for_all(self) -> None:
        """Wait for the answers to everything that was asked about keys."""
        sides = [side for block in self.table.blocks.values() for side in block.buckets]
        self.session.wait([sent.ticket for side in sides for sent in side.sending])

    def set_optimizer_states(self, states: Mapping[Key, Mapping[str, torch.Tensor]]) -> None:
        """Set the optimizer's state of keys on the servers, after this worker's own pushes are applied."""
        self._wait_for_all()
        dist_states.spread(self.session, self.name, self.table, states)

    @property
    def keeps_residuals(self) -> bool:
        """Whether the codec of pushes adds what it did not send to the next push."""
        codec = self.traffic.codecs.get("push")
        return codec is not None and codec.uses_residual

    def codec_states(self) -> dict[Key, dict[str, torch.Tensor]]:
        """Return the residuals of this worker's pushes, whole, by key: float32, in the key's shape."""
        return dist_states.residuals(self.table) if self.keeps_residuals else {}

    def set_codec_states(self, states: Mapping[Key, Mapping[str, torch.Tensor]]) -> None:
        """Set the residuals of this worker's pushes; those of other keys become 0."""
        dist_states.set_residuals(self.table, states)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the optimizer's state, gathered from all servers, to one safetensors file.

        One worker is enough, unless pushes are compressed by a codec with residuals. Those lie in each worker, so then
        every worker calls this, at the same point of its training: worker 0 writes ``fname``, and every other worker r
        its own residuals beside it, to ``<fname>.rank<r>.<digest>``. With pulls compressed ``fname`` also holds what
        the saving worker was not told yet (``unsent``): save the weights of the same worker with it.

        Raises:
            CheckpointError: it cannot be written there; what was there before is unchanged.
        """
        groups = self._spec.groups if dump_optimizer else None
        codec_files.save(self, fname, self.optimizer_states, optimizer=self._spec.name, groups=groups)

    def load_optimizer_states(self, fname: str) -> None:
        """Read what ``save_optimizer_states`` wrote, with any number of servers. Every worker calls it.

        Worker 0 reads ``fname``, and worker r its residuals beside it if it compresses pushes; where none were saved
        for it they start at 0, with a warning. What a codec remembers besides (PowerSGD's Q, the round that draws the
        elements of randomk) starts afresh.

        Raises:
            CheckpointError: on all workers: a file is missing, damaged, or of another save. Nothing is changed.
        """
        states, own = codec_files.load(self, fname, everywhere=False)
        codec_files.set_residuals(self, own)
        if states is not None:
            self.set_optimizer_states(states)
        self.barrier()

    # ---- the rest --------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all workers have come here. Until then nobody waits for the pushes of those who have.

        Workers that pushed fewer rounds than others have older values after it, and get the new ones with their next
        ``pull``.
        """
        self._barriers += 1
        if self._is_open:
            self._on_all_servers(m.Pause(self.name), "entering a barrier")
        self.session.barrier(f"{self.name}/{self._barriers}")
        for block in self.table.blocks.values():
            block.fresh = [False] * len(block.fresh)

    def send_command_to_servers(self, head: str, body: str = "") -> list[str]:
        """Run a registered server command on every server and return the answers in server order."""
        answers = self._on_all_servers(m.Command(head, body), f"command {head!r}")
        return [answer.body for answer in answers if isinstance(answer, m.Answer)]

    def stats(self) -> dict[str, Any]:
        """Return what happened, over all servers.

        ``updates``, the histogram of their ``staleness``, ``step_mass`` (the sum of their weights times learning
        rates), ``data_mass`` (samples per worker that reached the model), ``dropped`` (pushes that were too old to
        count) and ``dropped_by_worker``, ``network_bytes``. Every slot of every server counts; all but ``staleness``
        and ``network_bytes`` are means over slots, so that one round of all keys counts as one.
        """
        self._open()
        reports = [
            json.loads(answer.body)
            for answer in self._on_all_servers(m.AskStats(self.name), "counters")
            if isinstance(answer, m.StatsAre)
        ]
        return merged(reports)

    def close(self) -> None:
        """Leave the store: the other workers do not wait for this one any more. Idempotent.

        A store that was never used is left as well: others may use it.
        """
        if self._closed:
            return
        self._open()
        self._closed = True
        self._finish()
        self._on_all_servers(m.Leave(self.name), f"leaving store {self.name!r}")
        self._left = True
        for block in self.table.blocks.values():
            block.close()

    def _finish(self) -> None:
        """Wait for everything under way, and keep what nobody changes any more.

        Raises:
            PacelineError: it failed, now or before.
        """
        if self._left:
            return
        if self._unfinished is not None:
            raise PacelineError(f"store {self.name!r} could not be left: {self._unfinished}") from self._unfinished
        try:
            self._wait_for_all()
        except BaseException as error:
            self._unfinished = error
            raise
        for block in self.table.blocks.values():
            block.detach()  # before the others are free to go on without this worker


def _is_split(block: WorkerBlock) -> bool:
    return any(part.length != block.numel(part.key) for bucket in block.layout.buckets for part in bucket.parts)
