"""Groups of ``dist_gsync``, or the choice of ``dist_auto``, follow the workers' speeds in a running job. Pure.

Both send workers to groups of a new *generation*. A job has one of them: once rank 0 has published the keys of a
``dist_auto`` store, its choice follows.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import Settings
from paceline.membership.drift import Drift
from paceline.membership.revising import Revising
from paceline.membership.roster import MemberRecord
from paceline.wire import messages as m


class Following:
    """The groups that fit the measured speeds, and sentences about them.

    Args:
        settings: have the groups and the choice of the start.
    """

    def __init__(self, settings: Settings) -> None:
        self._drift, self._revising = Drift(settings), Revising(settings)

    def note_keys(self, published: m.Publish) -> None:
        """Note that rank 0 has published the keys of a store."""
        if published.auto and not self._drift.generation:
            self._revising.start(published.auto == "free")

    @property
    def _what_follows(self) -> Drift | Revising:
        return self._revising if self._revising.has_started else self._drift

    @property
    def groups(self) -> tuple[int, list[list[int]]]:
        """The generation, 0 for that of the start, and its groups, from 1 on."""
        return self._what_follows.generation, self._what_follows.groups

    @property
    def sentences(self) -> list[str]:
        """The present choice of ``dist_auto`` since it changed, and a better one."""
        return self._revising.sentences

    def check(self, workers: Sequence[MemberRecord]) -> str:
        """Compare speeds with the groups, if it is time to; returns a sentence if these have changed or should."""
        return self._what_follows.check(workers)
