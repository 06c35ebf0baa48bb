"""The current round of a worker: opened once before its first push, closed after its last one.

| state  | event                        | action                                                        | next   |
|--------|------------------------------|---------------------------------------------------------------|--------|
| closed | ``open()``: first push       | count the round; set samples and options; publish buffers     | open   |
| open   | ``open()``: any further push | nothing                                                       | open   |
| open   | ``close()``: all were pushed | nothing                                                       | closed |

Buffers are published before the first push, so the servers have a round's buffers before they can answer it.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.kvstore.dist import DistStore
from paceline.optim.buffers import Buffers
from paceline.optim.samples import SampleCounter
from paceline.updaters import Options


class Round:
    """Sets the settings that all pushes of one round share.

    Args:
        store: the parameters' store.
        samples: counts this worker's samples.
        buffers: the model's buffers, if workers share them.
        options: returns the optimizer's options per param group.
        has_gradients: whether any parameter has a gradient.

    Attributes:
        number: number of the round, from 1 on.
        options: options of the last round that was opened.
    """

    def __init__(
        self,
        store: DistStore,
        samples: SampleCounter,
        buffers: Buffers | None,
        options: Callable[[], list[Options]],
        has_gradients: Callable[[], bool],
    ) -> None:
        self._store, self._samples, self._buffers, self._current_options = store, samples, buffers, options
        self._has_gradients = has_gradients
        policy = store.policy
        self._weighs = store.lifecycle.mean and (policy.merge != "each" or policy.lr_scale == "sample")
        """Whether the numbers of samples decide how much a push counts."""
        self._is_open = False
        self.number = 0
        self.options: list[Options] = []

    def open(self) -> None:
        """Open the round, unless it is open."""
        if self._is_open:
            return
        self._store.lifecycle.follow_groups()
        self._is_open = True
        self.number += 1
        self._count()
        self.options = self._current_options()
        self._store.set_options(self.options)
        if self._buffers is not None:
            self._buffers.publish()

    def _count(self) -> None:
        """Set how many samples are behind the pushes of this round."""
        count, traffic = self._samples.take(self._has_gradients), self._store.traffic
        traffic.samples = count.samples if self._weighs or count.inputs is None else count.rows
        traffic.inputs = count.inputs if self._weighs else None
        traffic.rows = count.rows
        if self._weighs and self._store.rank == 0 and self._store.num_workers > 1:
            self._samples.say(count.doubt)

    def close(self) -> None:
        """Close the round: the next push opens another one."""
        self._is_open = False
