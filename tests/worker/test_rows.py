"""Rows in the answers of servers."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ProtocolError
from paceline.layout.tensors import to_frame
from paceline.wire import messages as m
from paceline.worker.block import WorkerBlock
from paceline.worker.rows import RowExchange


def new_exchange() -> RowExchange:
    spec = m.BlockSpec(0, "float32", [m.KeySpec("x", [7, 3], 0)], [0], [], 1000, "balanced", False)
    return RowExchange((WorkerBlock(spec, 1, shared=False, still=False, via=lambda owner: owner), 0))


@pytest.mark.parametrize("numbers", [[0, 9_000_000, 6], [-1, 2, 3], [1, 2, 7], [3, 2, 4]])
def test_answer_with_rows_that_the_key_does_not_have_is_refused(numbers: list[int]) -> None:
    done, rows = new_exchange(), torch.ones(3, 3)
    done.keep(m.Done(), [to_frame(torch.tensor([0, 2, 6])), to_frame(rows)])
    assert done.rows is not None
    with pytest.raises(ProtocolError, match="must ascend from 0 or more to less than 7"):
        done.keep(m.Done(), [to_frame(torch.tensor(numbers)), to_frame(rows)])
