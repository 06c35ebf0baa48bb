"""Runs any optimizer of torch.optim on stored flat values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from paceline.ranges import Ranges, common
from paceline.updaters import gradient, state_parts
from paceline.updaters.flat import FlatUpdater, Piece, State
from paceline.updaters.rows import LAZY, step_rows
from paceline.updaters.runs import Run, completed, group_of, runs_of, tuples
from paceline.updaters.simple import AssignUpdater
from paceline.updaters.updater_registry import check_name, find_class, is_whole_tensor
from paceline.updaters.updater_spec import KeyOptions, Options, StepOptions, UpdaterSpec, check_numbers


class TorchUpdater(FlatUpdater):
    """Runs a torch optimizer on one stored flat value, with torch's fused kernel if there is one.

    Elementwise optimizers get adjacent keys with equal options as one tensor. Whole-tensor optimizers get every key in
    its own shape.

    Args:
        value: 1-D tensor, updated in place.
        pieces: its pieces, in order.
        spec: the optimizer.
        cls: its class.
        options: current options; None: those of the spec.
        master: float32 masters to use instead of new copies of half precision values.
        apart: positions at which adjacent keys do not become one tensor.
    """

    def __init__(
        self,
        value: torch.Tensor,
        pieces: Sequence[Piece],
        spec: UpdaterSpec,
        cls: type[torch.optim.Optimizer],
        *,
        options: StepOptions | None = None,
        master: torch.Tensor | None = None,
        apart: Collection[int] = (),
    ) -> None:
        super().__init__(value, pieces)
        self._spec, self._cls = spec, cls
        self._whole = is_whole_tensor(spec.name)
        self._master = _master(value, spec) if master is None else master
        # Only with float32: torch's fused SGD is wrong for half types on CPUs (2.13), and grad_scale is a float32.
        self._fused = self._master.dtype == torch.float32 and not self._whole and "fused" in _parameters(cls)
        # Torch wraps every step for its profiler and for hooks, which are not used here: half the time on small slots.
        self._raw_step: Callable[[torch.optim.Optimizer], Any] = inspect.unwrap(cls.step)
        self._groups: Sequence[Options] = spec.groups if options is None else completed(options.groups, spec.groups)
        self._applied = options
        self._build(self._runs_of(self._keys, apart))

    @property
    def _keys(self) -> Mapping[str | int, KeyOptions]:
        """Current options of keys that differ from the default."""
        applied = None if self._applied is None else self._applied.keys
        return self._spec.keys if applied is None else applied

    def _runs_of(self, keys: Mapping[str | int, KeyOptions], apart: Collection[int] = ()) -> list[Run]:
        per_key = getattr(self._cls, "per_key", False)
        return runs_of(self.pieces, keys, whole=self._whole, per_key=per_key, apart=apart)

    def _build(self, runs: list[Run]) -> None:
        self._runs = runs
        self._params = [torch.nn.Parameter(run.view(self._master), requires_grad=True) for run in runs]
        extra: dict[str, Any] = {"fused": True} if self._fused else {}
        self._run_options = [self._options(run, self._groups) for run in runs]
        table = [
            {"params": [param]} | (_place(run) if run.place else {}) | chosen
            for param, run, chosen in zip(self._params, runs, self._run_options, strict=True)
        ]
        self._optimizer = self._cls(table, **extra)
        self._factor = _common_factor(self._run_options)

    def _options(self, run: Run, groups: Sequence[Options]) -> dict[str, Any]:
        options: dict[str, Any] = dict(group_of(run.options, groups))
        for name, factor in (("lr", run.options.lr_mult), ("weight_decay", run.options.wd_mult)):
            if factor != 1.0:
                options[name] = options.get(name, self._default(name)) * factor
        return tuples(options)

    def _default(self, name: str) -> float:
        parameter = _parameters(self._cls).get(name)
        return float(parameter.default) if parameter is not None else 0.0

    def _set_options(self, options: StepOptions | None) -> None:
        if options is None or options is self._applied:
            return
        keys = self._spec.keys if options.keys is None else options.keys
        # Keys that were separated stay separate: some state (ASGD's eta) is one number for a whole run.
        runs = self._runs_of(keys, apart=[run.start for run in self._runs])
        groups = completed(options.groups, self._spec.groups)
        table = [self._options(run, groups) for run in runs]
        self._groups = groups
        if runs != self._runs:
            self._rebuild(runs)
        for group, before, chosen in zip(self._optimizer.param_groups, self._run_options, table, strict=True):
            for name in before.keys() - chosen.keys():
                group[name] = self._optimizer.defaults.get(name)
            group.update(chosen)
        self._run_options, self._factor = table, _common_factor(table)
        self._applied = options

    def _keep_apart(self, absent: Ranges) -> None:
        """Separate pieces without a gradient from the others permanently: Adam's ``step`` is one number per run."""
        edges = {edge for one in absent for edge in one} - {0, self.value.numel()}
        known = {run.start for run in self._runs}
        if edges - known:
            self._rebuild(self._runs_of(self._keys, apart=known | edges))

    def _rebuild(self, runs: list[Run]) -> None:
        """Separate keys whose options now differ; the state is kept."""
        states = [self.state(piece) for piece in self.pieces]
        self._build(runs)
        for piece, state in zip(self.pieces, states, strict=True):
            self.load_state(piece, state)

    def update(self, merged: torch.Tensor, scale: float, options: StepOptions | None, absent: Ranges = ()) -> None:
        """Run one optimizer step on ``scale * merged``."""
        self._set_options(options)
        if absent:
            self._keep_apart(absent)
        gradients = self._gradients(merged, scale)
        for param, run, grad in zip(self._params, self._runs, gradients, strict=True):
            has_none = bool(absent) and bool(common(absent, ((run.start, run.start + run.length),)))
            param.grad = None if has_none else grad
        with torch.no_grad():
            self._raw_step(self._optimizer)
        for param in self._params:
            param.grad = None
        if self._master is not self.value:
            self.value.copy_(self._master)

    def _gradients(self, merged: torch.Tensor, scale: float) -> list[torch.Tensor]:
        """Return the gradient of every run: scaled and clipped, unless the fused kernel does that."""
        ours = scale != 1.0 or merged.dtype != self._master.dtype
        merged = merged.to(self._master.dtype)
        parts = [run.view(merged) for run in self._runs]
        if self._fused:
            # torch's fused kernels divide by grad_scale (made for GradScaler), which saves a separate pass. They write
            # the result back, so the gradient must be our own memory.
            factor = None if self._factor is None else scale * self._factor
            by_kernel = factor is not None and factor != 0.0 and (ours or factor == 1.0)
            self._optimizer.grad_scale = torch.tensor(1.0 / factor) if by_kernel and factor != 1.0 else None  # type: ignore[attr-defined,operator]
            if by_kernel:
                return parts
        return [
            gradient.prepared(part, chosen, scale, ours=ours)
            for part, chosen in zip(parts, self._run_options, strict=True)
        ]

    @property
    def is_lazy(self) -> bool:
        """Whether the optimizer has a lazy form, which updates only the rows of a gradient."""
        return self._cls in LAZY

    def update_rows(self, merged: torch.Tensor, scale: float, options: StepOptions | None) -> None:
        """Run one optimizer step; only on the rows of the gradient and their state if the optimizer is lazy."""
        if not self.is_lazy:
            super().update_rows(merged, scale, options)
            return
        self._set_options(options)
        [param], [group] = self._params, self._optimizer.param_groups
        state, shape = self._optimizer.state[param], merged.shape
        shaped = {name: _in_shape(value, param.shape, shape) for name, value in state.items()}
        step_rows(self._cls, param.detach().view(shape), shaped, group, merged.to(self._master.dtype), scale)
        state.update({name: _in_shape(value, shape, param.shape) for name, value in shaped.items()})
        if self._master is not self.value:
            rows = merged.indices()[0]
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
            for param, run in zip(half._params, half._runs, strict=True):
                half._optimizer.state[param] = self._state_at(start + run.start, run.length)
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
        for param, run in zip(both._params, both._runs, strict=True):
            first, last = run.start, run.start + run.length
            found = [self._state_at(first, min(last, edge) - first)] if first < edge else []
            if last > edge:
                found.append(right._state_at(max(first - edge, 0), last - max(first, edge)))
            both._optimizer.state[param] = found[0] if len(found) == 1 else state_parts.as_one(*found)
        return both

    def _like(
        self, value: torch.Tensor, pieces: Sequence[Piece], master: torch.Tensor | None, apart: Collection[int]
    ) -> TorchUpdater:
        """Return an updater of other values with the same options and no state."""
        return TorchUpdater(
            value, pieces, self._spec, self._cls, options=self._applied, master=master, apart=apart
        )  # fmt: skip

    def _state_of(self, index: int) -> Mapping[str, Any]:
        """Return the state of one run, not copied."""
        found: Mapping[str, Any] = self._optimizer.state.get(self._params[index], {})
        return found

    def _state_at(self, start: int, length: int) -> dict[str, Any]:
        """Return the state of a part of one run; it shares memory with the run's."""
        index = next(i for i, run in enumerate(self._runs) if run.start <= start < run.start + run.length)
        first = start - self._runs[index].start
        return state_parts.part(self._state_of(index), None if self._whole else slice(first, first + length))

    def state(self, piece: Piece) -> State:
        """Return the state of one piece, as copies."""
        param, run = self._find(piece)
        at = piece.start - run.start
        state: State = {}
        for name, found in self._optimizer.state.get(param, {}).items():
            value = (
                torch.tensor(float(found)) if isinstance(found, int) else found
            )  # SparseAdam counts its steps in an int
            if not isinstance(value, torch.Tensor):
                continue
            flat = not self._whole and value.dim() == 1
            state[name] = value[at : at + piece.length].clone() if flat else value.clone()
        if self._master is not self.value:
            state["master"] = self._master[piece.start : piece.start + piece.length].clone()
        return state

    def load_state(self, piece: Piece, state: State) -> None:
        """Set the state of one piece.

        Raises:
            ValueError: a tensor does not have the piece's shape.
        """
        param, run = self._find(piece)
        if piece.shape and not self._whole:  # torch's own state has the shape of the key
            state = {name: one.view(-1) if one.shape == piece.shape else one for name, one in state.items()}
        for name, value in state.items():
            self._check_state(piece, run, name, value)
        at = piece.start - run.start
        for name, value in state.items():
            if name == "master":
                self._master[piece.start : piece.start + piece.length].copy_(value)
            elif self._whole or value.dim() == 0:
                self._optimizer.state[param][name] = value.clone()
            else:
                whole = self._optimizer.state[param].setdefault(name, torch.zeros(run.length, dtype=value.dtype))
                whole[at : at + piece.length].copy_(value)

    def _check_state(self, piece: Piece, run: Run, name: str, value: torch.Tensor) -> None:
        if name == "master" and self._master is self.value:
            raise ValueError(f"key {piece.key!r} has a float32 master, but this optimizer has no multi_precision")
        if name != "master" and (value.dim() == 0 or ":" in self._spec.name):
            return
        wanted = run.shape if self._whole and name != "master" else (piece.length,)
        # Factored state (Adafactor) has 1 where it is summed over.
        fits = value.dim() == len(wanted) and all(
            size == full or (self._whole and size == 1) for size, full in zip(value.shape, wanted, strict=True)
        )
        if not fits:
            raise ValueError(f"state {name} of key {piece.key!r} has shape {tuple(value.shape)}, not {wanted}")

    def _find(self, piece: Piece) -> tuple[torch.nn.Parameter, Run]:
        for param, run in zip(self._params, self._runs, strict=True):
            if run.start <= piece.start and piece.start + piece.length <= run.start + run.length:
                return param, run
        raise ValueError(f"key {piece.key!r} at {piece.start}+{piece.length} is not part of this value")


def _place(run: Run) -> dict[str, Any]:
    """Return the key of a run, and its range in the key, as options for an optimizer."""
    assert run.place is not None
    return {"key": run.place[0], "key_start": run.place[1]}


def _common_factor(table: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the common factor on the gradients of all runs; None if factors differ or a gradient is clipped."""
    factors = {gradient.factor_of(options) for options in table}
    clipped = any(gradient.clip_of(options) is not None for options in table)
    return None if clipped or len(factors) > 1 else next(iter(factors), 1.0)


def _parameters(cls: type[torch.optim.Optimizer]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(cls.__init__).parameters


def _check_options(cls: type[torch.optim.Optimizer], groups: Sequence[Options]) -> None:
    """Check the options of every group with the class. Torch itself only checks those of the first call."""
    for group in groups:
        known = {name: value for name, value in group.items() if name in _parameters(cls)}
        cls([torch.nn.Parameter(torch.zeros(1, 1))], **tuples(known))


def _master(value: torch.Tensor, spec: UpdaterSpec) -> torch.Tensor:
    half = value.dtype in (torch.float16, torch.bfloat16)
    return value.to(torch.float32) if half and spec.multi_precision else value


def _in_shape(value: Any, before: torch.Size, after: torch.Size) -> Any:
    return value.view(after) if isinstance(value, torch.Tensor) and value.shape == before else value


def make_updater(
    spec: UpdaterSpec, value: torch.Tensor, pieces: Sequence[Piece], allowed: Collection[str] = ()
) -> FlatUpdater:
    """Build the updater that a spec describes for one stored flat value.

    Args:
        spec: name and options.
        value: 1-D tensor, updated in place.
        pieces: its pieces, in order.
        allowed: import paths of user classes that may be loaded here.

    Raises:
        ValueError: the name is unknown, or the optimizer rejects an option's value.
        TypeError: the optimizer does not have an option.
    """
    name = check_name(spec.name)
    check_numbers(spec.groups, spec.keys)
    if name == "assign":
        return AssignUpdater(value, pieces, spec)
    cls = find_class(name, allowed)
    _check_options(cls, spec.groups)
    return TorchUpdater(value, pieces, spec, cls)
