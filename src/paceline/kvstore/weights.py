"""Weights that a worker holds, and how to read them when the job has failed.

| state               | event                                           | next state              |
|---------------------|-------------------------------------------------|-------------------------|
| whole, of round r   | a round ends                                    | whole, of round r + 1   |
| whole, of round r   | a round fails before it has changed a weight    | whole, of round r       |
| whole, of round r   | a round fails after it has changed some weights | torn                    |
| torn                | a round ends                                    | whole, of the next one  |

Whole weights can be read at any time, also after the death of a server: they are in this worker's own memory. Torn ones
are an error that names them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from paceline.errors import PacelineError, PeerDiedError
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.naming import listed

logger = logging.getLogger(__name__)

#: Most names that an error lists.
_MOST_NAMES = 10

Tensors = Mapping[str, Sequence[torch.Tensor]]


class Weights:
    """Knows to which round the weights belong; ``failure`` returns why the job has failed, None while it has not.

    Attributes:
        round: rounds of this worker whose updates the weights hold.
    """

    def __init__(self, who: str, failure: Callable[[], PacelineError | None] = lambda: None) -> None:
        self._who, self._failure = who, failure
        self.round = 0
        self._torn: tuple[list[str], list[str]] | None = None
        """Names of the weights that a failed round has changed, and of the others."""
        self._has_warned = False

    @classmethod
    def of(cls, store: KVStoreBase | None) -> Weights:
        """Return a new object for weights that go through a store."""
        if not isinstance(store, DistStore):
            return cls("this process")
        session = store.session
        return cls(f"worker {store.rank}", lambda: session.failure)

    @contextlib.contextmanager
    def changing(self, tensors: Tensors, rounds: int = 1) -> Iterator[None]:
        """Watch a block of code that gives all weights, one tensor per device, new values, and may fail in the middle.

        Its end is the end of so many rounds.
        """
        before = _versions(tensors)
        try:
            yield
        except PacelineError:
            after = _versions(tensors)
            new = [name for name in tensors if after[name] != before[name]]
            if len(new) < len(tensors):
                self._torn = (new, [name for name in tensors if name not in new]) if new else self._torn
            else:
                self.ended(rounds)  # what has failed came after the last weight
            raise
        self.ended(rounds)

    def ended(self, rounds: int = 1) -> None:
        """Note the end of rounds: all weights have their values."""
        self.round += rounds
        self._torn = None

    def read(self, bring: Callable[[], None] = lambda: None, else_note: str = "") -> None:
        """Let somebody read the weights, after getting newer values, which may fail when the job has failed.

        ``else_note`` is the end of the warning where it has failed.

        Raises:
            PacelineError: the weights are torn; or ``bring`` failed while the job goes on.
        """
        note = ""
        try:
            bring()
        except PacelineError as error:
            if self._failure() is None and not isinstance(error, PeerDiedError):
                raise
            note = else_note
        if self._torn is not None:
            raise PacelineError(self._torn_text(*self._torn))
        if self._failure() is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: the job has failed (%s); the weights that are read now are those of round %d, the last that is "
                "complete here%s", self._who, self._failure(), self.round, note,
            )  # fmt: skip

    def _torn_text(self, new: Sequence[str], old: Sequence[str]) -> str:
        cause, unchanged = self._failure(), listed(map(repr, old), _MOST_NAMES)
        return (
            f"{self._who}: {len(new)} of {len(new) + len(old)} weights have the values of round {self.round + 1}, but "
            f"those of {unchanged} are still of round {self.round}, because that round was not finished"
            f"{'' if cause is None else f' ({cause})'}; use an earlier checkpoint"
        )


def _versions(tensors: Tensors) -> dict[str, list[int]]:
    """Return torch's count of in-place changes of each tensor."""
    return {name: [one._version for one in copies] for name, copies in tensors.items()}
