"""Parameters and the arena: gradients go in, values come out, without copies where both are in CPU memory.

Where a parameter is on a CUDA device, copies run beside the computation, on a side stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.errors import PacelineError
from paceline.kvstore.block import WorkerBlock
from paceline.optim.device import SideStream, side_streams


@dataclass(eq=False)
class Bound:
    """One parameter and its place in the arena."""

    name: str
    param: torch.nn.Parameter
    block: WorkerBlock
    index: int
    buckets: tuple[int, ...]
    value: torch.Tensor
    grad: torch.Tensor
    in_place: bool
    """``param.data`` is the arena's view."""
    version: int
    """Counts in-place changes of the parameter; neither the arena nor autograd moves it."""
    side: SideStream | None = None
    """Where copies run, for parameters on CUDA devices."""

    def take_grad(self) -> torch.cuda.Event | None:
        """Bring the gradient into the arena, unless it is there; after this ``param.grad`` is the arena's view.

        Returns:
            What tells when it is there, where that takes time beside the computation; else None.
        """
        grad = self.param.grad
        if grad is None:
            self.grad.zero_()
            return None
        if self.side is not None:
            return self.side.fetch(grad.to_dense() if grad.is_sparse else grad, self.grad)
        if grad.data_ptr() == self.grad.data_ptr() and self.param.device.type == "cpu":
            return None
        self.grad.copy_(grad.to_dense() if grad.is_sparse else grad)
        if self.param.device.type == "cpu" and not grad.is_sparse:
            self.param.grad = self.grad
        return None

    def give_value(self) -> None:
        """Bring the arena's value to the parameter, where it is not the arena itself."""
        if not self.in_place:
            with torch.no_grad():
                if self.side is None:
                    self.param.copy_(self.value)
                else:
                    self.side.bring(self.value, self.param)

    def check(self) -> None:
        """Raise if the parameter was moved away from the arena, or changed where the servers do not see it.

        Raises:
            PacelineError: with what to do.
        """
        if self.in_place and self.param._version != self.version:
            raise PacelineError(
                f"parameter {self.name!r} was changed in place after it was given to DistributedOptimizer; the servers "
                "hold the weights and would overwrite it. Load weights before wrapping the optimizer, or let it run in "
                "the workers (update_on_kvstore=False)"
            )
        if self.in_place and self.param.data_ptr() != self.value.data_ptr():
            raise PacelineError(
                f"parameter {self.name!r} was moved or converted after it was given to DistributedOptimizer; "
                "call model.to(...), .half() and the like first"
            )


def bind(
    names: Sequence[str], params: Sequence[torch.nn.Parameter], blocks: Sequence[WorkerBlock], values_in_place: bool
) -> list[Bound]:
    """Tie parameters to their places in the arenas.

    Args:
        names: of the keys.
        params: in the same order.
        blocks: where the keys are.
        values_in_place: make ``param.data`` a view of the arena's values, for parameters in CPU memory.
    """
    bound = []
    sides = side_streams(list(params))
    if sides:
        for block in blocks:
            block.pin()
    for name, param in zip(names, params, strict=True):
        block = next(block for block in blocks if name in block.key_index)
        index = block.key_index[name]
        buckets = tuple(stretch.bucket for stretch in block.stretches([index]))
        in_place = values_in_place and param.device.type == "cpu"
        one = Bound(name, param, block, index, buckets, block.value_of(index), block.grad_of(index), in_place, 0)
        one.side = sides.get(param.device)
        if in_place:
            param.data = one.value
        one.version = param._version
        bound.append(one)
    return bound
