"""What follows the workers' speeds in a running job: groups of ``dist_gsync``, or the choice of ``dist_auto``. Pure.

Both send workers to groups of a new *generation*. A job has one of them: once rank 0 has published the keys of a
``dist_auto`` store, that is what follows.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import Settings
from paceline.membership.drift import Drift
from paceline.membership.revising import Revising
from paceline.membership.roster import MemberRecord
from paceline.wire import messages as m


class Following:
    """The groups that fit the measured speeds, and what there is to say of them.

    Args:
        settings: with the groups and the choice of the start.
    """

    def __init__(self, settings: Settings) -> None:
        self._drift, self._revising = Drift(settings), Revising(settings)

    def note_keys(self, published: m.Publish) -> None:
        """Note whose keys rank 0 has published."""
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
        """What ``dist_auto`` does since it changed, and what would be better."""
        return self._revising.sentences

    def check(self, workers: Sequence[MemberRecord]) -> str:
        """Compare speeds with what the job does, if it is time to; returns a sentence if that has changed or should."""
        return self._what_follows.check(workers)
