"""Brings one rank's parameters and optimizer state to all ranks."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass
from typing import Any

import torch

from paceline.hvd import world
from paceline.hvd.collectives import broadcast_async_, synchronize
from paceline.hvd.objects import broadcast_object


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite parameters with those of ``root_rank``.

    Args:
        params: a ``state_dict``, ``named_parameters()``, or a list of tensors.
        root_rank: whose parameters.

    Raises:
        ValueError: anything else.
    """
    if isinstance(params, dict):
        named = sorted(params.items())
    elif isinstance(params, collections.abc.Iterable):
        named = [one if isinstance(one, tuple) else (str(number), one) for number, one in enumerate(params)]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    for name, tensor in named:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise ValueError(f"the parameter {name!r} is {type(tensor).__name__}, not a tensor")
    tensors = [(str(name), tensor) for name, tensor in named if tensor is not None]
    copies = [(name, tensor, tensor.detach().contiguous()) for name, tensor in tensors]
    handles = [broadcast_async_(copy, root_rank, f"parameters.{name}") for name, _, copy in copies]
    for handle, (_, tensor, copy) in zip(handles, copies, strict=True):
        synchronize(handle)
        if copy.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(copy)


@dataclass(frozen=True)
class _Hole:
    """Stands for a tensor in a state that is sent as an object."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def _take_out(state: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(state, torch.Tensor):
        tensors.append(state)
        return _Hole(state.dtype, tuple(state.shape))
    if isinstance(state, dict):
        return {key: _take_out(value, tensors) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_take_out(value, tensors) for value in state)
    return state


def _put_in(state: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(state, _Hole):
        tensors.append(torch.empty(state.shape, dtype=state.dtype))
        return tensors[-1]
    if isinstance(state, dict):
        return {key: _put_in(value, tensors) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_put_in(value, tensors) for value in state)
    return state


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give all ranks the optimizer state and the options of ``root_rank``.

    Args:
        optimizer: with the same param groups on all ranks; its state may be empty, on some ranks or on all.
        root_rank: whose state.
        model: not used; for scripts of Horovod.

    Raises:
        ValueError: an optimizer whose state cannot be sent (LBFGS), or param groups that differ.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    is_root = world.running().rank == root_rank
    tensors: list[torch.Tensor] = []
    skeleton = _take_out(optimizer.state_dict(), tensors) if is_root else None
    skeleton = broadcast_object(skeleton, root_rank, "optimizer state")
    if not is_root:
        tensors = []
    state = None if is_root else _put_in(skeleton, tensors)
    copies = [tensor.detach().cpu().contiguous() for tensor in tensors]
    handles = [broadcast_async_(copy, root_rank, f"optimizer state.{number}") for number, copy in enumerate(copies)]
    for handle in handles:
        synchronize(handle)
    if state is not None:
        optimizer.load_state_dict(state)
