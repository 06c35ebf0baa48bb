from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from paceline.launch.supervise.ready import ReadyPipe


@pytest.fixture
def pipe() -> Iterator[ReadyPipe]:
    made = ReadyPipe()
    yield made
    made.close()


def test_address_may_come_in_pieces(pipe: ReadyPipe) -> None:
    assert pipe.read() is None
    os.write(pipe.write_fd, b"tcp://127.0.")
    assert pipe.read() is None
    os.write(pipe.write_fd, b"0.1:5555\nmore")
    assert pipe.read() == "tcp://127.0.0.1:5555"
    pipe.close_write()


def test_pipe_that_ends_without_an_address_gives_none(pipe: ReadyPipe) -> None:
    os.write(pipe.write_fd, b"tcp://")
    pipe.close_write()
    assert pipe.read() is None
    assert pipe.read() == ""


@pytest.mark.parametrize("line", [b"hello", b"tcp://127.0.0.1:0", b"tcp://:", b"\xff", b""])
def test_line_that_is_no_address_is_refused(line: bytes, pipe: ReadyPipe) -> None:
    os.write(pipe.write_fd, line + b"\n")
    pipe.close_write()
    with pytest.raises(ValueError, match="said it listens at"):
        pipe.read()
