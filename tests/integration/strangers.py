"""A stranger who attacks listening sockets, as a program: ``python strangers.py KIND COUNT SECONDS host:port...``.

It opens COUNT connections, keeps them open, and opens new ones for those that are closed, until it is killed or the
time is over. It prints ``open`` when it has opened COUNT for the first time.
"""

import contextlib
import itertools
import os
import random
import resource
import socket
import sys
import time

ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
PROMISE_OF_4_GIB = b"\x06" + (2**32 - 1).to_bytes(8, "big")
MEBIBYTE = bytes(2**20)
KINDS = ("huge", "cut", "silent", "slow", "garbage", "replayed")


def first_bytes(kind: str) -> bytes:
    recorded = bytes.fromhex(os.environ.get("RECORDED", ""))
    return {
        "huge": ZMTP_GREETING + PROMISE_OF_4_GIB,
        "cut": b"PCL1K" + random.randbytes(random.randrange(49)),
        "silent": b"",
        "slow": b"P",
        "garbage": random.randbytes(random.randrange(1, 200)),
        "replayed": recorded or b"PCL1K" + random.randbytes(49),
    }[kind]


class Connection:
    def __init__(self, kind: str, address: tuple[str, int]) -> None:
        self.kind, self.address = kind, address
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.rest = first_bytes(kind)
        self.slow = itertools.cycle(b"CL1K" + random.randbytes(40))
        with contextlib.suppress(BlockingIOError):
            self.socket.connect(address)

    def go_on(self) -> bool:
        """Send something more; False when the connection is over."""
        try:
            if self.rest:
                self.rest = self.rest[self.socket.send(self.rest) :]
            elif self.kind == "huge":
                self.socket.send(MEBIBYTE)
            elif self.kind == "slow":
                self.socket.send(bytes([next(self.slow)]))
            return self.socket.recv(100) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False


def main(kinds: list[str], count: int, seconds: float, addresses: list[tuple[str, int]]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    deadline = time.monotonic() + seconds
    turns = itertools.cycle([(kind, address) for kind in kinds for address in addresses])
    alive: list[Connection] = []
    opened = 0
    while time.monotonic() < deadline:
        while len(alive) < count and time.monotonic() < deadline:
            for _ in range(min(200, count - len(alive))):
                with contextlib.suppress(OSError):
                    alive.append(Connection(*next(turns)))
                    opened += 1
            if opened >= count:
                break
            alive[-200:] = [one for one in alive[-200:] if one.go_on()]
        alive = [one for one in alive if one.go_on() or one.socket.close()]
        if opened >= count:
            print("open", flush=True)
            opened = -(10**12)
        time.sleep(0.01)


if __name__ == "__main__":
    kinds = list(KINDS) if sys.argv[1] == "all" else [sys.argv[1]]
    places = [(text.rpartition(":")[0], int(text.rpartition(":")[2])) for text in sys.argv[4:]]
    main(kinds, int(sys.argv[2]), float(sys.argv[3]), places)
