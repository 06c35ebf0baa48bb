"""The file descriptors that this process may open.

Each connection and each pipe needs one. Many systems begin with a soft limit of 1,024, which any process may raise to
the hard limit.
"""

from __future__ import annotations

import resource

from paceline.errors import ConfigError

#: The soft limit is raised no further: programs that close all possible descriptors would take long.
_MOST = 65_536

#: Descriptors of a process beside its connections: files, pipes, libraries.
_SPARE = 64


def limit() -> int:
    """Return the present limit: the soft one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> int:
    """Raise the limit as far as it makes sense; returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(_MOST, hard)
    if limit() < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(limit(), wanted)


def raise_limit_for(connections: int, who: str) -> None:
    """Raise the limit for a process, named by ``who``, with so many connections.

    Raises:
        ConfigError: so many are not possible.
    """
    most, needed = raise_limit(), connections + _SPARE
    if most < needed:
        raise ConfigError(
            f"{who} needs {needed} file descriptors, and may open {most} (ulimit -Hn); raise that limit: nofile in "
            "/etc/security/limits.conf, LimitNOFILE= of a service, --ulimit nofile= of a container"
        )
