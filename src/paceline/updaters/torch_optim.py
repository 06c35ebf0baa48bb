"""Runs any optimizer of torch.optim on stored flat values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from paceline.layout.ranges import Ranges, common
from paceline.updaters import state_parts
from paceline.updaters.classes import check_name, find_class, is_whole_tensor
from paceline.updaters.flat import FlatUpdater, Piece, State
from paceline.updaters.keyed import KeyedOptimizer, fits, master_of
from paceline.updaters.runs import Run, runs_of
from paceline.updaters.simple import AssignUpdater
from paceline.updaters.spec import KeyOptions, Options, StepOptions, UpdaterSpec, check_numbers, check_options


class TorchUpdater(FlatUpdater):
    """Runs a torch optimizer on one stored flat value, whose runs are the keys of a :class:`KeyedOptimizer`.

    Elementwise optimizers get adjacent keys with equal options as one tensor. Whole-tensor optimizers get every key in
    its own shape. Adjacent keys do not become one tensor at the positions ``apart``. Float32 masters that are given are
    used instead of new copies of half precision values.
    """

    def __init__(
        self,
        value: torch.Tensor,
        pieces: Sequence[Piece],
        spec: UpdaterSpec,
        cls: type[torch.optim.Optimizer],
        *,
        options: StepOptions = StepOptions(),  # noqa: B008 - it is frozen
        master: torch.Tensor | None = None,
        apart: Collection[int] = (),
    ) -> None:
        super().__init__(value, pieces)
        self._spec, self._cls, self._applied = spec, cls, options
        self._whole = is_whole_tensor(spec.name)
        self._master = master_of(value, spec) if master is None else master
        self._runs = self._runs_of(self._keys, apart)
        self._optimizer = self._optimizer_of(self._runs, options.groups)
        self._has_loaded = False
        """All pieces are separate, because state was loaded."""

    @property
    def _keys(self) -> Mapping[str | int, KeyOptions]:
        """Current options of keys that differ from the default."""
        return self._spec.keys if self._applied.keys is None else self._applied.keys

    def _runs_of(self, keys: Mapping[str | int, KeyOptions], apart: Collection[int] = ()) -> list[Run]:
        per_key = getattr(self._cls, "per_key", False)
        return runs_of(self.pieces, keys, whole=self._whole, per_key=per_key, apart=apart)

    def _optimizer_of(self, runs: Sequence[Run], groups: Sequence[Options]) -> KeyedOptimizer:
        """Return an optimizer of runs, by number."""
        made = KeyedOptimizer(self._spec, self._cls)
        for number, run in enumerate(runs):
            made.add(number, run.view(self._master), run.place)
        made.set_options(groups, {number: run.options for number, run in enumerate(runs)})
        return made

    def _set_options(self, options: StepOptions | None) -> None:
        if options is None or options is self._applied:
            return
        keys = self._spec.keys if options.keys is None else options.keys
        # Keys that were separated stay separate: some state (ASGD's eta) is one number for a whole run.
        runs = self._runs_of(keys, apart=[run.start for run in self._runs])
        if len(runs) != len(self._runs):
            self._rebuild(runs, options.groups)
        else:
            self._optimizer.set_options(options.groups, {number: run.options for number, run in enumerate(runs)})
            self._runs = runs
        self._applied = options

    def _keep_apart(self, absent: Ranges) -> None:
        """Separate pieces without a gradient from the others permanently: Adam's ``step`` is one number per run."""
        edges = {edge for one in absent for edge in one} - {0, self.value.numel()}
        known = {run.start for run in self._runs}
        if edges - known:
            self._rebuild(self._runs_of(self._keys, apart=known | edges), self._applied.groups)

    def _rebuild(self, runs: list[Run], groups: Sequence[Options]) -> None:
        """Go on with other runs. The state is kept: keys that become one run have equal counters."""
        optimizer = self._optimizer_of(runs, groups)
        states = [self.state(piece) for piece in self.pieces]
        self._runs, self._optimizer = runs, optimizer
        for piece, state in zip(self.pieces, states, strict=True):
            self._set_state(piece, state)

    def _part_all(self) -> None:
        """Separate all pieces: each may be given counters of its own (Adam's step), or no state."""
        runs = self._runs_of(self._keys, apart=[piece.start for piece in self.pieces])
        if len(runs) != len(self._runs):
            self._rebuild(runs, self._applied.groups)
        self._has_loaded = True

    def _join_alike(self) -> None:
        """Make adjacent keys one run again, after state was loaded, where their counters are equal."""
        states = [self._state_of(number) for number in range(len(self._runs))]
        alike = [state_parts.fit(left, right) for left, right in pairwise(states)]
        runs = self._runs_of(
            self._keys, apart=[run.start for run, fits_left in zip(self._runs[1:], alike, strict=True) if not fits_left]
        )
        if len(runs) != len(self._runs):
            self._rebuild(runs, self._applied.groups)
        self._has_loaded = False

    def update(self, merged: torch.Tensor, scale: float, options: StepOptions | None, absent: Ranges = ()) -> None:
        """Run one optimizer step on ``scale * merged``."""
        self._set_options(options)
        if self._has_loaded:
            self._join_alike()
        if absent:
            self._keep_apart(absent)
        ours = scale != 1.0 or merged.dtype != self._master.dtype
        merged = merged.to(self._master.dtype)
        gradients: dict[str | int, torch.Tensor] = {
            number: run.view(merged)
            for number, run in enumerate(self._runs)
            if not (absent and common(absent, ((run.start, run.start + run.length),)))
        }
        self._optimizer.update(gradients, scale, ours=ours)
        if self._master is not self.value:
            self.value.copy_(self._master)

    @property
    def is_lazy(self) -> bool:
        """Whether the optimizer has a lazy form, which updates only the rows of a gradient."""
        return self._optimizer.is_lazy

    def update_rows(self, merged: torch.Tensor, scale: float, options: StepOptions | None) -> None:
        """Run one optimizer step; only on the rows of the gradient and their state if the optimizer is lazy."""
        if not self.is_lazy:
            super().update_rows(merged, scale, options)
            return
        self._set_options(options)
        self._optimizer.update({0: merged.to(self._master.dtype)}, scale)
        if self._master is not self.value:
            rows, shape = merged.indices()[0], merged.shape
            self.value.view(shape).index_copy_(0, rows, self._master.view(shape)[rows].to(self.value.dtype))

    def value_was_set(self, start: int, stop: int) -> None:
        """Copy the new values to the float32 master."""
        if self._master is not self.value:
            self._master[start:stop].copy_(self.value[start:stop])

    def split(self, at: int) -> tuple[FlatUpdater, FlatUpdater]:
        """Return updaters of both halves; their states are views of this one's."""
        halves = []
        for (start, stop), pieces in zip(((0, at), (at, self.value.numel())), self.cut(at), strict=True):
            master = None if self._master is self.value else self._master[start:stop]
            half = self._like(self.value[start:stop], pieces, master, {run.start - start for run in self._runs})
            for number, run in enumerate(half._runs):
                half._state_of(number).update(self._state_at(start + run.start, run.length))
            halves.append(half)
        return halves[0], halves[1]

    def join(self, right: FlatUpdater, value: torch.Tensor, pieces: Sequence[Piece]) -> FlatUpdater | None:
        """Return one updater for both values, if the two have the same options.

        Adjacent keys whose counters differ (Adam's step, if one key had no gradient) stay separate in it. Halves of one
        key cannot be joined if their counters differ, or if the optimizer needs the whole key: then it returns None.
        """
        if not isinstance(right, TorchUpdater) or (right._spec, right._applied) != (self._spec, self._applied):
            return None
        edge = self.value.numel()
        apart = {run.start for run in self._runs} | {edge + run.start for run in right._runs if run.start}
        if self._whole or not state_parts.fit(self._state_of(-1), right._state_of(0)):
            if all(piece.start != edge for piece in pieces):
                return None
            apart.add(edge)
        master = None if self._master is self.value else state_parts.tensor_as_one(self._master, right._master)
        both = self._like(value, pieces, master, apart)
        for number, run in enumerate(both._runs):
            first, last = run.start, run.start + run.length
            found = [self._state_at(first, min(last, edge) - first)] if first < edge else []
            if last > edge:
                found.append(right._state_at(max(first - edge, 0), last - max(first, edge)))
            both._state_of(number).update(found[0] if len(found) == 1 else state_parts.as_one(*found))
        return both

    def _like(
        self, value: torch.Tensor, pieces: Sequence[Piece], master: torch.Tensor | None, apart: Collection[int]
    ) -> TorchUpdater:
        """Return an updater of other values with the same options and no state."""
        other = TorchUpdater(
            value, pieces, self._spec, self._cls, options=self._applied, master=master, apart=apart
        )  # fmt: skip
        other._has_loaded = self._has_loaded
        return other

    def _state_of(self, number: int) -> dict[str, Any]:
        """Return the state of one run, not copied; -1 is the last one."""
        return self._optimizer.own_state(number % len(self._runs))

    def _state_at(self, start: int, length: int) -> dict[str, Any]:
        """Return the state of a part of one run; it shares memory with the run's."""
        number = next(i for i, run in enumerate(self._runs) if run.start <= start < run.start + run.length)
        first = start - self._runs[number].start
        return state_parts.part(self._state_of(number), None if self._whole else slice(first, first + length))

    def state(self, piece: Piece) -> State:
        """Return the state of one piece, as copies."""
        number, at = self._find(piece)
        state: State = {}
        for name, value in self._state_of(number).items():
            if isinstance(value, int):  # SparseAdam counts its steps in an int
                state[name] = torch.tensor(float(value), dtype=torch.float32, device="cpu")
            elif isinstance(value, torch.Tensor):
                flat = not self._whole and value.dim() == 1
                state[name] = (value[at : at + piece.length] if flat else value).clone()
        if self._master is not self.value:
            state["master"] = self._master[piece.start : piece.start + piece.length].clone()
        return state

    def load_state(self, piece: Piece, state: State) -> None:
        """Set the state of one piece.

        Raises:
            ValueError: a tensor does not have the piece's shape.
        """
        if piece.shape and not self._whole:  # torch's own state has the shape of the key
            state = {name: one.view(-1) if one.shape == piece.shape else one for name, one in state.items()}
        for name, value in state.items():
            self._check_state(piece, self._runs[self._find(piece)[0]], name, value)
        if not self._has_loaded:
            self._part_all()
        self._set_state(piece, state)

    def _set_state(self, piece: Piece, state: State) -> None:
        number, at = self._find(piece)
        own = self._state_of(number)
        for name, value in state.items():
            if name == "master":
                self._master[piece.start : piece.start + piece.length].copy_(value)
            elif self._whole or value.dim() == 0:
                own[name] = value.clone()
            else:
                whole = own.setdefault(name, value.new_zeros(self._runs[number].length))
                whole[at : at + piece.length].copy_(value)

    def _check_state(self, piece: Piece, run: Run, name: str, value: torch.Tensor) -> None:
        if name == "master" and self._master is self.value:
            raise ValueError(f"key {piece.key!r} has a float32 master, but this optimizer has no multi_precision")
        if name != "master" and (value.dim() == 0 or ":" in self._spec.name):
            return
        wanted = run.shape if self._whole and name != "master" else (piece.length,)
        if not fits(value.shape, wanted, name, self._spec):
            raise ValueError(f"state {name} of key {piece.key!r} has shape {tuple(value.shape)}, not {wanted}")

    def _find(self, piece: Piece) -> tuple[int, int]:
        """Return the number of the run of a piece, and the first element there."""
        for number, run in enumerate(self._runs):
            if run.start <= piece.start and piece.start + piece.length <= run.start + run.length:
                return number, piece.start - run.start
        raise ValueError(f"key {piece.key!r} at {piece.start}+{piece.length} is not part of this value")


def make_updater(
    spec: UpdaterSpec, value: torch.Tensor, pieces: Sequence[Piece], allowed: Collection[str] = ()
) -> FlatUpdater:
    """Build the updater that a spec describes for one stored flat value, which it updates in place.

    Classes of import paths are loaded only if they are ``allowed``.

    Raises:
        ValueError: the name is unknown, or the optimizer rejects an option's value.
        TypeError: the optimizer does not have an option.
    """
    name = check_name(spec.name)
    check_numbers(spec.groups, spec.keys)
    if name == "assign":
        return AssignUpdater(value, pieces, spec)
    cls = find_class(name, allowed)
    check_options(cls, spec.groups)
    return TorchUpdater(value, pieces, spec, cls)
