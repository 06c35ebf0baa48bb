"""A man in the middle who changes, repeats, moves or drops bytes: no value is ever wrong, and rounds go on."""

import contextlib
import logging
import socket
import threading

import pytest
import torch

from paceline import kvstore
from paceline.errors import PacelineError
from paceline.net import sockets
from paceline.testing import LocalJob
from tests.integration.relays import tcp_pair

NUMEL = 1 << 18
#: Bytes after which the fault comes: inside the tensor of the first round's push and its answer.
AFTER = 400_000


class Middle:
    """Relays connections of this process to TCP listeners, and does something to the bytes.

    Args:
        fault: ``flip``, ``repeat``, ``reorder``, ``cut``.
        way: ``up`` or ``down``.
        every: do it to every connection, and not only to the first that is long enough.
    """

    def __init__(self, fault, way, every=False):
        self._fault, self._way, self._every = fault, way, every
        self._dial = sockets.dial
        self.done = 0

    def dial(self, address):
        ours, theirs = tcp_pair()
        far = self._dial(address)
        far.settimeout(None)
        for name, source, target in (("up", theirs, far), ("down", far, theirs)):
            threading.Thread(target=self._relay, args=(name, source, target), daemon=True).start()
        return ours

    def _relay(self, name, source, target):
        passed, held = 0, None
        try:
            while piece := source.recv(1 << 16):
                before, passed = passed, passed + len(piece)
                if name == self._way and before <= AFTER < passed and (self._every or not self.done):
                    self.done += 1
                    if self._fault == "reorder":
                        held = piece
                        continue
                    piece = self._changed(piece)
                target.sendall(piece)
                if held is not None:
                    target.sendall(held)
                    held = None
        except OSError:
            pass
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _changed(self, piece):
        if self._fault == "flip":
            middle = len(piece) // 2
            return piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :]
        return piece * 2 if self._fault == "repeat" else b""


def train(fault, way, every, rounds):
    """Push and pull a few rounds through the man in the middle; return values, the log, and how often he struck."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("paceline").addHandler(handler)
    middle = Middle(fault, way, every)
    sockets.dial = middle.dial
    seen = []
    try:
        store = kvstore.create("dist_sync")
        store.set_updater("add", rate=1.0)
        store.init("w", torch.zeros(NUMEL))
        out = torch.zeros(NUMEL)
        for _ in range(rounds):
            store.pushpull("w", torch.ones(NUMEL), out)
            seen.append([float(out.min()), float(out.max())])
    except PacelineError as error:
        lines.append(f"error: {error}")
    return seen, lines, middle.done


SETTINGS = {"shared_memory": False, "unix_sockets": False}


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("fault", ["flip", "repeat", "reorder", "cut"])
def test_changed_frame_is_refused_and_named_and_the_round_completes(fault, way):
    with LocalJob(1, 1, **SETTINGS) as job:
        [(seen, lines, done)] = job.run(train, fault, way, False, 4, timeout_s=100)
        assert job.servers[0].wait(30) == 0
        log = job.servers[0].output if way == "up" else "\n".join(lines)
    assert done == 1
    assert seen == [[number, number] for number in (1.0, 2.0, 3.0, 4.0)]
    assert "closed the connection with " + ("peer worker-" if way == "up" else "the listener at tcp://") in log
    assert "was changed, repeated, moved or cut on the way" in log or (fault == "cut" and "left out on the way" in log)


@pytest.mark.parametrize("way", ["up", "down"])
def test_who_changes_every_connection_brings_an_error_and_never_a_wrong_value(way):
    with LocalJob(1, 1, timeout_s=4, **SETTINGS) as job:
        [(seen, lines, done)] = job.run(train, "flip", way, True, 2, timeout_s=100)
    assert done > 1
    assert seen == []
    assert any(line.startswith("error: ") and "server 0" in line for line in lines)
