"""A holder of the job's key who claims nothing: ``python holders.py KIND COUNT NAME=host:port...``, with the job's key.

It keeps COUNT connections to the listeners, and opens new ones for those that are closed, until it is killed. It prints
``open`` when it has made each of them once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence

from paceline.net import Security
from paceline.net.handshake import GREETING_BYTES, Agreed, Initiator, Way
from paceline.net.records import RecordSender
from paceline.wire import encode
from paceline.wire import messages as m

THREADS = 8
KINDS = ("frames", "heads", "idle", "unread")
#: What a message of each kind promises, and the bytes of it that are sent.
PROMISE_BYTES, SENT_BYTES = 64 * 2**20, 2 * 2**20

Place = tuple[str, tuple[str, int]]
numbers = itertools.count()


def messages(kind: str, agreed: Agreed) -> Iterator[bytes | memoryview]:
    """Yield what is sent after the handshake."""
    writer = RecordSender(agreed.sending, agreed.encrypts)
    if kind == "frames":
        frames = [encode(1, 0, m.AskStatus()), bytes(PROMISE_BYTES)]
        pieces = writer.pieces(frames, [len(frames[0]), PROMISE_BYTES])
        yield next(pieces)
        yield from itertools.islice(pieces, SENT_BYTES // 2**20)
    elif kind == "heads":
        body = encode(1, 0, m.Lookup("s", [f"{key:04}" for key in range(200_000)]))
        yield from writer.pieces([body], [len(body)])
    elif kind == "unread":
        for seq in range(1, 200):
            body = encode(seq, 0, m.AskStatus())
            yield from writer.pieces([body], [len(body)])


def opened(kind: str, place: Place, security: Security) -> socket.socket:
    """Open a connection, and send the beginning."""
    name, address = place
    sock = socket.create_connection(address, 10.0)
    try:
        identity = f"holder-{os.getpid()}-{next(numbers)}".encode()
        initiator = Initiator(security.psk, identity, True, Way(False, name))
        sock.sendall(initiator.hello())
        welcome = b""
        while len(welcome) < GREETING_BYTES:
            got = sock.recv(GREETING_BYTES - len(welcome))
            if not got:
                raise ConnectionError
            welcome += got
        join, agreed = initiator.take(welcome)
        sock.sendall(join)
        sock.settimeout(1.0)
        with contextlib.suppress(OSError):
            for piece in messages(kind, agreed):
                sock.sendall(piece)
    except BaseException:
        sock.close()
        raise
    return sock


def is_closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def attack(kind: str, places: Sequence[Place], security: Security, made: threading.Semaphore) -> None:
    held: list[socket.socket | None] = [None] * len(places)
    while True:
        for index, place in enumerate(places):
            one = held[index]
            if one is not None and is_closed(one):
                one.close()
                held[index] = one = None
            if one is None:
                with contextlib.suppress(OSError):
                    held[index] = opened(kind, place, security)
                    made.release()


def main(kind: str, count: int, places: Sequence[Place]) -> None:
    security, made = Security(os.environ["PACELINE_JOB_KEY"]), threading.Semaphore(0)
    kinds = KINDS if kind == "all" else (kind,)
    for index in range(THREADS):
        mine = [place for _, place in zip(range(count // THREADS), itertools.cycle(places), strict=False)]
        args = kinds[index % len(kinds)], mine, security, made
        threading.Thread(target=attack, args=args, daemon=True).start()
    for _ in range(count // THREADS * THREADS):
        made.acquire()
    print("open", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    pairs = [one.partition("=") for one in sys.argv[3:]]
    hosts = [(name, *place.rsplit(":", 1)) for name, _, place in pairs]
    main(sys.argv[1], int(sys.argv[2]), [(name, (host, int(port))) for name, host, port in hosts])
