"""What all tests of the core share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.testing import CheckedRule


@pytest.fixture(autouse=True, scope="package")
def rules_check_themselves() -> Iterator[None]:
    """Servers inside of these tests notice at once when an event has damaged a rule."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.server.presence.Rule", CheckedRule)
        yield
