"""The distributed stores: a worker's side of the parameter server."""

from __future__ import annotations

import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch

from paceline import compression
from paceline.consistency import Policy, parse_groups, policy_of, resolve_groups
from paceline.errors import ConfigError, KeyMismatchError, RemoteError
from paceline.kvstore import checkpoint
from paceline.kvstore.base import Key, Keys, KVStore, Updater, Values, normalise
from paceline.kvstore.block import Stretch, WorkerBlock, bucket_specs
from paceline.roles.session import Session, Ticket
from paceline.tensors import dtype_name, from_frame, state_dtype_name, state_from_frame, to_frame
from paceline.transport.base import Frames
from paceline.updaters import Options, UpdaterSpec, is_whole_tensor, make_spec
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

OptimizerLike: TypeAlias = str | torch.optim.Optimizer | type[torch.optim.Optimizer]


def resolve_policy(store_type: str, session: Session, options: Mapping[str, Any]) -> Policy:
    """Return the policy of a store type with arguments over environment over defaults.

    Raises:
        ConfigError: the groups file cannot be read.
        ValueError: a setting does not fit.
    """
    settings = session.settings
    staleness = options.get("staleness")
    weighting = options.get("weighting") or (settings.weighting if store_type != "dist_sync" else "") or None
    groups: tuple[tuple[int, ...], ...] = ()
    if store_type == "dist_gsync":
        groups = _groups(options.get("groups") or settings.groups, session)
    return policy_of(
        store_type,
        groups=groups,
        first=options.get("k"),
        staleness=settings.staleness if staleness is None else staleness,
        weighting=weighting,
        age=options.get("age"),
        num_workers=settings.num_workers,
    )


def _groups(given: Any, session: Session) -> tuple[tuple[int, ...], ...]:
    """Turn a groups file, or lists of members, into ranks."""
    if not given:
        return ()
    if isinstance(given, str | Path):
        try:
            members = parse_groups(Path(given).read_text())
        except OSError as error:
            raise ConfigError(f"the groups file {given} cannot be read: {error.strerror}") from error
    else:
        members = [[str(member) for member in group] for group in given]
    return resolve_groups(members, [(worker.host, worker.local_rank) for worker in session.workers])


class DistStore(KVStore):
    """Keys on the servers of a job.

    Args:
        store_type: canonical type, e.g. ``dist_sync``.
        alias: the type as the user wrote it.
        session: this worker's part in the job.
        policy: merge, bound and weighting.
        name: namespace of the keys.
        mean: merge to the mean over samples instead of the sum.
    """

    def __init__(
        self, store_type: str, alias: str, session: Session, policy: Policy, name: str, mean: bool = False
    ) -> None:
        self._canonical, self._alias, self.session, self.policy, self.name = store_type, alias, session, policy, name
        self._num_servers = len(session.servers)
        self._blocks: dict[int, WorkerBlock] = {}
        self._where: dict[Key, tuple[WorkerBlock, int]] = {}
        self._loads = [0] * self._num_servers
        self._codec: compression.Codec | None = None
        self._spec: UpdaterSpec | None = None
        self._barriers = 0
        self._closed = False
        self.samples = 1.0
        """Samples behind the next pushes; weighs them where the store merges to the mean."""
        self._options = b""
        self._mean = mean
        self._is_open = False
        self._siblings = 0
        session.on_close(self.close)

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
        groups = [list(group) for group in policy.groups]
        body = m.OpenStore(
            self.name, policy.merge, groups, policy.first, bound, policy.weighting, policy.age, self._mean
        )
        self._on_all_servers(body, f"opening store {self.name!r}")

    def for_optimizer(self, mean: bool) -> DistStore:
        """Return a store for an optimizer's parameters: this one while it is unused, else a sibling."""
        if self._is_open:
            return self.sibling("optimizer", mean)
        self._mean = mean
        return self

    def sibling(self, what: str, mean: bool = False) -> DistStore:
        """Return another store with a namespace of its own; every worker makes the same ones in the same order.

        One for the ``rest`` of a model is never pushed to, so it needs no optimizer.
        """
        self._siblings += 1
        policy = Policy() if what == "rest" else self.policy
        name = f"{self.name}/{what}{self._siblings}"
        return DistStore(self._canonical, self._alias, self.session, policy, name, mean)

    def _on_all_servers(self, body: m.Request, what: str) -> list[m.Body]:
        tickets = [self.session.ask_server(server, body, what) for server in range(self._num_servers)]
        self.session.wait(tickets)
        return [ticket.body for ticket in tickets if ticket.body is not None]

    # ---- keys ------------------------------------------------------------------------------------------------------

    def init(self, key: Keys, value: Values) -> None:
        """Initialise keys, once each, with rank 0's values; other workers' values only say shape and dtype."""
        keys, values = normalise(key, value)
        if any(len(devices) > 1 for devices in values):
            raise KeyMismatchError(f"init takes one value per key; {_first_double(keys, values)!r} has several")
        tensors = [devices[0] for devices in values]
        for one, tensor in zip(keys, tensors, strict=True):
            self._check_new(one, tensor)
        self.add_keys(keys, tensors)

    def _check_new(self, key: Key, tensor: torch.Tensor) -> None:
        if key in self._where:
            raise KeyMismatchError(f"key {key!r} is initialised already")
        if self._where and type(key) is not type(next(iter(self._where))):
            raise TypeError("the keys of one store are all int or all str, not both")
        if tensor.layout is not torch.strided:
            raise TypeError(f"the value of key {key!r} is sparse; {self.type} holds dense values")
        dtype_name(tensor.dtype)

    def add_keys(
        self, keys: Sequence[Key], values: Sequence[torch.Tensor], tags: Sequence[int] = ()
    ) -> list[WorkerBlock]:
        """Initialise keys in one arena per dtype; keys of different tags never share a bucket. For front doors."""
        self._open()
        if self.rank == 0:
            blocks = self._place(keys, values, tags or [0] * len(keys))
            by_dtype = {block.spec.dtype: block for block in blocks}
            for key, value in zip(keys, values, strict=True):
                block = by_dtype[dtype_name(value.dtype)]
                block.value_of(block.key_index[key]).copy_(value.detach())
            self._send_values(blocks)
            self.session.call_scheduler(m.Publish(self.name, [block.spec for block in blocks]), "publishing keys")
        else:
            blocks = self._look_up(keys, values)
        for block in blocks:
            self._adopt(block)
        return blocks

    def _place(self, keys: Sequence[Key], values: Sequence[torch.Tensor], tags: Sequence[int]) -> list[WorkerBlock]:
        settings = self.session.settings
        speeds = [float(part) for part in settings.server_speeds.split(",") if part]
        whole = self._spec is not None and is_whole_tensor(self._spec.name)
        by_dtype: dict[str, list[m.KeySpec]] = {}
        for key, value, tag in zip(keys, values, tags, strict=True):
            by_dtype.setdefault(dtype_name(value.dtype), []).append(m.KeySpec(key, list(value.shape), tag))
        blocks: list[WorkerBlock] = []
        for dtype, specs in by_dtype.items():
            spec = m.BlockSpec(
                len(self._blocks) + len(blocks), dtype, specs, list(self._loads), speeds,
                settings.bigarray_bound, settings.placement, whole,
            )  # fmt: skip
            block = self._make_block(spec)
            for bucket in block.layout.buckets:
                self._loads[bucket.server] += bucket.length
            blocks.append(block)
        return blocks

    def _make_block(self, spec: m.BlockSpec) -> WorkerBlock:
        local = [s for s in self.session.servers if s.host_id == self.session.host_id]
        if not local or not self.session.settings.shared_memory:
            return WorkerBlock(spec, self._num_servers, shared=False)
        try:
            return WorkerBlock(spec, self._num_servers, shared=True)
        except OSError as error:
            logger.warning(
                "worker %d: no shared memory for %d keys (%s); using sockets", self.rank, len(spec.keys), error
            )
            return WorkerBlock(spec, self._num_servers, shared=False)

    def _send_values(self, blocks: Sequence[WorkerBlock]) -> None:
        tickets = []
        for block in blocks:
            for server in range(self._num_servers):
                buckets = bucket_specs(block.spec, block.layout, server)
                slices = [block.arena_slice(one.index, 0, one.length) for one in buckets]
                frames = [to_frame(block.values[part]) for part in slices]
                body = m.Init(self.name, block.spec.block, block.spec.dtype, buckets)
                tickets.append(self.session.ask_server(server, body, "initialising keys", frames))
        self.session.wait(tickets)

    def _look_up(self, keys: Sequence[Key], values: Sequence[torch.Tensor]) -> list[WorkerBlock]:
        """Learn from the scheduler where rank 0 has put the keys, and compare them with ours."""
        what = f"waiting for worker 0 to initialise {', '.join(map(repr, keys[:3]))}{' ...' if len(keys) > 3 else ''}"
        found = self.session.call_scheduler(m.Lookup(self.name, list(keys)), what)
        assert isinstance(found, m.Found)
        specs = {spec.name: (block.dtype, spec) for block in found.blocks for spec in block.keys}
        for key, value in zip(keys, values, strict=True):
            dtype, spec = specs[key]
            if list(value.shape) != spec.shape or dtype_name(value.dtype) != dtype:
                raise KeyMismatchError(
                    f"key {key!r} has shape {tuple(value.shape)} and dtype {dtype_name(value.dtype)} on worker "
                    f"{self.rank}, but shape {tuple(spec.shape)} and dtype {dtype} on worker 0; the models differ"
                )
        return [self._blocks.get(spec.block) or self._make_block(spec) for spec in found.blocks]

    def _adopt(self, block: WorkerBlock) -> None:
        """Make a block's keys known, and offer its arena to the servers of this host."""
        if block.spec.block in self._blocks:
            return
        self._blocks[block.spec.block] = block
        for name, index in block.key_index.items():
            self._where[name] = (block, index)
        if block.files is not None:
            self._offer_arena(block)

    def _offer_arena(self, block: WorkerBlock) -> None:
        assert block.files is not None
        values, grads = block.files
        size = block.layout.numel * block.dtype.itemsize
        body = m.MapArena(
            self.name, block.spec.block, self.session.pid, values.fd, grads.fd, size,
            [bucket.start for bucket in block.layout.buckets],
        )  # fmt: skip
        owners = {bucket.server for bucket in block.layout.buckets}
        for server in self.session.servers:
            if server.rank in owners and server.host_id == self.session.host_id:
                try:
                    self.session.call_server(server.rank, body, "offering shared memory")
                    block.mapped.add(server.rank)
                except (RemoteError, ValueError) as error:
                    logger.warning("worker %d: no shared memory with server %d (%s)", self.rank, server.rank, error)

    def _locate(self, keys: Sequence[Key]) -> list[tuple[WorkerBlock, int]]:
        for key in keys:
            if key not in self._where:
                raise KeyMismatchError(f"key {key!r} is not initialised in store {self.name!r}; call init first")
        return [self._where[key] for key in keys]

    # ---- push and pull ---------------------------------------------------------------------------------------------

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Send values; device values of one key are summed. Returns before the update is applied.

        ``priority`` orders nothing here: what is pushed leaves at once.
        """
        keys, values = normalise(key, value)
        places = self._locate(keys)
        for one, devices, (block, index) in zip(keys, values, places, strict=True):
            self._check_values(one, devices, block, index)
        for block, indices in _by_block(places).items():
            stretches = block.stretches(indices)
            self.session.wait(block.outstanding(stretches))
            for devices, (other, index) in zip(values, places, strict=True):
                if other is block:
                    _sum_into(block.grad_of(index), devices)
            self.push_stretches(block, stretches)

    def _check_values(self, key: Key, devices: Sequence[torch.Tensor], block: WorkerBlock, index: int) -> None:
        for value in devices:
            if list(value.shape) != block.spec.keys[index].shape:
                shape = tuple(block.spec.keys[index].shape)
                raise ValueError(f"key {key!r} was initialised with shape {shape}, not {tuple(value.shape)}")
            if value.layout is not torch.strided:
                raise TypeError(f"the value of key {key!r} is sparse; {self.type} holds dense values")

    def push_stretches(self, block: WorkerBlock, stretches: Sequence[Stretch]) -> list[Ticket]:
        """Push what lies in the arena's gradients. The new values come into its values, where that is one trip."""
        tickets = []
        for server, mine in _by_server(block, stretches).items():
            pieces = [
                (one.bucket, *piece)
                for one in mine
                for piece in block.buckets[one.bucket].rounds.next(one.start, one.length)
            ]
            entries = [m.Entry(block.spec.block, *piece) for piece in pieces]
            shared = server in block.mapped
            frames = self._payload(block, pieces, shared)
            body = m.Push(self.name, entries, self.samples, self._options, self._codec is not None, self._eager, shared)
            done = None if shared or not self._eager else partial(self._store_values, block, entries)
            rounds = [piece[3] for piece in pieces]
            ticket = self._ask(server, body, f"push of round {max(rounds)}", frames, done)
            self.session.note_round(max(rounds))
            for one in mine:
                block.note_sent(one, ticket)
            tickets.append(ticket)
        for key in _keys_in(block, stretches):
            block.fresh[key] = self._eager
        return tickets

    @property
    def _eager(self) -> bool:
        """Whether values that come with the answer of a push stay valid until the next push."""
        return self.policy.merge in ("all", "groups") or self._always_eager

    _always_eager = False

    def _payload(self, block: WorkerBlock, pieces: Sequence[tuple[int, int, int, int]], shared: bool) -> Frames:
        if self._codec is None:
            return [] if shared else [to_frame(block.grads[block.arena_slice(*piece[:3])]) for piece in pieces]
        frames = []
        for bucket, start, length, round in pieces:
            state = block.codec_state(self._codec, bucket, start, length)
            grads = block.grads[block.arena_slice(bucket, start, length)]
            frames.append(self._codec.encode(grads, state, round=round))
        return frames

    def _store_values(self, block: WorkerBlock, entries: Sequence[m.Entry], body: m.Body, frames: Frames) -> None:
        for entry, frame in zip(entries, frames, strict=True):
            part = block.arena_slice(entry.bucket, entry.start, entry.length)
            block.values[part].copy_(from_frame(frame, block.dtype, entry.length))

    def _ask(
        self, server: int, body: m.Request, what: str, frames: Frames, done: Callable[[m.Body, Frames], None] | None
    ) -> Ticket:
        return self.session.ask_server(server, body, what, frames, done)

    def pull(self, key: Keys, out: Values, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy stored values into ``out``, after this worker's own pushes of those keys are applied."""
        keys, outs = normalise(key, out)
        places = self._locate(keys)
        for one, devices, (block, index) in zip(keys, outs, places, strict=True):
            self._check_values(one, devices, block, index)
        self.read(places)
        for devices, (block, index) in zip(outs, places, strict=True):
            value = block.value_of(index)
            for tensor in devices:
                with torch.no_grad():
                    tensor.copy_(value)

    def read(self, places: Sequence[tuple[WorkerBlock, int]]) -> None:
        """Bring the values of keys into their arenas, and wait for it."""
        for block, indices in _by_block(places).items():
            self.session.wait(block.outstanding(block.stretches(indices)))
            stale = [index for index in indices if not block.fresh[index]]
            self.session.wait(self._pull_stretches(block, block.stretches(stale)))

    def _pull_stretches(self, block: WorkerBlock, stretches: Sequence[Stretch]) -> list[Ticket]:
        tickets = []
        for server, mine in _by_server(block, stretches).items():
            entries = [m.Entry(block.spec.block, one.bucket, one.start, one.length, 0) for one in mine]
            shared = server in block.mapped
            done = None if shared else partial(self._store_values, block, entries)
            tickets.append(self._ask(server, m.Pull(self.name, entries, shared), "pull", (), done))
        return tickets

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push, then pull into ``out`` (into ``value`` itself when ``out`` is None)."""
        self.push(key, value, priority)
        self.pull(key, value if out is None else out, priority)

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """Initialise keys with rank 0's values and copy them into ``out``."""
        self.init(key, value)
        self.pull(key, out, priority)

    def row_sparse_pull(self, key: Keys, out: Values, priority: int = 0, row_ids: Values | None = None) -> None:
        """Pull only some rows; distributed stores hold dense values."""
        raise TypeError(f"a {self.type} store holds dense values; use pull")

    # ---- what a push does ------------------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: OptimizerLike, **options: Any) -> None:
        """Run an optimizer on the servers. Every worker calls it; rank 0's counts. Same again: nothing changes."""
        self.set_spec(make_spec(optimizer, **options))

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
        """Set the updater as a spec; collective."""
        if spec.name == "assign" and self.policy.merge != "all":
            raise ValueError(f"a {self.type} store needs an optimizer; replacing values only makes sense in dist_sync")
        if is_whole_tensor(spec.name) and any(_is_split(block) for block in self._blocks.values()):
            raise ValueError(f"optimizer {spec.name!r} needs whole tensors, but keys are split; set it before init")
        self._open()
        if self.rank == 0:
            self._on_all_servers(
                m.SetUpdater(self.name, msgspec.msgpack.encode(spec)), f"setting optimizer {spec.name!r}"
            )
        self._spec = spec
        self.barrier()

    def set_options(self, groups: Sequence[Options]) -> None:
        """Set the optimizer's options per param group; they travel with every push from now on."""
        self._options = msgspec.msgpack.encode(groups)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress pushes: ``{"type": "2bit", "threshold": 0.5}``. Every worker calls it, before its first push."""
        codec = compression.make(compression_params)
        if codec is None:
            return
        if self._codec is not None and codec.params() != self._codec.params():
            raise ValueError(f"store {self.name!r} compresses with {self._codec.params()} already")
        self._open()
        body = m.SetCompression(self.name, msgspec.msgpack.encode(codec.params()))
        self._on_all_servers(body, "setting compression")
        self._codec = codec

    # ---- state -----------------------------------------------------------------------------------------------------

    def optimizer_states(self) -> dict[Key, dict[str, torch.Tensor]]:
        """Return the optimizer's state of every key, whole, from wherever it is."""
        states: dict[Key, dict[str, list[tuple[int, torch.Tensor]]]] = {key: defaultdict(list) for key in self._where}
        for block in self._blocks.values():
            asked = []
            for index, bucket in enumerate(block.layout.buckets):
                entry = m.Entry(block.spec.block, index, 0, bucket.length, 0)
                done = partial(self._take_state, states, block)
                asked.append(self._ask(bucket.server, m.GetState(self.name, [entry]), "optimizer state", (), done))
            self.session.wait(asked)
        return {key: {name: _joined(parts) for name, parts in state.items()} for key, state in states.items()}

    def _take_state(
        self,
        states: dict[Key, dict[str, list[tuple[int, torch.Tensor]]]],
        block: WorkerBlock,
        body: m.Body,
        frames: Frames,
    ) -> None:
        assert isinstance(body, m.StateIs)
        for item, frame in zip(body.items, frames, strict=True):
            for part in block.layout.buckets[item.bucket].parts:
                if part.start <= item.start < part.start + max(1, part.length):
                    tensor = state_from_frame(frame, item.dtype, item.shape)
                    key = block.spec.keys[part.key].name
                    states[key][item.name].append((part.key_start + item.start - part.start, tensor))

    def set_optimizer_states(self, states: Mapping[Key, Mapping[str, torch.Tensor]]) -> None:
        """Set the optimizer's state of keys on the servers."""
        places = self._locate(list(states))
        tickets = []
        for (block, index), state in zip(places, states.values(), strict=True):
            for one in block.stretches([index]):
                bucket = block.layout.buckets[one.bucket]
                part = next(part for part in bucket.parts if part.key == index)
                items, frames = _state_items(block, one, part.key_start, state)
                body = m.SetState(self.name, items)
                tickets.append(self._ask(bucket.server, body, "setting optimizer state", frames, None))
        self.session.wait(tickets)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the optimizer's state, gathered from all servers, to one safetensors file. One worker is enough."""
        spec = msgspec.to_builtins(self._spec) if self._spec is not None and dump_optimizer else None
        checkpoint.save(fname, self.optimizer_states(), {"optimizer": spec})

    def load_optimizer_states(self, fname: str) -> None:
        """Read what ``save_optimizer_states`` wrote, with any number of servers. Every worker calls it."""
        if self.rank == 0:
            self.set_optimizer_states(checkpoint.load(fname))
        self.barrier()

    # ---- the rest --------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until all workers have come here."""
        self._barriers += 1
        self.session.barrier(f"{self.name}/{self._barriers}")

    def send_command_to_servers(self, head: str, body: str = "") -> list[str]:
        """Run a registered server command on every server and return the answers in server order."""
        answers = self._on_all_servers(m.Command(head, body), f"command {head!r}")
        return [answer.body for answer in answers if isinstance(answer, m.Answer)]

    def stats(self) -> dict[str, Any]:
        """Return updates, staleness histogram, step mass and data mass per worker, over all servers.

        Every slot of every server counts; ``updates`` and the masses are means over slots, so that one round of all
        keys counts as one.
        """
        self._open()
        reports = [
            json.loads(answer.body)
            for answer in self._on_all_servers(m.AskStats(self.name), "counters")
            if isinstance(answer, m.StatsAre)
        ]
        slots = sum(report["slots"] for report in reports)
        staleness: Counter[int] = Counter()
        data_mass: Counter[int] = Counter()
        for report in reports:
            staleness.update({int(age): number for age, number in report["staleness"].items()})
            data_mass.update({int(worker): mass / slots for worker, mass in report["data_mass"].items()})
        return {
            "updates": sum(report["updates"] for report in reports) / slots,
            "staleness": dict(sorted(staleness.items())),
            "step_mass": sum(report["step_mass"] for report in reports) / slots,
            "data_mass": dict(sorted(data_mass.items())),
        }

    def close(self) -> None:
        """Be done with the store: the other workers do not wait for this one any more. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self._is_open:
            return
        for block in self._blocks.values():
            self.session.wait([ticket for side in block.buckets for ticket in (one.ticket for one in side.sending)])
        self._on_all_servers(m.Leave(self.name), f"leaving store {self.name!r}")
        for block in self._blocks.values():
            block.close()


def _by_block(places: Sequence[tuple[WorkerBlock, int]]) -> dict[WorkerBlock, list[int]]:
    blocks: dict[WorkerBlock, list[int]] = {}
    for block, index in places:
        blocks.setdefault(block, []).append(index)
    return blocks


def _by_server(block: WorkerBlock, stretches: Sequence[Stretch]) -> dict[int, list[Stretch]]:
    servers: dict[int, list[Stretch]] = {}
    for one in stretches:
        servers.setdefault(block.layout.buckets[one.bucket].server, []).append(one)
    return servers


def _keys_in(block: WorkerBlock, stretches: Sequence[Stretch]) -> list[int]:
    return sorted({part.key for one in stretches for part in block.layout.buckets[one.bucket].parts})


def _sum_into(target: torch.Tensor, devices: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        target.copy_(devices[0])
        for value in devices[1:]:
            target.add_(value.to(target.device))


def _is_split(block: WorkerBlock) -> bool:
    return any(part.length != block.numel(part.key) for bucket in block.layout.buckets for part in bucket.parts)


def _first_double(keys: Sequence[Key], values: Sequence[Sequence[torch.Tensor]]) -> Key:
    return next(key for key, devices in zip(keys, values, strict=True) if len(devices) > 1)


def _joined(parts: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Put the parts of a key's state together; state without parts is the same everywhere."""
    ordered = [tensor for _, tensor in sorted(parts, key=lambda part: part[0])]
    return ordered[0] if len(ordered) == 1 or ordered[0].dim() == 0 else torch.cat(ordered)


def _state_items(
    block: WorkerBlock, one: Stretch, key_start: int, state: Mapping[str, torch.Tensor]
) -> tuple[list[m.StateItem], list[Any]]:
    items, frames = [], []
    for name, tensor in state.items():
        flat = tensor.reshape(-1)
        whole = tensor.dim() == 0 or flat.numel() != block.numel(block.layout.buckets[one.bucket].parts[0].key)
        part = tensor if whole else flat[key_start : key_start + one.length]
        items.append(
            m.StateItem(
                block.spec.block,
                one.bucket,
                one.start,
                one.length,
                name,
                state_dtype_name(part.dtype),
                list(part.shape),
            )
        )
        frames.append(to_frame(part.contiguous()))
    return items, frames
