from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from paceline.errors import ConfigError
from paceline.host import interfaces as host_interfaces
from paceline.host.interfaces import (
    Interface,
    address_for_others,
    address_of,
    address_towards,
    addresses_for_others,
    interfaces,
    with_own_scope,
    with_scope,
)


def has(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Give this host addresses, each as ``INTERFACE ADDRESS``."""
    found: dict[str, list[SimpleNamespace]] = {}
    for name, address in map(str.split, addresses):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        found.setdefault(name, []).append(SimpleNamespace(family=family, address=address))
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


def test_loopback_is_found_by_name_address_and_network() -> None:
    assert Interface("lo", "127.0.0.1") in interfaces()
    for wanted in ("lo", "127.0.0.1", "127.0.0.0/8"):
        assert address_of(wanted) == "127.0.0.1"


@pytest.mark.parametrize("wanted", ["no-such", "l", "203.0.113.0/24", "lo0"])
def test_absent_interface_is_named_with_what_there_is(wanted: str) -> None:
    with pytest.raises(ConfigError, match=rf"interface '{wanted}' does not exist on .*; found lo 127\.0\.0\.1"):
        address_of(wanted)


def test_address_towards_the_first_target_that_can_be_named() -> None:
    assert address_towards(["no-such-host.invalid", "127.0.0.1"]) == "127.0.0.1"
    assert address_towards(["no-such-host.invalid"]) == ""
    assert address_towards([]) == ""


def test_name_that_is_loopback_here_is_not_the_address_for_others() -> None:
    """As the own name of a host is on Debian: 127.0.1.1."""
    others = [one.address for one in interfaces() if one.address not in ("127.0.0.1", "::1")]
    assert address_for_others("localhost") == (others[0] if others else "127.0.0.1")
    assert address_for_others("no-such-host.invalid") == (others[0] if others else "")
    assert address_for_others("127.0.0.1") == "127.0.0.1"
    assert [address_for_others(one) for one in others] == others


def test_addresses_of_a_cable_without_a_network_are_the_last_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "lo 127.0.0.1", "eth1 fe80::1%eth1", "eth1 169.254.7.1", "wlan0 2001:db8::1", "wlan0 10.0.0.1")
    assert addresses_for_others() == ["10.0.0.1", "2001:db8::1", "169.254.7.1", "fe80::1%eth1"]
    for wanted in ("eth1", "169.254.7.1", "169.254.0.0/16"):
        assert address_of(wanted) == "169.254.7.1"
    for wanted in ("fe80::1%eth1", "fe80::1", "fe80::/10"):
        assert address_of(wanted) == "fe80::1%eth1"


def test_addresses_that_two_hosts_have_tell_nothing_of_the_way_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of loopback, and of a bridge for containers: the packets to such an address stay on this host."""
    own = {"10.0.0.2": "10.0.0.1", "172.17.0.1": "172.17.0.1"}
    monkeypatch.setattr(host_interfaces, "source_address", lambda host: own.get(host, host))
    assert address_towards(["127.0.1.1", "172.17.0.1", "10.0.0.2", "10.0.0.9"]) == "10.0.0.1"
    assert address_towards(["127.0.1.1", "172.17.0.1"]) == "172.17.0.1"
    assert address_towards(["127.0.1.1"]) == "127.0.1.1"


def test_link_local_address_of_another_host_is_dialed_by_an_interface_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has(monkeypatch, "lo ::1", "net7 fe80::7%net7", "eth0 10.0.0.1")
    assert with_own_scope("fe80::1%eth0") == "fe80::1%net7"
    assert with_own_scope("fe80::1%net7") == "fe80::1%net7"
    assert with_own_scope("h1") == "h1"
    has(monkeypatch, "net7 fe80::7%net7", "net8 fe80::8%net8")
    assert with_own_scope("fe80::1%eth0") == "fe80::1%eth0", "nothing tells which one"
    index, name = socket.if_nameindex()[0]
    assert with_scope(("fe80::1", 80, 0, index)) == f"fe80::1%{name}"
    assert with_scope(("::1", 80, 0, 0)) == "::1"
    assert with_scope(("10.0.0.1", 80)) == "10.0.0.1"
