"""The exchange through stores that only broadcast and sum: all-reduce, one process with a codec, others' stores."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import torch

from paceline.errors import ConfigError, NonFiniteError
from paceline.kvstore.allreduce import AllReduceStore
from paceline.kvstore.base import KVStoreBase
from paceline.layout.tensors import floats, real_view
from paceline.optim.binding import is_finite, merged_not_finite
from paceline.optim.exchange import Exchange
from paceline.optim.names import NamedParameter, may_have_gradient
from paceline.optim.shared_tensors import Copies, FollowingBuffers, addends, broadcast, means_of, set_all, shared_of
from paceline.optim.sparse_exchange import find_sparse
from paceline.optim.watch import refuse_renormalising
from paceline.updaters import Options, StepOptions, options_apart
from paceline.wire import messages as m
from paceline.worker.traffic import Carried

Tensors = Mapping[str, torch.Tensor]

#: Keys besides the names of the model: of weights and of who has which gradient, and of numbers.
_COUNTS, _SUMS = "counts", "sums"

#: Bytes of what a worker tells the others for an error: names of parameters, and its optimizer's options.
_LONGEST, _LONGEST_OPTIONS = 240, 65_536

#: Of exchanges, which every worker makes in the same order.
_numbers = itertools.count()


class ReduceExchange(Exchange):
    """Merges through a store's ``pushpull``. Buffers of the model follow rank 0's with each merge.

    A mean is over the samples of all workers: a worker multiplies its gradients by its samples, divided by the mean
    number of a worker in the merge before. That number is the same on all workers, and gradients keep their magnitude.

    Args:
        store: only broadcasts and reduces.
        optimizer: the user's.
        model: the network, if it is known.
        reduction: ``mean`` over all samples, or ``sum`` over workers.
    """

    def __init__(
        self,
        store: KVStoreBase,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        reduction: Literal["mean", "sum"],
    ) -> None:
        self._store, self._optimizer, self._model, self.merge = store, optimizer, model, reduction
        self._named: list[NamedParameter] = []
        self._sparse: set[torch.nn.Parameter] = set()
        """Parameters of which other workers may have sparse gradients where this one has none."""
        self._alone = store.num_workers == 1
        self._name = f"{store.type} {next(_numbers)}"
        self._mean_samples = 0.0
        self._not_finite: list[str] = []
        """Parameters whose own gradient of the last round was not finite."""
        self._is_suspicious = True
        self._buffers: FollowingBuffers | None = None
        if model is not None and not self._alone:
            self._buffers = FollowingBuffers([[model]], store.rank)
            refuse_renormalising(model)
            params = (param for group in optimizer.param_groups for param in group["params"])
            broadcast(store, shared_of([[model]], filter(may_have_gradient, params)))

    def add(self, named: Sequence[NamedParameter]) -> None:
        """Take in parameters, with rank 0's weights. Every worker calls it."""
        self._named += named
        pairs = [(name, param) for name, param, _ in named]
        self._sparse.update(param for _, param in find_sparse(pairs, self._optimizer, self._model))
        broadcast(self._store, _alone(_real((name, param.data) for name, param, _ in named)))

    def push_rest(self, carried: Carried) -> None:
        """Replace all gradients by their sum or mean.

        A gradient that this worker does not have counts as zeros. One that no worker has stays None, so that the
        optimizer leaves the parameter alone, as in one process.
        """
        if self._alone:
            self._sum(_real((name, param.grad) for name, param, _ in self._named if param.grad is not None))
            return
        params = {name: param for name, param, _ in self._named if param.requires_grad or param.grad is not None}
        weight = self._weight(carried.samples)
        present = [weight != 0 and param.grad is not None for param in params.values()]
        for param in params.values():
            param.grad = self._zeros(param) if param.grad is None else param.grad.resolve_conj()
        grads = _real((name, param.grad) for name, param in params.items() if param.grad is not None)
        doubt = self._doubt(grads, weight)
        if weight == 0:
            torch._foreach_zero_(list(grads.values()))  # they may be NaN
        elif weight != 1:
            torch._foreach_mul_(list(grads.values()), weight)
        told = [self._own(one) for one in (_mark(carried), doubt)]
        counts = torch.tensor([weight, *itertools.chain(*told), *present], dtype=torch.float64, device="cpu")
        self._sum({**grads, f"{_COUNTS} of {len(present)}": counts}, self._buffers)
        weights, *rest = counts.tolist()
        workers = self._store.num_workers
        marks, doubts, owners = rest[:workers], rest[workers : 2 * workers], rest[2 * workers :]
        self._is_suspicious = any(doubts) or not isinstance(self._store, AllReduceStore)  # others may lose precision
        for param, number in zip(params.values(), owners, strict=True):
            if not number:
                param.grad = None
        if len(set(marks)) > 1:
            self._check_options(carried.options)
        if self.merge == "mean" and weights:
            torch._foreach_div_(list(grads.values()), weights)
            self._mean_samples *= weights / self._store.num_workers

    def _zeros(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Return a gradient of zeros of the same layout as those of other workers: unlike ones cannot be summed."""
        zeros = torch.zeros_like(param)
        return zeros.to_sparse(1) if param in self._sparse else zeros

    def _weight(self, samples: float) -> float:
        """Return what this worker's gradients are multiplied by before they are summed."""
        if self.merge == "sum":
            return 1.0
        if not self._mean_samples:
            [total] = self._totals(samples)
            self._mean_samples = total / self._store.num_workers or 1.0
        return samples / self._mean_samples

    def _own(self, number: float) -> list[float]:
        """Return a number per worker: this worker's, and 0 of the others."""
        return [number * (worker == self._store.rank) for worker in range(self._store.num_workers)]

    def encoded(self, groups: Sequence[Options]) -> bytes:
        """Return the options of all param groups, which the workers compare in each step."""
        return b"" if self._alone else msgspec.msgpack.encode(StepOptions(list(groups)))

    def _check_options(self, own: bytes) -> None:
        """Compare the options of all workers, which are not the same bytes. Every worker calls it in the same step.

        Raises:
            ConfigError: they differ by more than rounding.
        """
        texts = self._texts(own, _LONGEST_OPTIONS)
        try:
            first, *others = [msgspec.msgpack.decode(one, type=StepOptions) for one in texts]
        except msgspec.DecodeError:
            apart = "options of its many param groups differ"
        else:
            found = (options_apart(first, one, 0, rank) for rank, one in enumerate(others, 1))
            apart = next(filter(None, found), "")
        if apart:
            raise ConfigError(
                f"worker {self._store.rank}: the workers do not have the same optimizer: {apart}; set the same options "
                "on every worker before the same step"
            )

    def _texts(self, own: bytes, longest: int) -> list[bytes]:
        """Return the bytes of each worker, at most so many. Every worker calls it in the same step."""
        texts = torch.zeros(self._store.num_workers, longest, dtype=torch.float64, device="cpu")
        values = torch.tensor(list(own[:longest]), dtype=torch.float64, device="cpu")
        texts[self._store.rank, : len(values)] = values + 1
        self._store.pushpull(f"texts of {longest}", texts, texts)
        return [bytes(int(one) - 1 for one in text if one) for text in texts.tolist()]

    def _doubt(self, grads: Tensors, weight: float) -> float:
        """Return 1 where a gradient of this worker may make the sum NaN or Inf, else 0; notes those that are it now."""
        self._not_finite = []
        if not weight:
            return 0.0
        norms = floats([one.norm() if one.is_sparse else torch.linalg.vector_norm(one) for one in grads.values()])
        large = []
        for (name, one), norm in zip(grads.items(), norms, strict=True):
            if not norm * max(weight, 1.0) * self._store.num_workers < torch.finfo(one.dtype).max / 2:
                large.append(name)
        self._not_finite = [name for name in large if not is_finite(grads[name])]
        return float(bool(large))

    def suspicious(self) -> bool:
        """Return whether merged gradients of the last round may hold NaN or Inf. False is certain, True is not."""
        return self._is_suspicious

    def blame(self, names: Sequence[str], round: int) -> NonFiniteError:
        """Return the error about merged gradients that are not finite. All workers find them in the same step."""
        if self._alone:
            return super().blame(names, round)
        said = self._texts("\n".join(self._not_finite).encode(), _LONGEST)
        pushed = {rank: text.decode(errors="replace").split("\n") for rank, text in enumerate(said) if text}
        return merged_not_finite(self._store.rank, names, round, pushed)

    def _sum(self, summed: Tensors, buffers: FollowingBuffers | None = None) -> None:
        """Replace tensors by their sums over the workers, and buffers by rank 0's."""
        rest = {} if buffers is None else addends(self._store, buffers.told())
        values = [*summed.values(), *rest.values()]
        self._store.pushpull([*summed, *rest], values, values)
        if buffers is not None:
            set_all(buffers.followed(rest), rest)

    def mean_loss(self, loss: float, samples: float) -> float:
        """Return the mean of the workers' losses, weighted by samples; where gradients are summed, their sum."""
        weight = samples if self.merge == "mean" else 1.0
        value, weights = self._totals(loss * weight if weight else 0.0, weight)  # that of no samples may be NaN
        return value / (weights or 1.0) if self.merge == "mean" else value

    def _totals(self, *values: float) -> list[float]:
        """Return the sums of the workers' values."""
        total = torch.tensor(values, dtype=torch.float64, device="cpu")
        self._store.pushpull(f"{_SUMS} of {len(values)}", total, total)
        return total.tolist()

    def tell_step(self, step: int, weights: Mapping[str, torch.Tensor], batch: m.StepBatch | None) -> None:
        """Let rank 0 compare this worker's weights and batch of a step with those of the others. Does not wait."""
        if isinstance(self._store, AllReduceStore) and not self._alone:
            self._store.tell_step(self._name, step, weights, batch)

    def broadcast_weights(self) -> None:
        """Set the weights of all workers to rank 0's. Every worker calls it."""
        if not self._alone:
            weights = _alone(_real((name, param.data) for name, param, _ in self._named))
            values = addends(self._store, means_of(weights))
            self._sum(values)
            set_all(weights, values)


def _mark(carried: Carried) -> float:
    """Return a number that is another one for other options."""
    return 1.0 + zlib.crc32(carried.options)


def _real(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: real_view(one) for name, one in named}


def _alone(tensors: Tensors) -> Copies:
    return {name: [one] for name, one in tensors.items()}
