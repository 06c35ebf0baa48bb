"""Sockets that listen."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from paceline.launch.supervise.crew import free_port
from paceline.net.endpoints import dial, listen


@pytest.fixture
def two_ports() -> Iterator[str]:
    """Return a range of two ports, the first of which is taken."""
    for first in range(20_000, 60_000, 2):
        with socket.socket() as taken, socket.socket() as free:
            try:
                taken.bind(("127.0.0.1", first))
                free.bind(("127.0.0.1", first + 1))
            except OSError:
                continue
            free.close()
            taken.listen()
            yield f"{first}-{first + 1}"
            return


def test_process_listens_at_a_free_port_of_a_range(two_ports: str) -> None:
    sock, address = listen(f"tcp://127.0.0.1:{two_ports}")
    with sock, dial(address):
        assert address.endswith(two_ports.partition("-")[2])
        with pytest.raises(OSError, match=f"cannot listen at .*:{two_ports}: no port of the range is free"):
            listen(f"tcp://127.0.0.1:{two_ports}")


def test_launcher_finds_a_port_at_the_other_end_of_the_range(two_ports: str) -> None:
    assert free_port(two_ports) == int(two_ports.partition("-")[2])
