"""Tensors and bytes: dtypes that messages may name, and views without copies."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from paceline.errors import ProtocolError
from paceline.naming import listed

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_STATE_DTYPES = _DTYPES | {"int64": torch.int64, "int32": torch.int32, "bool": torch.bool, "uint8": torch.uint8}
_STATE_NAMES = {dtype: name for name, dtype in _STATE_DTYPES.items()}

Params = ParamSpec("Params")
Result = TypeVar("Result")

#: Dtypes with more bits than a float64 holds exactly.
_LONG = (torch.int64, torch.uint64)
_LOWER_HALF = (1 << 32) - 1

#: Tensors of a device with more bytes are not copied to host memory together.
_JOINED_BYTES = 1 << 20


def without_graph(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Decorate a function that autograd does not record, as ``torch.no_grad()`` does.

    Where autograd is off already, as in hooks of most backward passes, this costs 0.1 us in place of 4; else 2.
    """

    @functools.wraps(function)
    def run(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        torch.set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_grad_enabled(True)

    return run


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in messages.

    Raises:
        TypeError: a store does not hold this dtype.
    """
    if dtype not in _NAMES:
        pairs = "; give a complex value as pairs of real numbers: torch.view_as_real" if dtype.is_complex else ""
        raise TypeError(f"a distributed store holds {', '.join(_DTYPES)}, not {_text_of(dtype)}{pairs}")
    return _NAMES[dtype]


def as_tensor(data: Any) -> torch.Tensor:
    """Return a tensor as it is, and other data as a tensor in CPU memory, not on the default device of the script."""
    return data if isinstance(data, torch.Tensor) else torch.as_tensor(data, device="cpu")


def host_buffer(like: torch.Tensor) -> torch.Tensor:
    """Return empty host memory for a copy of a tensor, contiguous.

    The copy of a CUDA tensor is page-locked, so copies run at the full rate of the link. PyTorch keeps such memory for
    the next copies.
    """
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the content of a tensor in host memory, contiguous: itself, or a complete copy."""
    if tensor.device.type == "cpu":
        return tensor.contiguous()
    found = host_buffer(tensor)
    found.copy_(tensor)
    return found


@functools.cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return this process's stream for copies from and to a CUDA device, beside the computation."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def small_to_host(
    tensors: Mapping[str, torch.Tensor], copied: Callable[[torch.Tensor], torch.Tensor] = to_host
) -> dict[str, torch.Tensor]:
    """Return small tensors of devices in host memory, all of one device and dtype in one copy; others as they are."""
    found = dict(tensors)
    alike: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, one in tensors.items():
        if one.device.type != "cpu" and one.nbytes <= _JOINED_BYTES:
            alike.setdefault((one.device, one.dtype), []).append(name)
    for names in alike.values():
        parts = [tensors[name].detach().reshape(-1) for name in names]
        for name, part in zip(names, torch.split(copied(torch.cat(parts)), [*map(len, parts)]), strict=True):
            found[name] = part.view(tensors[name].shape)
    return found


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as pairs of real numbers, in the same memory; any other tensor as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of any real dtype as one that stores hold, exact: itself, or a copy in CPU memory.

    Integers of 64 bits become pairs (upper and lower half): a float64 has 53 bits.
    """
    if tensor.dtype in _NAMES:
        return tensor
    values = tensor.detach().cpu()
    if values.dtype not in _LONG:
        return values.to(torch.float32 if values.is_floating_point() else torch.float64)
    bits = values.view(torch.int64)
    return torch.stack([bits >> 32, bits & _LOWER_HALF]).double()


def set_from_floats(tensor: torch.Tensor, floats: torch.Tensor) -> None:
    """Set a tensor to the value of which :func:`as_floats` made ``floats``."""
    if tensor.dtype in _LONG:
        upper, lower = floats.to(torch.int64)
        floats = (upper << 32 | lower).view(tensor.dtype)
    tensor.copy_(floats)


def sum_into(target: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    """Copy the sum of values, which may lie on several devices, into a tensor."""
    overlaps = target.is_cuda and all(one.is_cuda for one in values)  # the host would read or write too early
    target.copy_(values[0], non_blocking=overlaps)
    for one in values[1:]:
        target.add_(one.to(target.device, non_blocking=overlaps))


def floats(values: Sequence[torch.Tensor]) -> list[float]:
    """Return scalars as numbers; all of one device in one copy."""
    if len({(one.device, one.dtype) for one in values}) == 1:
        return torch.stack(list(values)).tolist()
    return [one.item() for one in values]


def check_initialised(named: Iterable[tuple[object, torch.Tensor]]) -> None:
    """Check that parameters have a shape.

    Raises:
        ValueError: one belongs to a lazy module that has seen no batch.
    """
    lazy = [repr(name) for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"{listed(lazy)}: no shape yet, because a lazy module such as LazyLinear has seen no batch; "
            "run one forward pass first, as in model(batch), and then make the optimizer or initialise the store"
        )


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        ProtocolError: unknown name.
    """
    if name not in _DTYPES:
        raise ProtocolError(f"unknown element type {name!r}")
    return _DTYPES[name]


def state_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype of optimizer state.

    Raises:
        TypeError: servers hold no state of this dtype.
    """
    if dtype not in _STATE_NAMES:
        raise TypeError(f"optimizer state on servers is {', '.join(_STATE_DTYPES)}, not {_text_of(dtype)}")
    return _STATE_NAMES[dtype]


def _text_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def state_from_frame(frame: Any, name: str, shape: list[int]) -> torch.Tensor:
    """Return a tensor of optimizer state, copied from a received frame.

    Raises:
        ProtocolError: unknown dtype, or the sizes differ.
    """
    if name not in _STATE_DTYPES:
        raise ProtocolError(f"unknown element type {name!r} of optimizer state")
    flat = from_frame(frame, _STATE_DTYPES[name], math.prod(shape))
    try:
        return flat.clone().view(shape)
    except (RuntimeError, TypeError) as error:
        raise ProtocolError(f"no tensor can have the {len(shape)} dimensions of this optimizer state") from error


def from_frame(frame: Any, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """Return a flat tensor that shares the memory of a received frame, unless that is read-only.

    Raises:
        ProtocolError: the frame has another size.
    """
    buffer = memoryview(frame)
    if buffer.nbytes != numel * dtype.itemsize:
        raise ProtocolError(f"a frame of {buffer.nbytes} bytes for {numel} elements of {dtype.itemsize} bytes")
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    if buffer.readonly:
        buffer = memoryview(bytearray(buffer))
    return torch.frombuffer(buffer, dtype=dtype)


def to_frame(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
