"""``hvd.run`` runs a function on several ranks."""

from __future__ import annotations

import os

import pytest
import torch

import paceline.hvd as hvd
from paceline.errors import LaunchError


def test_results_by_rank_and_failures() -> None:
    pytest.importorskip("cloudpickle")
    base = 10

    def work(offset: int, scale: float = 1.0) -> list[float]:
        hvd.init()
        return [hvd.rank(), hvd.allreduce(torch.tensor([scale * offset * hvd.rank()]), op=hvd.Sum).item() + base]

    assert hvd.run(work, (2,), {"scale": 3.0}, num_proc=2) == [[0, 16.0], [1, 16.0]]

    def fail() -> None:
        os._exit(3)

    with pytest.raises(LaunchError, match="exited with non-zero status"):
        hvd.run(fail, np=2)
    with pytest.raises(ValueError, match="at least 1"):
        hvd.run(work, num_proc=0)
