"""The buckets of a store that their server keeps: set up, and reported."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch

from paceline.compression import make
from paceline.consistency import Policy, Pushed
from paceline.errors import ConfigError, KeyMismatchError, ProtocolError
from paceline.observe import meter
from paceline.server import rows
from paceline.server.bucket import StoredBucket
from paceline.server.bucket_store import BucketStore
from paceline.server.clip_sink import ClipSink
from paceline.server.sinks import ApplySink
from paceline.updaters import FlatUpdater, Piece, StepOptions, UpdaterSpec, make_updater, options_apart
from paceline.wire import messages as m

logger = logging.getLogger(__name__)

#: Pushes that have other options before it is said: at the end of an epoch a slow worker may change them a push late.
_PUSHES = 4

#: Changes of a worker's options that are kept, for the rounds of slower ones.
_KEPT = 1000


class OwnStore(BucketStore):
    """The part of a store that one server keeps.

    Args:
        name: name of the store.
        policy: merge, bound, weighting and age limit.
        mean: merge to the mean over samples instead of the sum.
        num_workers: number of the job's workers.
        allowed: import paths of optimizers that may be loaded here.
        share: keep values in shared memory where workers may map them.
        hosts: hosts of the workers, by rank: sums are made host by host; empty: all on one.
        clips: hold complete cohorts until a worker brings the factor that clips them.

    Attributes:
        clip: the sink that holds cohorts; None in a store that does not clip.
        codecs: by leg that is compressed, ``push`` or ``pull``.
        has_updater: whether the store knows how a push changes values.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        mean: bool,
        num_workers: int,
        allowed: Collection[str],
        share: bool = False,
        hosts: Sequence[str] = (),
        clips: bool = False,
    ) -> None:
        self.has_updater = policy.merge == "all"
        self._allowed = allowed
        self._apply = ApplySink(name, policy)
        self.codecs = self._apply.codecs
        self.clip = ClipSink(self._apply) if clips else None
        # With other merges a worker's values stand still while the server's move on.
        shared = share and policy.merge == "all"
        super().__init__(name, policy, mean, num_workers, self.clip or self._apply, hosts, shared)
        self._options = None if policy.merge == "all" else UnlikeOptions()

    # ---- setting up ------------------------------------------------------------------------------------------------

    def init(
        self, block: int, specs: Sequence[m.BucketSpec], values: Sequence[torch.Tensor], answers: str = ""
    ) -> None:
        """Initialise buckets of a block, each with flat values: all, or none when one of them cannot be.

        Raises:
            KeyMismatchError: a bucket is initialised already.
            ProtocolError: keys do not cover a bucket, or it cannot answer so.
        """
        if "pull" in self.codecs:
            self._check_float32(value.dtype for value in values)
        if any((block, spec.index) in self for spec in specs):
            raise KeyMismatchError(f"block {block} of store {self.name!r} is initialised already")
        if answers == "merged" and self.policy.merge != "all":
            raise ProtocolError(f"store {self.name!r} has no rounds of all workers whose merged rows it could bring")
        all_pieces = [_pieces_of(spec) for spec in specs]
        made = []
        for spec, pieces, own in zip(specs, all_pieces, self.settle(block, values), strict=True):
            bucket = StoredBucket(own, pieces, self.unpushed.copy(), self._updater(own, pieces), (block, spec.index))
            bucket.answers = rows.answers_of(bucket, answers, self.unpushed.live)
            made.append(bucket)
        self._keep_known_apart(made)
        self.add(made)
        meter.active.hold(sum(value.numel() for value in values), len(made))

    def _updater(self, values: torch.Tensor, pieces: Sequence[Piece]) -> FlatUpdater:
        return make_updater(self._apply.spec, values, pieces, self._allowed)

    def note_options(self, entry: m.Entry, pushes: Sequence[Pushed], options: StepOptions | None) -> None:
        """Say once which workers have other options than others; one server has the first bucket, and says it for all.

        With ``all`` such pushes make no update (:meth:`~paceline.server.merge.Accumulator.objection`).
        """
        if self._options is None or options is None or entry.place != (0, 0) or entry.start:
            return
        for one in pushes:
            apart = self._options.note(one.worker, one.round, options)
            if apart:
                self._options = None
                logger.warning(
                    "store %r: %s. Each of its updates has the options of the worker that pushed it first. If a "
                    "scheduler changes them, call it on every worker", self.name, apart,
                )  # fmt: skip
                return

    def set_updater(self, spec: UpdaterSpec, fresh: bool = False) -> None:
        """Set how a push changes values. Setting the same again keeps the optimizer's state, unless it is ``fresh``.

        Raises:
            ValueError: the optimizer is unknown, refuses its options, or needs whole tensors where keys are split.
        """
        if spec == self._apply.spec and self.has_updater and not fresh:
            return
        slots = [(bucket, slot) for bucket in self for slot in bucket.slots]
        if not slots:
            # Options are tried on something, so that a mistake is found now and not at the first key.
            value = torch.zeros(1, dtype=torch.float32, device="cpu")
            make_updater(spec, value, [Piece(next(iter(spec.keys), ""), 0, 1, (1, 1))], self._allowed)
        updaters = [
            make_updater(spec, bucket.values[slot.range], slot.updater.pieces, self._allowed) for bucket, slot in slots
        ]
        for updater, (_, slot) in zip(updaters, slots, strict=True):
            slot.updater = updater
        self._apply.spec, self.has_updater = spec, True
        self.sums_in_float32 = spec.multi_precision

    def set_compression(self, params: dict[str, Any], leg: str) -> None:
        """Set the codec of pushes or of pulls; saying the same again changes nothing.

        Raises:
            ValueError: unknown leg, codec or parameters, another codec is in use, or it is too late.
            TypeError: a codec for pulls, and values that are not float32.
        """
        name, buckets = self.name, list(self)
        if leg not in ("push", "pull"):
            raise ValueError(f"the legs that can be compressed are 'push' and 'pull', not {leg!r}")
        codec, known = make(params), self.codecs.get(leg)
        if known is not None and (codec is None or codec.params() != known.params()):
            raise ValueError(f"store {name!r} compresses its {leg} leg with {known.params()} already")
        if codec is None or known is not None:
            return
        if leg == "pull":
            if any(slot.pending for bucket in buckets for slot in bucket.slots):
                raise ValueError(f"store {name!r} has unanswered pushes; compress its pull leg before the first push")
            self._check_float32(bucket.values.dtype for bucket in buckets)
        self.codecs[leg] = codec
        self._keep_known_apart(buckets)

    def _check_float32(self, dtypes: Iterable[torch.dtype]) -> None:
        for dtype in dtypes:
            if dtype != torch.float32:
                raise TypeError(f"store {self.name!r} compresses pulls, which takes float32 values, not {dtype}")

    def _keep_known_apart(self, buckets: Iterable[StoredBucket]) -> None:
        """Leave the memory of buckets to the known values: workers of this host may map it."""
        if "pull" in self.codecs and self.policy.merge == "all":
            for bucket in buckets:
                bucket.keep_known_apart(self._updater)

    # ---- checks ----------------------------------------------------------------------------------------------------

    def check_kind(self, push: m.Push) -> None:
        """Refuse a push of a kind that is not taken here.

        Raises:
            ConfigError: the store needs an optimizer.
            ProtocolError: rows, or encoded values, where there can be none.
        """
        if not self.has_updater:
            raise self.no_updater()
        if push.rows:
            if push.coded or push.shared:
                raise ProtocolError("rows travel as they are")
            if push.want and len(push.entries) != 1:
                raise ProtocolError(f"an answer brings rows of one key, not of {len(push.entries)}")
        if push.coded and "push" not in self.codecs:
            raise ProtocolError(f"a compressed push, but store {self.name!r} has no compression")

    def no_updater(self) -> ConfigError:
        """Return the error for a push to a store that does not know how it changes values."""
        return ConfigError(
            f"store {self.name!r} merges pushes as {self.policy.merge!r} and needs an optimizer where the "
            "values are: call set_optimizer before the first push"
        )

    # ---- counters --------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the counters."""
        stats = self.stats
        return {
            "slots": sum(len(bucket.slots) for bucket in self),
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
            "updates": stats.updates,
            "skipped": stats.skipped,
            "staleness": {str(age): number for age, number in sorted(stats.staleness.items())},
            "weight_sum": stats.weight_sum,
            "step_mass": stats.step_mass,
            "data_mass": {str(worker): mass for worker, mass in sorted(stats.data_mass.items())},
            "dropped": {str(worker): number for worker, number in sorted(stats.dropped.items())},
        }


def _pieces_of(spec: m.BucketSpec) -> list[Piece]:
    """Return the keys of a bucket and where they lie.

    Raises:
        ProtocolError: they do not cover it.
    """
    pieces, position = [], 0
    offsets = spec.offsets or [0] * len(spec.keys)
    if not len(spec.keys) == len(spec.lengths) == len(spec.shapes) == len(offsets):
        raise ProtocolError("a bucket lists different numbers of keys, lengths, shapes and offsets")
    for key, length, shape, offset in zip(spec.keys, spec.lengths, spec.shapes, offsets, strict=True):
        pieces.append(Piece(key, position, length, tuple(shape), offset))
        position += length
    if position != spec.length:
        raise ProtocolError(f"keys of {position} elements in a bucket of {spec.length}")
    return pieces


class UnlikeOptions:
    """Finds workers whose optimizers have other options, in stores where an update has the options of its own push.

    Workers that go at their own pace change a learning rate in the same round (a schedule by steps) or at the same time
    (a schedule by epochs, whose samples come from a pool). Where neither explains it, not all workers run the schedule.
    """

    def __init__(self) -> None:
        self._changes: dict[int, deque[tuple[int, StepOptions]]] = {}
        """By worker, the first rounds of its options."""
        self._last: dict[int, int] = {}
        """By worker, its last round."""
        self._apart: Counter[tuple[int, int]] = Counter()
        """By two workers, pushes in a row with other options."""

    def note(self, worker: int, round: int, options: StepOptions) -> str:
        """Take in the options of a push; returns how they differ from those of another worker, if they do for long."""
        if round <= self._last.get(worker, 0):
            return ""  # it comes again
        changes = self._changes.setdefault(worker, deque(maxlen=_KEPT))
        if not changes or changes[-1][1] is not options:
            changes.append((round, options))
        self._last[worker] = round
        first = min(self._changes)
        for other in [first] if worker != first else [one for one in self._changes if one != first]:
            pair = (other, worker) if other < worker else (worker, other)
            found = self._difference(worker, other, round)
            if found is not None:
                self._apart[pair] = self._apart[pair] + 1 if found else 0
            if found and self._apart[pair] >= _PUSHES:
                return f"{found} in round {round}"
        return ""

    def _difference(self, worker: int, other: int, round: int) -> str | None:
        """Return how options differ from those of another worker, in that round and now; None: it is not known."""
        ours, theirs = self._changes[worker][-1][1], self._changes[other]
        place = bisect_right(theirs, round, key=itemgetter(0))
        if self._last[other] < round or not place:
            return None
        apart = ""
        for one in (theirs[-1][1], theirs[place - 1][1]):
            apart = "" if one is ours else options_apart(ours, one, worker, other)
            if not apart:
                break
        return apart
