"""Python objects, parameters and optimizer state between ranks: Horovod's module ``functions``.

The contract of objects is that of pickle: a sender of objects can run code in the receiver. So objects travel
only in bodies of messages of the job's connections, which are authenticated and encrypted whatever ``PACELINE_ENCRYPT``
is, and never in tensors. Apart from these functions only ``hvd.run`` and its processes (``run.py``, ``task.py``)
unpickle: the contents of a folder of this user.
"""

from __future__ import annotations

import collections.abc
import pickle
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.collectives import world
from paceline.collectives.negotiation.messages import OperationRequest
from paceline.collectives.operations import broadcast, synchronize
from paceline.collectives.process_sets import ProcessSet, global_process_set, members_of
from paceline.errors import MissingExtraError

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]

try:
    import cloudpickle as _pickler  # lambdas and local classes
except ImportError:
    _pickler = pickle


def dumps(obj: Any) -> bytes:
    """Return a pickled object; lambdas and local classes too, if cloudpickle is installed.

    Raises:
        MissingExtraError: the object needs cloudpickle, and that is not installed.
    """
    try:
        raw: bytes = _pickler.dumps(obj)
    except (pickle.PicklingError, AttributeError) as error:
        if _pickler is not pickle:
            raise
        raise MissingExtraError(f"{error}; cloudpickle could: pip install 'paceline[hvd]'") from None
    return raw


def _check_key(running: world.World) -> None:
    if running.size > 1:
        running.base.link.security.check_objects()


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of ``root_rank`` (counted in the whole job).

    Args:
        obj: any object that can be pickled; only the root's counts.
        root_rank: rank that sends the object.
        name: pairs the calls of different ranks; those without one go one by one.
        process_set: the ranks that take part.

    Raises:
        ValueError: the root is not in the process set.
        HorovodInternalError: ranks disagree on the root, or the job is down.
        ConfigError: the job has no key.
    """
    set_id, _ = members_of(process_set, root_rank)
    running = world.current()
    _check_key(running)
    is_root = running.rank == root_rank
    raw = dumps(obj) if is_root else b""
    request = OperationRequest("broadcast_object", name or "object", set_id, root=root_rank, payload=raw)
    [found] = running.background.call(request)
    return obj if is_root else pickle.loads(found)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, in their order.

    Args:
        obj: any object that can be pickled.
        name: pairs the calls of different ranks.

    Raises:
        HorovodInternalError: the job is down.
        ConfigError: the job has no key.
    """
    running = world.current()
    _check_key(running)
    request = OperationRequest("allgather_object", name or "object", payload=dumps(obj))
    return [pickle.loads(raw) for raw in running.background.call(request)]


# ---- parameters and optimizer state ----------------------------------------------------------------------------------


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite parameters with those of ``root_rank``.

    Args:
        params: a ``state_dict``, ``named_parameters()``, or a list of tensors.
        root_rank: rank that sends the parameters.

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
    handles = [broadcast([copy], root_rank, f"parameters.{name}", in_place=True) for name, _, copy in copies]
    for handle, (_, tensor, copy) in zip(handles, copies, strict=True):
        synchronize(handle)
        if copy.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(copy)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give all ranks the optimizer state and the options of ``root_rank``.

    Args:
        optimizer: with the same param groups on all ranks; its state may be empty, on some ranks or on all.
        root_rank: rank that sends the state.
        model: not used; for scripts of Horovod.

    Raises:
        ValueError: an optimizer whose state cannot be sent (LBFGS), or param groups that differ.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    is_root = world.current().rank == root_rank
    state: Any = optimizer.state_dict() if is_root else None
    skeleton = tree_map_only(torch.Tensor, lambda one: one.to("meta"), state)
    skeleton = broadcast_object(skeleton, root_rank, "optimizer state")
    if not is_root:
        contiguous = torch.contiguous_format
        state = tree_map_only(
            torch.Tensor, lambda one: torch.empty_like(one, device="cpu", memory_format=contiguous), skeleton
        )
    copies = [one.detach().cpu().contiguous() for one in tree_leaves(state) if isinstance(one, torch.Tensor)]
    broadcast_parameters([(f"optimizer state.{number}", copy) for number, copy in enumerate(copies)], root_rank)
    if not is_root:
        optimizer.load_state_dict(state)
