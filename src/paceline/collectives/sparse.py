"""Entries of sparse tensors that come from other ranks: checked before use, as an index says where to write. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from paceline.errors import ProtocolError


def check_counts(counts: Sequence[int], like: torch.Tensor, members: Sequence[int], rank: int) -> None:
    """Check how many entries each rank has.

    Args:
        counts: entries by member; a coalesced tensor has at most one for each place.
        like: the sparse tensor of this rank.
        members: ranks, in the order of ``counts``.
        rank: this rank.

    Raises:
        ProtocolError: a rank has more entries than a tensor of this shape can have.
    """
    most = math.prod(like.shape[: like.sparse_dim()])
    for sender, count in zip(members, counts, strict=True):
        if not 0 <= count <= most:
            raise ProtocolError(
                f"rank {sender} has a sparse tensor of {count} entries, and that of rank {rank} has shape "
                f"{tuple(like.shape)}, so at most {most}: {_SAME}"
            )


def added(
    indices: torch.Tensor,
    values: torch.Tensor,
    counts: Sequence[int],
    shape: Sequence[int],
    members: Sequence[int],
    rank: int,
) -> torch.Tensor:
    """Return the sum of the sparse tensors of all ranks, not coalesced; see :func:`check_indices`."""
    check_indices(indices, counts, shape, members, rank)
    return torch.sparse_coo_tensor(indices.t(), values, tuple(shape), device=values.device, check_invariants=False)


def check_indices(
    indices: torch.Tensor, counts: Sequence[int], shape: Sequence[int], members: Sequence[int], rank: int
) -> None:
    """Check the indices of the entries of all ranks, one rank's after the other.

    Args:
        indices: one row per entry, on any device; integers of shape (entries, sparse dimensions).
        counts: entries by member.
        shape: shape of the sparse tensor on this rank.
        members: ranks, in the order of ``counts``.
        rank: this rank.

    Raises:
        ProtocolError: an index is outside of the shape, or the indices are not as many as ``counts`` says.
    """
    if len(indices) != sum(counts):
        raise ProtocolError(f"rank {rank} got {len(indices)} indices of {sum(counts)} entries of a sparse tensor")
    limits = torch.tensor(tuple(shape)[: indices.shape[1]], device=indices.device)
    is_wrong = ((indices < 0) | (indices >= limits)).any(1)
    if bool(is_wrong.any()):
        place = int(is_wrong.nonzero()[0])
        sender = members[bisect_right(list(accumulate(counts)), place)]
        raise ProtocolError(
            f"rank {sender} has sent index {tuple(indices[place].tolist())} of a sparse tensor, which has shape "
            f"{tuple(shape)} on rank {rank}: {_SAME}"
        )


_SAME = "sparse tensors have the same shape on all ranks. Compare the sizes of the embeddings and of their vocabularies"
