"""Objects of a script: the network between hosts neither sees them nor can put code in their place."""

from __future__ import annotations

import io
import os
import socket
import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist

from paceline.errors import ConfigError
from paceline.net import lifeline, sockets
from paceline.testing import LocalJob
from tests.ddp.test_backend import open_group
from tests.integration.relays import tcp_pair

#: Of more bytes than a head has room for.
OBJECT = "an object of a rank " * 5000
BYTES, NUMBERS = b"bytes of a tensor " * 4096, torch.arange(20_000, dtype=torch.float32)
ALONE = {"shared_memory": False, "unix_sockets": False}


class Tap:
    """Relays the connections of this process, and keeps what it sees."""

    def __init__(self) -> None:
        self._dial, self.seen = sockets.dial, bytearray()
        sockets.dial = self.dial

    def dial(self, address: str) -> socket.socket:
        ours, theirs = tcp_pair()
        far = self._dial(address)
        far.settimeout(None)
        for source, target in ((theirs, far), (far, theirs)):
            threading.Thread(target=self._relay, args=(source, target), daemon=True).start()
        return ours

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        while piece := source.recv(1 << 16):
            self.seen += piece
            target.sendall(piece)
        target.close()


def gathered(rank: int) -> list[Any]:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, [OBJECT, rank])
    return found[1 - rank]  # type: ignore[no-any-return]


def at_one(rank: int) -> list[Any]:
    found: list[Any] = [None, None]
    dist.gather_object([OBJECT, rank], found if rank == 0 else None, 0)
    return found[1] if rank == 0 else [OBJECT, 0]


def broadcast(rank: int) -> list[Any]:
    found = [OBJECT, 0] if rank == 1 else [None, None]
    dist.broadcast_object_list(found, 1)
    return found


def many(rank: int) -> list[Any]:
    """So many objects that the list of their sizes is large."""
    found: list[Any] = [OBJECT, *[0] * 3000] if rank == 0 else [None] * 3001
    dist.broadcast_object_list(found)
    return found[:2]


def scattered(rank: int) -> list[Any]:
    found: list[Any] = [None]
    dist.scatter_object_list(found, [[OBJECT, 0], [OBJECT, 1]] if rank == 0 else None)
    return found[0]  # type: ignore[no-any-return]


def between_two(rank: int) -> list[Any]:
    found: list[Any] = [OBJECT, 0] if rank == 0 else [None, None]
    if rank == 0:
        dist.send_object_list(found, 1)
    else:
        dist.recv_object_list(found, 0)
    return found


OF_TORCH: tuple[Callable[[int], list[Any]], ...] = (gathered, at_one, broadcast, many, scattered, between_two)


def own_pickle(rank: int) -> list[Any]:
    """What libraries do that pickle themselves."""
    tensor = torch.frombuffer(bytearray(BYTES), dtype=torch.uint8) * (rank == 1)
    dist.broadcast(tensor, 1)
    buffer = io.BytesIO()
    torch.save(OBJECT, buffer)
    saved = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    found = [torch.empty_like(saved) for _ in range(2)]
    dist.all_gather(found, saved)
    if rank == 0:
        dist.send(saved, 1)
    else:
        dist.recv(saved, 0)
    assert bytes(tensor.tolist()) == BYTES
    return [torch.load(io.BytesIO(bytes(found[1 - rank].tolist()))), rank]


def tapped() -> list[Any]:
    tap, rank = Tap(), int(os.environ["PACELINE_RANK"])
    lifeline.host_id = lambda: str(rank)
    open_group()
    crc = [zlib.crc32(function(rank)[0].encode()) for function in (*OF_TORCH, own_pickle)]
    is_hidden = OBJECT.encode()[:1000] not in tap.seen and BYTES[:1000] not in tap.seen
    dist.broadcast(NUMBERS if rank == 0 else torch.empty_like(NUMBERS), 0)
    dist.barrier()
    return [crc, is_hidden, NUMBERS.numpy().tobytes()[:1000] in tap.seen]


@pytest.mark.parametrize("encrypt", [False, True])
def test_network_sees_numbers_without_encryption_and_never_an_object(encrypt: bool) -> None:
    with LocalJob(num_workers=2, num_servers=1, encrypt=encrypt, **ALONE) as job:
        wanted = [zlib.crc32(OBJECT.encode())] * (len(OF_TORCH) + 1)
        assert job.run(tapped) == [[wanted, True, not encrypt]] * 2


def refused() -> list[str]:
    rank = open_group()
    found = []
    for function in OF_TORCH:
        with pytest.raises(ConfigError) as caught:
            function(rank)
        found.append(str(caught.value))
    total = torch.ones(3)
    dist.all_reduce(total)
    return [*found, str(total.tolist())]


def test_job_without_a_key_refuses_objects_and_goes_on() -> None:
    with LocalJob(num_workers=2, num_servers=1, insecure=True) as job:
        for *found, total in job.run(refused):
            assert all("objects are pickled" in text and "start it with a key" in text for text in found)
            assert total == "[2.0, 2.0, 2.0]"
