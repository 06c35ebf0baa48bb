from __future__ import annotations

import socket

import pytest

from paceline.launch.engines.ray_cluster.frames import ERR, EXIT, LARGEST, OUT, pack, unpack


def sent(data: bytes) -> list[tuple[int, bytes]]:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        return list(unpack(far))


def test_frames_arrive_as_they_were_sent() -> None:
    frames = [(OUT, b"a\n"), (ERR, b""), (EXIT, b"7")]
    assert sent(b"".join(pack(*frame) for frame in frames)) == frames


def test_frame_that_is_cut_off_is_lost() -> None:
    assert sent(pack(OUT, b"whole") + pack(OUT, b"cut off")[:-1]) == [(OUT, b"whole")]


def test_length_that_nobody_sends_is_refused() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        sent(b"\x01" + (LARGEST + 1).to_bytes(4, "big"))
