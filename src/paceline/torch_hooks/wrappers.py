"""Wrappers of models that merge gradients by themselves, as DistributedDataParallel does: paceline refuses them.

Accelerate, the Trainer of Hugging Face and scripts such as nanoGPT's start their own DDP where they see ``RANK`` and
``WORLD_SIZE``. Then both merge the same gradients, and the last writer wins.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import distributed as dist

from paceline.errors import PacelineError

logger = logging.getLogger(__name__)

#: Classes of modules that merge gradients, and of parameters that are parts of others. A wrapper cannot exist where its
#: module was never imported.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"),
)
_SHARDED = (("torch.distributed.tensor", "DTensor"), ("torch.distributed.fsdp._flat_param", "FlatParameter"))

_WAY_OUT = (
    "Give paceline the bare model; if the script starts DDP by itself where it sees RANK and WORLD_SIZE (accelerate, "
    "HF Trainer), start it with: paceline launch --no-torchrun-env"
)

_warned = False


def refuse_wrapped(params: Iterable[torch.Tensor], model: torch.nn.Module | None, rank: int) -> None:
    """Raise if something else merges the gradients of a model; warn once if something may do so unseen.

    For jobs of several workers: when an optimizer is made, and at its first step. It is cheap where the script does
    not use torch.distributed.

    Raises:
        PacelineError: the model or a part of it is wrapped, or a parameter is a shard.
    """
    known = set(params)
    sharded = next((one for one in known if isinstance(one, _loaded(_SHARDED))), None)
    if sharded is not None:
        raise _error(rank, f"a parameter is a {type(sharded).__name__}, a part of one that is sharded over processes")
    wrappers = _loaded(_WRAPPERS)
    found = [] if model is None else [one for one in model.modules() if isinstance(one, wrappers)]
    in_use = dist.is_available() and dist.is_initialized()
    found += [one for one in _living(wrappers) if not known.isdisjoint(one.parameters())] if in_use else []
    if found:
        raise _error(rank, f"the model is wrapped in {_name_of(found[0], wrappers)}, which merges gradients by itself")
    if in_use and dist.get_world_size() > 1:
        _warn(rank)


def _error(rank: int, what: str) -> PacelineError:
    return PacelineError(f"worker {rank}: {what}, and paceline would merge them again. {_WAY_OUT}")


def _warn(rank: int) -> None:
    global _warned
    if not _warned:
        _warned = True
        logger.warning(
            "worker %d: the script has a process group of %d processes of torch.distributed beside this job. If it "
            "merges gradients through it, they are merged twice: then start it with paceline launch --no-torchrun-env",
            rank, dist.get_world_size(),
        )  # fmt: skip


def _loaded(places: Iterable[tuple[str, str]]) -> tuple[type, ...]:
    """Return the classes whose modules are imported."""
    return tuple(cls for module, name in places if (cls := getattr(sys.modules.get(module), name, None)) is not None)


def _living(classes: tuple[type, ...]) -> Iterator[torch.nn.Module]:
    """Yield all modules of these classes in this process: a script need not have told us of its wrapper."""
    return (one for one in gc.get_objects() if issubclass(type(one), classes))


def _name_of(wrapper: torch.nn.Module, classes: tuple[type, ...]) -> str:
    return next(cls.__name__ for cls in classes if isinstance(wrapper, cls))
