"""Row-sparse values: sums, and updates of only the rows of a gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.errors import ProtocolError
from paceline.updaters import gradient
from paceline.updaters.mxnet import Add, Ftrl, MXNetSGD

_HALF = (torch.float16, torch.bfloat16)
#: Optimizers with a lazy form: rows without a gradient keep value and state (MXNet's ``lazy_update=True``).
LAZY = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.SparseAdam,
    MXNetSGD,
    Ftrl,
    Add,
)

#: Optimizers that torch itself runs on rows; they also count a step when there are no rows.
_COUNTING = (torch.optim.Adagrad, torch.optim.SparseAdam)


def of_rows(numbers: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the row-sparse tensor with these values in its rows of these numbers, which ascend."""
    return torch.sparse_coo_tensor(
        numbers[None], values, shape, device=values.device, is_coalesced=True, check_invariants=False
    )


def check_numbers(numbers: torch.Tensor, height: int) -> None:
    """Check row numbers that another process has sent: an index says where to write.

    Raises:
        ProtocolError: they do not ascend, or are not rows of a value of this height.
    """
    if numbers.numel() and (
        int(numbers[0]) < 0 or int(numbers[-1]) >= height or not bool((numbers[1:] > numbers[:-1]).all())
    ):
        raise ProtocolError(f"row numbers must ascend from 0 or more to less than {height}")


def all_rows(value: torch.Tensor) -> torch.Tensor:
    """Return a dense value as rows, also rows of zeros."""
    return of_rows(torch.arange(len(value), device=value.device), value, value.shape)


def no_rows(like: torch.Tensor) -> torch.Tensor:
    """Return a row-sparse tensor without rows."""
    return of_rows(torch.zeros(0, dtype=torch.int64, device=like.device), like.detach()[:0], like.shape)


def sum_rows(values: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the coalesced sum of row-sparse tensors on one device: indices sorted, without repeats.

    Half precision is summed in single precision and rounded once.
    """
    single = values[0].dtype in _HALF
    total = values[0].detach().to(device, torch.float32 if single else None, copy=True)
    for one in values[1:]:
        total = total + one.detach().to(device, total.dtype)
    return total.coalesce().to(values[0].dtype)


def add_rows(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two row-sparse tensors of one device and dtype; torch has none for half precision."""
    return sum_rows([one, other], one.device) if one.dtype in _HALF else one + other


@torch.no_grad()
def to_rows(value: torch.Tensor) -> torch.Tensor:
    """Return a value as the row-sparse tensor of its rows that are not 0; it may share the value's memory.

    It is ``to_sparse(1)``, but some hundred times faster.
    """
    if value.is_sparse:
        return value
    value = value.detach()
    kept = (value.reshape(len(value), -1) != 0).any(1).nonzero().view(-1)
    rows = value[kept] if len(kept) < len(value) else value
    return of_rows(kept, rows, value.shape)


@torch.no_grad()
def put_rows(picked: torch.Tensor, rows: torch.Tensor, target: torch.Tensor) -> None:
    """Copy values of rows, whose numbers are distinct and sorted, into a target.

    A sparse target then holds only these rows; the other rows of a dense one are not changed.
    """
    picked = picked.to(target.device, target.dtype)
    if target.is_sparse:
        target.copy_(of_rows(rows.to(target.device), picked, target.shape))
    else:
        target.index_copy_(0, rows.to(target.device), picked)


@torch.no_grad()
def step_rows(
    optimizer: torch.optim.Optimizer,
    param: torch.Tensor,
    group: Mapping[str, Any],
    grad: torch.Tensor,
    scale: float,
) -> None:
    """Run one optimizer step on the rows of a value that its gradient has, and on their state.

    The rows of the gradient and their state are copied into small dense tensors, and the same optimizer class steps on
    these.

    Args:
        optimizer: holds the state of ``param``.
        param: the whole value: in the shape of the gradient, or flat.
        group: its param group, with ``rescale_grad`` and ``clip_gradient``.
        grad: row-sparse gradient: one sparse dimension, coalesced.
        scale: factor that turns ``grad`` into the gradient.
    """
    cls, rows = type(optimizer), grad.indices()[0]
    if rows.numel() == 0 and cls not in _COUNTING:
        return
    state, value = optimizer.state[param], param.detach().view(grad.shape)
    small, takes_rows = torch.nn.Parameter(value[rows]), cls is torch.optim.SparseAdam
    options = {name: one for name, one in group.items() if name not in ("params", "fused", "key_options")}
    solver = cls([{"params": [small], **options}])  # type: ignore[call-arg]  # subclasses have defaults
    solver.state[small] |= {
        name: one.view(value.shape)[rows] if isinstance(one, torch.Tensor) and one.shape == param.shape else one
        for name, one in state.items()
        if one is not None
    }
    if takes_rows and "step" in state:
        solver.state[small]["step"] = int(state["step"])  # it is sent as a tensor, whose powers would be float32
    [values] = gradient.prepared([grad.values().to(small.dtype) * scale], group)
    small.grad = all_rows(values) if takes_rows else values
    with torch.enable_grad():
        solver.step()
    value.index_copy_(0, rows, small.detach())
    for name, one in solver.state[small].items():
        state[name] = _put(state.get(name), one, rows, param, value.shape)


def _put(whole: Any, one: Any, rows: torch.Tensor, param: torch.Tensor, shape: torch.Size) -> Any:
    """Return the state of all rows after a step of some; ``shape`` is the shape of the value by rows."""
    if not isinstance(one, torch.Tensor) or one.dim() != len(shape) or one.shape[1:] != shape[1:]:
        return one
    whole = torch.zeros_like(param) if whole is None else whole
    whole.view(shape).index_copy_(0, rows, one)
    return whole
