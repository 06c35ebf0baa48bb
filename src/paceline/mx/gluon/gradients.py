"""Values and gradients of parameters on several devices: rank 0's, fresh or stale, dense or sparse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from paceline.errors import StaleGradientError
from paceline.kvstore.base import KVStoreBase
from paceline.layout.keys import Key
from paceline.mx.gluon.parameter import Parameter
from paceline.updaters.rows import all_rows, no_rows, to_rows

#: State of an optimizer, by key.
States: TypeAlias = dict[Key, dict[str, Any]]

_NAMED = 3


def check_fresh(parameters: Mapping[str, Parameter]) -> None:
    """Raise when backward has not reached a parameter on some device.

    Raises:
        StaleGradientError: names parameters and devices.
    """
    stale = [(key, devices) for key, one in parameters.items() if (devices := _without_gradient(one))]
    if not stale:
        return
    named = "; ".join(f"{key!r} on {', '.join(devices)}" for key, devices in stale[:_NAMED])
    more = f" and {len(stale) - _NAMED} more parameters" if len(stale) > _NAMED else ""
    raise StaleGradientError(
        f"backward has put no gradient since the last step into {named}{more}. Call backward on the loss of every "
        "device before step. A slice that was changed after split_and_load runs on the first device: change the batch "
        "before, or use as_in_context(slice, device). If these parameters are not used in this batch, pass "
        "ignore_stale_grad=True"
    )


def collect(parameters: Mapping[str, Parameter], everywhere: bool) -> dict[str, list[torch.Tensor]]:
    """Return the gradients per device of every parameter that has one.

    A device without a gradient counts as zero. With ``everywhere`` a parameter without any gradient counts as zero too,
    because all workers must push the same keys to a distributed store, and gradients of row-sparse parameters are rows:
    of a dense one all rows, also rows of zeros, because the update changes all of them.
    """
    table: dict[str, list[torch.Tensor]] = {}
    for key, one in parameters.items():
        params = one.on_devices()
        if not everywhere and all(param.grad is None for param in params):
            continue
        for param in params:
            if param.grad is None:
                param.grad = no_rows(param) if one.is_row_sparse else torch.zeros_like(param)
            elif everywhere and one.is_row_sparse and not param.grad.is_sparse:
                param.grad = all_rows(param.grad)
        table[key] = [param.grad for param in params if param.grad is not None]
    return table


def densify(parameters: Mapping[str, Parameter]) -> None:
    """Turn sparse gradients into dense ones, for stores that do not support rows."""
    for one in parameters.values():
        for param in one.on_devices():
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.to_dense()


def use_up(parameters: Mapping[str, Parameter]) -> None:
    """Clear gradients that a step has used, except where ``grad_req`` is ``add``."""
    for one in parameters.values():
        if one.grad_req == "write":
            one.zero_grad()


def _without_gradient(one: Parameter) -> list[str]:
    return [str(ctx) for ctx, param in zip(one.list_ctx(), one.on_devices(), strict=True) if param.grad is None]


def broadcast(store: KVStoreBase, parameters: Mapping[str, Parameter], by_rows: bool, prefix: str = "") -> None:
    """Copy rank 0's values to all devices and workers, also of frozen parameters.

    With ``by_rows`` row-sparse parameters are kept as rows in the store.
    """
    outs = [one.list_data() for one in parameters.values()]
    values = [
        to_rows(out[0]) if by_rows and one.is_row_sparse else out[0]
        for one, out in zip(parameters.values(), outs, strict=True)
    ]
    store.broadcast([prefix + key for key in parameters], values, outs)
