"""Pushes and pulls of one worker: sends the arenas' gradients to the servers, and stores their values in the arenas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch

from paceline.compression import Codec, Leg
from paceline.layout.local_merge import Route
from paceline.layout.ranges import is_all
from paceline.layout.tensors import sum_into, to_frame, without_graph
from paceline.net.base import Frames
from paceline.net.call import Call
from paceline.observe import meter
from paceline.observe.account import ENCODE, SEND
from paceline.wire import messages as m
from paceline.worker import answers
from paceline.worker.block import WorkerBlock
from paceline.worker.call_plan import CallPlan, CallStep
from paceline.worker.session import Session


class EarlierRequests(Protocol):
    """Requests that are answered before the last push of a round is sent."""

    def advance(self) -> bool:
        """Send what can be sent by now; returns whether all is answered. Does not wait."""

    def wait(self) -> None:
        """Send the rest, and wait for all answers."""


@dataclass(frozen=True)
class Carried:
    """All that a push carries besides gradients. All pushes of one round carry the same.

    Attributes:
        samples: samples behind it: its weight if the store merges to the mean.
        rows: how many samples there may be, for speeds.
        options: encoded options of the optimizer; empty: unchanged.
        skip: no server may apply this round, for example because gradients are not finite. Neither gradients nor
            residuals are read or sent. Merged gradients become NaN for all workers.
        round: number of the front door's round, for errors; 0: it counts none.
        nan: what an exchange does with a gradient that is not finite: push it, skip the round, or raise an error.
        after: requests that the servers have got before the last push of the round is sent.
    """

    samples: float = 1.0
    rows: float = 1.0
    options: bytes = b""
    skip: bool = False
    round: int = 0
    nan: Literal["pass", "skip", "error"] = "pass"
    after: EarlierRequests | None = None


class Traffic:
    """Pushes the arenas' gradients, and stores pulled values in the arenas.

    ``blocks`` are those of the store by number, those that are still to come too. ``merges_rounds``: each update is
    made of one round of this worker's unit, so the values in the answer to a push stay valid until this worker's next
    push. Answers always bring them: one round trip instead of two.
    """

    def __init__(self, session: Session, store: str, blocks: Mapping[int, WorkerBlock], merges_rounds: bool) -> None:
        self.clip_norm = 0.0
        """Largest norm of a merged gradient; 0: no limit. With a limit, pushes are answered after :meth:`clip`."""
        self._unclipped: dict[int, list[m.Entry]] = {}
        """Entries that were pushed since the last clipping, by owner."""
        self._session, self._store, self._blocks, self._merges_rounds = session, store, blocks, merges_rounds
        self.codecs: dict[Leg, Codec] = {}
        self._note = b""
        self._told: Call | None = None
        self._heard: list[tuple[int, bytes]] = []

    @property
    def _answers_bring_values(self) -> bool:
        """Whether answers to pushes bring values. Compressed values are only sent this way."""
        return self._merges_rounds or "pull" in self.codecs

    # ---- calls on lists of keys ------------------------------------------------------------------------------------

    def push(self, plan: CallPlan, values: list[torch.Tensor] | list[list[torch.Tensor]], carried: Carried) -> None:
        """Push one value per key of the plan, or a list of device values, which are summed."""
        for step in plan.steps:
            self.wait(step)
            _fill(step.grads, values[step.positions])
            for route, spans in step.sends.items():
                self.push_ranges(route, spans, carried, self._answers_bring_values)
            step.set_fresh(self._answers_bring_values)

    def pull(self, plan: CallPlan, outs: list[torch.Tensor] | list[list[torch.Tensor]]) -> None:
        """Copy the values of the plan's keys into one tensor per key, or into a list of tensors per key."""
        self.refresh(plan, lambda step: _empty(step.values, outs[step.positions]))

    def refresh(self, plan: CallPlan, then: Callable[[CallStep], None] = lambda step: None) -> None:
        """Pull the values of keys into their arenas, step by step."""
        for step in plan.steps:
            self.wait(step)
            if not step.is_fresh():
                self._session.wait([self._pull_ranges(*item) for item in step.sends.items()])
            then(step)
            if not self._merges_rounds:
                step.set_fresh(False)

    def set_values(self, plan: CallPlan, values: Sequence[torch.Tensor]) -> list[Call]:
        """Send values of the plan's keys, each in its shape, to their owners, which have them when the calls are done.

        The values must not change until then.
        """
        calls: list[Call] = []
        for step in plan.steps:
            self.wait(step)
            found: dict[int, tuple[list[m.Entry], list[Any]]] = {}
            for (block, index), value in zip(step.places, values[step.positions], strict=True):
                flat = value.detach().to("cpu", block.dtype).contiguous().view(-1)
                for server, one, start in block.parts_of(index):
                    entries, frames = found.setdefault(server, ([], []))
                    entries.append(m.Entry(*one.place, one.start, one.length, 0))
                    frames.append(to_frame(flat[start : start + one.length]))
            for server, (entries, frames) in found.items():
                body = m.SetValues(self._store, entries)
                calls.append(self._session.ask_server(server, body, "setting values", frames))
            step.set_fresh(False)
        return calls

    def wait(self, step: CallStep) -> None:
        """Wait for the answers to requests on a step's keys."""
        self._session.check()  # also before a forked child writes to the arena of its parent
        spans = [one for sends in step.sends.values() for one in sends]
        calls = [call for one in spans for call in self._blocks[one.block].outstanding(one)]
        if calls:
            is_answered = False
            try:
                self._session.wait(calls)
                is_answered = True
            finally:
                if not is_answered:
                    step.set_fresh(False)  # a failed answer brings no values

    # ---- messages --------------------------------------------------------------------------------------------------

    def push_ranges(
        self,
        route: Route,
        spans: Sequence[m.Span],
        carried: Carried,
        want: bool = True,
        absent: Sequence[m.Span] = (),
    ) -> Call:
        """Push ranges of the arenas' gradients.

        The answer lists the ranges for which no worker had a gradient: see :attr:`WorkerBlock.missing`.

        Args:
            route: route of the ranges.
            spans: the ranges.
            carried: all that the push carries besides gradients.
            want: the answer brings the new values into the arenas.
            absent: parts of the ranges for which this worker has no gradient. Each part is all that the ranges hold of
                a key (:meth:`WorkerBlock.ranges`). They count as zeros, and the arenas' gradients become zeros there.
                If no worker has a gradient, no value is updated.
        """
        before = meter.active.enter(SEND)
        # Codecs of both legs have their states in the worker and the owner, so pushes are not summed between them.
        server = route.owner if self.codecs else route.via
        entries: list[m.Entry] = []
        shared, round = True, 0
        for one in spans:
            block = self._blocks[one.block]
            shared = shared and server in block.mapped
            for piece in block.buckets[one.bucket].rounds.next(one.start, one.length):
                entries.append(m.Entry(one.block, one.bucket, *piece))
                round = max(round, piece[2])
        gone = answers.cut(entries, absent) if absent and not carried.skip else []
        coded = "push" in self.codecs
        is_read_in_place = shared and not coded and not gone
        frames: Frames = ()
        if not (carried.skip or is_read_in_place):
            sending = meter.active.enter(ENCODE) if coded else meter.NOTHING
            frames = self._payload(entries, shared, gone)
            meter.active.leave(sending)
        note, self._note = self._note, b""
        body = m.Push(
            self._store, entries, carried.samples, carried.options, coded, want, shared, absent=gone,
            skip=carried.skip, note=note,
        )  # fmt: skip
        done = partial(self._answered, entries, shared, want)
        self._session.note_round(round, carried.rows)
        if self.clip_norm:
            self.note_unclipped(route.owner, entries)
        call = self._session.ask_server(server, body, f"push of round {round}", frames, done)
        self._told = call if note else self._told
        for one in spans:
            self._blocks[one.block].note_sent(one, call)
        meter.active.leave(before)
        return call

    def note_unclipped(self, owner: int, entries: Sequence[m.Entry]) -> None:
        """Note entries whose push to an owner follows, for :meth:`clip`."""
        self._unclipped.setdefault(owner, []).extend(entries)

    # ---- notes -----------------------------------------------------------------------------------------------------

    def tell(self, note: bytes) -> None:
        """Give the next push a note for the workers whose pushes make one update with it: ``merge`` is ``all``.

        Args:
            note: at most 64 bytes.
        """
        self._note, self._told, self._heard = note, None, []

    def heard(self) -> dict[int, bytes]:
        """Return the notes of the update that was made with this worker's last note, after waiting for it.

        They are the same for all workers behind that update. Nothing, if there was no push since :meth:`tell`.
        """
        self._note = b""
        if self._told is not None:
            self._session.wait([self._told])
        return dict(self._heard)

    def clip(self) -> float:
        """Clip all pushes since the last call, and let the servers apply them; returns the norm before clipping.

        The merged gradient of all these pushes, after the mean, is scaled by ``min(1, clip_norm / (norm + 1e-6))``, as
        :func:`torch.nn.utils.clip_grad_norm_` does. All workers that merge their pushes call this at the same point.
        """
        pushed, self._unclipped = self._unclipped, {}
        owners = sorted(pushed)
        asked = [
            self._session.ask_server(owner, m.AskNorm(self._store, pushed[owner]), "norm of a round")
            for owner in owners
        ]
        self._session.wait(asked)
        parts = [call.body for call in asked if isinstance(call.body, m.NormIs)]
        norm = math.sqrt(math.fsum(one.squares for one in parts))
        limit = self.clip_norm / (norm + 1e-6)
        factor = 1.0 if limit > 1.0 else limit  # not min: that would lose a NaN
        skip = any(one.skipped for one in parts)
        for owner in owners:
            # The servers answer the pushes after this.
            self._session.ask_server(owner, m.Commit(self._store, pushed[owner], factor, skip), "clipping a round")
        return norm

    def _payload(self, entries: Iterable[m.Entry], shared: bool, gone: Sequence[m.Span]) -> Frames:
        codec = self.codecs.get("push")
        frames: list[Any] = []
        for entry in entries:
            block = self._blocks[entry.block]
            ranges = answers.gaps(gone, entry) if gone else ()
            if ranges and is_all(ranges, entry.length):
                frames.append(b"")
                continue
            grads = block.grads[block.arena_slice(entry)]
            for start, stop in ranges:
                grads[start:stop] = 0
            if codec is None:
                frames.append(to_frame(grads))
            else:
                state = block.codec_state(codec, entry)
                with answers.held_back(state.residual, ranges) if ranges else nullcontext():
                    frames.append(codec.encode(grads, state, round=entry.round))
        return () if codec is None and shared else frames

    def _pull_ranges(self, route: Route, spans: Sequence[m.Span]) -> Call:
        entries = [m.Entry(*one.place, one.start, one.length, 0) for one in spans]
        shared = all(route.owner in self._blocks[one.block].mapped for one in spans)
        body = m.Pull(self._store, entries, shared)
        done = partial(self._store_values, entries, shared)
        call = self._session.ask_server(route.owner, body, "pull", (), done)
        for one in spans:
            self._blocks[one.block].note_sent(one, call)
        return call

    def _answered(self, entries: Sequence[m.Entry], shared: bool, want: bool, body: m.Body, frames: Frames) -> None:
        """Use the answer to a push."""
        assert isinstance(body, m.Values)
        for entry in entries:
            self._blocks[entry.block].note_absent(entry, body.absent)
        self._heard = body.notes or self._heard
        if want and (body.known or not shared):
            self._store_values(entries, shared, body, frames)

    def _store_values(self, entries: Sequence[m.Entry], shared: bool, body: m.Body, frames: Frames) -> None:
        assert isinstance(body, m.Values)
        if body.known:
            answers.store_known(self._blocks, entries, shared, self.codecs.get("pull"), body.known, frames)
        elif not shared:
            answers.store_values(self._blocks, entries, frames)


@without_graph
def _fill(targets: list[torch.Tensor], values: list[Any]) -> None:
    """Copy one value, or the sum of several values, into each target."""
    if isinstance(values[0], torch.Tensor):
        torch._foreach_copy_(targets, values)
        return
    for target, devices in zip(targets, values, strict=True):
        sum_into(target, devices)


@without_graph
def _empty(sources: list[torch.Tensor], outs: list[Any]) -> None:
    """Copy every source to its out, or to each tensor of a list of outs."""
    if isinstance(outs[0], torch.Tensor):
        torch._foreach_copy_(outs, sources)
        return
    for source, devices in zip(sources, outs, strict=True):
        for out in devices:
            out.copy_(source)
