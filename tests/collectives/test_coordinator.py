"""What ends a job: messages that no rank would send."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from paceline.collectives.coordinator import Coordinator
from paceline.collectives.environment import HvdSettings, ProcessPlace
from paceline.collectives.negotiation.messages import (
    VERSION,
    Down,
    OperationRequest,
    RankEntered,
    Submission,
    ToCoordinator,
    encode,
)
from paceline.collectives.timeline import Timeline
from paceline.net.security import Security

REQUEST = OperationRequest("allreduce", "x", dtypes=("float32",), shapes=((1,),))


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    """The coordinator of two ranks that have entered."""
    found = Coordinator(ProcessPlace(0, 2, 0, "a job"), [], Security(""), HvdSettings(), Timeline())
    for rank in range(2):
        found.take(rank, ToCoordinator(1, RankEntered(VERSION, "host", "id", 1)))
    yield found
    found.close(0.0)


@pytest.mark.parametrize(
    "raw",
    [
        b"no message",
        encode(ToCoordinator(1, Submission(0, requests=(msgspec.structs.replace(REQUEST, op=99),)))),
    ],
)
def test_a_message_that_no_rank_would_send_ends_the_job_in_a_sentence(coordinator: Coordinator, raw: bytes) -> None:
    coordinator.take(0, ToCoordinator(1, Submission(0, requests=(REQUEST,))))
    coordinator._take_frames(b"hvd-1", raw)
    last = coordinator.receive(0.0)[-1].body
    assert isinstance(last, Down)
    assert last.rank == 1
    assert last.reason.startswith("rank 1 sent what is no message: ")
