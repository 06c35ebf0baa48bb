"""Reduces gradients while backward computes them: the part of DistributedOptimizer that is no optimizer.

States of a parameter, for each step:

| state | event | next |
|---|---|---|
| counting | backward accumulates its gradient, not for the last time | counting |
| counting | backward accumulates its gradient for the last time | sent |
| counting | ``synchronize``: it has no gradient, or the last accumulation is uneven | sent (zeros for none) |
| sent | backward ends, and all that need a gradient are sent; or ``synchronize`` | reduced: ``param.grad`` is final |
| sent | the loop, which has not called ``synchronize``, changes the gradient | AssertionError in ``synchronize`` |
| sent, reduced | backward accumulates its gradient | AssertionError |
| reduced | ``step``, ``synchronize``, or a GradScaler reads the gradients | counting |
| any | ``shutdown``, then backward or ``synchronize`` in another job | counting |
| any | another optimizer with one of the parameters is wrapped | the end: that one reduces them |

Where each rank uses another part of the model no rank waits at the end of backward but one that has sent everything, so
ranks do not wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Variable

from paceline.collectives import world
from paceline.collectives.operations import (
    Average,
    allreduce,
    sparse_allreduce_async,
    synchronize,
)
from paceline.collectives.process_sets import ProcessSet
from paceline.hvd.compression import CodecCompression, CodecReduction, Compressor
from paceline.hvd.parameters import Named
from paceline.layout.arguments import compressible
from paceline.torch_hooks.untraced import untraced
from paceline.updaters.rows import no_rows

_TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)


@dataclass
class OptimizerArguments:
    """The arguments of :func:`paceline.hvd.DistributedOptimizer`, as they are now: parameters may be added."""

    named_parameters: Named
    compression: type[Compressor] | CodecCompression
    backward_passes_per_step: int
    op: int
    gradient_predivide_factor: float
    groups: int | Sequence[Sequence[torch.Tensor]] | None
    sparse_as_dense: bool
    process_set: ProcessSet
    deterministic: bool


_CHANGED = (
    "The gradient of {changed!r} was changed between backward and step(), before it was reduced: {missing} needs a "
    "gradient and backward gave none, so the end of backward did not wait. Call optimizer.synchronize() before "
    "gradients are changed, and step() inside optimizer.skip_synchronize(); or freeze the parameters that are not used."
)


def _hooked(param: Any, hook: Callable[[torch.Tensor], None]) -> Any:
    """Add a hook to a parameter, also to one that needs no gradient yet; returns its handle."""
    needed = param.requires_grad
    param.requires_grad_(True)  # torch needs it to add hooks; they stay when it is reset
    handle = param.register_post_accumulate_grad_hook(hook)
    param.requires_grad_(needed)
    return handle


@untraced
class Reducer:
    """Reduces the gradients of parameters.

    Args:
        choices: how; their parameters have the same names on all ranks.
        groups: parameters that are reduced together, when all have their gradients.
        sparse_again: gradients that are reduced as dense ones become sparse then.
    """

    def __init__(
        self, choices: OptimizerArguments, groups: Sequence[Sequence[torch.nn.Parameter]], sparse_again: bool
    ) -> None:
        self.choices, self.groups, self._sparse_again = choices, [list(group) for group in groups], sparse_again
        self.named, self.passes = choices.named_parameters, choices.backward_passes_per_step
        divisor = choices.gradient_predivide_factor
        self._factors = (1.0 / divisor, divisor) if choices.op == Average else (1.0, 1.0)
        self._names: dict[int, str] = {}
        self._group_of = {id(param): number for number, group in enumerate(self.groups) for param in group}
        self._left: dict[int, int] = {}
        self._waits: dict[int, Callable[[], None]] = {}
        self._sent: set[int] = set()
        self._late: list[torch.Tensor] = []
        """Parameters whose gradients later hooks may change: they are sent when backward ends."""
        self._given: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        """Parameters whose gradients are being reduced, with these and torch's counts of changes in place."""
        self._group_left: dict[int, set[int]] = {}
        self._sparse: set[int] = set()
        self._codecs: dict[int, CodecReduction] = {}
        self._callback_queued = False
        self._required: set[torch.nn.Parameter] | None = None
        self._job: world.World | None = None
        """The job in which gradients were counted since the last step."""
        self.is_replaced = False
        self._hooks: dict[int, Any] = {}
        self._take(self.named)

    def add(self, named: Named) -> None:
        """Take in more parameters, between steps; also those that need no gradient yet."""
        self.named += named
        self._take(named)

    def _take(self, named: Named) -> None:
        for name, param in named:
            release(param, self)
            self._names[id(param)], self._left[id(param)] = name, self.passes
            if param.is_floating_point() or param.is_complex():  # others never have a gradient
                self._hooks[id(param)] = _hooked(param, self._on_gradient)

    def has(self, param: torch.Tensor) -> bool:
        """Return whether the gradients of a parameter are reduced."""
        return id(param) in self._names

    def _give_up(self) -> None:
        """Reduce nothing any more."""
        for hook in self._hooks.values():
            hook.remove()
        self.reset()
        self.is_replaced = True

    @property
    def unconsumed(self) -> bool:
        """Whether backward has given gradients, in this job, that were not used yet."""
        return self._job is not None and world.is_initialized() and self._job is world.current()

    @property
    def is_active(self) -> bool:
        """Whether there is anybody to reduce with."""
        if self.is_replaced or not world.is_initialized() or world.current().size == 1:
            return False
        process_set = self.choices.process_set
        return bool(process_set.included()) and process_set.size() != 1

    @property
    def required(self) -> set[torch.nn.Parameter]:
        """The parameters that ``synchronize`` sends even if backward gave no gradient: by default all that need one."""
        if self._required is not None:
            return self._required
        return {param for _, param in self.named if param.requires_grad}

    @required.setter
    def required(self, params: set[torch.nn.Parameter]) -> None:
        self._required = params

    @property
    def begun(self) -> list[torch.nn.Parameter]:
        """The parameters that backward has given a gradient since the last step."""
        if not self.unconsumed:
            return []
        return [param for _, param in self.named if self._left[id(param)] < self.passes]

    @property
    def passes_left(self) -> dict[torch.nn.Parameter, int]:
        """How many backward passes each parameter waits for."""
        return {param: self._left[id(param)] for _, param in self.named}

    def set_passes(self, passes: int) -> None:
        """Set the number of backward passes per step."""
        self.passes = self.choices.backward_passes_per_step = passes
        self.reset()

    # ---- during backward -------------------------------------------------------------------------------------------

    def _on_gradient(self, param: torch.Tensor) -> None:
        if not self.is_active:
            return
        if self._job is not world.current():
            self._forget()
            self._job = world.current()
        if id(param) in self._sent:
            raise AssertionError(_TOO_MANY)
        self._left[id(param)] -= 1
        if self._left[id(param)] > 0:
            return
        if not self._callback_queued:
            self._callback_queued = True
            world.current().background.hold()
            Variable._execution_engine.queue_callback(self._after_backward)
        if next(reversed(param._post_accumulate_grad_hooks)) == self._hooks[id(param)].id:
            self._ready(param)
        else:
            self._sent.add(id(param))
            self._late.append(param)

    def _after_backward(self) -> None:
        """Wait if all is sent; else a later backward may bring the rest."""
        self._callback_queued = False
        self._send_late()
        if self._missing() is None:
            self._finish()
        elif world.is_initialized():
            world.current().background.urge()

    def _missing(self) -> str | None:
        """Return the name of a parameter that needs a gradient and is not sent; None: there is none."""
        return next((name for name, param in self.named if param.requires_grad and id(param) not in self._sent), None)

    def _send_late(self) -> None:
        late, self._late = self._late, []
        for param in late:
            self._ready(param)

    def _ready(self, param: torch.Tensor) -> None:
        self._sent.add(id(param))
        number = self._group_of.get(id(param))
        if number is None:
            self._waits[id(param)] = self._send(param)
            return
        missing = self._group_left.setdefault(number, {id(one) for one in self.groups[number]})
        missing.discard(id(param))
        if not missing:
            del self._group_left[number]
            self._waits[id(param)] = self._send_group(number)

    # ---- sending ---------------------------------------------------------------------------------------------------

    def _gradient(self, param: torch.Tensor) -> torch.Tensor:
        if param.grad is None:
            param.grad = no_rows(param) if id(param) in self._sparse else torch.zeros_like(param)
        if param.grad.is_sparse and self.choices.sparse_as_dense:
            param.grad = param.grad.to_dense()
        return param.grad

    def _send(self, param: torch.Tensor) -> Callable[[], None]:
        name, gradient, choices = self._names[id(param)], self._gradient(param), self.choices
        self._given.append((param, gradient, gradient._version))
        if gradient.is_sparse:
            return self._send_sparse(param, gradient, name)
        if isinstance(choices.compression, CodecCompression):
            found = self._codecs.get(id(param))
            if found is None:
                compressible(("push",), name, gradient.dtype, by_rows=False)
                found = self._codecs[id(param)] = CodecReduction(choices.compression, gradient.numel())
            return found.start(gradient, name, choices.op, choices.process_set)
        return self._send_dense([gradient], name)

    def _send_sparse(self, param: torch.Tensor, gradient: torch.Tensor, name: str) -> Callable[[], None]:
        self._sparse.add(id(param))
        wait_for = sparse_allreduce_async(gradient, name, self.choices.op, self.choices.process_set)

        def wait() -> None:
            param.grad = wait_for().coalesce()

        return wait

    def _send_group(self, number: int) -> Callable[[], None]:
        gradients = [self._gradient(param) for param in self.groups[number]]
        for param, gradient in zip(self.groups[number], gradients, strict=True):
            self._given.append((param, gradient, gradient._version))
        if any(gradient.is_sparse for gradient in gradients):
            raise ValueError("a sparse gradient in a group; use sparse_as_dense=True, or leave its parameter out")
        return self._send_dense(gradients, f"group.{number}.{self._names[id(self.groups[number][0])]}", grouped=True)

    def _send_dense(self, gradients: list[torch.Tensor], name: str, grouped: bool = False) -> Callable[[], None]:
        choices = self.choices
        compression = choices.compression
        assert not isinstance(compression, CodecCompression)
        pairs = [compression.compress(gradient) for gradient in gradients]
        targets = [compressed.contiguous().data for compressed, _ in pairs]  # without the gradients' counts of changes
        handle = allreduce(
            targets, None, name, choices.op, *self._factors, choices.process_set,
            in_place=True, grouped=True, deterministic=choices.deterministic and not grouped,
        )  # fmt: skip

        def wait() -> None:
            for gradient, result, (_, context) in zip(gradients, synchronize(handle), pairs, strict=True):
                whole = compression.decompress(result, context)
                if whole.data_ptr() != gradient.data_ptr():
                    with torch.no_grad():
                        gradient.copy_(whole)

        return wait

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Send the missing gradients, wait for everything, and begin anew.

        Raises:
            AssertionError: a gradient that was sent has been changed since.
        """
        if not self.unconsumed:
            self._forget()
        changed, missing = self._changed(), self._missing()
        if self.is_active:
            self._send_late()
            required = {id(param) for param in self.required}
            for _, param in self.named:
                begun = self._left[id(param)] < self.passes
                if (id(param) in required or begun) and id(param) not in self._sent:
                    self._ready(param)
            self._finish()
        self.reset()
        if changed is not None:
            raise AssertionError(_CHANGED.format(changed=changed, missing=missing or "a parameter"))

    def _changed(self) -> str | None:
        """Return the name of a parameter whose gradient the loop has changed since it was sent; None: there is none."""
        for param, gradient, version in self._given:
            if param.grad is not gradient or gradient._version != version:
                return self._names[id(param)]
        return None

    def _finish(self) -> None:
        waits, self._waits = self._waits, {}
        for wait in waits.values():
            wait()
        self._given = []
        if waits and self._sparse_again:
            self._make_sparse()

    def _make_sparse(self) -> None:
        """Make the results sparse: all of them, as a rank may not know yet that a parameter's gradients are."""
        for _, param in self.named:
            if param.grad is not None and not param.grad.is_sparse:
                param.grad = param.grad.to_sparse(min(1, param.dim()))

    def reset(self) -> None:
        """Count from the start: the gradients were used."""
        if self.unconsumed:
            self._finish()
        self._forget()

    def _forget(self) -> None:
        """Count from the start, without the operations of a job that has ended."""
        self._waits, self._given = {}, []
        self._callback_queued, self._late = False, []
        self._sent.clear()
        self._group_left.clear()
        self._left = {id(param): self.passes for _, param in self.named}
        self._job = None


def release(param: Any, new: Reducer | None = None) -> None:
    """Let no other reducer than the new one reduce a parameter."""
    for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
        other = getattr(hook, "__self__", None)
        if isinstance(other, Reducer) and other is not new:
            other._give_up()
