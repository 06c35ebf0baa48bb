"""Watches a model: counts samples, and updates buffers before they are read."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.kvstore.weights import Weights
from paceline.observe import meter
from paceline.optim.buffers import Buffers
from paceline.optim.samples import SampleCounter, tensors_in
from paceline.worker import alone

_UNWATCHED = (
    "give that named_parameters=model.named_parameters() instead of model=, and set optimizer.samples to the size of "
    "each batch"
)


class _NotCompiledError(PacelineError, AttributeError):
    """A hook of paceline cannot be compiled. To other code a hook has no name."""


class ModelHook:
    """A hook of a model. Copies of the model, and pickled ones, have a hook that does nothing.

    The method that it calls is held weakly, so that the model does not keep the optimizer alive.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = None if call is None else weakref.WeakMethod(call)

    def __call__(self, *args: Any) -> None:
        """Call the function, unless this hook is a copy or the optimizer was freed."""
        call = None if self._call is None else self._call()
        if call is not None:
            call(*args)

    @property
    def is_dead(self) -> bool:
        """Whether this hook does nothing any more."""
        return self._call is None or self._call() is None

    @property
    def __name__(self) -> str:
        """Raise an error: only torch.jit.script, which compiles hooks, asks a hook for its name."""
        raise _NotCompiledError(
            "torch.jit.script compiles the hooks of a model, and those of paceline are Python. After training, call "
            "optimizer.close() first. To train a scripted model, script it before the DistributedOptimizer is made, "
            f"and {_UNWATCHED}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHook:
        return type(self)()

    def __reduce__(self) -> tuple[type[ModelHook], tuple[()]]:
        return type(self), ()


class CopyHook(ModelHook):
    """An attribute of a module that is copied and pickled before all others, and calls its function then."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHook:
        self()
        return super().__deepcopy__(memo)

    def __reduce__(self) -> tuple[type[ModelHook], tuple[()]]:
        self()
        return super().__reduce__()

    def put_first(self, module: torch.nn.Module) -> None:
        """Make this the first attribute of a module."""
        attributes = dict(module.__dict__)
        attributes.pop(_ATTRIBUTE, None)
        module.__dict__.clear()
        module.__dict__.update({_ATTRIBUTE: self} | attributes)


_ATTRIBUTE = "_paceline_before_copy"

_OWN_BUFFERS = ", and buffers such as running means may be this worker's own"


class ModelWatch:
    """Counts samples, and brings buffers up to date before the model reads them.

    Weights can be read also when the job has failed and nothing new arrives.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        samples: SampleCounter,
        buffers: Buffers | None,
        weights: Weights,
    ) -> None:
        self._samples, self._buffers, self._weights = samples, buffers, weights
        for module in model.modules():
            _remove_dead_hooks(module)
        hooks = self._hooks = [
            model.register_forward_pre_hook(ModelHook(self._before_forward)),
            model.register_forward_hook(ModelHook(self._after_forward), with_kwargs=True),
        ]
        hooks.append(model.register_state_dict_pre_hook(ModelHook(self._before_read)))  # type: ignore[no-untyped-call]
        CopyHook(self._before_read).put_first(model)
        for module in model.modules():  # what is under way must not come after what is loaded
            if buffers is not None and module._buffers:
                hooks.append(module.register_load_state_dict_pre_hook(ModelHook(self._before_load)))  # type: ignore[no-untyped-call]
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # what torch.compile has made of the model runs without hooks, also new ones

    def close(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()

    def _after_forward(self, module: torch.nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        self._samples.see((args, kwargs), outputs)
        if module.training and not torch.compiler.is_compiling() and alone.wants_inputs():
            alone.note_inputs(tensors_in((args, kwargs)))

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if module.training:
            meter.active.forward_begins()
        else:
            self._weights.read()
        if self._buffers is not None and self._buffers.forward_begins():
            self._weights.read(self._buffers.take, _OWN_BUFFERS)

    def _before_read(self, *_: Any) -> None:
        self._weights.read(self._bring, _OWN_BUFFERS)

    def _before_load(self, *_: Any) -> None:
        self._before_read()
        if self._buffers is not None:
            self._buffers.keep()

    def _bring(self) -> None:
        if self._buffers is not None:
            self._buffers.take()


def _remove_dead_hooks(module: torch.nn.Module) -> None:
    """Remove what earlier optimizers have left, which are freed by now."""
    before, after, loading = module._forward_pre_hooks, module._forward_hooks, module._load_state_dict_pre_hooks
    for hooks in (before, after, module._state_dict_pre_hooks, loading):
        for key, wrapped in list(hooks.items()):
            hook = getattr(wrapped, "hook", wrapped)  # torch wraps those of load_state_dict
            if isinstance(hook, ModelHook) and hook.is_dead:
                del hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)


def refuse_scripted(model: torch.nn.Module | None) -> None:
    """Raise for a model of TorchScript: it takes no hooks.

    Raises:
        ValueError: says what to do instead.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(f"model is a {type(model).__name__} of TorchScript, which takes no hooks: {_UNWATCHED}")


def refuse_renormalising(model: torch.nn.Module) -> None:
    """Raise for modules that write weights in their forward pass: each worker would write other values.

    Raises:
        ValueError: names the module and says what to do instead.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(
                f"module {name!r} has max_norm={module.max_norm}: it scales the rows that a worker looks up, so the "
                "workers' weights would drift apart. Leave max_norm out, and renormalise all rows after step instead"
            )
