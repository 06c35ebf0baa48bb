"""The limit of file descriptors is raised, and one that is too low is named."""

from __future__ import annotations

import resource

import pytest

from paceline.errors import ConfigError
from paceline.host import descriptors

NEVER = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "limit"),
    [
        (1024, 4096, 4096),
        (1024, 10**9, 65_536),
        (1024, NEVER, 65_536),
        (10**6, 10**9, 10**6),
        (4096, 4096, 4096),
        (NEVER, NEVER, 65_536),
    ],
)
def test_soft_limit_is_raised_to_the_hard_one(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, limit: int
) -> None:
    found: list[tuple[int, int]] = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: found[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: found.append(limits))
    assert descriptors.raise_limit() == limit
    assert found[1:] in ([], [(limit, hard)])
    assert descriptors.limit() == limit


def test_limit_that_is_too_low_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 1024))
    descriptors.raise_limit_for(960, "a server")
    with pytest.raises(ConfigError, match=r"a server needs 1264 file descriptors, and may open 1024 \(ulimit -Hn\)"):
        descriptors.raise_limit_for(1200, "a server")
