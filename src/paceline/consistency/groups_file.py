"""The groups file: which workers step together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def parse_groups(text: str) -> list[list[str]]:
    """Read a groups file: one group per line, members separated by blanks or commas, ``#`` starts a comment.

    Raises:
        ValueError: the file names nobody.
    """
    lines = [line.split("#", 1)[0].replace(",", " ").split() for line in text.splitlines()]
    groups = [line for line in lines if line]
    if not groups:
        raise ValueError("the groups file names nobody; write one group per line, members by rank, host or host:slot")
    return groups


def groups_line(groups: Iterable[Iterable[object]]) -> str:
    """Return a groups file in one line: ``0 1; 2;``."""
    return " ".join(f"{' '.join(map(str, group))};" for group in groups)


def resolve_groups(groups: Sequence[Sequence[str]], hosts: Sequence[tuple[str, int]]) -> tuple[tuple[int, ...], ...]:
    """Turn members into ranks.

    Args:
        groups: members per group: a rank, a host (all its workers) or ``host:slot`` (one of them).
        hosts: (host, local rank) of every worker, in rank order.

    Raises:
        ValueError: a member that is not part of the job.
    """
    return tuple(tuple(sorted(rank for member in group for rank in _ranks(member, hosts))) for group in groups)


def name_ranks(line: str, hosts: Sequence[tuple[str, int]]) -> str:
    """Turn members that are hosts, or a ``host:slot``, into ranks; other members stay as they are.

    Args:
        line: a groups file in one line.
        hosts: (name in the launcher's list of hosts, local rank) of every worker, in rank order.
    """
    groups = parse_groups(line.replace(";", "\n"))
    return groups_line([_named(member, hosts) for member in group] for group in groups)


def _named(member: str, hosts: Sequence[tuple[str, int]]) -> str:
    return " ".join(map(str, _found(member, hosts))) or member


def _found(member: str, hosts: Sequence[tuple[str, int]]) -> list[int]:
    """Return the ranks of the workers of a host, or of a ``host:slot``."""
    host, _, slot = member.rpartition(":") if _is_slot(member) else (member, "", "")
    return [rank for rank, (name, local) in enumerate(hosts) if name == host and slot in ("", str(local))]


def _ranks(member: str, hosts: Sequence[tuple[str, int]]) -> list[int]:
    if member.isdecimal():
        if int(member) >= len(hosts):
            raise ValueError(f"groups: rank {member} does not exist; the job has workers 0 to {len(hosts) - 1}")
        return [int(member)]
    ranks = _found(member, hosts)
    if not ranks:
        known = ", ".join(f"{name}:{local}" for name, local in hosts)
        raise ValueError(
            f"groups: no worker runs at {member!r}; workers run at {known}; name them so, by rank, or as the list of "
            "hosts (-H) does"
        )
    return ranks


def _is_slot(member: str) -> bool:
    # An IPv6 address has several colons; host:slot has one.
    return member.count(":") == 1 and member.rpartition(":")[2].isdecimal()
