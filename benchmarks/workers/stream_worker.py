"""An end of a plain TCP stream: ``listen ADDRESS`` says its port, then what it got; ``send ADDRESS PORT SECONDS``."""

import json
import socket
import sys
import time

CHUNK = 1 << 20


def listen(address: str) -> None:
    """Receive one stream; print bytes and seconds from its first byte to its last."""
    with socket.create_server((address, 0)) as server:
        print(json.dumps({"port": server.getsockname()[1]}), flush=True)
        connection, _ = server.accept()
    buffer, total, start = bytearray(CHUNK), 0, None
    with connection:
        while count := connection.recv_into(buffer):
            start = start or time.perf_counter()
            total += count
        end = time.perf_counter()
    print(json.dumps({"bytes": total, "seconds": end - (start or end)}), flush=True)


def send(address: str, port: str, seconds: str) -> None:
    """Send zeros for some time."""
    chunk, end = bytes(CHUNK), time.perf_counter() + float(seconds)
    with socket.create_connection((address, int(port)), timeout=30.0) as connection:
        while time.perf_counter() < end:
            connection.sendall(chunk)


{"listen": listen, "send": send}[sys.argv[1]](*sys.argv[2:])
