"""A relay without the key between two ranks: its pickle is never loaded, whatever ``PACELINE_ENCRYPT`` says."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

import paceline.hvd as hvd
from paceline.collectives.environment import find_place
from paceline.errors import PacelineError
from paceline.net import new_job_key, sockets
from tests.hvd import relay
from tests.hvd.ranks import TIMEOUT_S, Ranks
from tests.integration.relays import listening_ports


def take(go: str) -> str:
    """Take rank 0's object, through the relay whose port is in a file; return what came of it."""
    if os.environ["RANK"] == "1":
        while not Path(go).exists():
            time.sleep(0.01)
        port = int(Path(go).read_text())
        if port:  # the network leads the connection there
            dial = sockets.dial
            sockets.dial = lambda address: dial(f"tcp://127.0.0.1:{port}")
    weights = relay.MARK.decode() + "w" * 4 * relay.LARGE
    try:
        hvd.init()
        found = hvd.broadcast_object(weights if hvd.rank() == 0 else None)
    except (PacelineError, hvd.HorovodInternalError) as error:
        return f"{type(error).__name__}: {error}"
    if hvd.rank() == 0:
        signal.pause()  # what it has sent is still under way; the test ends this process
    return "the object" if found == weights else f"something else: {found!r}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def relaying(*arguments: object) -> Iterator[int]:
    """Run the relay; its port."""
    command = [sys.executable, relay.__file__, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def overwrite(store: int, entry: str, port: int) -> None:
    """Write the relay's address into an entry of the TCPStore, which asks nobody for a key."""
    there = TCPStore("127.0.0.1", store, is_master=False)
    there.wait([entry])
    there.set(entry, f"tcp://127.0.0.1:{port}")


def port_of_rank_0(ranks: Ranks, store: int) -> int:
    """Return where rank 0 listens for the others, as everybody on the network could find out."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (ports := set(listening_ports(ranks.children[0].pid)) - {store}):
        assert time.monotonic() < deadline, ranks.output(0)
        time.sleep(0.05)
    [port] = ports
    return port


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("way", ["network", "store"])
def test_code_of_a_relay_without_the_key_does_not_run(way: str, encrypt: bool, tmp_path: Path) -> None:
    """It stands on the way to rank 0, or has overwritten rank 0's address in the TCPStore."""
    go, trace, store = tmp_path / "go", tmp_path / "ran", free_port()
    names = {"PACELINE_JOB_ID": "attacked", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store)}
    keys = {"PACELINE_JOB_KEY": new_job_key(), "PACELINE_ENCRYPT": str(int(encrypt))}
    ranks = Ranks(take, 2, str(go), environment={**names, **keys, "LOCAL_WORLD_SIZE": "1"})
    entry = f"paceline-hvd {find_place({**names, 'RANK': '0', 'WORLD_SIZE': '2'}).job}"
    try:
        target = port_of_rank_0(ranks, store)
        with relaying(target, trace) as port:
            if way == "store":
                overwrite(store, entry, port)
            part = go.with_suffix(".part")
            part.write_text(str(port if way == "network" else 0))
            part.rename(go)
            ranks.children[1].wait(TIMEOUT_S)
    finally:
        for child in ranks.children:
            child.send_signal(signal.SIGKILL)
            child.wait(TIMEOUT_S)
    said = ranks.result(1)
    assert not trace.exists(), said
    assert said.startswith("AuthenticationError: rank 1 does not trust" if way == "store" else "CollectiveError")
