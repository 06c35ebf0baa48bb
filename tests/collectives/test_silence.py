"""Silence of another rank that counts, by states of its process that the test makes up."""

from __future__ import annotations

import pytest

from paceline.collectives import silence
from paceline.collectives.silence import Silence
from paceline.net.hosts import ProcessState


class Host:
    """The kernel: its process uses a share of the time that passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, letter: str, share: float) -> None:
        self._letter, self._share = letter, share
        self.now = 0.0
        monkeypatch.setattr(silence, "process_state", lambda pid: ProcessState(self._letter, self._share * self.now))

    def wait(self, one: Silence, seconds: int) -> float:
        for _ in range(seconds):
            self.now += 1.0
            one.note(1.0)
        return one.counted_s


@pytest.mark.parametrize(
    ("letter", "share", "counted_s"),
    [
        ("S", 0.0, 100.0),
        ("S", 0.5, 100.0),
        ("T", 0.0, 100.0),
        ("R", 0.0, 2.0),  # the first second, and the one before the second look
        ("R", 0.5, 51.0),
        ("R", 4.0, 100.0),
    ],
)
def test_silence_counts_but_for_the_time_in_which_a_process_waits_for_a_processor(
    monkeypatch: pytest.MonkeyPatch, letter: str, share: float, counted_s: float
) -> None:
    assert Host(monkeypatch, letter, share).wait(Silence(7), 100) == pytest.approx(counted_s)


def test_silence_of_a_process_elsewhere_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Host(monkeypatch, "R", 0.0).wait(Silence(0), 100) == 100.0


def test_silence_begins_anew_when_something_came(monkeypatch: pytest.MonkeyPatch) -> None:
    host, one = Host(monkeypatch, "S", 0.0), Silence(7)
    host.wait(one, 50)
    one.note(1.0, is_over=True)
    assert host.wait(one, 3) == 3.0


@pytest.mark.parametrize(("letter", "is_gone"), [("S", False), ("T", False), ("", False), ("Z", True), ("X", True)])
def test_silence_of_a_process_that_has_ended_is_known(
    monkeypatch: pytest.MonkeyPatch, letter: str, is_gone: bool
) -> None:
    one = Silence(7)
    Host(monkeypatch, letter, 0.0).wait(one, 2)
    assert one.is_gone is is_gone
