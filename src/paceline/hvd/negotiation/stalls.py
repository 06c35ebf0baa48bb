"""Operations that only some ranks have asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from paceline.hvd.negotiation.words import Key, NegotiationSettings, Pending

_MOST_NAMES = 6


def stalled(
    pending: Mapping[Key, Pending],
    warned: set[Key],
    missing: Callable[[Key, Iterable[int]], list[int]],
    now: float,
    options: NegotiationSettings,
) -> tuple[str, str]:
    """Return a warning, and why everything must end; each may be empty.

    Args:
        pending: operations by key.
        warned: operations that an earlier warning named; those of this one are added.
        missing: tells which ranks an operation lacks.
        now: the time.
        options: when an operation is too old.
    """
    if not options.stall_warning_s:
        return "", ""
    old = {key: one for key, one in pending.items() if now - one.since >= options.stall_warning_s}
    warning = ""
    if not old.keys() <= warned:
        warning = _text(old, missing, options.stall_warning_s)
        warned.update(old)
    limit = options.stall_shutdown_s
    fatal = {key: one for key, one in pending.items() if limit and now - one.since >= limit}
    return warning, _text(fatal, missing, limit) if fatal else ""


def _text(old: Mapping[Key, Pending], missing: Callable[[Key, Iterable[int]], list[int]], age_s: float) -> str:
    by_rank: dict[int, list[str]] = {}
    for key, one in old.items():
        for rank in missing(key, one.requests):
            by_rank.setdefault(rank, []).append(f"{key[1]}.{key[2]}")
    lines = [f"{rank}: [{_names(names)}]" for rank, names in sorted(by_rank.items())]
    return (
        "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
        f"waiting for remainder of ranks for more than {age_s:g} seconds. Missing ranks:\n" + "\n".join(lines)
    )


def _names(names: list[str]) -> str:
    more = f", ... ({len(names) - _MOST_NAMES} more)" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def conflicts(pending: Mapping[Key, Pending], now: float, age_s: float) -> Iterator[tuple[Key, str]]:
    """Yield operations of the same name and different kinds that wait on different ranks, with an error."""
    by_name: dict[tuple[int, str], list[Key]] = {}
    for key, one in pending.items():
        if now - one.since >= age_s:
            by_name.setdefault((key[0], key[2]), []).append(key)
    for (_, name), keys in by_name.items():
        ranks = [set(pending[key].requests) for key in keys]
        if len(keys) > 1 and not set.intersection(*ranks):
            pairs = zip(keys, ranks, strict=True)
            who = "; ".join(f"{key[1]}: rank {', '.join(map(str, sorted(some)))}" for key, some in pairs)
            text = f"Mismatched operations: ranks asked for different operations under the name {name!r} ({who})"
            yield from [(key, text) for key in keys]
