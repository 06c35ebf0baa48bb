"""What a server does with requests: no socket, no thread, no clock."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import msgspec
import torch

from paceline.config import Settings
from paceline.consistency import Policy
from paceline.errors import KeyMismatchError, PacelineError, ProtocolError
from paceline.peer.errors_by_name import failed
from paceline.server import clip, rows
from paceline.server.admission import check_clipping, is_absent
from paceline.server.bucket import Pending
from paceline.server.forward import notices as relaying
from paceline.server.forward.notices import Opened
from paceline.server.forward.store import AskFn, RelayStore
from paceline.server.members import Members
from paceline.server.merge import Encoded
from paceline.server.state import get_state, set_state
from paceline.server.store import ServerStore
from paceline.server.sums import check_sum, push_sum
from paceline.tensors import dtype_of, from_frame, to_frame
from paceline.transport.base import Frames
from paceline.updaters import StepOptions, UpdaterSpec
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

#: ``answer(peer, seq, body, make_frames, urgency)``.
AnswerFn: TypeAlias = Callable[[bytes, int, m.Reply, Callable[[], Frames], int | None], None]
CommandFn: TypeAlias = Callable[["RequestHandler", str], str]
_Place: TypeAlias = tuple[int, int, int, int]
"""(block, bucket, start, length)"""

_COMMANDS: dict[str, CommandFn] = {}
_options_decoder = msgspec.msgpack.Decoder(StepOptions)
_spec_decoder = msgspec.msgpack.Decoder(UpdaterSpec)


def register_command(name: str, function: CommandFn) -> None:
    """Make ``KVStore.send_command_to_servers(name, body)`` possible; runs in the server process.

    Raises:
        ValueError: the name is taken.
    """
    if name in _COMMANDS:
        raise ValueError(f"a server command named {name!r} is registered already")
    _COMMANDS[name] = function


def _set_log_level(service: RequestHandler, body: str) -> str:
    logging.getLogger("paceline").setLevel(body.upper())
    return body.upper()


register_command("ping", lambda service, body: body)
register_command("log_level", _set_log_level)


@lru_cache(maxsize=1024)
def _options(encoded: bytes) -> StepOptions | None:
    """Decode options; the same bytes give the same object, so that a change is seen by identity."""
    return _options_decoder.decode(encoded) if encoded else None


class RequestHandler:
    """The stores of one server, and the requests on them.

    Args:
        settings: of the server.
        answer: sends an answer.
        ask: sends a request to another server.
    """

    def __init__(self, settings: Settings, answer: AnswerFn, ask: AskFn = relaying.no_upstream) -> None:
        self.settings = settings
        self._answer, self._ask = answer, ask
        self._stores: dict[str, Opened] = {}
        self._left: frozenset[int] = frozenset()
        """The workers that have left the job, and so every store."""
        self._peers = Members()
        self._handlers: dict[type[m.Message], Callable[[int, Any, Frames], m.Reply | tuple[m.Reply, Frames]]] = {
            m.OpenStore: self._open,
            m.Init: self._init,
            m.SetUpdater: self._set_updater,
            m.SetValues: self._set_values,
            m.SetCompression: self._set_compression,
            m.MapArena: self._map_arena,
            m.AskValues: self._ask_values,
            m.GetState: self._get_state,
            m.SetState: self._set_state,
            m.Command: self._command,
            m.AskStats: self._stats,
            m.PullRows: self._pull_rows,
            m.Relay: self._relay,
            m.Commit: self._commit,
        }

    def admit(self, members: Sequence[m.Member], host_id: str = "", rank: int = 0) -> None:
        """Learn who the members of the job are, and which of them this server is."""
        self._peers.admit(members, host_id, rank)

    def take_out(self, workers: frozenset[int]) -> None:
        """Wait no more for the workers that have left the job, in any store; ``workers`` only grows."""
        if workers != self._left:
            for opened in self._stores.values():
                self._take_out(opened, workers - self._left)
            self._left = workers

    def _take_out(self, opened: Opened, workers: Iterable[int]) -> None:
        for worker in sorted(workers):
            if not opened.heard[m.Leave, worker, True]:  # else it has said so itself
                body = m.Leave(opened.body.store)
                relaying.heed(opened, self._peers.rank, worker, body, direct=True)
                relaying.pass_on(opened, self._ask, worker, body, lambda reply: None)

    def is_member(self, peer: bytes) -> bool:
        """Tell whether a connection belongs to a member."""
        return peer in self._peers

    def handle(self, peer: bytes, seq: int, body: m.Request, frames: Frames) -> None:
        """Carry out one request. Whatever is wrong with it goes back to the peer, and changes nothing here."""
        try:
            if isinstance(body, m.Claim):
                self._peers.claim(peer, body)
                self._reply(peer, seq, m.Done())
            elif peer in self._peers.servers:
                self._of_server(peer, seq, body, frames)
            elif peer not in self._peers.workers:
                raise ProtocolError("this connection belongs to no member; claim it first")
            elif isinstance(body, m.Push):
                self._push(peer, seq, body, frames)
            elif isinstance(body, m.Pull):
                self._pull(peer, seq, body)
            elif isinstance(body, m.Pause | m.Leave | m.AskMissing):
                self._of_worker(peer, seq, body)
            elif isinstance(body, m.AskNorm):
                clip.ask(
                    self._store(body.store), self._peers.workers[peer], body.entries, partial(self._reply, peer, seq)
                )
            else:
                self._other(peer, seq, body, frames)
        except (PacelineError, ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
            self._reply(peer, seq, failed(error))
        except Exception as error:
            # A mistake of ours must not end the job of all: who asked is told, and the log has the rest.
            logger.exception("a %s of peer %r failed", type(body).__name__, peer)
            self._reply(peer, seq, m.Failed("RemoteError", f"{type(error).__name__}: {error}"[:4000]))

    def _reply(self, peer: bytes, seq: int, body: m.Reply, frames: Frames = ()) -> None:
        self._answer(peer, seq, body, lambda: frames, None)

    def _other(self, peer: bytes, seq: int, body: m.Request, frames: Frames) -> None:
        handler = self._handlers.get(type(body))
        if handler is None:
            raise ProtocolError(f"a server does not take {type(body).__name__}")
        result = handler(self._peers.workers[peer], body, frames)
        self._reply(peer, seq, *(result if isinstance(result, tuple) else (result, ())))

    def _opened(self, name: str) -> Opened:
        if name not in self._stores:
            raise KeyMismatchError(f"store {name!r} was not opened on this server")
        return self._stores[name]

    def _store(self, name: str) -> ServerStore:
        return self._opened(name).store

    # ---- setting up ------------------------------------------------------------------------------------------------

    def _open(self, worker: int, body: m.OpenStore, frames: Frames) -> m.Reply:
        known = self._stores.get(body.store)
        if known is not None:
            if known.body != body:
                raise ValueError(
                    f"worker {worker} opens store {body.store!r} as {_describe(body)}, but it is open as "
                    f"{_describe(known.body)}; create the same stores in the same order on every worker"
                )
            return m.Done()
        groups = tuple(tuple(group) for group in body.groups)
        bound = None if body.bound < 0 else body.bound
        age = None if body.age < 0 else body.age
        policy = Policy(body.merge, groups, body.first, bound, body.weighting, age)  # type: ignore[arg-type]
        policy.check(self.settings.num_workers)
        check_clipping(body.clip_norm, policy)
        self._stores[body.store] = self._new_store(body, policy)
        self._take_out(self._stores[body.store], self._left)
        return m.Done()

    def _new_store(self, body: m.OpenStore, policy: Policy) -> Opened:
        num_workers, peers = self.settings.num_workers, self._peers
        allowed = [path for path in self.settings.allow_optimizer.split(",") if path]
        share = self.settings.shared_memory and peers.has_neighbours
        hosts, clip_norm = peers.worker_hosts, body.clip_norm
        store = ServerStore(body.store, policy, body.mean, num_workers, allowed, share, hosts, clip_norm)
        relays = peers.relays(policy.unit_of(num_workers) if body.local_merge else range(num_workers))
        relay = None
        if any(relays.relayed_by(peers.rank, one) for one in range(num_workers)):
            relay = RelayStore(body.store, policy, body.mean, relays, peers.rank, share, self._ask)
        return Opened(body, store, relays, relay, Counter())

    def _init(self, worker: int, body: m.Init, frames: Frames) -> m.Reply:
        if len(frames) != len(body.buckets):
            raise ProtocolError(f"{len(body.buckets)} buckets with {len(frames)} frames of values")
        dtype = dtype_of(body.dtype)
        pairs = zip(body.buckets, frames, strict=True)
        self._store(body.store).init(
            body.block, body.buckets, [from_frame(f, dtype, b.length) for b, f in pairs], body.answers
        )
        return m.Done()

    def _set_updater(self, worker: int, body: m.SetUpdater, frames: Frames) -> m.Reply:
        opened, spec = self._opened(body.store), _spec_decoder.decode(body.spec)
        opened.store.set_updater(spec)
        if opened.relay is not None:
            opened.relay.set_updater(spec)
        return m.Done()

    def _set_compression(self, worker: int, body: m.SetCompression, frames: Frames) -> m.Reply:
        params = msgspec.msgpack.decode(body.params, type=dict[str, bool | int | float | str])
        self._store(body.store).set_compression(params, body.leg)
        return m.Done()

    def _map_arena(self, worker: int, body: m.MapArena, frames: Frames) -> m.Reply:
        self._peers.check_memory(worker, body.pid)
        opened = self._opened(body.store)
        held = [one for one in (opened.store, opened.relay) if one is not None and one.has_block(body.block)]
        for one in held or [opened.store]:
            one.map_arena(worker, body)
        return m.Done()

    def _ask_values(self, worker: int, body: m.AskValues, frames: Frames) -> m.Reply:
        fd, starts = self._store(body.store).values_at(body.block) or (0, [])
        return m.ValuesAt(os.getpid(), fd, starts)

    def _relay(self, worker: int, body: m.Relay, frames: Frames) -> m.Reply:
        relay = self._opened(body.store).relay
        if relay is None:
            raise ProtocolError(
                f"store {body.store!r} passes on nothing that workers push to server {self._peers.rank}"
            )
        relay.adopt(worker, body)
        fd, starts = relay.values_at(body.block) or (0, [])
        return m.ValuesAt(os.getpid(), fd, starts)

    # ---- values ----------------------------------------------------------------------------------------------------

    def _push(self, peer: bytes, seq: int, push: m.Push, frames: Frames) -> None:
        worker, opened = self._peers.workers[peer], self._opened(push.store)
        store = opened.holder(push.entries[0].block, push.entries[0].bucket) if push.entries else opened.store
        store.check_push(worker, push)
        options = _options(push.options)
        values = [self._pushed_values(store, worker, push, *pair) for pair in self._with_frames(push, frames)]
        pending = Pending(
            worker,
            push.want,
            push.shared,
            finish=partial(self._pushed, peer, seq, store, push),
            fail=partial(self._push_failed, peer, seq),
            remaining=1,  # until all entries are taken: the first may be released at once
        )
        for entry, value in zip(push.entries, values, strict=True):
            store.push(entry, value, push, options, pending)
        pending.remaining -= 1
        if pending.remaining == 0:
            pending.finish(pending)
        store.flush()
        store.received_bytes += self._crossing(peer, frames)

    def _push_sum(self, peer: bytes, seq: int, push: m.PushSum, frames: Frames) -> None:
        opened = self._opened(push.store)
        store, server = opened.store, self._peers.servers[peer]
        for share in push.shares:
            relaying.check_speaker(opened, self._peers.rank, server, share.worker)
        check_sum(store, push)
        if not push.skip and len(frames) != len(push.entries):
            raise ProtocolError(f"{len(push.entries)} entries with {len(frames)} frames of values")
        options, worker = _options(push.options), push.shares[0].worker
        values = [
            None
            if is_absent(push.absent, entry)
            else from_frame(frame, store.bucket(entry.block, entry.bucket).values.dtype, entry.length)
            for frame, entry in zip(() if push.skip else frames, () if push.skip else push.entries, strict=True)
        ] or [None] * len(push.entries)
        pending = Pending(
            worker,
            want=True,
            shared=False,
            finish=lambda one: self._send_values(peer, seq, worker, store, push.entries, one.absent),
            fail=partial(self._push_failed, peer, seq),
            remaining=1,
        )
        for index, value in enumerate(values):
            push_sum(store, index, value, push, options, pending)
        pending.remaining -= 1
        if pending.remaining == 0:
            pending.finish(pending)
        store.received_bytes += self._crossing(peer, frames)

    def _crossing(self, peer: bytes, frames: Frames) -> int:
        """Return how many bytes of frames cross the network between here and a peer."""
        return sum(memoryview(frame).nbytes for frame in frames) if frames and self._peers.is_far(peer) else 0

    def _with_frames(self, push: m.Push, frames: Frames) -> list[tuple[m.Entry, Any]]:
        if push.skip or (push.shared and not push.coded):
            return [(entry, None) for entry in push.entries]
        if push.rows and len(frames) == 2 * len(push.entries):
            return list(zip(push.entries, zip(frames[::2], frames[1::2], strict=True), strict=True))
        if push.rows or len(frames) != len(push.entries):
            raise ProtocolError(f"{len(push.entries)} entries with {len(frames)} frames of values")
        return list(zip(push.entries, frames, strict=True))

    def _pushed_values(
        self, store: ServerStore, worker: int, push: m.Push, entry: m.Entry, frame: Any
    ) -> torch.Tensor | Encoded | None:
        if push.skip or is_absent(push.absent, entry):
            return None
        bucket = store.bucket(entry.block, entry.bucket)
        if push.rows:
            return rows.pushed(bucket, entry, frame)
        if frame is None:
            return bucket.arenas[worker].grads[entry.start : entry.start + entry.length]
        if push.coded:
            codec = store.codecs["push"]
            codec.check(frame, entry.length)
            return Encoded(codec, frame, entry.length)
        return from_frame(frame, bucket.values.dtype, entry.length)

    def _pushed(self, peer: bytes, seq: int, store: ServerStore, push: m.Push, pending: Pending) -> None:
        if push.want and push.rows:
            self._send_rows(peer, seq, pending.worker, store, push.entries[0])
        elif pending.told:
            self._tell(peer, seq, store, [], pending.told, pending.absent)
        elif push.want and not push.shared:
            self._send_values(peer, seq, pending.worker, store, push.entries, pending.absent)
        else:
            self._reply(peer, seq, m.Values([], absent=_stretches(pending.absent)))

    def _push_failed(self, peer: bytes, seq: int, error: Exception) -> None:
        self._reply(peer, seq, failed(error))

    def _pull(self, peer: bytes, seq: int, pull: m.Pull) -> None:
        worker, store = self._peers.workers[peer], self._store(pull.store)
        for entry in pull.entries:
            bucket = store.bucket(entry.block, entry.bucket)
            store.check_entry(bucket, entry)
            if pull.shared and worker not in bucket.arenas:
                raise ProtocolError(f"worker {worker} has not offered shared memory for block {entry.block}")
        if not pull.shared and "pull" not in store.codecs:
            self._send_values(peer, seq, worker, store, pull.entries)
            return
        versions, told = [], []
        for entry in pull.entries:
            versions.append(store.read(worker, entry)[0])
            if pull.shared:
                store.show(store.bucket(entry.block, entry.bucket), worker, entry.start, entry.length)
            if "pull" in store.codecs:
                told += store.tell(worker, entry, pull.shared)
        self._tell(peer, seq, store, versions, told)

    def _tell(
        self,
        peer: bytes,
        seq: int,
        store: ServerStore,
        versions: list[int],
        told: Sequence[tuple[m.Told, Any]],
        absent: Collection[_Place] = (),
    ) -> None:
        """Answer with what a worker is told; given again, the answer is the same bytes."""
        frames = [frame for _, frame in told if frame is not None]
        store.sent_bytes += self._crossing(peer, frames)
        urgency = told[0][0].bucket if frames else None
        body = m.Values(versions, [words for words, _ in told], _stretches(absent))
        self._answer(peer, seq, body, lambda: frames, urgency)

    def _set_values(self, worker: int, body: m.SetValues, frames: Frames) -> m.Reply:
        store = self._store(body.store)
        if len(frames) != len(body.entries):
            raise ProtocolError(f"{len(body.entries)} entries with {len(frames)} frames of values")
        buckets = [store.bucket(entry.block, entry.bucket) for entry in body.entries]
        for bucket, entry in zip(buckets, body.entries, strict=True):
            store.check_entry(bucket, entry)
        triples = zip(buckets, body.entries, frames, strict=True)
        values = [from_frame(frame, bucket.values.dtype, entry.length) for bucket, entry, frame in triples]
        for bucket, entry, new in zip(buckets, body.entries, values, strict=True):
            bucket.overwrite(entry.start, new)
        return m.Done()

    def _send_rows(self, peer: bytes, seq: int, worker: int, store: ServerStore, entry: m.Entry) -> None:
        """Answer a push of rows with rows; given again, the answer is the same bytes."""
        version, values = store.read(worker, entry)
        frames = rows.taken(store.bucket(entry.block, entry.bucket), worker, version, values)
        store.sent_bytes += self._crossing(peer, frames)
        self._answer(peer, seq, m.Values([version]), lambda: frames, entry.bucket)

    def _commit(self, worker: int, body: m.Commit, frames: Frames) -> m.Reply:
        clip.commit(self._store(body.store), worker, body)
        return m.Done()

    def _pull_rows(self, worker: int, body: m.PullRows, frames: Frames) -> tuple[m.Reply, Frames]:
        store, entry = self._store(body.store), body.entry
        bucket = store.bucket(entry.block, entry.bucket)
        if not frames and bucket.answers is not None and bucket.answers.stores_value:
            store.check_entry(bucket, entry)
            version, values = store.read(worker, entry)
            return m.Values([version]), rows.taken(bucket, worker, version, values)
        if len(frames) != 1 or (bucket.answers is not None and not bucket.answers.stores_value):
            raise ProtocolError(f"a pull of rows with {len(frames)} frames of row numbers makes no sense here")
        chosen = rows.numbers(bucket, entry, frames[0])
        version, values = store.read(worker, entry)
        return m.Values([version]), [to_frame(values.view(rows.shape_of(bucket, entry))[chosen])]

    def _send_values(
        self,
        peer: bytes,
        seq: int,
        worker: int,
        store: ServerStore,
        entries: Sequence[m.Entry],
        absent: Collection[_Place] = (),
    ) -> None:
        """Answer with values, as they are at the moment of sending, also when the answer is given again."""

        def read() -> tuple[list[int], list[Any]]:
            found = [store.read(worker, entry) for entry in entries]
            copied = [values if store.values_stand_still else values.clone() for _, values in found]
            return [version for version, _ in found], [to_frame(values) for values in copied]

        versions, frames = read()
        store.sent_bytes += self._crossing(peer, frames)
        first = [frames]
        # The next forward pass needs the first layers first.
        urgency = entries[0].bucket if entries else None
        body = m.Values(versions, absent=_stretches(absent))
        self._answer(peer, seq, body, lambda: first.pop() if first else read()[1], urgency)

    # ---- the rest --------------------------------------------------------------------------------------------------

    def _get_state(self, worker: int, body: m.GetState, frames: Frames) -> tuple[m.Reply, Frames]:
        return get_state(self._store(body.store), worker, body.entries)

    def _set_state(self, worker: int, body: m.SetState, frames: Frames) -> m.Reply:
        set_state(self._store(body.store), worker, body.items, frames)
        return m.Done()

    def _command(self, worker: int, body: m.Command, frames: Frames) -> m.Reply:
        if body.head not in _COMMANDS:
            raise ValueError(f"unknown server command {body.head!r}; known are {', '.join(sorted(_COMMANDS))}")
        return m.Answer(_COMMANDS[body.head](self, body.body))

    def _stats(self, worker: int, body: m.AskStats, frames: Frames) -> m.Reply:
        return m.StatsAre(json.dumps(self._store(body.store).report()))

    def _of_worker(self, peer: bytes, seq: int, body: m.Pause | m.Leave | m.AskMissing) -> None:
        """Heed what others may have to know too: it is passed on to servers to which the worker's pushes are."""
        worker, opened = self._peers.workers[peer], self._opened(body.store)
        reply = partial(self._reply, peer, seq)
        if isinstance(body, m.AskMissing):
            relaying.missing(opened, self._ask, worker, body, reply)
        else:
            relaying.heed(opened, self._peers.rank, worker, body, direct=True)
            relaying.pass_on(opened, self._ask, worker, body, reply)

    def _of_server(self, peer: bytes, seq: int, body: m.Request, frames: Frames) -> None:
        if isinstance(body, m.PushSum):
            self._push_sum(peer, seq, body, frames)
        elif isinstance(body, m.OnBehalf):
            opened, server = self._opened(body.body.store), self._peers.servers[peer]
            self._reply(peer, seq, relaying.on_behalf(opened, self._peers.rank, server, body))
        else:
            raise ProtocolError(f"a server does not take {type(body).__name__} from another server")


def _stretches(absent: Collection[_Place]) -> list[m.Stretch]:
    return [m.Stretch(*one) for one in sorted(absent)] if absent else []


def _describe(body: m.OpenStore) -> str:
    merged = {"groups": f"groups {body.groups}", "first": f"the first {body.first}"}.get(body.merge, body.merge)
    bound = "no bound" if body.bound < 0 else f"bound {body.bound}"
    age = "no age limit" if body.age < 0 else f"age {body.age}"
    how = f"{'mean' if body.mean else 'sum'}, {'with' if body.local_merge else 'without'} local merge"
    how += f", norms up to {body.clip_norm:g}" if body.clip_norm else ""
    return f"merge {merged}, {bound}, weighting {body.weighting}, {age}, {how}"
