"""What the doctor finds on a host."""

from __future__ import annotations

import os
import sys

import pytest

from paceline.launch import Host
from paceline.launch.remote.host_checks import Doctor
from paceline.launch.remote.request import agent_script


def command(host: Host) -> list[str]:
    return agent_script("", sys.executable, os.getcwd(), os.environ.get("PYTHONPATH", ""))


def test_directory_that_cannot_be_written_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/proc")
    [finding] = Doctor([Host("127.0.0.1")], command, lambda host, link: f"{host} {link.code}", 60.0).run()
    assert finding.problems == []
    assert finding.facts["shared"] is False
