"""The optimizer runs in the worker, on gradients that are merged by the end of each backward pass.

    backward: gradient complete ─► arena ─► bucket complete ─► push ─► merged ─► answer
    end of backward: push the rest ─► wait for all answers ─► copy merged gradients to ``p.grad``

So what a loop does with ``p.grad`` afterwards has the meaning it has with one process and the joined batch: clipping,
scaling, another backward pass that adds to it, reading norms. Gradients that are already merged are the same on all
workers, so a second pass over them merges to their sum with the new ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.errors import NonFiniteError, PacelineError
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.optim.backward import BackwardWatch
from paceline.optim.binding import Bound, bind, take_all
from paceline.optim.choices import Choices
from paceline.optim.exchange import Exchange
from paceline.optim.samples import Samples
from paceline.optim.sparse import SparseExchange, find_sparse
from paceline.updaters import Options, UpdaterSpec
from paceline.updaters.spec import plain

Named = Sequence[tuple[str, torch.nn.Parameter, int]]
"""Name, parameter and param group of each parameter."""
Closure = Callable[[], Any]


class LocalUpdate:
    """Nothing to merge: one process steps by itself. Base of the updates in which the worker steps.

    Args:
        inner: the user's optimizer.
        named: its parameters.
        choices: of the user.
    """

    scales_by_itself = False
    """Whether ``step`` does the unscaling of a GradScaler; else the scaler does it as with any optimizer."""

    def __init__(self, inner: torch.optim.Optimizer, named: Named, choices: Choices) -> None:
        self.inner, self.named, self.choices = inner, list(named), choices
        self.skipped_steps = 0

    def step(self, closure: Closure | None) -> Any:
        """Step on merged gradients. A closure's loss is merged too, so that all workers take the same decisions."""
        if closure is not None:
            return self.inner.step(lambda: self._merged_closure(closure))
        if self._prepare():
            self.inner.step()
        return None

    def _merged_closure(self, closure: Closure) -> Any:
        loss = self.merge_loss(closure())
        with torch.no_grad():
            if not self._prepare():
                raise NonFiniteError("gradients are not finite; a step with a closure cannot be skipped")
        return loss

    @torch.no_grad()
    def _prepare(self) -> bool:
        """Make the gradients what the optimizer is to see; returns whether it is to step."""
        self.finish()
        bad = self._not_finite()
        if bad and self.choices.on_nan == "error":
            raise self.blame(bad)
        if bad and self.choices.on_nan == "skip":
            self.skipped_steps += 1
            return False
        params = [param for _, param, _ in self.named]
        if self.choices.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, self.choices.clip_norm)
        if self.choices.clip_value is not None:
            torch.nn.utils.clip_grad_value_(params, self.choices.clip_value)
        return True

    def finish(self) -> None:
        """Merge what is not merged yet."""

    def merge_loss(self, loss: Any) -> Any:
        """Return the loss over the samples of all workers."""
        return loss

    def _not_finite(self) -> list[str]:
        """Return the names of the parameters whose merged gradient is not finite now."""
        if self.choices.on_nan == "pass" or not self.suspicious():
            return []
        return [name for name, param, _ in self.named if param.grad is not None and not is_finite(param.grad)]

    def suspicious(self) -> bool:
        """Tell whether a merged gradient may not be finite; cheap, and never wrong when it says no."""
        return any(param.grad is not None and not sums_up(param.grad) for _, param, _ in self.named)

    def blame(self, names: Sequence[str]) -> NonFiniteError:
        """Return the error about gradients that are not finite."""
        return NonFiniteError(f"the gradient of {_some(names)} is NaN or Inf; {WAY_OUT}")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add gradients up, as with DDP."""
        yield

    def synchronize(self) -> None:
        """Wait until the weights of the last step are here; they are."""

    def broadcast_weights(self) -> None:
        """Make rank 0's weights everybody's; there is nobody else."""

    def add(self, named: Named) -> None:
        """Take the parameters of a param group that was added."""
        self.named += named

    def close(self) -> None:
        """Take no part in backward passes any more."""


class MergingUpdate(LocalUpdate):
    """Merges gradients at the end of each backward pass.

    Args:
        inner: the user's optimizer.
        named: its parameters.
        choices: of the user.
    """

    def __init__(self, inner: torch.optim.Optimizer, named: Named, choices: Choices) -> None:
        super().__init__(inner, named, choices)
        adds_up = choices.reduction == "sum"
        self._watch = BackwardWatch(self._on_gradient, self._on_end, self._refuse_merged if adds_up else None)
        self._watch.watch(param for _, param, _ in named)
        self._passes = 0
        self._syncs = True
        self._is_merged = False
        """There was a merge since the last step, and no gradient came after it."""
        self._sums: set[torch.nn.Parameter] = set()
        """Parameters whose gradients are sums over workers since the last merge."""

    def _merges_now(self) -> bool:
        return self._syncs and self._passes + 1 >= self.choices.passes

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        self._is_merged = False
        if self._merges_now():
            with torch.no_grad():
                self.complete(param)

    def _on_end(self) -> None:
        if not self._merges_now():
            self._passes += 1
            return
        with torch.no_grad():
            self._merge()

    def finish(self) -> None:
        """Merge what no backward pass has merged: gradients that were set by hand, or in :meth:`no_sync`."""
        if not self._is_merged:
            self._merge()
        self._is_merged = False

    def _merge(self) -> None:
        self._passes = 0
        for param in list(self._sums):
            self._refuse_merged(param)
        self.merge()
        self._is_merged = True
        if self.choices.reduction == "sum":
            self._sums = {param for _, param, _ in self.named}

    def _refuse_merged(self, param: torch.nn.Parameter) -> None:
        """Refuse to merge a sum again: each worker would add it. A mean of equal values is that value."""
        if param in self._sums and param.grad is not None and bool(param.grad.any()):
            name = next(name for name, one, _ in self.named if one is param)
            raise PacelineError(
                f"the gradient of {name!r} is summed over the workers already, and would be once more: with "
                "reduction='sum' call zero_grad before the next backward, set backward_passes_per_step, or use no_sync"
            )
        self._sums.discard(param)

    def close(self) -> None:
        """Take no part in backward passes any more."""
        self._watch.close()

    def complete(self, param: torch.nn.Parameter) -> None:
        """Take a gradient that is complete, while backward goes on."""

    def merge(self) -> None:
        """Bring the merged gradients to the parameters."""
        raise NotImplementedError

    def add(self, named: Named) -> None:
        """Take the parameters of a param group that was added; every worker does."""
        super().add(named)
        self._watch.watch(param for _, param, _ in named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add gradients up; the first backward pass after it, or ``step``, merges them."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before


class StoreUpdate(MergingUpdate):
    """Merges through a store of one process with a codec, or through a third party's store.

    Args:
        inner: the user's optimizer.
        named: its parameters.
        choices: of the user.
        store: that only broadcasts and reduces.
    """

    def __init__(self, inner: torch.optim.Optimizer, named: Named, choices: Choices, store: KVStoreBase) -> None:
        super().__init__(inner, named, choices)
        self._store = store
        self._broadcast(named)

    def _broadcast(self, named: Named) -> None:
        values = [param.data for _, param, _ in named]
        self._store.broadcast([name for name, _, _ in named], values, values)

    def merge(self) -> None:
        """Push gradients and pull their sum or mean; one that this worker lacks counts as zeros."""
        alone = self._store.num_workers == 1
        ready = [(name, param) for name, param, _ in self.named if param.grad is not None or not alone]
        for _, param in ready:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        grads = [param.grad for _, param in ready if param.grad is not None]
        self._store.pushpull([name for name, _ in ready], grads, grads)
        if self.choices.reduction == "mean":
            torch._foreach_div_(grads, float(self._store.num_workers))

    def add(self, named: Named) -> None:
        """Take the parameters of a param group that was added."""
        super().add(named)
        self._broadcast(named)


class WorkerUpdate(MergingUpdate):
    """Merges through the servers of a ``dist_sync`` store.

    Args:
        inner: the user's optimizer.
        named: its parameters.
        choices: of the user.
        store: merges to the mean over samples, or to the sum.
        model: the network, if it is known.
        samples: of this worker.
        on_round: called before the first push of each merge.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        named: Named,
        choices: Choices,
        store: DistStore,
        model: torch.nn.Module | None,
        samples: Samples,
        on_round: Callable[[], None],
    ) -> None:
        super().__init__(inner, [], choices)
        self._store, self._model, self._samples, self._on_round = store, model, samples, on_round
        self._exchange = Exchange(store, self._before_round, self._before_push, _AGAIN)
        self._overlap = choices.overlap is not False
        self._round = 0
        self._is_open = self._suspect = False
        self._loss_store: DistStore | None = None
        store.set_spec(UpdaterSpec())
        self._sparse = SparseExchange(store, [], "worker")
        self.add(named)

    def add(self, named: Named) -> None:
        """Give parameters keys and rank 0's weights; every worker does."""
        super().add(named)
        sparse = find_sparse([(name, param) for name, param, _ in named], self.inner, self._model)
        self._sparse.add(sparse)
        dense = [(name, param) for name, param, _ in named if param not in self._sparse]
        if dense:
            self._add_dense([name for name, _ in dense], [param for _, param in dense])

    def _add_dense(self, names: list[str], params: list[torch.nn.Parameter]) -> None:
        # What is frozen now may stay so for long: it shares no bucket with what is trained.
        tags = [int(not param.requires_grad) for param in params]
        blocks = self._store.add_keys(names, [param.data for param in params], tags)
        self._store.traffic.refresh(self._store.table.plan(tuple(names)))
        bound = bind(names, params, blocks)
        take_all(bound, weights=True)
        self._exchange.add(bound)
        self._by_param = {one.param: one for one in self._exchange.bound}

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        self._samples.touch()
        super()._on_gradient(param)

    def complete(self, param: torch.nn.Parameter) -> None:
        """Copy a gradient into the arena and push its bucket when that is complete."""
        if self._overlap and param not in self._sparse:
            self._exchange.fill(self._by_param[param])

    def merge(self) -> None:
        """Push what is left, wait for all answers, and bring merged gradients to the parameters."""
        self._exchange.push_rest()
        self._before_round()
        self._sparse.push()
        self._exchange.settle()
        self._sparse.finish()
        self._is_open = False
        self._suspect = self.choices.on_nan != "pass" and not self._all_sum_up()
        take_all((one for one in self._exchange.bound if not one.missing), weights=False)

    def _all_sum_up(self) -> bool:
        return all(sums_up(block.values) for block in self._exchange.blocks) and self._sparse.all_sum_up()

    def _before_round(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        self._round += 1
        self._store.traffic.samples = self._samples.take()
        self._store.set_options(plain_groups(self.inner))  # the servers compare them between workers
        self._on_round()

    def _before_push(self, members: Sequence[Bound]) -> bool:
        """Tell the others where a codec would hide from them that a gradient is not finite."""
        encoded = "push" in self._store.traffic.codecs and self.choices.on_nan != "pass"
        return encoded and not all(sums_up(one.grad) for one in members)

    def suspicious(self) -> bool:
        """Tell whether the last merge brought something that may not be finite, or the loop made it so since."""
        return self._suspect

    def blame(self, names: Sequence[str]) -> NonFiniteError:
        """Return the error about gradients that are not finite; all workers come here in the same step."""
        own = [one.name for one in self._exchange.bound if not one.absent and not is_finite(one.grad)]
        own += self._sparse.not_finite()
        found = self._store.session.gather(f"{self._store.name}/not finite", "\n".join(own[:100]).encode())
        guilty = {rank: text.decode().split("\n") for rank, text in enumerate(found) if text}
        whose = "; ".join(f"worker {rank} pushed that of {_some(theirs)}" for rank, theirs in guilty.items())
        return NonFiniteError(
            f"worker {self._store.rank}: the merged gradient of {_some(names)} is NaN or Inf in round {self._round}: "
            f"{whose or 'the sum of finite gradients is too large'}; {WAY_OUT}"
        )

    def merge_loss(self, loss: Any) -> Any:
        """Return the mean of the workers' losses, weighted by samples; with reduction ``sum`` their sum."""
        if self._store.num_workers == 1 or not isinstance(loss, torch.Tensor | float | int):
            return loss
        value = torch.tensor([float(loss)], dtype=torch.float64)
        if self._loss_store is None:
            self._loss_store = self._store.sibling("loss", self.choices.reduction == "mean")
            self._loss_store.init("loss", torch.zeros_like(value))
        self._loss_store.samples = self._samples.last
        self._loss_store.pushpull("loss", value)
        return loss.detach().clone().fill_(value[0]) if isinstance(loss, torch.Tensor) else float(value)

    def broadcast_weights(self) -> None:
        """Make rank 0's weights everybody's. Every worker calls it."""
        bound = self._exchange.bound
        names = [one.name for one in bound]
        self._store.barrier()  # until all have read what the last merge has brought to the same place
        if self._store.rank == 0:
            self._store.set_values(names, [one.param.data for one in bound])
        self._store.barrier()
        self._store.traffic.refresh(self._store.table.plan(tuple(names)))
        take_all(bound, weights=True)
        self._store.barrier()
        self._sparse.broadcast_weights()


def plain_groups(optimizer: torch.optim.Optimizer) -> list[Options]:
    """Return the options of every param group that are plain data: numbers, strings, tuples of numbers."""
    found = []
    for group in optimizer.param_groups:
        options: Options = {}
        for name, value in group.items():
            with contextlib.suppress(TypeError, ValueError):
                if name != "params":
                    options[name] = plain(name, value)
        found.append(options)
    return found


#: Within one backward pass only checkpointing inside autograd's own passes does this.
_AGAIN = (
    "One backward pass computes it twice: give torch.utils.checkpoint use_reentrant=False, or DistributedOptimizer "
    "overlap=False"
)
WAY_OUT = "lower the learning rate, clip gradients, or set on_nan='skip' (leave such steps out) or 'pass'"


def is_finite(tensor: torch.Tensor) -> bool:
    """Tell whether there is no NaN and no Inf."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return sums_up(values) or bool(values.isfinite().all())


def sums_up(tensor: torch.Tensor) -> bool:
    """Tell whether the sum is finite: one quick pass, and no proof of the contrary (it may be too large)."""
    values = tensor._values() if tensor.is_sparse else tensor
    return bool(values.sum(dtype=torch.float32 if values.itemsize < 4 else None).isfinite())


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
