"""DistributedOptimizer: a torch optimizer whose gradients, or whose whole update, go through a key-value store."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, overload

import torch

from paceline import compression as codecs
from paceline.errors import PacelineError
from paceline.kvstore import create
from paceline.kvstore.agreement import agree_on_store, optimizer_facts, option_facts, tensor_facts
from paceline.kvstore.base import KVStore, KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.optim.buffers import Buffers
from paceline.optim.choices import Choices, OnNan, Update
from paceline.optim.local_update import LocalUpdate, StoreUpdate
from paceline.optim.names import name_parameters
from paceline.optim.samples import Samples
from paceline.optim.server_update import ServerUpdate, spec_of
from paceline.optim.watch import ModelWatch, refuse_renormalising
from paceline.optim.worker_update import WorkerUpdate
from paceline.transport.allocator import give_back_freed_memory
from paceline.worker.optimizer_states import States

logger = logging.getLogger(__name__)


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer; the training loop stays as it is.

    Gradients are means over the local batch, as PyTorch's losses make them; what is applied is the mean over the
    samples of all workers. Every worker starts from rank 0's weights.

    With ``update="worker"`` (the default of ``dist_sync``) every backward pass ends with the merged gradients in
    ``param.grad``, as with DistributedDataParallel, and the wrapped optimizer steps in each worker. With
    ``update="server"`` (the other modes have no other) the servers step. ``docs/pytorch.md`` says what a loop may do.

    Collective: every worker of the job makes it, with the same model and the same options.

    Args:
        optimizer: the optimizer. Its state is kept.
        kvstore: a store, or the type of one to create.
        model: the network. With it keys have the parameters' names, frozen parameters and buffers are broadcast too,
            buffers follow rank 0's, and the number of samples is seen from the inputs.
        named_parameters: names for the keys, when there is no ``model``.
        update: who steps: ``worker`` or ``server``.
        compression: ``{"type": "2bit", "threshold": 0.5}`` and the like; with ``"leg": "both"`` for pulls too, or a
            list for different codecs on the two legs (see ``KVStore.set_gradient_compression``).
        staleness: bound of ``dist_ssync`` and ``dist_gsync``, in rounds, when ``kvstore`` is a type.
        weighting: of stale updates, when ``kvstore`` is a type.
        age: missed updates beyond which a push is dropped, when ``kvstore`` is a type.
        reduction: ``mean`` over all samples, or ``sum`` over workers.
        samples: samples in a local batch; settable any time. Default: seen by ``model``, else all workers count alike.
        batch_dim: dimension of the model's inputs that counts samples; 1 for ``[T, B]``.
        backward_passes_per_step: backward passes that are added up before they are pushed. Accumulation is right
            without it; with it less is sent.
        overlap: push while backward runs. Default: True in ``dist_sync``; in the other modes what is in ``param.grad``
            at ``step`` is pushed. With ``update="server"`` gradients must not change after they were pushed.
        lazy: with ``update="server"``, ``step`` returns before the new weights are here; the next forward pass of
            ``model``, its ``state_dict``, copies of it and :meth:`synchronize` wait for them. Other reads do not.
        clip_grad_norm: largest norm of the merged gradient over all parameters, as ``torch.nn.utils.clip_grad_norm_``.
        clip_grad_value: largest absolute value of an element of the merged gradient.
        on_nan: what to do with gradients that are NaN or Inf: ``error``, ``skip`` the step on all workers (counted in
            ``skipped_steps``), or ``pass`` them on.

    Raises:
        ValueError: the optimizer cannot work this way; the text says why.
        KeyMismatchError: the models or options of the workers differ.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kvstore: str | KVStoreBase = "dist_sync",
        *,
        model: torch.nn.Module | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        update: Update | None = None,
        compression: codecs.Compression | None = None,
        staleness: int | None = None,
        weighting: str | None = None,
        age: int | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        samples: float | None = None,
        batch_dim: int = 0,
        backward_passes_per_step: int = 1,
        overlap: bool | None = None,
        lazy: bool = False,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        on_nan: OnNan = "error",
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer")
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError("this optimizer is wrapped already")
        if lazy and model is None:
            raise ValueError("lazy=True needs model=: its forward pass waits for the weights")
        choices = Choices(
            reduction, backward_passes_per_step, overlap, lazy, clip_grad_norm, clip_grad_value, on_nan
        )  # fmt: skip
        by_leg = codecs.by_leg(compression)
        self.inner = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = optimizer.state
        self._named_model, self._samples = model, Samples(samples, batch_dim)
        named = model.named_parameters() if model is not None and named_parameters is None else named_parameters
        self._names = name_parameters(self.param_groups, named)
        self._buffers: Buffers | None = None
        self.kvstore = _store(kvstore, choices, update, staleness=staleness, weighting=weighting, age=age)
        self._update: LocalUpdate | ServerUpdate
        if isinstance(self.kvstore, DistStore):
            self._update = self._distributed(self.kvstore, update, choices, compression or ())
        else:
            self._update = self._in_process(self.kvstore, update, choices, compression if by_leg else None)
        self._step_supports_amp_scaling = self._update.scales_by_itself
        if model is not None:
            self._watch = ModelWatch(model, self._samples, self._buffers, self.synchronize, lazy)
        if isinstance(self.kvstore, DistStore):
            self.kvstore.barrier()
            give_back_freed_memory()

    # ---- setting up ------------------------------------------------------------------------------------------------

    def _distributed(
        self, store: DistStore, update: Update | None, choices: Choices, compression: codecs.Compression
    ) -> WorkerUpdate | ServerUpdate:
        who = self._who_steps(store, update)
        self._agree(store, who, choices, compression)
        store.set_gradient_compression(compression)
        model = self._named_model
        if model is not None and store.num_workers > 1:
            refuse_renormalising(model)
        if model is not None:
            self._buffers = Buffers(store, model, [param for _, param, _ in self._names])
        if who == "worker":
            return WorkerUpdate(self.inner, self._names, choices, store, model, self._samples, self._publish)
        spec = spec_of(self.inner, self._names)
        return ServerUpdate(self.inner, self._names, choices, store, spec, model, self._samples, self._publish)

    def _agree(self, store: DistStore, who: Update, choices: Choices, compression: codecs.Compression) -> None:
        """Compare the model and all options with the other workers, before anything is sent."""
        legs = sorted((leg, sorted(codec.params().items())) for leg, codec in codecs.by_leg(compression).items())
        options = dataclasses.asdict(choices) | {"update": who, "compression": str(legs)}
        facts = [*optimizer_facts(self.inner, self._names), *option_facts("DistributedOptimizer", options)]
        if self._named_model is not None:
            facts += tensor_facts(self._named_model.named_buffers(), "buffer")
        agree_on_store(store, "the optimizer", facts)

    def _who_steps(self, store: DistStore, update: Update | None) -> Update:
        if update not in (None, "worker", "server"):
            raise ValueError(f"update is 'worker' or 'server', not {update!r}")
        if update == "worker" and store.policy.merge != "all":
            raise ValueError(f"{store.type} has no merged gradients; update='worker' needs dist_sync")
        return update or ("worker" if store.policy.merge == "all" else "server")

    def _in_process(
        self, store: KVStoreBase, update: Update | None, choices: Choices, compression: codecs.Compression | None
    ) -> LocalUpdate:
        if update == "server":
            raise ValueError(f"a {store.type} store has no servers; update='server' needs a distributed one")
        if compression is not None:
            store.set_gradient_compression(compression)  # type: ignore[attr-defined]
        if compression is None and store.num_workers == 1:
            return LocalUpdate(self.inner, self._names, choices)
        return StoreUpdate(self.inner, self._names, choices, store)

    def _publish(self) -> None:
        if self._buffers is not None:
            self._buffers.publish()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. After wrapping: every worker does, and the worker must step.

        Raises:
            PacelineError: the servers step.
        """
        if "_update" not in self.__dict__:
            super().add_param_group(param_group)
            return
        if isinstance(self._update, ServerUpdate):
            self._update.add([])
        self.inner.add_param_group(param_group)
        if self.inner.param_groups is not self.param_groups:
            self.param_groups.append(self.inner.param_groups[-1])
        names = None if self._named_model is None else self._named_model.named_parameters()
        known = {name for name, _, _ in self._names}
        added = [one for one in name_parameters(self.param_groups, names) if one[0] not in known]
        self._names += added
        self._update.add(added)

    # ---- a step ----------------------------------------------------------------------------------------------------

    @property
    def samples(self) -> float | None:
        """Samples in a local batch; None: as seen by ``model``."""
        return self._samples.given

    @samples.setter
    def samples(self, samples: float | None) -> None:
        self._samples.given = samples

    @property
    def skipped_steps(self) -> int:
        """Steps that were left out because gradients were not finite."""
        return self._update.skipped_steps

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply the gradients of all workers; returns with the new weights in place, unless ``lazy``.

        With a closure and ``update="worker"`` the loss is merged too, so that optimizers that decide by it (LBFGS)
        decide alike on all workers.

        Raises:
            PeerDiedError: a member of the job died.
            DeadlineError: other workers did not come in time.
            NonFiniteError: a gradient is NaN or Inf.
            PacelineError: with ``update="server"``, a gradient, an option or a weight has changed where the servers do
                not see it.
        """
        if isinstance(self._update, ServerUpdate):
            scale, inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            return self._update.step(closure, scale, inf)  # type: ignore[no-any-return]
        return self._update.step(closure)  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        """Wait until the weights of the last step are here; only with ``lazy`` they may not be."""
        self._update.synchronize()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only add gradients up, as DistributedDataParallel's.

        Raises:
            PacelineError: the servers step; there is ``backward_passes_per_step``.
        """
        if isinstance(self._update, ServerUpdate):
            raise PacelineError("no_sync needs update='worker'; with the servers stepping set backward_passes_per_step")
        return self._update.no_sync()

    def broadcast_weights(self) -> None:
        """Make rank 0's weights and buffers everybody's, on the servers too. Every worker calls it."""
        self._publish()
        self._update.broadcast_weights()
        self.sync_buffers()

    def sync_buffers(self) -> None:
        """Take rank 0's buffers as of its last step. Evaluation, ``state_dict`` and copies of ``model`` do so too."""
        if self._buffers is not None:
            self._buffers.take()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        super().zero_grad(set_to_none)

    def close(self) -> None:
        """Take no part in backward passes any more. Another DistributedOptimizer of the same parameters does this."""
        self._update.close()

    # ---- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state like any torch optimizer, gathered from the servers where they hold it.

        With compression there is ``codec_states`` besides: what this worker's codec has not pushed yet, and what the
        servers have not told it yet. To go on bit for bit every worker saves its own.
        """
        self.synchronize()
        unsent = self._update.fetch_states() if isinstance(self._update, ServerUpdate) else {}
        return super().state_dict() | self._codec_states(unsent)

    def _codec_states(self, unsent: States) -> dict[str, Any]:
        store = self.kvstore
        if not isinstance(store, KVStore) or not (store.keeps_residuals or unsent):
            return {}
        return {"codec_states": {"rank": store.rank, "pushes": store.codec_states(), "unsent": unsent}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; with a distributed store every worker calls it, and where servers step rank 0's counts.

        Each worker's own are the residuals of its pushes: where the state is another worker's they start at 0.
        """
        self.synchronize()
        super().load_state_dict(state_dict)
        self.inner.param_groups, self.inner.state = self.param_groups, self.state
        codec_states = state_dict.get("codec_states", {})
        if isinstance(self.kvstore, KVStore) and self.kvstore.keeps_residuals:
            mine = codec_states.get("rank") == self.kvstore.rank
            self.kvstore.set_codec_states(codec_states["pushes"] if mine else {})
        if isinstance(self._update, ServerUpdate):
            self._update.give_states(codec_states.get("unsent", {}))

    def __getattr__(self, name: str) -> Any:
        """Return what the wrapped optimizer has besides."""
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.optim.Optimizer:
        """Return a copy of the wrapped optimizer with its state; it is not part of the job."""
        self.state_dict()
        return copy.deepcopy(self.inner, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the wrapped optimizer with its state."""
        self.state_dict()
        return _the_same, (self.inner,)


def _the_same(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Stand for a DistributedOptimizer where one is unpickled."""
    return optimizer


def _store(kvstore: str | KVStoreBase, choices: Choices, update: Update | None, **options: Any) -> KVStoreBase:
    """Return the store for the parameters."""
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(kvstore, str):
        kvstore = create(kvstore, **given)
    elif given:
        raise ValueError(f"{', '.join(given)} belong to the store; give them to kvstore.create")
    if not isinstance(kvstore, DistStore):
        return kvstore
    on_servers = update == "server" or kvstore.policy.merge == "groups"
    clip = choices.clip_norm if on_servers and kvstore.policy.merges_rounds else None
    return kvstore.for_optimizer(choices.reduction == "mean", clip or 0.0)
