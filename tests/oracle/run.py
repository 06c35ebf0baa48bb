"""What a script is written against: the few lines that a job adds to a training loop, and batches to train on.

A *script* is a training loop as a PyTorch user writes it. It takes a :class:`Run`; the only lines that it would not
have without paceline are ``run.distribute(optimizer, net)`` and, where the user must say something, its options. In a
job every worker gets its own part of each batch, never as much as the others. In the *joined* run, the oracle, one
process gets whole batches, ``distribute`` returns the optimizer as it is, and nothing of paceline takes part.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

#: Steps of a script, unless it says otherwise. ``nox -s oracle`` makes more of them than the tests.
STEPS = int(os.environ.get("ORACLE_STEPS", "24"))

Tensors = tuple[torch.Tensor, ...]
#: Makes a batch: of so many samples, by this generator.
Make = Callable[[int, torch.Generator], Tensors]
#: What a script returns: everything that must be as in the joined run.
Result = torch.nn.Module | torch.Tensor | list[Any] | tuple[Any, ...] | dict[str, Any]


def sizes(step: int, workers: int) -> list[int]:
    """Return how many samples each worker has in a step: unlike each other, and unlike those of other steps."""
    return [2 + (3 * rank + (rank + 2) * step) % 5 for rank in range(workers)]


@dataclass
class Run:
    """One run of a script.

    Attributes:
        workers: of the job.
        rank: of this worker; of rank 0 in the joined run, whose first weights everybody gets.
        joined: this is the oracle.
        kvstore: type of the store.
        options: of every ``DistributedOptimizer``, stronger than a script's own.
        pause: called in every gradient hook, to take its time.
        device: the default device of the script, and that of its batches.
        loaders: data sets begun so far.
        steps_made: batches taken so far.
    """

    workers: int
    rank: int = 0
    joined: bool = True
    kvstore: str = "dist_sync"
    options: Mapping[str, Any] = field(default_factory=dict)
    pause: Callable[[], None] | None = None
    device: str = "cpu"
    loaders: int = 0
    steps_made: int = 0

    def distribute(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, **options: Any) -> Any:
        """Return the optimizer to go on with."""
        if self.joined:
            return optimizer
        from paceline import DistributedOptimizer  # the joined run knows nothing of it

        params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
        self._slow_down(params)
        if model is None:
            options["named_parameters"] = [(f"p{index}", param) for index, param in enumerate(params)]
        options = {"batch_dim": 0} | options | dict(self.options)  # shapes alone do not tell what counts samples
        return DistributedOptimizer(optimizer, self.kvstore, model=model, **options)

    def _slow_down(self, params: list[torch.Tensor]) -> None:
        if self.pause is not None:
            for param in params:
                param.register_post_accumulate_grad_hook(lambda _: self.pause and self.pause())

    def no_sync(self, optimizer: Any) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which gradients stay here."""
        return contextlib.nullcontext() if self.joined else optimizer.no_sync()

    def batches(
        self, make: Make, steps: int = STEPS, *, alike: int = 1, dim: int | Mapping[int, int] = 0
    ) -> Iterator[Tensors]:
        """Yield this worker's part of every batch; in the joined run the whole.

        Args:
            make: makes whole batches.
            steps: how many.
            alike: so many batches after each other are cut in the same way.
            dim: dimension of the samples, for all tensors or by index.
        """
        self.loaders += 1
        for step in range(steps):
            parts = sizes(step // alike, self.workers)
            generator = torch.Generator().manual_seed(7919 * self.loaders + step)
            with torch.device("cpu"):
                made = make(sum(parts), generator)
            whole = tuple(one.to(self.device) for one in made)
            self.steps_made += 1
            if self.joined:
                yield whole
                continue
            dims = dim if isinstance(dim, Mapping) else dict.fromkeys(range(len(whole)), dim)
            yield tuple(one.split(parts, dims.get(index, 0))[self.rank] for index, one in enumerate(whole))


def tensors_of(result: Result, name: str = "") -> dict[str, torch.Tensor]:
    """Return what a script returned as named tensors; of modules the parameters."""
    if isinstance(result, torch.Tensor):
        return {name: result.detach().clone()}
    if isinstance(result, torch.nn.Module):
        return {f"{name}.{key}": param.detach().clone() for key, param in result.named_parameters()}
    items = result.items() if isinstance(result, dict) else enumerate(result)
    found: dict[str, torch.Tensor] = {}
    for key, one in items:
        value = one if isinstance(one, torch.Tensor | torch.nn.Module | list | tuple | dict) else torch.tensor(one)
        found |= tensors_of(value, f"{name}[{key}]")
    return found
