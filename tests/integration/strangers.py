"""A stranger who attacks listening sockets, as a program: ``python strangers.py KIND COUNT SECONDS host:port...``.

It opens COUNT connections, keeps them open, and opens new ones for those that are closed, until it is killed or the
time is over. It prints ``open`` and their number when it has made COUNT: the other side's kernel has accepted them.
What ``replayed`` sends is in the environment as hexadecimal digits: RECORDED has HELLO:JOIN of one member for each
listener, and any of them is sent to any.
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
    recorded = random.choice(os.environ.get("RECORDED", ":").split())
    hello, join = map(bytes.fromhex, recorded.split(":"))
    return {
        "huge": ZMTP_GREETING + PROMISE_OF_4_GIB,
        "cut": b"PCL1K" + random.randbytes(random.randrange(49)),
        "silent": b"",
        "slow": b"P",
        "garbage": random.randbytes(random.randrange(1, 200)),
        "replayed": hello + random.choice([b"", join]),
    }[kind]


class Connection:
    def __init__(self, kind: str, address: tuple[str, int]) -> None:
        self.kind, self.address = kind, address
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.rest = first_bytes(kind)
        self.slow = itertools.cycle(b"CL1K" + random.randbytes(40))
        self.is_made = False
        with contextlib.suppress(BlockingIOError):
            self.socket.connect(address)

    def note_made(self) -> bool:
        """Return whether the connection was made since the last call."""
        if self.is_made:
            return False
        with contextlib.suppress(OSError):
            self.socket.getpeername()
            self.is_made = True
        return self.is_made

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
    made, is_said = 0, False
    while time.monotonic() < deadline:
        for _ in range(min(200, count - len(alive))):
            with contextlib.suppress(OSError):
                alive.append(Connection(*next(turns)))
        made += sum(one.note_made() for one in alive)
        alive = [one for one in alive if one.go_on() or one.socket.close()]
        if made >= count and not is_said:
            print("open", made, flush=True)
            is_said = True
        time.sleep(0.001)


if __name__ == "__main__":
    kinds = list(KINDS) if sys.argv[1] == "all" else [sys.argv[1]]
    places = [(text.rpartition(":")[0], int(text.rpartition(":")[2])) for text in sys.argv[4:]]
    main(kinds, int(sys.argv[2]), float(sys.argv[3]), places)
