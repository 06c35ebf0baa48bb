"""Copies past the caches."""

from __future__ import annotations

import pytest
import torch

from paceline.net import streaming
from paceline.net.streaming import LEAST_BYTES, LINE_BYTES, stream_copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.complex128, torch.bfloat16])
@pytest.mark.parametrize("size", [0, LINE_BYTES, LEAST_BYTES - 16, LEAST_BYTES, LEAST_BYTES + 16, 3 * LEAST_BYTES + 48])
@pytest.mark.parametrize("off", [0, 16, 1024])
def test_all_bytes_are_copied_and_no_others_wherever_they_lie(dtype: torch.dtype, size: int, off: int) -> None:
    values = torch.randint(0, 256, (size + off,), dtype=torch.uint8)
    whole = torch.full((size + 4096,), 7, dtype=torch.uint8)
    target, source = whole[off : off + size].view(dtype), values[off:].view(dtype)
    stream_copy(target, source)
    assert torch.equal(target.view(torch.uint8), values[off:])
    assert torch.cat([whole[:off], whole[off + size :]]).unique().tolist() == [7]


def test_this_machine_has_a_copy_of_lines_and_plain_copies_do_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert streaming._copy_lines() is not None
    monkeypatch.setattr(streaming, "_copy_lines", lambda: None)
    source, target = torch.rand(LEAST_BYTES), torch.zeros(LEAST_BYTES)
    stream_copy(target, source)
    assert torch.equal(target, source)
