"""The rounds of a DDP script, for the account of its process.

The begin of a step is not told by a DDP script, so it is seen where PyTorch has hooks for all optimizers and models.

| event | the account |
|---|---|
| a DDP model begins a forward pass, in training | ``compute`` begins; the rows of its inputs count |
| DDP waits for the last bucket, at the end of backward | see :meth:`paceline.observe.meter.Meter.await_exchange` |
| an optimizer begins to step | ``update`` begins |
| it has stepped, and gradients were exchanged since the last round | the round ends |

Where DDP cannot copy buffers, the error names the one that is unlike (``ddp/buffers.py``).

Steps of a script that has a store of paceline, too, are not counted here: its pushes are the rounds.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.ddp import buffers
from paceline.ddp.shares import MeasuredShares
from paceline.naming import listed
from paceline.observe import meter
from paceline.observe.account import UPDATE
from paceline.optim.samples import tally, tensors_in
from paceline.torch_hooks.untraced import apart
from paceline.worker import alone
from paceline.worker.session import Session

logger = logging.getLogger(__name__)

#: Parameters that took no gradient when DDP took their model: it exchanges none of theirs later, and says nothing.
_frozen: WeakKeyDictionary[DistributedDataParallel, dict[str, torch.nn.Parameter]] = WeakKeyDictionary()


class DdpTraining:
    """The steps of this process; without ``shares`` its batches are as large as those of the others."""

    def __init__(self, session: Session, shares: MeasuredShares | None) -> None:
        self.session, self.shares = session, shares
        self._samples, self._rounds, self._has_exchanged = 0.0, 0, False

    def before_forward(self, model: DistributedDataParallel, args: Any, kwargs: Any) -> None:
        """Note that a DDP model begins a forward pass."""
        if not torch.is_grad_enabled():
            return
        self._tell_unfrozen(model)
        if alone.wants_inputs():
            alone.note_inputs(tensors_in((args, kwargs)))
        if self.shares is not None:
            self.shares.before_forward(model, args, kwargs)
        if model.module.training:  # Lightning's Trainer leaves the wrapper itself in eval() after a validation
            meter.active.forward_begins()
            self._samples += tally((args, kwargs), None).rows

    def _tell_unfrozen(self, model: DistributedDataParallel) -> None:
        names = [name for name, one in _frozen.get(model, {}).items() if one.requires_grad]
        if names:
            del _frozen[model]
            if not self.session.rank:
                logger.warning(
                    "%s took no gradient when DistributedDataParallel took the model, so it does not exchange their "
                    "gradients now, and the workers' weights grow apart (under torchrun, too): wrap the model again "
                    "once they are unfrozen, or freeze after wrapping, with find_unused_parameters=True",
                    listed(names),
                )

    def before_step(self) -> None:
        """Note that an optimizer begins to step."""
        if not self.session.kind.store_type:
            self._has_exchanged |= self.session.meter.await_exchange()
            meter.active.enter(UPDATE)

    def after_step(self) -> None:
        """Note that an optimizer has stepped."""
        if self.session.kind.store_type:
            return
        if self._has_exchanged:
            self._rounds, self._has_exchanged = self._rounds + 1, False
            if not self.session.kind.is_ddp:
                self.session.trains(is_ddp=True)
            if self.shares is None:
                self.session.note_round(self._rounds, self._samples or 1.0)
            else:
                self.shares.end_round(self._rounds)
            self._samples = 0.0
        meter.active.step_ends()


_current: DdpTraining | None = None


def watch(session: Session) -> None:
    """Watch the steps of this process, from now on for this job. Idempotent."""
    global _current
    if _current is not None and _current.session is session:
        return
    if _current is None:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        DistributedDataParallel.__init__ = _watched(DistributedDataParallel.__init__)  # type: ignore[method-assign]
        DistributedDataParallel._sync_buffers = _named(DistributedDataParallel._sync_buffers)  # type: ignore[method-assign]
        Join.notify_join_context = staticmethod(_kept(Join.notify_join_context))  # type: ignore[assignment]
    shares = MeasuredShares(session) if os.environ.get("PACELINE_DDP") == "measured" else None
    if shares is not None:
        shares.install()
    _current = DdpTraining(session, shares)


def _watched(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: DistributedDataParallel, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if _current is not None and _current.shares is not None:
            _current.shares.check(module)
        with contextlib.nullcontext() if _current is None else buffers.named(_current.session, self):
            original(self, module, *args, **kwargs)
        if _current is not None and dist.get_backend(self.process_group) == "paceline":
            self.register_forward_pre_hook(_before_forward, with_kwargs=True)
            _frozen[self] = {name: one for name, one in module.named_parameters() if not one.requires_grad}
            if _current.shares is not None:
                self.register_forward_hook(_after_forward)
                _current.shares.take_model(self)

    return init


def _named(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def sync(self: DistributedDataParallel) -> None:
        with contextlib.nullcontext() if _current is None else buffers.named(_current.session, self):
            original(self)

    return apart(sync)


#: What models in ``join`` have told the other ranks last: DDP keeps only the half of the handle that is C++.
_told: WeakKeyDictionary[Any, object] = WeakKeyDictionary()


def _kept(original: Callable[[Any], object]) -> Callable[[Any], object]:
    @functools.wraps(original)
    def notify(joinable: Any) -> object:
        work = _told[joinable] = original(joinable)
        return work

    return notify


def _before_forward(model: Any, args: Any, kwargs: Any) -> None:
    if _current is not None and not torch.compiler.is_compiling():
        _current.before_forward(model, args, kwargs)


def _after_forward(model: DistributedDataParallel, args: Any, outputs: Any) -> None:
    is_seen = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if _current is not None and _current.shares is not None and is_seen:
        _current.shares.after_forward(model, outputs)


def _before_step(optimizer: object, args: Any, kwargs: Any) -> None:
    if _current is not None and not torch.compiler.is_compiling():
        _current.before_step()


def _after_step(optimizer: object, args: Any, kwargs: Any) -> None:
    if _current is not None and not torch.compiler.is_compiling():
        _current.after_step()
