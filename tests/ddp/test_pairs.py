"""Send and receive of two ranks, when one of them does not come."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from paceline.ddp.pairs import Pairs
from paceline.errors import DeadlineError, PacelineError
from paceline.worker.session import Session


class Lonely:
    """Stands for a session in which the other ranks never come."""

    rank, servers = 0, ("one",)

    def __init__(self) -> None:
        self.asked: list[object] = []

    def ask_server(self, server: int, body: object, *rest: object) -> None:
        self.asked.append(body)

    def wait(self, calls: object, timeout_s: float) -> None:
        raise DeadlineError(f"it was not answered within {timeout_s:g} s")


@pytest.mark.parametrize("how", ["recv", "recv_any", "send"])
def test_operation_after_one_that_failed_fails_and_takes_no_message(how: str) -> None:
    session = Lonely()
    pairs = Pairs(cast("Session", session), "g", [0, 1])
    calls: dict[str, Any] = {
        "recv": lambda: pairs.recv(torch.zeros(1), 1, 7, 0.1),
        "recv_any": lambda: pairs.recv_any(torch.zeros(1), 7, 0.1),
        "send": lambda: pairs.send(torch.zeros(1), 1, 7, 0.1),
    }
    with pytest.raises(DeadlineError, match=r"not answered within 0.1 s"):
        calls[how]().wait()
    for retry in calls.values():
        with pytest.raises(PacelineError, match="before this one has failed") as caught:
            retry().wait()
        assert ("any rank" if how == "recv_any" else "rank 1") in str(caught.value)
        assert "open the group again on all ranks" in str(caught.value)
    assert len(session.asked) == 1
