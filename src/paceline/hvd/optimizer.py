"""``DistributedOptimizer``: an optimizer whose gradients are those of all ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from paceline.collectives import world
from paceline.collectives.operations import Adasum, Average, allreduce, synchronize
from paceline.collectives.process_sets import ProcessSet, global_process_set
from paceline.hvd.closures import ClosureCalls, calls_it_once
from paceline.hvd.compression import CodecCompression, Compression, Compressor
from paceline.hvd.parameters import checked_names, make_groups
from paceline.hvd.reducer import OptimizerArguments, Reducer, release
from paceline.torch_hooks.untraced import apart
from paceline.torch_hooks.wrappers import refuse_wrapped
from paceline.worker.weight_sums import is_due

_EARLY_ZERO = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)
_IN_PLACE = (
    "param_groups has parameters that were put into it in place, so their gradients would not be reduced. Before the "
    "forward pass call optimizer.add_param_group(...), or set optimizer.param_groups = [...], on every rank."
)
_REPLACED = (
    "A DistributedOptimizer that was made later reduces parameters of this one, so this one reduces none any more. "
    "Step with that one, or give each optimizer parameters of its own."
)
_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). The gradients "
    "are reduced already, and are not reduced again."
)


class Wrapped:
    """The methods of all distributed optimizers: copies, and the private names that Horovod's users read.

    Options and state are those of the optimizer that was wrapped. Schedules that were made before have that one, and
    a state may be loaded into either.
    """

    _hvd_base: type[torch.optim.Optimizer]
    _hvd_inner: Any
    _hvd_arguments: OptimizerArguments
    _hvd_steps: world.OptimizerSteps | None
    """Its steps since ``init`` or the last join; None before the first."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of the wrapped optimizer."""
        groups: list[dict[str, Any]] = self._hvd_inner.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._hvd_inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self._hvd_inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self._hvd_inner.state = state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._hvd_inner.__setstate__(state)

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes before each step."""
        return self._hvd_arguments.backward_passes_per_step

    @property
    def _parameter_names(self) -> dict[torch.nn.Parameter, str]:
        return {param: name for name, param in self._hvd_arguments.named_parameters}

    @property
    def _compression(self) -> Any:
        return self._hvd_arguments.compression

    def __reduce__(self) -> Any:
        state = {name: getattr(self._hvd_inner, name) for name in ("defaults", "state", "param_groups")}
        return _rebuild, (self._hvd_base, state, self._hvd_arguments)

    def __copy__(self) -> Any:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied


class DistributedMethods:
    """The methods that a distributed optimizer adds to the class of the user's optimizer."""

    _hvd: Reducer
    _hvd_inner: Any
    _hvd_base: type[torch.optim.Optimizer]
    _hvd_arguments: OptimizerArguments
    _hvd_synchronized: bool
    _hvd_by_scaler: bool
    _hvd_skips: bool

    @property
    def _requires_update(self) -> set[torch.nn.Parameter]:
        """The parameters whose gradients ``synchronize`` sends even if backward gave none. Can be assigned."""
        return self._hvd.required

    @_requires_update.setter
    def _requires_update(self, params: set[torch.nn.Parameter]) -> None:
        self._hvd.required = params

    @property
    def _handles(self) -> dict[torch.nn.Parameter, tuple[None, None]]:
        """The parameters with a gradient that was not used yet, as keys; there are no handles in it."""
        return dict.fromkeys(self._hvd.begun, (None, None))

    @property
    def _allreduce_delay(self) -> dict[torch.nn.Parameter, int]:
        """How many backward passes each parameter waits for."""
        return self._hvd.passes_left

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups. A GradScaler that reads them gets reduced gradients."""
        if self._hvd.unconsumed and sys._getframe(1).f_globals.get("__name__", "").startswith("torch.amp"):
            self._hvd.synchronize()
            self._hvd_synchronized = self._hvd_by_scaler = True
        return super().param_groups  # type: ignore[misc,no-any-return]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._hvd_inner.param_groups = groups
        self._take_new()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, on every rank; its gradients are reduced, too. Weights are not broadcast."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._take_new()

    def _new_params(self) -> list[torch.nn.Parameter]:
        """Return the parameters in the param groups whose gradients are not reduced."""
        groups = self._hvd_inner.param_groups
        return [param for group in groups for param in group["params"] if not self._hvd.has(param)]

    def _take_new(self) -> None:
        known = len(self._hvd.named)
        self._hvd.add([(f"allreduce.added.{known + number}", param) for number, param in enumerate(self._new_params())])

    @apart
    def synchronize(self) -> None:
        """Wait until the gradients of all ranks are reduced. ``step`` does it, except inside ``skip_synchronize``."""
        if not self._hvd_synchronized or self._hvd.unconsumed:
            self._hvd.synchronize()
        self._hvd_synchronized, self._hvd_by_scaler = True, False

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, ``step`` does not synchronize: for scripts that have done it."""
        self._hvd_skips = True
        try:
            yield
        finally:
            self._hvd_skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes there are before each step."""
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self._hvd.set_passes(passes)

    @apart
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the gradients of all ranks.

        Raises:
            AssertionError: gradients were changed before they were reduced, or a parameter's would never be.
            PacelineError: ranks call the closure unlike often.
        """
        if self._hvd.is_replaced and world.is_initialized() and world.current().size > 1:
            raise AssertionError(_REPLACED)
        if self._new_params():
            raise AssertionError(_IN_PLACE)
        if not self._hvd_skips:
            if self._hvd_synchronized and not self._hvd_by_scaler and not self._hvd.unconsumed:
                warnings.warn(_TWICE, stacklevel=2)
            elif closure is None and (not self._hvd_synchronized or self._hvd.unconsumed):
                self._hvd.synchronize()
        calls = self._closure_calls() if closure is not None else None
        result = super().step(self._reduced(closure, calls))  # type: ignore[misc]
        if calls is not None:
            calls.end()
        self._hvd_synchronized = self._hvd_by_scaler = False
        _end_step(self)
        return result

    def _closure_calls(self) -> ClosureCalls | None:
        """Return the count of calls in a step, for an optimizer that may call its closure several times."""
        arguments = self._hvd_arguments
        if calls_it_once(self._hvd_base) or not self._hvd.is_active:
            return None
        return ClosureCalls(arguments.named_parameters[0][0], arguments.process_set)

    def _reduced(self, closure: Callable[[], Any] | None, calls: ClosureCalls | None) -> Callable[[], Any] | None:
        if closure is None:
            return None

        def reduced() -> Any:
            if calls is not None:
                calls.begin()
            self._hvd_synchronized = False
            loss = closure()
            self.synchronize()
            return loss

        return reduced

    @apart
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients.

        Raises:
            AssertionError: they have not been used since backward.
        """
        if self._hvd.unconsumed and self._hvd.is_active:
            raise AssertionError(_EARLY_ZERO)
        self._hvd_synchronized = self._hvd_by_scaler = False
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]


class AdasumMethods:
    """The methods that an Adasum optimizer adds to the class of the user's optimizer.

    Each rank steps by itself, and the changes of the weights are combined.
    """

    _hvd_arguments: OptimizerArguments

    @property
    def _requires_update(self) -> set[torch.nn.Parameter]:
        return {param for _, param in self._hvd_arguments.named_parameters if param.requires_grad}

    @property
    def _handles(self) -> dict[torch.nn.Parameter, Any]:
        """Empty: no operation runs between calls of ``step``."""
        return {}

    def synchronize(self) -> None:
        """Do nothing: changes of weights are reduced in ``step``."""

    def skip_synchronize(self) -> NoReturn:
        """Refuse.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients are added up until ``step``."""

    @apart
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and combine the changes of all ranks."""
        named = [(name, param) for name, param in self._hvd_arguments.named_parameters if param.requires_grad]
        compression: Any = self._hvd_arguments.compression
        before = [param.detach().clone() for _, param in named]
        result = super().step(closure)  # type: ignore[misc]
        waiting = []
        for (name, param), start in zip(named, before, strict=True):
            compressed, context = compression.compress((param.detach() - start).contiguous())
            waiting.append((allreduce([compressed], None, name, Adasum, in_place=True), context))
        with torch.no_grad():
            for (_, param), start, (handle, context) in zip(named, before, waiting, strict=True):
                param.copy_(start + compression.decompress(synchronize(handle), context))
        _end_step(self)
        return result


# The step of the user's class calls the hooks of steps. Torch adds them to a step without this mark when a state is
# loaded, and they would run twice.
DistributedMethods.step.hooked = True  # type: ignore[attr-defined]
AdasumMethods.step.hooked = True  # type: ignore[attr-defined]


def _end_step(optimizer: Any) -> None:
    """After some of the steps, let the ranks' weights be compared: nothing else brings them together."""
    optimizer._hvd_inner._opt_called = True  # schedules that were made before look at it
    process_set, named = optimizer._hvd_arguments.process_set, optimizer._hvd_arguments.named_parameters
    if not world.is_initialized() or not process_set.included():
        return
    ranks = () if process_set is global_process_set else process_set.ranks
    steps = optimizer._hvd_steps = world.current().count_step(optimizer._hvd_steps, named, ranks)
    if is_due(steps.count):
        weights = {name: param.data for name, param in named}
        world.current().tell_step(steps.name, steps.count, weights, ranks)


def _rebuild(base: type[torch.optim.Optimizer], state: dict[str, Any], arguments: OptimizerArguments) -> Any:
    optimizer = base.__new__(base)
    optimizer.__setstate__(state)
    return DistributedOptimizer(optimizer, **vars(arguments))


def _wrapped(optimizer: torch.optim.Optimizer, methods: type, arguments: OptimizerArguments) -> Any:
    """Return an optimizer of a subclass of the given one's class, with the same state and param groups."""
    base = type(optimizer)
    cls = type(base.__name__, (methods, Wrapped, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    wrapped: Any = cls.__new__(cls)  # type: ignore[call-overload]
    own = ("state", "param_groups", "step")  # a schedule has replaced the step of its optimizer
    wrapped.__dict__.update({name: value for name, value in vars(optimizer).items() if name not in own})
    wrapped._hvd_inner = optimizer
    wrapped._hvd_base, wrapped._hvd_arguments = base, arguments
    wrapped._hvd_steps = None
    wrapped._hvd_synchronized = wrapped._hvd_skips = wrapped._hvd_by_scaler = False
    return wrapped


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] | CodecCompression = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    deterministic: bool = False,
) -> Any:
    """Return an optimizer of the same class that steps with the gradients of all ranks.

    Gradients are reduced while backward computes them. When backward ends, ``param.grad`` is final, so gradients can be
    clipped, and unscaled by a GradScaler, as they are.

    Args:
        optimizer: keeps its state and shares its param groups. An optimizer of the same parameters that was wrapped
            before does not step any more.
        named_parameters: ``model.named_parameters()``; names pair parameters of different ranks.
        compression: how gradients travel.
        backward_passes_per_step: gradients of so many backward passes are added before they are reduced; without a
            division. The last step of an epoch may have fewer.
        op: Average, Sum, Adasum, Min, Max or Product.
        gradient_predivide_factor: divides before and multiplies after the sum; only with Average.
        num_groups: deprecated; use ``groups``.
        groups: number of groups, or lists of parameters that are reduced together.
        sparse_as_dense: reduce sparse gradients as dense ones. They stay dense, except for ``torch.optim.SparseAdam``,
            which takes none.
        process_set: the ranks that take part.
        deterministic: results do not depend on when gradients become ready: they are not fused.

    Raises:
        ValueError: a wrong argument; the text says which.
        NotImplementedError: Adasum with a process set.
    """
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    optimizer = getattr(optimizer, "_hvd_inner", optimizer)  # one that was wrapped before is wrapped anew
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if world.is_initialized() and world.current().size > 1:
        refuse_wrapped(params, None, world.current().rank)
    named = checked_names(optimizer, None if named_parameters is None else list(named_parameters))
    arguments = OptimizerArguments(
        named, compression, backward_passes_per_step, op, gradient_predivide_factor, groups, sparse_as_dense,
        process_set, deterministic,
    )  # fmt: skip
    if op == Adasum and world.current().size > 1:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets.")
        for param in params:
            release(param)
        return _wrapped(optimizer, AdasumMethods, arguments)
    if isinstance(compression, CodecCompression) and groups:
        raise ValueError("groups cannot be compressed by a codec")
    wrapped = _wrapped(optimizer, DistributedMethods, arguments)
    sparse_again = sparse_as_dense and isinstance(optimizer, torch.optim.SparseAdam)
    wrapped._hvd = Reducer(arguments, make_groups(groups, named, params, process_set), sparse_again)
    return wrapped
