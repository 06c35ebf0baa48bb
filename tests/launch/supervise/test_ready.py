from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from paceline.launch import ProcessName
from paceline.launch.supervise.crew import STATUS
from paceline.launch.supervise.events import Complete, Event, Exited, Lost, Over, Ready, Runs, StatusSaid, words_of
from paceline.launch.supervise.ready import EndedPipe, ReadyPipe


@pytest.fixture
def pipe() -> Iterator[ReadyPipe]:
    made = ReadyPipe()
    yield made
    made.close()


def test_address_may_come_in_pieces(pipe: ReadyPipe) -> None:
    assert pipe.news() == []
    os.write(pipe.write_fd, b"tcp://127.0.")
    assert pipe.news() == []
    os.write(pipe.write_fd, b"0.1:5555\nmore")
    assert pipe.news() == [Ready("tcp://127.0.0.1:5555")]
    pipe.close_write()


def test_pipe_that_ends_without_an_address_gives_none(pipe: ReadyPipe) -> None:
    os.write(pipe.write_fd, b"tcp://")
    pipe.close_write()
    assert pipe.news() == []
    assert not pipe.ended
    assert pipe.news() == []
    assert pipe.ended


@pytest.mark.parametrize("line", [b"hello", b"tcp://127.0.0.1:0", b"tcp://:", b"\xff", b""])
def test_line_that_is_no_address_is_refused(line: bytes, pipe: ReadyPipe) -> None:
    os.write(pipe.write_fd, line + b"\n")
    pipe.close_write()
    with pytest.raises(ValueError, match="said it listens at"):
        pipe.news()


def test_news_follow_the_address(pipe: ReadyPipe) -> None:
    os.write(pipe.write_fd, b'tcp://127.0.0.1:5555\n["lost", ["worker", 1], "it rai')
    assert pipe.news() == [Ready("tcp://127.0.0.1:5555")]
    assert pipe.news() == []
    os.write(
        pipe.write_fd,
        b'sed", false]\n["status", "how all do"]\nnonsense\n[]\n["lost", ["worker", 2], "it died", true]\n["over"]\n',
    )
    assert pipe.news() == [
        Lost(ProcessName("worker", 1), "it raised"),
        StatusSaid("how all do"),
        Lost(ProcessName("worker", 2), "it died", True),
        Over(),
    ]
    assert not pipe.ended
    pipe.close_write()
    assert pipe.news() == []
    assert pipe.ended


def test_words_for_the_scheduler_are_lines_also_when_nobody_reads() -> None:
    pipe = EndedPipe()
    pipe.tell(words_of(Exited(ProcessName("server", 2), 137)))
    pipe.tell(words_of(Runs(ProcessName("worker", 2), 0.25)))
    pipe.tell(STATUS)
    said = b'["exited", ["server", 2], 137, ""]\n["runs", ["worker", 2], 0.25, false]\n["status"]\n'
    assert os.read(pipe.read_fd, 200) == said
    pipe.close_read()
    pipe.tell(STATUS)
    pipe.close()


def test_scheduler_says_when_all_have_joined(pipe: ReadyPipe) -> None:
    os.write(pipe.write_fd, b'tcp://127.0.0.1:5555\n["complete"]\n')
    assert pipe.news() == [Ready("tcp://127.0.0.1:5555"), Complete()]
    pipe.close_write()


def test_pipe_takes_the_status_of_a_large_job_before_it_is_read(pipe: ReadyPipe) -> None:
    os.write(pipe.write_fd, b"tcp://127.0.0.1:5555\n")
    assert pipe.news() == [Ready("tcp://127.0.0.1:5555")]
    os.set_blocking(pipe.write_fd, False)
    line = json.dumps(["status", 500_000 * "x"]).encode() + b"\n"
    assert os.write(pipe.write_fd, line) == len(line)
    said: list[Event] = []
    while not said:
        said += pipe.news()
    assert said == [StatusSaid(500_000 * "x")]
    pipe.close_write()
