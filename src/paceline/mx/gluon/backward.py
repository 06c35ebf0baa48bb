"""Backward passes of several replicas at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.mx.context import Context, cpu, gpu
from paceline.mx.gluon.parallel import run_replicas

_graphs_joined = False


def join_graphs() -> None:
    """Note that graphs of different replicas share nodes in this process (``SyncBatchNorm``).

    From then on :func:`backward` runs one joint pass. Two concurrent passes over shared nodes would free them twice.
    """
    global _graphs_joined
    _graphs_joined = True


def backward(losses: torch.Tensor | Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Compute the gradients of the sum of all losses, all replicas in parallel.

    The result is that of ``for loss in losses: loss.backward()``, but it is faster, and it also works when the graphs
    of the replicas share nodes.

    Args:
        losses: one loss per replica; a loss that is not a scalar is summed.
        retain_graph: keep the graphs for another pass.

    Raises:
        ValueError: no losses.
    """
    listed = [losses] if isinstance(losses, torch.Tensor) else list(losses)
    if not listed:
        raise ValueError("there are no losses to go backward from")
    scalars = [one if one.dim() == 0 else one.sum() for one in listed]
    if _graphs_joined or len(scalars) == 1:
        torch.autograd.backward(scalars, retain_graph=retain_graph)
        return
    jobs = [lambda one=one: one.backward(retain_graph=retain_graph) for one in scalars]
    run_replicas([_context(index, one) for index, one in enumerate(scalars)], jobs)


def _context(index: int, loss: torch.Tensor) -> Context:
    return gpu(loss.device.index) if loss.is_cuda else cpu(index)
