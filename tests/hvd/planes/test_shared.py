"""How ranks of one host wait for each other."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from paceline.hvd.errors import HorovodInternalError
from paceline.hvd.planes.shared import Neighbours, Offer


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """The process has more than 1,024 open files, as with many data loaders; ``select`` takes none above them."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1024)]
    yield
    for fd in files:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_ranks_that_do_not_come_are_named_however_many_files_are_open(many_open_files: None) -> None:
    offers = [Offer([other for other in range(3) if other != rank], 4096) for rank in range(3)]
    described = {rank: offer.describe() for rank, offer in enumerate(offers) if rank}
    neighbours = Neighbours(0, offers[0], described, timeout_s=0.01)
    with pytest.raises(HorovodInternalError, match=r"rank 1 and rank 2 did not go on with an operation within 0\.01 s"):
        neighbours.meet([1, 2])
    neighbours.close()
    for one in offers[1:]:
        one.close()
