"""Counts what a process holds: objects by type, and the lengths of paceline's own tables."""

from __future__ import annotations

import gc
import queue
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

from tests.soak.samples import descriptors_of

#: By name: ``objects list``, ``BucketSide.sending``, ``bytes of tensors``.
Census = dict[str, int]

#: Few by construction: bins of a histogram, and the last 25 rounds that were measured. How many of them there are
#: depends on how busy the host is.
_BOUNDED = frozenset({"Stats.staleness", "RoundTimes._last", "objects paceline.hetero.measured.WorkerRound"})

#: Modules whose objects are a bounded number for each worker, which is there when it has told enough: after some
#: heartbeats, however many steps these take. ``tests/observe/test_bounded.py`` counts them over many rounds.
_VERDICTS = ("paceline.observe.history", "paceline.observe.detector")

#: Messages are counted as objects, without their lists. The last one may be alive, and how many lists it has, and how
#: long they are, depends on the host.
_MESSAGES = "paceline.wire.messages"

_SIZED = (dict, list, set, frozenset, deque, tuple, bytearray)


def leave_out_what_is_there() -> None:
    """Count only objects that are made from now on. Libraries have hundreds of thousands."""
    gc.collect()
    gc.freeze()


def census(is_whole: bool = False) -> Census:
    """Count what this process holds. Tables are the containers that objects and modules of paceline refer to.

    Args:
        is_whole: count what verdicts about workers are made from, too.
    """
    _count(is_whole)  # looking at an object makes others: its dictionary, a tensor's storage
    return _count(is_whole)


def _count(is_whole: bool) -> Census:
    gc.collect()
    objects = gc.get_objects()
    torch = sys.modules.get("torch")  # the scheduler does without
    found: Counter[str] = Counter()
    storages: dict[int, int] = {}
    for one in objects:
        kind = type(one)
        module = str(kind.__module__)  # of some types it is a descriptor
        if module in _VERDICTS and not is_whole:
            found["objects builtins.list"] -= sum(_lists(value) for _, value in _attributes(one))
            continue
        if (objects_of := f"objects {module}.{kind.__qualname__}") not in _BOUNDED:
            found[objects_of] += 1
        if (
            torch is not None
            and issubclass(kind, torch.Tensor)
            and one.layout is torch.strided
            and one.device.type == "cpu"
            and not hasattr(one, "fake_mode")  # a FakeTensor, which torch.compile leaves behind, has no memory
        ):
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif module.startswith(_MESSAGES):
            found["objects builtins.list"] -= sum(type(value) is list for _, value in _attributes(one))
        elif module.startswith("paceline"):
            for name, value in _attributes(one):
                if (table := f"{kind.__qualname__}.{name}") not in _BOUNDED:
                    found[table] += _length(value)
    for module, name, value in _globals():
        found[f"{module}.{name}"] += _length(value)
    held = {"bytes of tensors": sum(storages.values()), "descriptors": descriptors_of("self")}
    return dict(found) | held


def _lists(value: Any) -> int:
    """Return how many lists a value is, with those in it."""
    return 1 + sum(map(_lists, value)) if type(value) is list else 0


def _attributes(one: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(one, "__dict__", {}).items()
    for cls in type(one).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(one, name):
                yield name, getattr(one, name)


def _globals() -> Iterator[tuple[str, str, Any]]:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("paceline") and module is not None:
            for name, value in list(vars(module).items()):
                yield module_name, name, value


def _length(value: Any) -> int:
    if isinstance(value, deque) and value.maxlen is not None:
        return 0  # bounded
    if isinstance(value, _SIZED):
        return len(value)
    if isinstance(value, queue.SimpleQueue):
        return value.qsize()
    if callable(getattr(value, "cache_info", None)):
        return int(value.cache_info().currsize)
    return 0


def grown(before: Mapping[str, int], after: Mapping[str, int], most: int) -> dict[str, int]:
    """Return by how much counts have grown, where that is more than ``most``; of bytes, 1,000 times as much."""
    differences = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: more for name, more in differences.items() if more > most * (1000 if name.startswith("bytes") else 1)}
