"""Runs a torch optimizer on tensors by key."""

from __future__ import annotations

import inspect
from collections.abc import Callable, KeysView, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from paceline.updaters import gradient
from paceline.updaters.classes import is_whole_tensor
from paceline.updaters.rows import LAZY, step_rows
from paceline.updaters.runs import completed, group_of
from paceline.updaters.spec import KeyOptions, Options, UpdaterSpec, defaults_of, tuples

#: Steps of torch that have a fused kernel. A subclass with a step of its own has none.
_FUSED = {inspect.unwrap(cls.step) for cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)}
_SGD = inspect.unwrap(torch.optim.SGD.step)
_FUSED_ON_CPU = inspect.unwrap(torch.optim.Adagrad.step)
#: Torch's fused SGD is wrong for half types on CPUs (2.13).
_FUSED_DTYPES = (torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)

Key: TypeAlias = int | str
State: TypeAlias = dict[str, Any]


class KeyedOptimizer:
    """One torch optimizer over named tensors: every update is one step of only the keys that have a gradient.

    Keys with the same options, dtype and device form one param group, so that torch's fused and multi-tensor kernels
    process them together. Sparse gradients update only their rows (MXNet's lazy update) if the optimizer supports it.
    Not thread-safe.
    """

    def __init__(self, spec: UpdaterSpec, cls: type[torch.optim.Optimizer]) -> None:
        self._spec, self._cls = spec, cls
        self._groups, self._keys = list(spec.groups), dict(spec.keys)
        self._values: dict[Key, torch.Tensor] = {}
        self._params: dict[Key, torch.nn.Parameter] = {}
        self._places: dict[Key, tuple[Key, int]] = {}
        self._masters: set[Key] = set()
        self._without_momentum: set[Key] = set()
        self._chosen: dict[KeyOptions, Options] = {}
        self._factor: float | None = None
        self._divides = False
        self._optimizer: torch.optim.Optimizer | None = None
        self._is_stale = True
        # Torch wraps steps for its profiler and for hooks, which are not used here: half the time on small tensors.
        self._bare_step: Callable[[torch.optim.Optimizer], Any] = inspect.unwrap(cls.step)
        if not self._bare_step.__module__.startswith(("torch.optim.", "paceline.")):
            self._bare_step = cls.step

    @property
    def keys(self) -> KeysView[Key]:
        """The keys, in the order in which they were added."""
        return self._params.keys()

    @property
    def is_lazy(self) -> bool:
        """Whether a sparse gradient changes only its rows."""
        return self._cls in LAZY

    def add(self, key: Key, value: torch.Tensor, place: tuple[Key, int] | None = None) -> None:
        """Add a tensor; updates change it in place.

        ``place`` is its key and first element there, for optimizers that need it; None: the whole of ``key``.
        """
        self._params[key] = torch.nn.Parameter(value.detach(), requires_grad=True)
        self._places[key] = place or (key, 0)
        self._hold(key, value.detach())

    def _hold(self, key: Key, value: torch.Tensor) -> None:
        self._values[key] = value
        self._params[key].data = master_of(value, self._spec)
        self._masters.discard(key)
        if self._params[key].dtype != value.dtype:
            self._masters.add(key)
        self._is_stale = True

    # ---- options ---------------------------------------------------------------------------------------------------

    def set_options(self, groups: Sequence[Options] = (), keys: Mapping[Key, KeyOptions] | None = None) -> None:
        """Set options per param group, and the groups of keys. The state is not changed.

        Args:
            groups: options per param group; those that they do not name are the spec's.
            keys: keys that are not in group 0 with multipliers 1; None: the spec's.

        Raises:
            ValueError: a param group does not exist. No option is changed.
        """
        groups = completed(groups, self._spec.groups)
        keys = self._spec.keys if keys is None else keys
        if groups == self._groups and keys == self._keys:
            return
        chosen = self._choose(groups, keys)
        if keys != self._keys:
            self._is_stale = True
        elif self._optimizer is not None and not self._is_stale:
            for group in self._optimizer.param_groups:
                before, current = self._chosen[group["key_options"]], chosen[group["key_options"]]
                group.update({name: self._optimizer.defaults.get(name) for name in before.keys() - current.keys()})
                group.update(tuples(current))
                if before.get("momentum") != current.get("momentum"):
                    self._note_momentum()
        self._groups, self._keys = groups, dict(keys)
        self._note(chosen)

    def _choose(self, groups: Sequence[Options], keys: Mapping[Key, KeyOptions]) -> dict[KeyOptions, Options]:
        """Return the options of all kinds of keys."""
        found = {keys.get(key, KeyOptions()) for key in self._params}
        return {one: self._options(one, group_of(one, groups)) for one in found}

    def _options(self, key_options: KeyOptions, group: Options) -> Options:
        options = dict(group)
        for name, factor in (("lr", key_options.lr_mult), ("weight_decay", key_options.wd_mult)):
            if factor != 1.0:
                cls: Any = self._cls  # mypy thinks that classes are not hashable
                usual: Any = options[name] if name in options else defaults_of(cls).get(name, 0.0)
                options[name] = usual * factor
        return options

    def _note(self, chosen: dict[KeyOptions, Options]) -> None:
        """Set the options, and the factor on all gradients: None if factors differ or a gradient is clipped."""
        self._chosen = chosen
        factors = {gradient.factor_of(options) for options in chosen.values()}
        clipped = any(gradient.clip_of(options) is not None for options in chosen.values())
        self._factor = None if clipped or len(factors) > 1 else next(iter(factors), 1.0)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def update(self, merged: Mapping[Key, torch.Tensor], scale: float = 1.0, *, ours: bool = True) -> None:
        """Run one step of the given keys.

        ``scale`` turns ``merged`` into the gradients: dense or sparse, in the shapes of their keys. If they are
        ``ours``, they may be overwritten.
        """
        optimizer, dense = self._built, {}
        for key, grad in merged.items():
            if grad.is_sparse and self.is_lazy:
                group = next(g for g in optimizer.param_groups if any(self._params[key] is one for one in g["params"]))
                step_rows(optimizer, self._params[key], group, grad, scale)
            else:
                dense[key] = (grad.to_dense() if grad.is_sparse else grad).to(self._params[key].dtype)
        with torch.no_grad():
            for part in self._apart(dense):
                self._step(optimizer, part, scale, ours)
            for key in self._masters and self._masters & merged.keys():
                self._values[key].copy_(self._params[key])

    def _apart(self, dense: dict[Key, torch.Tensor]) -> list[dict[Key, torch.Tensor]]:
        """Return the gradients of one step, or of two: torch's fused SGD cannot mix keys with and without momentum."""
        first = self._without_momentum & dense.keys()
        if not first:
            return [dense] if dense else []
        self._without_momentum -= first
        first = {key for key in first if self._built.state[self._params[key]].get("momentum_buffer") is None}
        if len(first) in (0, len(dense)):
            return [dense]
        return [{key: dense[key] for key in dense if (key in first) is new} for new in (True, False)]

    def _step(
        self, optimizer: torch.optim.Optimizer, dense: Mapping[Key, torch.Tensor], scale: float, ours: bool
    ) -> None:
        for key, grad in dense.items():
            self._params[key].grad = grad
        try:
            optimizer.grad_scale = self._prepare(optimizer.param_groups, scale, ours)  # type: ignore[attr-defined]
            self._bare_step(optimizer)
        finally:
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            for key in dense:
                self._params[key].grad = None

    def _prepare(self, groups: Sequence[dict[str, Any]], scale: float, ours: bool) -> torch.Tensor | None:
        """Scale and clip the gradients; if fused kernels divide instead, returns the divisor."""
        factor = None if self._factor is None else scale * self._factor
        if factor == 1.0:
            return None
        if factor and ours and self._divides:
            # torch's fused kernels divide by grad_scale (made for GradScaler), which saves a separate pass. They write
            # the result back, so the gradient must be our own memory. It has single precision, as the gradients have.
            return torch.tensor(1.0 / factor, device=groups[0]["params"][0].device)
        for group in groups:
            params = [param for param in group["params"] if param.grad is not None]
            grads = gradient.prepared([param.grad for param in params], group, scale, ours=ours)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
        return None

    @property
    def _built(self) -> torch.optim.Optimizer:
        if self._optimizer is None or self._is_stale:
            self._note(self._choose(self._groups, self._keys))
            before, self._optimizer = self._optimizer, self._build()
            self._optimizer.state.update(before.state if before is not None else {})
            self._is_stale = False
            self._note_momentum()
        return self._optimizer

    def _note_momentum(self) -> None:
        if self._bare_step is _SGD and self._optimizer is not None:
            state = self._optimizer.state
            fresh = {key for key, param in self._params.items() if state[param].get("momentum_buffer") is None}
            self._without_momentum = fresh

    def _build(self) -> torch.optim.Optimizer:
        """Build a new optimizer: some, like Adagrad, create their state only in the constructor."""
        self._divides = all(self._is_fused(one) and one.dtype == torch.float32 for one in self._params.values())
        grouped: dict[Any, dict[str, Any]] = {}
        per_key = getattr(self._cls, "per_key", False)
        for key, param in self._params.items():
            options = self._keys.get(key, KeyOptions())
            group: dict[str, Any] = {"key_options": options} | ({"fused": True} if self._is_fused(param) else {})
            if per_key:
                group["key"], group["key_start"] = self._places[key]
            kind = (options, param.dtype, param.device, key if per_key else None)
            grouped.setdefault(kind, group | {"params": []} | tuples(self._chosen[options]))["params"].append(param)
        return self._cls(list(grouped.values()))  # type: ignore[call-arg]  # subclasses have defaults

    def _is_fused(self, param: torch.Tensor) -> bool:
        on_cpu = self._bare_step is _FUSED_ON_CPU and param.device.type == "cpu"
        return (self._bare_step in _FUSED or on_cpu) and param.dtype in _FUSED_DTYPES

    # ---- values and state ------------------------------------------------------------------------------------------

    def set_value(self, key: Key, value: torch.Tensor) -> None:
        """Set a value from outside; the state is not changed. Unknown keys are ignored."""
        if key in self._values:
            self._values[key].copy_(value.detach())
            self.value_was_set(key)

    @torch.no_grad()
    def value_was_set(self, key: Key) -> None:
        """Copy a value that was set from outside into its float32 master, if it has one."""
        if key in self._masters:
            self._params[key].copy_(self._values[key])

    @torch.no_grad()
    def follow(self, key: Key, value: torch.Tensor) -> None:
        """Go on with a tensor that a script may have written, or given other memory (``param.data = ...``)."""
        held = self._values[key]
        if value.data_ptr() != held.data_ptr() or value.dtype != held.dtype:
            self._hold(key, value.detach())
            state = {} if self._optimizer is None else self._optimizer.state.get(self._params[key], {})
            for name, part in state.items():
                if isinstance(part, torch.Tensor) and part.is_floating_point() and part.dim():
                    state[name] = part.to(self._params[key].dtype)
        elif key in self._masters:
            master = self._params[key]
            master.copy_(torch.where(value == master.to(value.dtype), master, value))

    def own_state(self, key: Key) -> State:
        """Return the state of one key itself, not a copy."""
        found: State = self._built.state[self._params[key]]
        return found

    def state(self, key: Key) -> State:
        """Return copies of the state of one key."""
        state = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in self.own_state(key).items()
            if value is not None
        }
        if key in self._masters:
            state["master"] = self._params[key].detach().clone()
        return state

    @torch.no_grad()
    def load_state(self, key: Key, state: State) -> None:
        """Replace the state of one key.

        Raises:
            ValueError: a tensor does not fit the key's shape. The state is unchanged.
        """
        self.check_state(key, state)
        param = self._params[key]
        if not state:  # anew: some, like Adagrad, create their state only in the constructor
            self._built.state.pop(param, None)
            self._is_stale = True
            return
        self._built.state[param] = {
            name: value.clone().to(param.device if value.dim() else value.device)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in state.items()
            if name != "master"
        }
        if "master" in state and key in self._masters:
            param.copy_(state["master"])
            self._values[key].copy_(param)
        self._note_momentum()

    def check_state(self, key: Key, state: State) -> None:
        """Raise if a state does not fit the value of its key, as :func:`check_state` does."""
        check_state(key, self._values[key], state, self._spec)


def master_of(value: torch.Tensor, spec: UpdaterSpec) -> torch.Tensor:
    """Return the tensor that an optimizer changes: the value itself, or a float32 copy of it."""
    return value.float() if value.dtype in _HALF and spec.multi_precision else value


def check_state(key: Key, value: torch.Tensor, state: State, spec: UpdaterSpec) -> None:
    """Raise if a state does not fit the value of its key.

    Raises:
        ValueError: names the key, the tensor of the state and both shapes.
    """
    for name, part in state.items():
        if name == "master" and master_of(value, spec) is value:
            raise ValueError(f"key {key!r} has a float32 master, but this optimizer has no multi_precision")
        if not isinstance(part, torch.Tensor) or part.numel() == 1 or (name != "master" and ":" in spec.name):
            continue  # an optimizer of another package has state of any shape
        if not fits(part.shape, value.shape, name, spec):
            raise ValueError(
                f"state {name!r} of key {key!r} has shape {tuple(part.shape)}, but the key has {tuple(value.shape)}: "
                "the file belongs to another model"
            )


def fits(shape: Sequence[int], wanted: Sequence[int], name: str, spec: UpdaterSpec) -> bool:
    """Return whether a tensor of the state has the shape of its value.

    Factored state of whole tensors (Adafactor) has 1 where it is summed over.
    """
    factored = name != "master" and is_whole_tensor(spec.name)
    return len(shape) == len(wanted) and all(
        size == full or (factored and size == 1) for size, full in zip(shape, wanted, strict=True)
    )
