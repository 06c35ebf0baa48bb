from __future__ import annotations

import errno
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launch.remote.shell import (
    ERR,
    EXIT,
    LARGEST,
    LOST,
    OUT,
    Broker,
    accept_all,
    main,
    pack,
    read_request,
    unpack,
)


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


def test_long_output_is_cut_into_frames() -> None:
    near, far = socket.socketpair()
    data = bytes(range(256)) * (LARGEST // 128)
    sender = threading.Thread(target=lambda: (near.sendall(pack(OUT, data)), near.close()))
    sender.start()
    with far:
        found = list(unpack(far))
    sender.join(60)
    assert [len(part) for _, part in found] == [LARGEST, LARGEST]
    assert b"".join(part for _, part in found) == data


def test_shell_passes_its_input_and_shows_what_the_broker_sends(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "door"))
        door.listen()
        command = [sys.executable, "-m", "paceline.launch.remote.shell", str(tmp_path / "door"), '["which", 1]']
        shell = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        near, _ = door.accept()
        with near:
            assert read_request(near) == ["which", 1]
            assert shell.stdin is not None
            shell.stdin.write(b"input")
            shell.stdin.flush()
            assert near.recv(5) == b"input"
            near.sendall(pack(OUT, b"out") + pack(ERR, b"err") + pack(EXIT, b"7"))
            assert shell.communicate(timeout=60) == (b"out", b"err")
    assert shell.returncode == 7


def test_shell_whose_broker_is_gone_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing"), "1"]) == LOST
    assert capfd.readouterr().err.startswith("the broker is gone: ")


def test_socket_can_be_made_however_long_the_path_of_temporary_files_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    broker = Broker("hub", "no.module")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(broker.socket)
    broker.close()
    assert list(long.iterdir()) == []
    assert not Path(broker.socket).parent.exists()


def test_connections_are_taken_again_when_descriptors_are_free_again(tmp_path: Path) -> None:
    class Listener(socket.socket):
        refusals = 2

        def accept(self) -> tuple[socket.socket, object]:
            if self.refusals:
                self.refusals -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    taken = threading.Event()

    def take(connection: socket.socket) -> None:
        with connection:
            taken.set()

    with Listener(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        accept_all(listener, take)
        client.connect(str(tmp_path / "socket"))
        assert taken.wait(30)


def test_broker_that_ends_before_it_has_read_its_task_says_why() -> None:
    broker = Broker("test", "paceline.no_such_module")
    try:
        broker.start(1_000_000 * "x")
        with pytest.raises(LaunchError, match=r"No module named paceline\.no_such_module"):
            broker.says(60.0)
    finally:
        broker.close()
