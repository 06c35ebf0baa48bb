"""Closures that an optimizer calls several times in a step: all ranks call them equally often, or get an error.

An optimizer such as LBFGS decides by the loss whether it calls the closure again. Each rank has a loss of its own. The
rank that calls it again would wait for gradients of one that does not.

| moment | a rank tells the others |
| ------ | ----------------------- |
| before the second call and each later one | the number of this call |
| the end of the step | that it ends, after so many calls |

Optimizers of ``torch.optim`` but LBFGS call it once in a step: their ranks tell nothing.
"""

from __future__ import annotations

import torch

from paceline.collectives import world
from paceline.collectives.operations import Sum, allreduce, synchronize
from paceline.collectives.process_sets import ProcessSet, members_of
from paceline.errors import PacelineError
from paceline.naming import listed


def calls_it_once(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether an optimizer is known to call its closure once in a step."""
    return kind.__module__.startswith("torch.optim.") and not issubclass(kind, torch.optim.LBFGS)


class ClosureCalls:
    """The calls of a closure in one step of an optimizer.

    Args:
        name: name of the optimizer, the same on all ranks.
        process_set: the ranks that step.
    """

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        self._name, self._process_set, self._count = name, process_set, 0

    def begin(self) -> None:
        """Begin the next call.

        Raises:
            PacelineError: another rank ends the step.
        """
        self._count += 1
        if self._count > 1:
            self._tell(self._count)

    def end(self) -> None:
        """End the step.

        Raises:
            PacelineError: another rank calls the closure again.
        """
        self._tell(-1 - self._count)

    def _tell(self, mine: int) -> None:
        ranks = members_of(self._process_set)[1]
        told = torch.zeros(len(ranks), dtype=torch.int64, device="cpu")
        told[ranks.index(world.current().rank)] = mine
        handle = allreduce([told], None, f"closure.{self._name}", Sum, process_set=self._process_set, in_place=True)
        counts = dict(zip(ranks, synchronize(handle).tolist(), strict=True))  # 0: a rank that has joined
        ended = [rank for rank, count in counts.items() if count < 0]
        again = [rank for rank, count in counts.items() if count > 0]
        if ended and again:
            raise PacelineError(
                f"rank {listed(ended, 8)} ended this step of the optimizer after {-1 - counts[ended[0]]} calls of the "
                f"closure, and rank {listed(again, 8)} calls it again: the optimizer decides by the loss that the "
                "closure returns, and each rank returns its own. Let it return the mean of all ranks, so that they "
                "decide alike: return hvd.allreduce(loss.detach(), name='loss')"
            )
