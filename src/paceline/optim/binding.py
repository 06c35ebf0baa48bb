"""Copies between parameters and the arena: gradients in, merged gradients or weights out.

The arena is never the user's memory. Servers may read and write it at any time of a round. ``param.data`` and
``param.grad`` belong to this process alone: changes that a training loop makes there are not sent by themselves.

For parameters on a CUDA device copies run beside the computation, on a side stream.
"""

from __future__ import annotations

import cmath
import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.errors import NonFiniteError, PacelineError
from paceline.kvstore.dist import DistStore
from paceline.layout.tensors import floats, real_view, to_host
from paceline.naming import listed
from paceline.optim.device import SideStream, other_bits, side_stream, side_streams
from paceline.wire import messages as m
from paceline.worker.block import WorkerBlock

WAY_OUT = "lower the learning rate, clip gradients, or set on_nan='skip' (skips such steps) or 'pass'"


@dataclass(eq=False)
class Bound:
    """One parameter and its place in the arena."""

    name: str
    param: torch.nn.Parameter
    block: WorkerBlock
    index: int
    ranges: tuple[m.Span, ...]
    """Ranges of the parameter in buckets."""
    value: torch.Tensor
    grad: torch.Tensor
    absent: bool = False
    """Whether there was no gradient at the last :meth:`put_grad`."""
    filled: bool = False
    """Whether the gradient of this round is in the arena."""

    def __post_init__(self) -> None:
        """Note dtype and shape of the parameter."""
        self.kind = self.param.dtype, self.param.shape

    def put_grad(self, side: SideStream | None = None) -> None:
        """Copy the gradient into the arena; without a gradient, set ``absent``.

        Args:
            side: the side stream of the parameter's CUDA device, which copies later.
        """
        grad = self.param.grad
        self.absent = grad is None
        if grad is None:
            return
        dense = real_view(grad.to_dense() if grad.is_sparse else grad)
        if side is None:
            self.grad.copy_(dense)
        else:
            side.fetch(dense, self.grad)

    def converted(self) -> PacelineError:
        """Return the error about a parameter that has another dtype or shape than when it was bound."""
        (dtype, shape), now = self.kind, self.param
        return PacelineError(
            f"parameter {self.name!r} was {dtype} {tuple(shape)} when it was given to "
            f"DistributedOptimizer and is {now.dtype} {tuple(now.shape)} now: convert the model (half, double, to) "
            "before that, or close that optimizer and make a new one after it, on every worker"
        )

    def target(self, weights: bool) -> torch.Tensor:
        """Return the target of the arena's value: the weight, or the gradient, which is replaced if need be."""
        if weights:
            return real_view(self.param.data)
        grad = self.param.grad
        if grad is not None and grad.grad_fn is not None and grad.layout is torch.strided:
            with torch.enable_grad():  # of backward(create_graph=True): a loop may take a derivative of it
                self.param.grad = grad.resolve_conj().clone(memory_format=torch.contiguous_format)
            grad = self.param.grad.detach()
        elif grad is None or not _takes_values(grad):
            grad = self.param.grad = torch.empty_like(self.param)
        return real_view(grad)


def take_all(bound: Iterable[Bound], weights: bool) -> None:
    """Copy the arena's values of several parameters out: to the weights, or to the gradients that a worker had."""
    copies: dict[SideStream | None, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for one in bound:
        if not weights and one.absent and one.block.is_missing(one.index):
            continue
        target = one.target(weights)
        values, targets = copies.setdefault(side_stream(target), ([], []))
        values.append(one.value)
        targets.append(target)
    for side, (values, targets) in copies.items():
        if side is None:
            torch._foreach_copy_(targets, values)
        else:
            side.bring(values, targets)


def _takes_values(target: torch.Tensor) -> bool:
    """Return whether values can be copied there: it is dense, needs no gradient, and has no shared elements."""
    if target.layout is not torch.strided or target.requires_grad or target.is_conj():
        return False
    return target.is_contiguous() or not any(
        step == 0 and size > 1 for step, size in zip(target.stride(), target.shape, strict=True)
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bits, NaN included, in the same shape and dtype."""
    return not known([unlike(one, other)])[0]


def unlike(one: torch.Tensor, other: torch.Tensor) -> bool | torch.Tensor:
    """Return whether two tensors differ in shape, dtype or bits.

    An accelerator compares its own tensors, and a CUDA device also tensors of host memory with its own, without
    waiting: :func:`known` reads the result. The host memory must not change before that, or before the next mark of
    the side stream.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return True
    if one.device == other.device and one.device.type != "cpu":
        return other_bits(one, other)
    side = side_stream(one) if other.device.type == "cpu" else None
    if side is not None:
        return side.unlike(one, other)
    here, there = to_host(one), to_host(other)
    return bool(_libc.memcmp(here.data_ptr(), there.data_ptr(), here.numel() * here.itemsize))


def known(compared: Sequence[bool | torch.Tensor]) -> list[bool]:
    """Return the results of :func:`unlike`, after waiting for the devices that compare."""
    waiting = [one for one in compared if isinstance(one, torch.Tensor)]
    for side in side_streams(waiting):
        side.join()
    there = iter(floats(waiting))
    return [bool(next(there)) if isinstance(one, torch.Tensor) else one for one in compared]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether there is no NaN and no Inf."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return sums_up(values) or bool(values.isfinite().all())


def sums_up(tensor: torch.Tensor) -> bool:
    """Return whether the sum is finite: one quick pass. False proves nothing: the sum may be too large."""
    return cmath.isfinite(_sum_of(tensor).item())


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether no tensor has a NaN or Inf: mostly after one wait for their device."""
    return all(map(cmath.isfinite, floats([_sum_of(one) for one in tensors]))) or all(map(is_finite, tensors))


def _sum_of(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor._values() if tensor.is_sparse else tensor
    return values.sum(dtype=torch.float32 if values.itemsize < 4 else None)


def not_finite_in(store: DistStore, name: str, round: int) -> NonFiniteError:
    """Return the error about a gradient of this worker that is not finite."""
    return NonFiniteError(f"worker {store.rank}: the gradient of {name!r} is NaN or Inf in round {round}; {WAY_OUT}")


def merged_not_finite(
    rank: int, names: Sequence[str], round: int, pushed: Mapping[int, Sequence[str]]
) -> NonFiniteError:
    """Return the error about merged gradients that are not finite.

    ``pushed`` has, by worker, the parameters whose gradients were not finite before they were merged.
    """
    whose = "; ".join(f"worker {one} pushed that of {listed(map(repr, theirs))}" for one, theirs in pushed.items())
    return NonFiniteError(
        f"worker {rank}: the merged gradient of {listed(map(repr, names))} is NaN or Inf in round {round}: "
        f"{whose or 'the sum of finite gradients is too large'}; {WAY_OUT}"
    )


def changed_here(store: DistStore, name: str) -> PacelineError:
    """Return the error about a weight that the servers hold, and that was changed in this process alone."""
    or_worker = ", or use update='worker'" if store.policy.merge == "all" else ""
    return PacelineError(
        f"worker {store.rank}: parameter {name!r} was changed after the last step, where the servers do not see it; "
        "they hold the weights. After such a change call optimizer.broadcast_weights() on every "
        f"worker{or_worker}"
    )


def bind_keys(
    store: DistStore, names: Sequence[str], params: Sequence[torch.nn.Parameter], tags: Sequence[int]
) -> list[Bound]:
    """Initialise keys for parameters, find their places, and give the parameters rank 0's weights.

    Keys of unlike tags share no bucket.

    Raises:
        ValueError: a parameter has gradients of another type.
    """
    for name, param in zip(names, params, strict=True):
        of_gradient = getattr(param, "grad_dtype", param.dtype)
        if of_gradient != param.dtype:
            raise ValueError(
                f"parameter {name!r} is {param.dtype} with grad_dtype {of_gradient}, and gradients are merged in the "
                "type of their parameter: leave grad_dtype as it is, or make the parameter of that type"
            )
    blocks = store.add_keys(names, [real_view(param.data) for param in params], tags)
    store.traffic.refresh(store.table.plan(tuple(names)))
    devices = {param.device for param in params if param.is_cuda}
    if devices:
        for block in blocks:
            block.pin(devices)
    bound = []
    for name, param in zip(names, params, strict=True):
        block = next(block for block in blocks if name in block.key_index)
        index = block.key_index[name]
        ranges = tuple(block.ranges([index]))
        bound.append(Bound(name, param, block, index, ranges, block.value_of(index), block.grad_of(index)))
    take_all(bound, weights=True)
    return bound
