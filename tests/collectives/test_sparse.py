"""Entries of sparse tensors that other ranks send."""

from __future__ import annotations

import pytest
import torch

from paceline.collectives.sparse import check_counts, check_indices
from paceline.errors import ProtocolError

#: Ranks whose entries come one after the other: 1, none and 2.
MEMBERS, COUNTS = (3, 5, 8), (1, 0, 2)


@pytest.mark.parametrize(
    ("place", "wrong", "sender"), [(0, (6, 0), 3), (1, (0, 4), 8), (2, (-1, 0), 8), (2, (2**62, 0), 8)]
)
def test_index_outside_of_the_own_shape_is_refused_with_both_ranks(
    place: int, wrong: tuple[int, int], sender: int
) -> None:
    indices = torch.tensor([[0, 0], [5, 3], [0, 0]])
    check_indices(indices, COUNTS, (6, 4, 2), MEMBERS, 5)
    indices[place] = torch.tensor(wrong)
    with pytest.raises(ProtocolError) as caught:
        check_indices(indices, COUNTS, (6, 4, 2), MEMBERS, 5)
    text = f"rank {sender} has sent index {wrong} of a sparse tensor, which has shape (6, 4, 2) on rank 5"
    assert str(caught.value).startswith(text)


def test_more_or_fewer_entries_than_there_can_be_are_refused() -> None:
    like = torch.sparse_coo_tensor([[0], [0]], torch.ones(1, 2), (6, 4, 2), check_invariants=True)
    check_counts((24, 0, 1), like, MEMBERS, 5)
    for count in (25, -1, 2**62):
        with pytest.raises(ProtocolError, match=f"rank 8 has a sparse tensor of {count} entries, and that of rank 5"):
            check_counts((24, 0, count), like, MEMBERS, 5)
    with pytest.raises(ProtocolError, match="rank 5 got 2 indices of 3 entries"):
        check_indices(torch.zeros(2, 1, dtype=torch.int64), COUNTS, (6,), MEMBERS, 5)
