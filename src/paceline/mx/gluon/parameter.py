"""Parameters of a model that is replicated on several devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.errors import PacelineError
from paceline.mx.context import Context, ContextLike, as_context, as_contexts
from paceline.mx.init import Initializer

_GRAD_REQS = ("write", "add", "null")
_STYPES = ("default", "row_sparse")


class Replicas:
    """The copies of one model, and their parameters and buffers by name.

    Attributes:
        contexts: the devices, one per copy.
    """

    def __init__(self, net: nn.Module, contexts: Sequence[Context]) -> None:
        self.contexts = tuple(contexts)
        self._replicas = [net]
        self._complete = False
        self._names: dict[str, list[nn.Parameter]] = {}
        self._on_shapes: list[Callable[[], None]] = []
        self._before_reading: list[Callable[[], None]] = []
        self._before_forward: list[Callable[[], None]] = []
        self._params = ParameterDict([Parameter(name, self) for name, _ in net.named_parameters()])

    @property
    def replicas(self) -> tuple[nn.Module, ...]:
        """The model of every device; only the first one while shapes are unknown."""
        return tuple(self._replicas)

    @property
    def has_shapes(self) -> bool:
        """Whether all shapes are known, and all devices have their copies."""
        return self._complete

    def collect_params(self, select: str | None = None) -> ParameterDict:
        """Return the parameters, all or those whose names match the regular expression ``select``."""
        return self._params if select is None else self._params.select(select)

    def on_shapes(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once lazy modules have their shapes and all devices have their copies."""
        self._on_shapes.append(callback)

    def before_reading(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` before buffers are read: for evaluation, and for ``state_dict``."""
        self._before_reading.append(callback)

    def before_forward(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` before a forward pass."""
        self._before_forward.append(callback)

    def has_sparse_gradient(self, name: str) -> bool:
        """Return whether a parameter is the table of an embedding with ``sparse=True``."""
        param = self.parameters_named(name)[0]
        return any(
            getattr(module, "sparse", False) is True and any(one is param for one in module.parameters(recurse=False))
            for module in self._replicas[0].modules()
        )

    def parameters_named(self, name: str) -> list[nn.Parameter]:
        """Return a parameter of every existing replica, in device order."""
        if name not in self._names:
            self._names[name] = [replica.get_parameter(name) for replica in self._replicas]
        return self._names[name]


class Parameter:
    """One parameter of a replicated model: a tensor per device. Between steps all of them are equal.

    Made by ``ReplicatedModule.collect_params``.

    Attributes:
        name: its name in the model; the first name if parameters are tied.
        lr_mult: factor on the learning rate.
        wd_mult: factor on the weight decay.
    """

    def __init__(self, name: str, net: Replicas) -> None:
        self.name = name
        self.lr_mult = 1.0
        self.wd_mult = 1.0
        self._net = net
        self._grad_req = "write" if self.tensors()[0].requires_grad else "null"
        self._stype, self._grad_stype = "default", ""
        self._on_set: list[Callable[[torch.Tensor], None]] = []

    @property
    def net(self) -> Replicas:
        """The replicas that it belongs to."""
        return self._net

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape.

        Raises:
            PacelineError: not known before the first batch.
        """
        return tuple(self.on_devices()[0].shape)

    @property
    def grad_req(self) -> str:
        """The treatment of gradients.

        ``write``: ``Trainer.step`` clears them after use; backward passes before the step accumulate. ``add``: they
        accumulate until ``zero_grad``. ``null``: there are none.
        """
        return self._grad_req

    @grad_req.setter
    def grad_req(self, value: str) -> None:
        if value not in _GRAD_REQS:
            raise ValueError(f"grad_req {value!r} is unknown; it is one of {', '.join(_GRAD_REQS)}")
        self._grad_req = value
        for param in self.tensors():
            param.requires_grad_(value != "null")
            if value == "null":
                param.grad = None

    @property
    def stype(self) -> str:
        """How a store keeps it: ``default``, or ``row_sparse``: as rows, which the store also updates.

        Set it before the trainer is created.
        """
        return self._stype

    @stype.setter
    def stype(self, value: str) -> None:
        self._stype = _checked_stype(value)

    @property
    def grad_stype(self) -> str:
        """The form of its gradients: ``row_sparse`` for embeddings with ``sparse=True``, else ``default``.

        Set it before the trainer is created if a model computes sparse gradients in another way.
        """
        return self._grad_stype or ("row_sparse" if self._net.has_sparse_gradient(self.name) else "default")

    @grad_stype.setter
    def grad_stype(self, value: str) -> None:
        self._grad_stype = _checked_stype(value)

    @property
    def is_row_sparse(self) -> bool:
        """Whether a store that updates it keeps it as rows."""
        return "row_sparse" in (self.stype, self.grad_stype)

    def on_devices(self) -> list[nn.Parameter]:
        """Return the torch parameter of every replica, in device order.

        Raises:
            PacelineError: its shape is not known before the first batch.
        """
        params = self.tensors()
        if is_lazy(params[0]):
            raise PacelineError(
                f"parameter {self.name!r} has no shape before the first batch: call the network on a batch, "
                "or net.infer_shapes(sample), first"
            )
        return params

    def tensors(self) -> list[nn.Parameter]:
        """Return the existing torch parameters, with or without a shape."""
        return self._net.parameters_named(self.name)

    @property
    def has_shape(self) -> bool:
        """Whether its shape is known and every device has its copy."""
        return not is_lazy(self.tensors()[0]) and len(self.tensors()) == len(self.list_ctx())

    def list_ctx(self) -> list[Context]:
        """Return its devices."""
        return list(self._net.contexts)

    def list_data(self) -> list[torch.Tensor]:
        """Return its value on every device: the tensors that the model uses, no copies."""
        return [one.detach() for one in self.on_devices()]

    def list_grad(self) -> list[torch.Tensor]:
        """Return its gradient on every device; zeros where backward has not computed one.

        Raises:
            PacelineError: ``grad_req`` is ``null``.
        """
        if self._grad_req == "null":
            raise PacelineError(f"parameter {self.name!r} has no gradient: its grad_req is 'null'")
        return [torch.zeros_like(one) if one.grad is None else one.grad for one in self.on_devices()]

    def data(self, ctx: ContextLike | None = None) -> torch.Tensor:
        """Return its value on one device, by default the first.

        Raises:
            ValueError: it does not live there.
        """
        return self.list_data()[self._index(ctx)]

    def grad(self, ctx: ContextLike | None = None) -> torch.Tensor:
        """Return its gradient on one device, by default the first.

        Raises:
            ValueError: it does not live there.
        """
        return self.list_grad()[self._index(ctx)]

    @torch.no_grad()
    def set_data(self, data: torch.Tensor) -> None:
        """Set its value on every device, and in the store if a trainer updates it there.

        Raises:
            ValueError: another shape.
        """
        params = self.on_devices()
        if data.shape != params[0].shape:
            raise ValueError(f"parameter {self.name!r} has shape {tuple(params[0].shape)}, not {tuple(data.shape)}")
        for callback in self._on_set:
            callback(data)
        for param in params:
            param.copy_(data)

    def initialize(self, init: Initializer) -> None:
        """Set new values on every device: from ``init``, or 0 in a bias; others of one dimension keep theirs.

        A parameter without a shape is set when it has one.
        """
        if not self.has_shape:
            self._net.on_shapes(lambda: self.initialize(init))
            return
        value = self.data().clone()
        if value.dim() > 1:
            init(value)
        elif self.name.rpartition(".")[2].startswith("bias"):
            value.zero_()
        self.set_data(value)

    def on_set(self, callback: Callable[[torch.Tensor], None]) -> None:
        """Call ``callback(data)`` before every ``set_data``."""
        self._on_set.append(callback)

    @property
    def is_taken(self) -> bool:
        """Whether a trainer has it, which sees new values."""
        return bool(self._on_set)

    def zero_grad(self) -> None:
        """Clear the gradients on all devices."""
        for param in self.tensors():
            param.grad = None

    def _index(self, ctx: ContextLike | None) -> int:
        contexts = self.list_ctx()
        if ctx is not None and as_context(ctx) not in contexts:
            lives = ", ".join(map(str, contexts))
            raise ValueError(f"parameter {self.name!r} lives on {lives}, not on {as_context(ctx)}")
        return 0 if ctx is None else contexts.index(as_context(ctx))

    def __repr__(self) -> str:
        first = self.tensors()[0]
        shape = "?" if is_lazy(first) else tuple(first.shape)
        return f"Parameter({self.name}, shape={shape}, ctx={self.list_ctx()}, grad_req={self._grad_req})"


def _checked_stype(value: str) -> str:
    if value not in _STYPES:
        raise ValueError(f"storage type {value!r} is unknown; it is one of {', '.join(_STYPES)}")
    return value


class ParameterDict(Mapping[str, Parameter]):
    """The parameters of a model by name, in the order of the model."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = {one.name: one for one in parameters}

    def __getitem__(self, name: str) -> Parameter:
        if name not in self._parameters:
            raise KeyError(f"no parameter {name!r}; there are {', '.join(self._parameters)}")
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def select(self, pattern: str) -> ParameterDict:
        """Return the parameters whose names match a regular expression from their beginning."""
        return ParameterDict([one for name, one in self._parameters.items() if re.match(pattern, name)])

    def setattr(self, name: str, value: Any) -> None:
        """Set an attribute (``lr_mult``, ``wd_mult``, ``grad_req``, ``stype``, ``grad_stype``) of all parameters.

        Raises:
            AttributeError: parameters have no such attribute.
        """
        for one in self._parameters.values():
            if name not in ("lr_mult", "wd_mult", "grad_req", "stype", "grad_stype"):
                raise AttributeError(f"parameters have no settable attribute {name!r}")
            setattr(one, name, value)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for one in self._parameters.values():
            one.zero_grad()

    def initialize(self, init: Initializer, ctx: ContextLike | Sequence[ContextLike] | None = None) -> None:
        """Set new values of all parameters, the same on all devices (see :meth:`Parameter.initialize`).

        Args:
            init: one of :mod:`paceline.mx.init`, or another function that fills a tensor in place.
            ctx: the devices, as given to ``replicate``.

        Raises:
            ValueError: other devices.
        """
        for one in self._parameters.values():
            if ctx is not None and as_contexts(ctx) != one.list_ctx():
                raise ValueError(f"ctx is {as_contexts(ctx)}; replicate put the network on {one.list_ctx()}")
            one.initialize(init)

    def __repr__(self) -> str:
        return "ParameterDict(\n  " + "\n  ".join(map(repr, self._parameters.values())) + "\n)"
