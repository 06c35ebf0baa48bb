"""Runs a torch optimizer on named tensors of one device."""

from __future__ import annotations

import inspect
from collections.abc import KeysView, Mapping, Sequence
from typing import Any

import torch

from paceline.keys import Key
from paceline.kvstore.inprocess.apply import Applier, State
from paceline.updaters import KeyOptions, Options, UpdaterSpec, gradient
from paceline.updaters.rows import LAZY, lazy_update
from paceline.updaters.runs import completed, group_of, tuples

_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_FUSED_DTYPES = (torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)


class KeyedOptimizer(Applier):
    """One optimizer over named tensors: every push of some keys is one step of only those keys.

    Keys with the same options and dtype form one param group, so that torch's fused and multi-tensor kernels process
    them together. Sparse gradients update only their rows (MXNet's lazy update) if the optimizer supports it.
    Not thread-safe.

    Args:
        spec: options per param group, and the groups of keys.
        cls: the optimizer's class.
    """

    def __init__(self, spec: UpdaterSpec, cls: type[torch.optim.Optimizer]) -> None:
        self._cls = cls
        self._multi_precision = spec.multi_precision
        self._usual = self._groups = list(spec.groups)
        self._keys: dict[Key, KeyOptions] = dict(spec.keys)
        self._values: dict[Key, torch.Tensor] = {}
        self._params: dict[Key, torch.nn.Parameter] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._stale = True

    @property
    def keys(self) -> KeysView[Key]:
        """The keys, in the order in which they were added."""
        return self._params.keys()

    def add(self, key: Key, value: torch.Tensor) -> None:
        """Add a tensor; updates change it in place."""
        self._values[key] = value.detach()
        half = value.dtype in _HALF and self._multi_precision
        master = value.detach().float() if half else value.detach()
        self._params[key] = torch.nn.Parameter(master, requires_grad=True)
        self._stale = True

    def set_options(self, groups: Sequence[Options] = (), keys: Mapping[Key, KeyOptions] | None = None) -> None:
        """Change options per param group, or the groups of keys. The state is not changed."""
        groups = completed(groups, self._usual) if groups else self._groups
        keys = self._keys if keys is None else dict(keys)
        if keys != self._keys:
            self._groups, self._keys, self._stale = groups, keys, True
        elif groups != self._groups:
            before, self._groups = self._groups, groups
            for group in self._optimizer.param_groups if self._optimizer else ():
                current = self._options(group["key_options"])
                for name in group_of(group["key_options"], before).keys() - current.keys():
                    group[name] = self._optimizer.defaults.get(name) if self._optimizer else None
                group.update(current)

    def update(self, merged: Mapping[Key, torch.Tensor], scale: float = 1.0) -> None:
        """Run one step of the given keys.

        Args:
            merged: dense or sparse gradient per key, in the key's shape; may be overwritten.
            scale: factor that turns ``merged`` into the gradient.
        """
        dense = {key: self._cast(key, grad) for key, grad in merged.items() if not self._is_lazy(grad)}
        for key, grad in merged.items():
            if key not in dense:
                lazy_update(self._built, self._params[key], self._group_of(key), grad, scale)
        if dense:
            self._step(dense, scale)
        for key in merged:
            if self._params[key].dtype != self._values[key].dtype:
                self._values[key].copy_(self._params[key].detach())

    def refresh(self, key: Key) -> None:
        """Copy a value that was set from outside into its float32 master, if it has one."""
        if self._params[key].dtype != self._values[key].dtype:
            with torch.no_grad():
                self._params[key].copy_(self._values[key])

    def value(self, key: Key) -> torch.Tensor:
        """Return the value of a key: the tensor itself, no copy."""
        return self._values[key]

    def set_value(self, key: Key, value: torch.Tensor) -> None:
        """Set a value from outside; the state is not changed. Unknown keys are ignored."""
        if key in self._values:
            self._values[key].copy_(value.detach())
            self.refresh(key)

    def state(self, key: Key) -> State:
        """Return copies of the state of one key."""
        state = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in self._built.state.get(self._params[key], {}).items()
            if value is not None
        }
        if self._params[key].dtype != self._values[key].dtype:
            state["master"] = self._params[key].detach().clone()
        return state

    def load_state(self, key: Key, state: State) -> None:
        """Replace the state of one key.

        Raises:
            ValueError: a tensor has neither the key's shape nor a single element. Nothing is changed.
        """
        param = self._params[key]
        check_state(key, param, state)
        kept = {name: value for name, value in state.items() if name != "master"}
        self._built.state[param] = {
            name: value.clone().to(param.device if value.dim() else value.device)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in kept.items()
        }
        with torch.no_grad():
            if "master" in state and param.dtype != self._values[key].dtype:
                param.copy_(state["master"])
                self._values[key].copy_(param)

    @property
    def _built(self) -> torch.optim.Optimizer:
        if self._optimizer is None or self._stale:
            before, self._optimizer = self._optimizer, self._build()
            self._optimizer.state.update(before.state if before is not None else {})
            self._stale = False
        return self._optimizer

    def _build(self) -> torch.optim.Optimizer:
        """Build a new optimizer: some, like Adagrad, create their state only in the constructor."""
        grouped: dict[tuple[KeyOptions, bool, Key | None], list[torch.nn.Parameter]] = {}
        per_key = getattr(self._cls, "per_key", False)
        for key, param in self._params.items():
            fused = issubclass(self._cls, _FUSED) and param.dtype in _FUSED_DTYPES
            kind = (self._keys.get(key, KeyOptions()), fused, key if per_key else None)
            grouped.setdefault(kind, []).append(param)
        table = [
            {"params": params, "key_options": options}
            | ({"fused": True} if fused else {})
            | ({} if key is None else {"key": key})
            | self._options(options)
            for (options, fused, key), params in grouped.items()
        ]
        return self._cls(table)  # type: ignore[call-arg]  # subclasses have defaults

    def _options(self, key_options: KeyOptions) -> dict[str, Any]:
        options: dict[str, Any] = dict(group_of(key_options, self._groups))
        for name, factor in (("lr", key_options.lr_mult), ("weight_decay", key_options.wd_mult)):
            if factor != 1.0:
                options[name] = options.get(name, self._default(name)) * factor
        return tuples(options)

    def _default(self, name: str) -> float:
        parameter = inspect.signature(self._cls.__init__).parameters.get(name)
        known = parameter is not None and isinstance(parameter.default, int | float)
        return float(parameter.default) if parameter is not None and known else 0.0

    def _group_of(self, key: Key) -> dict[str, Any]:
        param = self._params[key]
        return next(g for g in self._built.param_groups if any(one is param for one in g["params"]))

    def _is_lazy(self, grad: torch.Tensor) -> bool:
        return grad.is_sparse and self._cls in LAZY

    def _cast(self, key: Key, grad: torch.Tensor) -> torch.Tensor:
        dense = grad.to_dense() if grad.is_sparse else grad
        return dense.to(self._params[key].dtype)

    def _step(self, dense: Mapping[Key, torch.Tensor], scale: float) -> None:
        optimizer = self._built
        for key, grad in dense.items():
            self._params[key].grad = grad
        try:
            optimizer.grad_scale = self._prepare(optimizer.param_groups, scale)  # type: ignore[attr-defined]
            optimizer.step()
        finally:
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            for key in dense:
                self._params[key].grad = None

    def _prepare(self, groups: Sequence[dict[str, Any]], scale: float) -> torch.Tensor | None:
        """Scale and clip the gradients in place; if fused kernels divide instead, returns the divisor."""
        factors = {scale * gradient.factor_of(group) for group in groups}
        clipped = any(gradient.clip_of(group) is not None for group in groups)
        by_kernel = len(factors) == 1 and not clipped and all(group.get("fused") for group in groups)
        grads = {index: [p.grad for p in group["params"] if p.grad is not None] for index, group in enumerate(groups)}
        every = [grad for found in grads.values() for grad in found]
        if by_kernel and 0.0 not in factors and all(grad.dtype == torch.float32 for grad in every):
            # torch's fused kernels divide by grad_scale (made for GradScaler), which saves a separate pass. It has
            # single precision, so gradients of double precision are scaled here.
            [factor] = factors
            return None if factor == 1.0 else torch.tensor(1.0 / factor, device=every[0].device)
        for index, group in enumerate(groups):
            factor, clip = scale * gradient.factor_of(group), gradient.clip_of(group)
            if grads[index] and factor != 1.0:
                torch._foreach_mul_(grads[index], factor)
            if grads[index] and clip is not None:
                torch._foreach_clamp_min_(grads[index], -clip)
                torch._foreach_clamp_max_(grads[index], clip)
        return None


def check_options(cls: type[torch.optim.Optimizer], groups: Sequence[Options]) -> None:
    """Try options on a small parameter, because torch silently accepts unknown names in param groups.

    Raises:
        TypeError: the class does not have an option.
        ValueError: the class rejects an option's value.
    """
    for group in groups:
        options: dict[str, Any] = tuples(gradient.without(group))
        try:
            cls([torch.nn.Parameter(torch.zeros(1, 1))], **options)
        except TypeError as error:
            known = [name for name in inspect.signature(cls.__init__).parameters if name not in ("self", "params")]
            raise TypeError(f"{cls.__name__}: {error}; its options are {', '.join(known)}") from error


def check_state(key: Key, value: torch.Tensor, state: State) -> None:
    """Raise if a state does not match the value of its key.

    Raises:
        ValueError: names the key, the tensor of the state and both shapes.
    """
    for name, part in state.items():
        if isinstance(part, torch.Tensor) and part.numel() != 1 and part.shape != value.shape:
            raise ValueError(
                f"state {name!r} of key {key!r} has shape {tuple(part.shape)}, but the key has {tuple(value.shape)}: "
                "the file belongs to another model"
            )
