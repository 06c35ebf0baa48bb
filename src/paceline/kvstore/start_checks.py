"""Checks at the start that all workers train the same model in the same way.

Collective. Workers that agree exchange 32 bytes; only when they do not, they exchange their facts, so that each of
them can raise the same error.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from paceline.kvstore.agreement import (
    MAX_VARIANTS,
    Document,
    Fact,
    Facts,
    digest,
    disagreement,
    pack,
    representatives,
    squeeze,
    unsqueeze,
)
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.layout.tensors import check_initialised
from paceline.updaters.spec import IMPLEMENTATION
from paceline.worker.session import Session

_LARGEST_LISTED = 16

#: Name, parameter and index of its param group.
_Named: TypeAlias = Sequence[tuple[object, torch.Tensor, int]]


def agree(session: Session, what: str, facts: Facts) -> None:
    """Compare facts with all other workers. Every worker calls it at the same point of its script.

    The facts are in order, each subject once. The error names what is set up, as ``the optimizer``.

    Raises:
        KeyMismatchError: keys, their shapes, types or order differ. On every worker, with the same text.
        ConfigError: options differ. On every worker, with the same text.
        PeerDiedError: a worker died; the text names it.
        DeadlineError: not all workers called this in time; the text names the missing ones.
    """
    if session.settings.num_workers == 1:
        return
    packed = pack(Document(what, list(facts)))
    ranks = representatives(session.gather("agreement", digest(packed)))
    if len(ranks) == 1:
        return
    compared = list(ranks)[:MAX_VARIANTS]
    mine = squeeze(packed) if session.rank in compared else b""
    found = session.gather("disagreement", mine)
    raise disagreement({rank: unsqueeze(found[rank]) for rank in compared if found[rank]}, ranks)


def agree_on_store(store: KVStoreBase, what: str, facts: Facts) -> None:
    """Compare facts and the store's settings with all workers of a distributed store; other stores have one worker."""
    if isinstance(store, DistStore):
        agree(store.session, what, [*facts, *store_facts(store)])


# ---- facts -----------------------------------------------------------------------------------------------------------


def tensor_facts(named: Iterable[tuple[object, torch.Tensor]], kind: str = "parameter") -> list[Fact]:
    """Describe tensors that become keys: name, shape, dtype, and their order.

    Raises:
        ValueError: a parameter has no shape yet.
    """
    table = list(named)
    check_initialised(table)
    return [Fact(f"{kind} {name!r}", _kind(tensor), True) for name, tensor in table]


def optimizer_facts(optimizer: torch.optim.Optimizer, named: _Named) -> list[Fact]:
    """Describe an optimizer: its class, its parameters with their groups in the order of the keys, and all options.

    Raises:
        ValueError: a parameter has no shape yet.
    """
    check_initialised([(name, param) for name, param, _ in named])
    cls = type(optimizer)
    facts = [Fact("the optimizer", f"{cls.__module__}.{cls.__qualname__}")]
    facts += [
        Fact(f"parameter {name!r}", f"{_kind(param)} in param group {group}", True) for name, param, group in named
    ]
    for index, group in enumerate(optimizer.param_groups):
        facts += option_facts(f"param group {index}", group)
    return facts


def state_facts(optimizer: torch.optim.Optimizer, named: _Named) -> list[Fact]:
    """Describe the state with which an optimizer begins: its entries, the kind of its tensors, and how many steps.

    A state that only some workers have loaded differs in this. That of a new optimizer is left out, and so are other
    numbers, which unlike machines round differently.
    """
    facts = []
    for name, param, _ in named:
        state = {entry: _brief(value) for entry, value in optimizer.state.get(param, {}).items()}
        facts += [Fact(f"the optimizer's state of {name!r}", _text(state) or "")] if state else []
    return facts


def _brief(value: Any) -> str:
    """Return a tensor's kind; of a single number its value, if that is whole; nothing for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return _kind(value)
    one = value.item() if isinstance(value, torch.Tensor) and value.numel() else value
    return str(int(one)) if isinstance(one, int | float) and float(one).is_integer() else ""


def option_facts(owner: str, options: Mapping[str, Any]) -> list[Fact]:
    """Describe options by name. Options other than numbers, text and lists of them are left out."""
    texts = {name: _text(value) for name, value in options.items() if name not in IMPLEMENTATION}
    return [Fact(f"{name} of {owner}", texts[name] or "") for name in sorted(texts) if texts[name] is not None]


def store_facts(store: DistStore) -> list[Fact]:
    """Describe how a distributed store handles pushes, and which one of the job it is."""
    policy = store.policy
    options = {name: getattr(policy, name) for name in policy.__dataclass_fields__}
    name = Fact("the store's name, by the order of creation,", store.name)
    return [Fact("the store's type", store.type), name, *option_facts("the store", options)]


def _kind(tensor: torch.Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else " sparse"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{layout}"


def _text(value: Any) -> str | None:
    """Return a value as text, equal for equal values; None if it is not plain data."""
    if isinstance(value, torch.Tensor):
        value = value.tolist() if value.numel() <= _LARGEST_LISTED else _kind(value)
    if value is None or isinstance(value, bool | str):
        return str(value)
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        number = float(value)
        return str(int(number)) if number.is_integer() else repr(number)
    if isinstance(value, Mapping):
        parts = {str(name): _text(one) for name, one in value.items()}
        return "{" + ", ".join(f"{name}: {part}" for name, part in sorted(parts.items()) if part is not None) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(_text(one) or "..." for one in value) + ")"
    return None
