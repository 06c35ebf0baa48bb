"""Registers the backend, and makes scripts that ask for another one open it.

| a script of ``paceline launch --ddp`` calls | instead |
|---|---|
| ``init_process_group`` with no backend, NCCL, Gloo or both | ``paceline``, with the job's own store |
| ``new_group`` with such a backend | a group of ``paceline`` |
| ``all_gather_object`` and the other functions for objects | the same, on sealed frames; refused without a key |
| ``monitored_barrier``, ``_set_pg_timeout``, which PyTorch has for its own backends only | that of the group |
| any of them with another backend | PyTorch's own |

In every worker of a job, PyTorch's flight recorder (2.15 and newer) leaves our groups out: it cannot attach to them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline import config
from paceline.errors import ConfigError

NAME = "paceline"

_DEVICES = ("cpu", "cuda", "mps", "xpu")

#: Backends in whose place ours is opened.
_OTHERS = frozenset({
    "nccl", "nccl2", "nccl-lazy", "nccl-legacy", "gloo", "mpi", "ucc", "xccl", "undefined", NAME,
})  # fmt: skip

#: Arguments of ``init_process_group`` and ``new_group`` that mean something to other backends only.
_FOREIGN = ("pg_options", "device_id")


#: Functions that pickle objects, and send them as tensors.
_OF_OBJECTS = (
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
)  # fmt: skip


def register() -> None:
    """Make the backend known to torch.distributed. Idempotent.

    PyTorch 2.14 calls it for a script that asks for ``paceline`` (entry point ``torch.distributed.backends``).
    """
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        devices = list(dict.fromkeys((*_DEVICES, torch._C._get_privateuse1_backend_name())))
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
        _replace(dict.fromkeys(_OF_OBJECTS, _carry_objects))
        if hasattr(c10d, "_maybe_attach_flight_recorder"):  # from PyTorch 2.15 on
            _replace({"_maybe_attach_flight_recorder": _attach_recorder})


def _create(options: Any, pg_options: Any) -> Any:
    from paceline.ddp.group import PacelineGroup
    from paceline.ddp.training import watch
    from paceline.worker import alone
    from paceline.worker.current import current_session

    session = current_session()
    alone.note_store("ddp")
    watch(session)
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    if members[options.group_rank] != session.rank or max(members) >= len(session.workers):
        raise ConfigError(
            f"torch.distributed calls this process rank {members[options.group_rank]} of {len(members)}, and the job "
            f"worker {session.rank} of {len(session.workers)}; take both from RANK and WORLD_SIZE, which the launcher "
            "sets"
        )
    return PacelineGroup(session, options.group_id, members, options.timeout)


class _Replaced(functools.partial[Any]):
    """A function of torch.distributed that is ours now."""


def replace_init() -> None:
    """Make calls for other backends open ours. Idempotent."""
    _replace(_REPLACED)


def _replace(functions: Mapping[str, Callable[..., Any]]) -> None:
    for name, make in functions.items():
        original = getattr(c10d, name)
        if isinstance(original, _Replaced):
            continue
        wrapped = functools.update_wrapper(_Replaced(make, original), original)
        for module in [one for at, one in list(sys.modules.items()) if at.startswith("torch.distributed")]:
            if getattr(module, name, None) is original:
                setattr(module, name, wrapped)


def is_ours(backend: object) -> bool:
    """Return whether our backend is opened for a backend that a script names: ``cpu:gloo,cuda:nccl``, or nothing."""
    names = [] if backend is None else [one.rpartition(":")[2] for one in str(backend).lower().split(",")]
    return _OTHERS.issuperset(names)


def _init(
    original: Callable[..., None], backend: Any = None, init_method: Any = None, *args: Any, **kwargs: Any
) -> None:
    given = dict(zip(("timeout", "world_size", "rank", "store", "group_name"), args, strict=False)) | kwargs
    if not is_ours(backend):
        return original(backend, init_method, **given)
    from paceline.ddp.board_store import BoardStore
    from paceline.worker.current import current_session

    if given.pop("enable_reconfigure", False):
        raise ConfigError(
            "init_process_group got enable_reconfigure=True, and the members of a group of paceline do not change: "
            "leave it out; `paceline launch --max-restarts N` starts a job again after a death"
        )
    for name in _FOREIGN:
        given.pop(name, None)
    # A trainer that once started processes may have written RANK and WORLD_SIZE anew, for itself.
    job = config.from_environment()
    rank, size = job.rank, job.num_workers
    for name, own in (("rank", rank), ("world_size", size)):
        if given.setdefault(name, -1) not in (-1, own):
            raise ConfigError(
                f"init_process_group got {name}={given[name]}, and this job has {name} {own}: `paceline launch --ddp` "
                "starts one process per rank, so a script must not start processes itself; take ranks from RANK, "
                "WORLD_SIZE and LOCAL_RANK"
            )
        given[name] = own
    if given.get("store") is None:
        given["store"] = BoardStore(current_session())
    return original(NAME, None, **given)


def _new_group(original: Callable[..., Any], ranks: Any = None, timeout: Any = None, backend: Any = None,
               *args: Any, **kwargs: Any) -> Any:  # fmt: skip
    if not is_ours(backend):
        return original(ranks, timeout, backend, *args, **kwargs)
    for name in _FOREIGN:
        kwargs.pop(name, None)
    return original(ranks, timeout, None, None, *args[1:], **kwargs)


def _asked(original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the group that a call is for, None if it is none of ours, and the other arguments."""
    from paceline.ddp.group import PacelineGroup

    given = dict(inspect.signature(original).bind(*args, **kwargs).arguments)
    found = given.pop("group", None) or dist.group.WORLD
    return (found if isinstance(found, PacelineGroup) else None), given


def _by_group(method: str) -> Callable[..., Any]:
    """Return a call that our groups answer by a method, which has the same arguments."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        group, given = _asked(original, args, kwargs)
        return original(*args, **kwargs) if group is None else getattr(group, method)(**given)

    return call


def _carry_objects(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from paceline.ddp.objects import carrying_objects

    group, _ = _asked(original, args, kwargs)
    if group is None:
        return original(*args, **kwargs)
    group.check_objects()
    with carrying_objects():
        return original(*args, **kwargs)


def _attach_recorder(original: Callable[..., None], group: Any, *args: Any) -> None:
    from paceline.ddp.described import DescribedGroup

    if not isinstance(group, DescribedGroup):
        original(group, *args)


_REPLACED: dict[str, Callable[..., Any]] = {
    "init_process_group": _init,
    "new_group": _new_group,
    "monitored_barrier": _by_group("monitored_barrier"),
    "_set_pg_timeout": _by_group("set_timeout"),
}
