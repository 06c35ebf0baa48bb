"""The sum of sparse tensors, which are the gradients of ``nn.Embedding(sparse=True)``.

Every rank gets the indices and values of all ranks, in their order, and adds them: so the result is the same on all.
"""

from __future__ import annotations

import torch

from paceline.c10d.host_copy import HostCopy
from paceline.hvd.planes.base import AVERAGE, Plane, Reduction


def add_sparse(plane: Plane, tensor: torch.Tensor, how: Reduction) -> None:
    """Replace a sparse tensor by the sum over all ranks, or the mean."""
    mine = tensor.detach().to("cpu").coalesce()
    counts = torch.empty(how.size, dtype=torch.int64, device="cpu")
    plane.allgather(torch.tensor([mine._nnz()], device="cpu"), counts, [1] * how.size)
    rows = _all_rows(plane, mine.indices().t().contiguous(), counts)
    values = _all_rows(plane, mine.values(), counts)
    total = torch.sparse_coo_tensor(rows.t(), values, mine.shape, device="cpu", check_invariants=False).coalesce()
    tensor.copy_(total / how.size if how.op == AVERAGE else total)


def _all_rows(plane: Plane, mine: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, one rank's after the other."""
    found = mine.new_empty((int(counts.sum()), *mine.shape[1:]))
    row_bytes = mine[0].nbytes if len(mine) else found[:1].nbytes
    plane.allgather(HostCopy(mine).as_bytes, HostCopy(found, reads=False).as_bytes, (row_bytes * counts).tolist())
    return found
