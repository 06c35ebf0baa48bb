"""A host that answers what no agent says: it is named, and its words move neither the launcher nor the terminal."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.launch.remote.agent_link import MAGIC, AgentLines

ABOUT = {
    "python": "/usr/bin/python3", "version": "3.12.1", "cores": 2, "host": "h1", "addresses": ["10.0.0.1"],
    "reached_at": "", "clock": time.time(), "pid": 1,
}  # fmt: skip
FACTS = {"versions": {"paceline": "1", "torch": "2"}, "shared": True}
ADDRESS = ["address", "127.0.0.1", 5]

#: Stands in for ssh: it says the content of a file, and stays until its stdin ends.
SSH = """#!/bin/sh
cat '{said}'
exec cat > /dev/null
"""


def hello(**changes: Any) -> list[Any]:
    return ["hello", ABOUT | changes]


class Told:
    """Commands whose only host says lines of a test's choosing."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self._said, self._ssh, self._capfd = folder / "said", folder / "ssh", capfd
        self._ssh.write_text(SSH.format(said=self._said))
        self._ssh.chmod(0o700)

    def doctor(self, *lines: Any) -> tuple[int, str]:
        """Return the exit code of ``paceline doctor`` and what it shows."""
        code, out, _ = self._run(["doctor", "-H", "h1,", "--ssh", str(self._ssh), "--timeout", "60"], lines)
        return code, out

    def launch(self, *lines: Any) -> tuple[int, str]:
        """Return the exit code of ``paceline launch`` and its own words."""
        words = ["launch", "-n", "1", "-s", "0", "-H", "h1,", "-o", f"ssh={self._ssh}", "--start-timeout", "60"]
        code, _, err = self._run([*words, "--", "true"], lines)
        return code, err

    def _run(self, words: list[str], lines: Sequence[Any]) -> tuple[int, str, str]:
        """Run a command; the host says bytes as they are, other values as JSON."""
        said = (one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines)
        self._said.write_bytes(MAGIC + b"".join(said))
        code = main(words)
        out, err = self._capfd.readouterr()
        assert "Traceback" not in err
        return code, out, err


@pytest.fixture
def told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Told:
    return Told(tmp_path, capfd)


@pytest.mark.parametrize("line", [
    ["hello", {}], hello(clock="now"), hello(clock=float("nan")), hello(addresses=5), hello(cores=[]),
    b"[" * 100_000 + b"\n", b"\xff\xfe{]\n", b'["hello", ' + b"9" * 5000 + b"]\n", {"hello": 1}, [[]],
])  # fmt: skip
def test_doctor_names_a_host_that_greets_as_no_agent_does(told: Told, line: Any) -> None:
    code, text = told.doctor(line)
    assert code == 1
    assert "h1: host h1 did not start an agent" in text
    assert "is not a line of the agent's protocol" in text


@pytest.mark.parametrize("facts", [{}, FACTS | {"versions": []}, FACTS | {"versions": {"torch": 5, "paceline": []}},
                                   FACTS | {"shared": 7}])  # fmt: skip
def test_doctor_names_a_host_whose_facts_are_none(told: Told, facts: dict[str, Any]) -> None:
    code, text = told.doctor(hello(), ["facts", facts, 1])
    assert code == 1
    assert 'h1: the connection to host h1 ended: ["facts"' in text


def test_words_of_a_host_have_no_power_over_the_terminal(told: Told) -> None:
    evil = "\x1b]52;c;aGk=\x07\x1b[2J\nto fix: nothing \udcff"
    code, text = told.doctor(hello(version=evil), ["refused", evil], ["facts", FACTS, 1], ["reached", {}])
    assert code == 1
    assert not {"\x1b", "\x07"} & set(text)
    assert "h1: \\x1b]52;c;aGk=\\x07\\x1b[2J\\nto fix: nothing \\udcff" in text
    code, text = told.launch(hello(), ["refused", evil])
    assert code == 1
    assert not {"\x1b", "\x07"} & set(text)


@pytest.mark.parametrize("signum", [9, 19, 999])
def test_host_sends_the_launcher_only_signals_that_end_a_job(told: Told, signum: int) -> None:
    code, text = told.launch(hello(), ["signalled", signum])
    assert code == 1
    assert f'the connection to host h1 ended: ["signalled", {signum}] is not a line' in text


@pytest.mark.parametrize("line", [
    ["out", "worker", 99, 1, "hi"], ["out", "worker", 0, 7, "hi"], ["closed", "nobody", 0, 1], ["living", [5]],
    ["living", [["worker", 7]]], ["exited", ["worker", 77], 0, ""], ["exited", 5], ["exited", ["worker", 0], "y", []],
    ["stopped", 5], ["runs", ["worker", 0], float("nan"), True], ["runs", ["worker", 0], 10**400, True],
    ["address", "127.0.0.1", 10**9], ["address", "h1\0", 5],
])  # fmt: skip
def test_host_that_tells_of_processes_that_it_has_not_fails_the_job(told: Told, line: list[Any]) -> None:
    code, text = told.launch(hello(), ADDRESS, line)
    assert code == 255
    assert re.search("worker 0 on h1 failed: (exit code 255: )?the connection to host h1 ended: ", text), text


def test_output_that_never_ends_is_not_kept() -> None:
    lines = AgentLines(MAGIC)
    for _ in range(100):
        assert lines.feed(b"x" * 2**16) == []
    assert len(lines.noise) <= 4096
    assert lines.feed(MAGIC[:5]) == []
    assert lines.feed(MAGIC[5:] + b'["pong"]\n') == [["pong"]]
    assert lines.feed(b"x" * 2**24) == []
    with pytest.raises(ValueError, match="more than 16 MiB"):
        lines.feed(b"x")
