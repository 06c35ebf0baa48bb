"""Makes the policy of a distributed store from its type and options."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import Settings, variable
from paceline.consistency import Policy, parse_groups, policy_of, resolve_groups
from paceline.errors import ConfigError
from paceline.hetero import Choice
from paceline.hetero.files import parse_choice, parse_measured
from paceline.kvstore.store_options import OPTIONS
from paceline.layout.local_merge import LocalMerge
from paceline.worker.session import Session


def resolve_policy(store_type: str, session: Session, options: Mapping[str, Any]) -> Policy:
    """Return the policy of a store type. Arguments override the environment, which overrides the defaults.

    Raises:
        ConfigError: the groups file cannot be read, or there are no measurements for ``dist_auto``.
        ValueError: a setting is wrong for the type.
    """
    settings = session.settings
    if store_type == "dist_auto":
        choice = chosen(settings)
        return Policy() if choice is None else choice.policy
    _warn_of_unused(store_type, session)
    staleness = options.get("staleness")
    weighting = options.get("weighting") or (settings.weighting if store_type != "dist_sync" else "") or None
    age = options.get("age")
    if age is None and store_type != "dist_sync":
        age = settings.age
    groups: tuple[tuple[int, ...], ...] = ()
    if store_type == "dist_gsync":
        groups = _groups(options.get("groups") or settings.groups or settings.worker_groups, session)
    return policy_of(
        store_type,
        groups=groups,
        first=options.get("k"),
        grace_s=options.get("grace_s"),
        staleness=settings.staleness if staleness is None else staleness,
        weighting=weighting,
        age=age,
        lr_scale=options.get("lr_scale") or (settings.lr_scale if store_type != "dist_sync" else None) or None,
        num_workers=settings.num_workers,
    )


def chosen(settings: Settings) -> Choice | None:
    """Return the choice for ``dist_auto``; None while the job only measures, in lock step.

    Raises:
        ConfigError: there are no measurements, or the choice does not fit this job.
    """
    if settings.profile:
        return None
    if not settings.choice:
        raise ConfigError("nothing was measured for dist_auto; start the job with: paceline launch --groups auto")
    try:
        found = parse_choice(settings.choice, settings.num_workers)
    except ValueError as error:
        raise ConfigError(f"{variable('choice')}: {error}") from error
    try:
        if settings.measured:
            parse_measured(settings.measured, settings.num_workers)
    except ValueError as error:
        raise ConfigError(f"{variable('measured')}: {error}") from error
    return found


def local_merge_of(session: Session, policy: Policy) -> LocalMerge:
    """Return the servers that merge the pushes of each host, for stores of a policy."""
    workers, servers = ([one.host_id for one in members] for members in (session.workers, session.servers))
    merges = session.settings.merges_locally(policy.merge)
    return LocalMerge(workers, servers, policy.unit_of(len(workers)) if merges else range(len(workers)))


def revises(settings: Settings) -> bool:
    """Whether the scheduler compares the choice of ``dist_auto`` with others while the job trains."""
    return bool(settings.regroup_rounds and settings.choice and settings.measured and not settings.profile)


def _warn_of_unused(store_type: str, session: Session) -> None:
    """Warn of settings of the job that this type of store does not have."""
    measures = ("groups",) if session.settings.profile else ()  # which store this is was not known before
    for name in {"staleness", "weighting", "lr_scale", "age", "groups"}.difference(measures):
        if getattr(session.settings, name) not in (None, "") and name not in OPTIONS[store_type]:
            flag = "" if name == "lr_scale" else f" (--{name})"
            text = (
                f"{variable(name)}{flag} is set, but a {store_type} store has no {name}: it changes nothing there"
            )
            warnings.warn(text, stacklevel=2)


def _groups(given: Any, session: Session) -> tuple[tuple[int, ...], ...]:
    """Turn a groups file, its text in one line, or lists of members, into ranks."""
    if not given:
        return ()
    if given == "auto":  # all workers step together while their speeds are measured
        if not session.settings.profile:
            raise ConfigError("groups are auto, but nothing measures them here; start the job with --groups auto")
        return (tuple(range(session.settings.num_workers)),)
    if isinstance(given, str) and ";" in given:
        members = parse_groups(given.replace(";", "\n"))
    elif isinstance(given, str | Path):
        try:
            members = parse_groups(Path(given).read_text())
        except OSError as error:
            raise ConfigError(f"the groups file {given} cannot be read: {error.strerror}") from error
    else:
        members = [[str(member) for member in group] for group in given]
    return resolve_groups(members, [(worker.host, worker.local_rank) for worker in session.workers])
