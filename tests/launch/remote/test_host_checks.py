"""What the doctor finds on a host."""

from __future__ import annotations

import pytest

from paceline.host.interfaces import interfaces
from paceline.launch import Host
from paceline.launch.remote.host_checks import Doctor, broken_ways, listen, reach
from paceline.launch.remote.request import agent_here


def command(host: Host) -> list[str]:
    return agent_here()


def test_directory_that_cannot_be_written_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/proc")
    [finding] = Doctor([Host("127.0.0.1")], command, lambda host, link: f"{host} {link.code}", 60.0).run()
    assert finding.problems == []
    assert finding.facts["shared"] is False


def test_host_is_reached_by_addresses_of_both_kinds() -> None:
    addresses = [address for address in ("127.0.0.1", "::1") if address in {one.address for one in interfaces()}]
    with listen() as listening:
        port = listening.getsockname()[1]
        assert reach([[address, address, port] for address in addresses]) == dict.fromkeys(addresses, "")


OPEN = "; open the ports between the hosts, or choose -i"


@pytest.mark.parametrize(
    ("broken", "problems"),
    [
        ([], {}),
        (["ac", "bc"], {"c": ["cannot be reached by a, b: late" + OPEN]}),
        (["ab", "ac"], {"a": ["cannot reach b, c: late" + OPEN]}),
        (["ab"], {"b": ["cannot be reached by a: late" + OPEN]}),
        (["ab", "ba"], {"b": ["cannot be reached by a: late" + OPEN, "cannot reach a: late" + OPEN]}),
        (["bc", "cb", "ba", "ab"], {"b": ["cannot be reached by a, c: late" + OPEN, "cannot reach a, c: late" + OPEN]}),
    ],
)
def test_hosts_that_others_do_not_reach_are_named_and_those_others_are_not(
    broken: list[str], problems: dict[str, list[str]]
) -> None:
    ways = {one: {other: "late" * (one + other in broken) for other in "abc" if other != one} for one in "abc"}
    assert broken_ways(ways) == problems
