"""One model on several devices."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.mx.context import Context, ContextLike, as_contexts, check_available, index_of, mark
from paceline.mx.gluon.parallel import backward, run_replicas
from paceline.mx.gluon.parameter import Replicas
from paceline.mx.init import Initializer
from paceline.naming import absent
from paceline.optim.shared_tensors import mean_of

#: What to use in place of methods that Gluon's networks have.
INSTEAD_OF_METHODS = {
    "cast": "net.to(torch.float16) before replicate",
    "export": "torch.export",
    "hybridize": "torch.compile of the network, or no call at all: what it computes is the same",
    "load_parameters": "net.load_state_dict(torch.load(path)) of the network that replicate returned",
    "save_parameters": "torch.save(net.state_dict(), path) of the network that replicate returned",
    "summary": "print(net)",
}


def replicate(net: nn.Module, devices: ContextLike | Sequence[ContextLike]) -> ReplicatedModule:
    """Put a model on several devices, with identical values on all of them.

    ``net`` itself becomes the replica of the first device (it is moved there); the other replicas are copies. With lazy
    modules the first batch sets the shapes, and then the copies are made.

    Args:
        net: any module. Tied parameters stay tied, buffers are copied.
        devices: one device, or a list of distinct ones.

    Raises:
        TypeError: ``net`` is not a module.
        ValueError: a device is named twice or does not exist.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"replicate needs a torch.nn.Module, not {type(net).__name__}")
    contexts = as_contexts(devices)
    check_available(contexts)
    return ReplicatedModule(net.to(contexts[0].device), contexts)


class ReplicatedModule(Replicas):
    """A model with one replica per device. Made by :func:`replicate`.

    A call with a list of slices (from ``split_and_load``) runs the replicas in parallel and returns the list of
    outputs. A call with one slice runs the replica of its device. A call with any other tensor runs the first replica.

    Attributes:
        contexts: the devices, one per replica.
    """

    def __init__(self, net: nn.Module, contexts: Sequence[Context]) -> None:
        super().__init__(net, contexts)
        if not _has_lazy(net):
            self._copy_to_all()

    def initialize(self, init: Initializer, ctx: ContextLike | Sequence[ContextLike] | None = None) -> None:
        """Set new values of all parameters; see :meth:`ParameterDict.initialize`."""
        self._params.initialize(init, ctx)

    def __call__(self, *inputs: Any) -> Any:
        """Run the model.

        Args:
            *inputs: the model's positional arguments. Either each is a list with one slice per device, or each is a
                single value for one replica: the replica of the slice's device, also if devices are logical CPUs.

        Returns:
            A list with one output per device, or the output of one replica.

        Raises:
            ValueError: the number of slices is not the number of devices, or a slice is on another device.
        """
        for callback in self._before_forward:
            callback()
        if not any(isinstance(one, list) for one in inputs):
            index = index_of(inputs, self.contexts)
            self.infer_shapes(*inputs)
            return self._marked(index, self._replicas[index](*inputs))
        slices = self._per_replica(inputs)
        self.infer_shapes(*slices[0])
        jobs: list[Callable[[], Any]] = [
            functools.partial(replica, *args) for replica, args in zip(self._replicas, slices, strict=True)
        ]
        return [self._marked(index, output) for index, output in enumerate(run_replicas(self.contexts, jobs))]

    def _marked(self, index: int, output: Any) -> Any:
        """Mark an output with its replica, so that the next network runs the same one."""
        return mark(output, self.contexts[index]) if len(self.contexts) > 1 else output

    def backward(self, losses: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Run backward from one loss per device, in parallel; see :func:`paceline.mx.gluon.parallel`."""
        backward(losses)

    @torch.no_grad()
    def infer_shapes(self, *inputs: Any) -> None:
        """Set the shapes of lazy modules from one sample of the inputs, then copy the model to all devices.

        Does nothing when all shapes are known. Running statistics are not changed.
        """
        if self._complete:
            return
        net = self._replicas[0]
        saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def save(
            module: nn.Module, _: Any
        ) -> None:  # before it runs: for lazy modules, right after their shapes are set
            for buffer in module.buffers(recurse=False):
                saved.setdefault(id(buffer), (buffer, buffer.clone()))

        hooks = [module.register_forward_pre_hook(save) for module in net.modules()]
        try:
            net(*inputs)
        finally:
            for hook in hooks:
                hook.remove()
            for buffer, value in saved.values():
                buffer.copy_(value)
        lazy = [name for name, param in net.named_parameters() if is_lazy(param)]
        if lazy:
            raise ValueError(f"the first batch did not reach {', '.join(lazy)}; their shapes are still unknown")
        self._became_complete()

    def train(self, mode: bool = True) -> ReplicatedModule:
        """Set training mode on all replicas."""
        if not mode:
            self._about_to_read()
        for replica in self._replicas:
            replica.train(mode)
        return self

    def eval(self) -> ReplicatedModule:
        """Set evaluation mode on all replicas."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self._params.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state. Buffers that are no integers (running statistics) are means over the devices."""
        self._about_to_read()
        states = [replica.state_dict() for replica in self._replicas]
        buffers = dict(self._replicas[0].named_buffers())
        return {
            name: mean_of([state[name] for state in states]) if name in buffers else value
            for name, value in states[0].items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the state of all replicas, and the values in the store if a trainer updates them there."""
        self._about_to_read()  # what is under way must not come after what is loaded
        for replica in self._replicas:
            replica.load_state_dict(state)
        if not self._complete and not _has_lazy(self._replicas[0]):
            self._became_complete()
        for param in self._params.values():
            param.set_data(param.data())

    def _about_to_read(self) -> None:
        for callback in self._before_reading:
            callback()

    def _became_complete(self) -> None:
        self._copy_to_all()
        for callback in self._on_shapes:
            callback()

    def _copy_to_all(self) -> None:
        net = self._replicas[0]
        self._replicas = [net, *(copy.deepcopy(net).to(one.device) for one in self.contexts[1:])]
        self._names, self._complete = {}, True

    def _per_replica(self, inputs: Sequence[Any]) -> list[tuple[Any, ...]]:
        for index, one in enumerate(inputs):
            if not isinstance(one, list):
                raise TypeError(
                    f"input {index} is {type(one).__name__}, but others are lists of slices; split them all"
                )
            if len(one) != len(self.contexts):
                raise ValueError(
                    f"input {index} has {len(one)} slices, but the network has {len(self.contexts)} replicas "
                    f"({', '.join(map(str, self.contexts))}); use split_and_load(data, net.contexts)"
                )
            for context, part in zip(self.contexts, one, strict=True):
                if isinstance(part, torch.Tensor) and part.device != context.device:
                    raise ValueError(f"input {index}: the slice of {context} is on {part.device}; use split_and_load")
        return list(zip(*inputs, strict=True))

    if not TYPE_CHECKING:  # a checker knows the names above, and no others

        def __getattr__(self, name: str) -> Any:
            return absent(type(self).__name__, dir(type(self)), INSTEAD_OF_METHODS)(name)

    def __repr__(self) -> str:
        return f"ReplicatedModule(on {', '.join(map(str, self.contexts))}: {self._replicas[0]!r})"


def _has_lazy(net: nn.Module) -> bool:
    return any(is_lazy(one) for one in [*net.parameters(), *net.buffers()])
