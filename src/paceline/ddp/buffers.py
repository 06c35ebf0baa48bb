"""Buffers of unlike shape: DDP copies rank 0's buffers to all ranks as one list of elements, so an error names none.

Where such a copy fails, all ranks of the group write the shapes of their buffers on the board of the job, and compare.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.ddp.board_store import BoardStore
from paceline.errors import PacelineError, ProtocolError
from paceline.worker.session import Session

#: How long to wait for the other ranks' shapes. All of them fail at about the same time.
_SHAPES_S = 5.0

#: Shapes and dtypes by name.
_Shapes = dict[str, str]


@contextmanager
def named(session: Session, model: DistributedDataParallel) -> Iterator[None]:
    """Raise an error that names the first buffer of unlike shape where the block fails because of one.

    Raises:
        ProtocolError: instead of one without the name.
    """
    try:
        yield
    except ProtocolError as error:
        difference = ""
        with suppress(PacelineError):
            difference = unlike(session.rank, _of_all_ranks(session, model))
        if not difference:
            raise
        raise ProtocolError(difference) from error


def unlike(rank: int, shapes: dict[int, _Shapes]) -> str:
    """Describe the first buffer whose shape differs between this rank and another one; empty: there is none."""
    for other, theirs in shapes.items():
        for name in {**shapes[rank], **theirs}:
            here, there = shapes[rank].get(name, "no such buffer"), theirs.get(name, "no such buffer")
            if here != there:
                return (
                    f"buffer {name!r} differs between ranks: rank {rank} has {here}, rank {other} has {there}. "
                    "DistributedDataParallel copies the first rank's buffers to all ranks, at its start and before "
                    "each forward pass in training. Give the buffer the same shape on all ranks; or let each rank keep "
                    "its own buffers: DistributedDataParallel(model, broadcast_buffers=False)"
                )
    return ""


def _of_all_ranks(session: Session, model: DistributedDataParallel) -> dict[int, _Shapes]:
    """Return the shapes of the group's ranks."""
    group = model.process_group
    ranks = dist.get_process_group_ranks(group)
    ignored = getattr(model, "parameters_to_ignore", ())
    mine = {name: _described(one) for name, one in model.module.named_buffers() if name not in ignored}
    board, names = BoardStore(session), [f"paceline/buffers/{group.group_name}/{rank}" for rank in ranks]
    board.set(f"paceline/buffers/{group.group_name}/{session.rank}", json.dumps(mine))
    board.wait(names, timedelta(seconds=_SHAPES_S))
    return {rank: json.loads(board.get(name)) for rank, name in zip(ranks, names, strict=True)}


def _described(buffer: torch.Tensor) -> str:
    return f"shape {tuple(buffer.shape)} of {buffer.dtype}"
