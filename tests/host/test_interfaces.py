from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.host.interfaces import Interface, address_for_others, address_of, address_towards, interfaces


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
