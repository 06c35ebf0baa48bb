"""Contexts: the devices that hold replicas of a model, named as in MXNet, and marks of tensors that belong to one.

Logical CPUs share one ``torch.device``, so that does not tell to which replica a tensor belongs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")

_TEXT = re.compile(r"(cpu|gpu|cuda)(?:\((\d+)\)|:(\d+))?")

# A table beside the tensors: saved or copied tensors have no extra attributes.
_contexts = WeakTensorKeyDictionary()


@dataclass(frozen=True, order=True)
class Context:
    """One device that can hold a replica of a model.

    ``cpu(0)`` and ``cpu(1)`` are *logical* devices: two replicas that share memory and cores. They let a program for
    several devices run on one machine. ``gpu(i)`` is ``cuda:i``.

    Args:
        device_type: ``"cpu"`` or ``"gpu"``.
        device_id: 0 or more.
    """

    device_type: str
    device_id: int = 0

    def __post_init__(self) -> None:
        if self.device_type not in ("cpu", "gpu"):
            raise ValueError(f"device type {self.device_type!r} is unknown; it is 'cpu' or 'gpu'")
        if isinstance(self.device_id, bool) or not isinstance(self.device_id, int):
            raise TypeError(f"device id {self.device_id!r} is {type(self.device_id).__name__}, not int")
        if self.device_id < 0:
            raise ValueError(f"device id {self.device_id} is negative")

    @property
    def device(self) -> torch.device:
        """Device of this context's tensors; all logical CPUs share ``torch.device("cpu")``."""
        return torch.device("cpu") if self.device_type == "cpu" else torch.device("cuda", self.device_id)

    def __str__(self) -> str:
        return f"{self.device_type}({self.device_id})"

    __repr__ = __str__


#: A device: a context, a ``torch.device``, or the text of either.
ContextLike: TypeAlias = Context | torch.device | str


def cpu(device_id: int = 0) -> Context:
    """Return the logical CPU device ``device_id``."""
    return Context("cpu", device_id)


def gpu(device_id: int = 0) -> Context:
    """Return the CUDA device ``device_id``. It need not exist until a tensor is put on it."""
    return Context("gpu", device_id)


def num_gpus() -> int:
    """Return the number of CUDA devices that this process can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def as_context(device: ContextLike) -> Context:
    """Return the context that ``device`` names: ``gpu(1)``, ``torch.device("cuda:1")``, ``"cuda:1"``, ``"gpu(1)"``.

    A device without a number is number 0.

    Raises:
        TypeError: not a device.
        ValueError: the text or device type is neither CPU nor CUDA.
    """
    if isinstance(device, Context):
        return device
    if not isinstance(device, torch.device | str):
        raise TypeError(f"{device!r} is {type(device).__name__}; a device is a Context, a torch.device or its name")
    match = _TEXT.fullmatch(str(device).strip().lower())
    if match is None:
        raise ValueError(f"{str(device)!r} names no device; write cpu, cpu(1), gpu(0) or cuda:0")
    kind, inner, after = match.groups()
    return Context("cpu" if kind == "cpu" else "gpu", int(inner or after or 0))


def as_contexts(devices: ContextLike | Sequence[ContextLike]) -> list[Context]:
    """Return the contexts of one device or a list of distinct devices.

    Raises:
        TypeError: not devices.
        ValueError: no device, or one that is named twice.
    """
    listed = [devices] if isinstance(devices, Context | torch.device | str) else devices
    contexts = [as_context(one) for one in listed]
    if not contexts:
        raise ValueError("the list of devices is empty; name at least one, for example [cpu(0)]")
    repeated = sorted({one for one in contexts if contexts.count(one) > 1})
    if repeated:
        raise ValueError(f"{repeated[0]} is named {contexts.count(repeated[0])} times; a device holds one replica")
    return contexts


def check_available(contexts: Sequence[Context]) -> None:
    """Check that this machine has the devices of some contexts.

    Raises:
        ValueError: a device is missing; the text says how many there are.
    """
    for one in contexts:
        if one.device_type == "gpu" and one.device_id >= num_gpus():
            raise ValueError(
                f"{one} does not exist: this process sees {num_gpus()} CUDA devices; use cpu() or another number "
                "(CUDA_VISIBLE_DEVICES and `nvidia-smi` show them)"
            )


def moved(tensor: torch.Tensor, context: Context) -> torch.Tensor:
    """Return a tensor on a device. A copy to a GPU may be under way; one to the host, which would not wait, is not."""
    return tensor.to(context.device, non_blocking=context.device_type == "gpu")


def as_in_context(tensor: torch.Tensor, ctx: ContextLike) -> torch.Tensor:
    """Return a tensor on a device; a replicated network runs it on the replica of that device.

    Tensors that torch makes from it (``x.float()``, ``x.view(...)``) belong to no replica; call this again on them.

    Args:
        tensor: any tensor; it is not changed. It is not copied if it is on the device already.
        ctx: the device.
    """
    context = as_context(ctx)
    found = moved(tensor, context)
    return mark(found.view_as(found) if found is tensor else found, context)


def mark(value: T, context: Context) -> T:
    """Mark all tensors in a value with their device; returns the value."""
    for one in _tensors(value):
        _contexts[one] = context
    return value


def index_of(inputs: Sequence[Any], contexts: Sequence[Context]) -> int:
    """Return the index of the replica that inputs belong to: by mark or GPU, else the first replica.

    Args:
        inputs: tensors, or tuples, lists and dictionaries of them; other values are ignored.
        contexts: the replicas' devices.

    Raises:
        ValueError: inputs of one call belong to different replicas.
    """
    tensors = [tensor for one in inputs for tensor in _tensors(one)]
    marked = {_contexts[one]: None for one in tensors if one in _contexts and _contexts[one] in contexts}
    if len(marked) > 1:
        raise ValueError(f"the inputs of one call are slices of {' and '.join(map(str, marked))}; give slices of one")
    if marked:
        return contexts.index(next(iter(marked)))
    devices = [one.device for one in tensors]
    return next((index for index, one in enumerate(contexts) if one.device in devices), 0)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, tuple | list) else []
