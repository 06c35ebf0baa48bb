from __future__ import annotations

import re

import pytest

from paceline.launch import Host, parse_host_list, parse_hosts


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("172.30.0.172", Host("172.30.0.172")),
        ("  node1  # the fast one", Host("node1")),
        ("node1:2222", Host("node1", port=2222)),
        ("me@node1:2222 slots=4", Host("me@node1", port=2222, slots=4)),
        ("node1 slots=4 max_slots=8", Host("node1", slots=4)),
        ("[fe80::1]:2222", Host("fe80::1", port=2222)),
        (
            "n1:22 slots=4 weight=3 group=a iface=eth1",
            Host("n1", port=22, slots=4, weight=3.0, group="a", interface="eth1"),
        ),
        ("n1 iface=10.0.0.0/8", Host("n1", interface="10.0.0.0/8")),
    ],
)
def test_forms_of_a_line(line: str, host: Host) -> None:
    assert parse_hosts(f"# hosts\n\n{line}\n", "hosts") == (host,)


def test_number_after_a_colon_is_slots_for_mpich() -> None:
    assert parse_hosts("h1:2\nh2:3", "hosts", number_is_slots=True) == (Host("h1", slots=2), Host("h2", slots=3))


def test_host_on_two_lines_has_the_slots_of_both() -> None:
    assert parse_hosts("a\na\nb slots=2\nb slots=3", "hosts") == (Host("a", slots=2), Host("b", slots=5))


def test_hosts_may_be_a_list() -> None:
    assert parse_host_list("h1,h2:2222") == (Host("h1"), Host("h2", port=2222))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "hosts names no host; write one per line"),
        ("# nothing\n", "names no host"),
        ("a\nb slot=4", "hosts, line 2: 'slot=4' is not understood; after a host: slots=4"),
        ("a slots=four", "line 1: slots=four is not a number"),
        ("a slots=-1", "host a: slots=-1"),
        ("a weight=0", "host a: weight=0; it is above 0"),
        ("a weight=inf", "host a: weight=inf; it is above 0, and at most 1e+15"),
        ("a:99999", "port 99999 does not exist"),
        ("-oProxyCommand=x", "is not the name of a host"),
        ("ada@-oProxyCommand=x", "is not the name of a host"),
        ("h;id", "is not the name of a host"),
        ("h$(id)", "is not the name of a host"),
        ("h';id;'", "is not the name of a host"),
        ("a:b", "'a:b' is not a host or host:port"),
        ("fd00::1", "'fd00::1' is not a host or host:port (IPv6 addresses stand in brackets)"),
        ("a:2201\na:2202", "line 2: host a was there with another port, and a host is known by its name"),
        ("a group=x\na group=y", "line 2: host a was there with another weight, group or interface"),
        ("a weight=2\na", "line 2: host a was there with another weight, group or interface"),
    ],
)
def test_wrong_line_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_hosts(text, "hosts")
