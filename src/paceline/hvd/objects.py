"""Python objects between ranks.

Their contract is that of pickle: whoever can send an object can run code in the receiver. So objects travel only in
bodies of messages of the job's connections, which are authenticated and encrypted whatever ``PACELINE_ENCRYPT`` is, and
never in tensors. Apart from these functions only ``hvd.run`` and its processes (``run.py``, ``task.py``) unpickle: what
they find in a folder of this user.
"""

from __future__ import annotations

import pickle
from typing import Any

from paceline.errors import ConfigError, MissingExtraError
from paceline.hvd import world
from paceline.hvd.negotiation import Request
from paceline.hvd.process_sets import ProcessSet, global_process_set, members_of

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
    if running.size > 1 and not running.base.link.security.job_key:
        raise ConfigError(
            "objects are pickled: whoever sends one can run code in all ranks. This job has no key "
            "(PACELINE_INSECURE=1, here or in rank 0), so anybody could; start it with a key, or send tensors"
        )


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of ``root_rank`` (counted in the whole job).

    Args:
        obj: any object that can be pickled; only the root's counts.
        root_rank: whose object.
        name: pairs the calls of different ranks; by default the type's name, so objects of one type go one by one.
        process_set: the ranks that take part.

    Raises:
        ValueError: the root is not in the process set.
        HorovodInternalError: ranks disagree on the root, or the job is down.
        ConfigError: the job has no key.
    """
    set_id, members = members_of(process_set)
    if root_rank not in members:
        raise ValueError(f"root rank {root_rank} is not in the process set of ranks {list(members)}")
    running = world.running()
    _check_key(running)
    is_root = running.rank == root_rank
    raw = dumps(obj) if is_root else b""
    request = Request("broadcast_object", name or "object", set_id, root=root_rank, payload=raw)
    [found] = running.call(request)
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
    running = world.running()
    _check_key(running)
    request = Request("allgather_object", name or "object", payload=dumps(obj))
    return [pickle.loads(raw) for raw in running.call(request)]
