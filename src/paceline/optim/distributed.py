"""DistributedOptimizer: a torch optimizer that merges gradients, or runs its update, in a key-value store."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, overload

import torch

from paceline import compression as codecs
from paceline.errors import PacelineError
from paceline.kvstore import create
from paceline.kvstore.base import KVStoreBase
from paceline.observe import meter
from paceline.observe.account import UPDATE
from paceline.optim.choosing import choose_strategy
from paceline.optim.local_choices import LocalChoices, Outer
from paceline.optim.local_steps import LocalSteps
from paceline.optim.names import may_have_gradient, name_added, name_parameters
from paceline.optim.samples import SampleCounter, Weigh
from paceline.optim.standing import Standing
from paceline.optim.strategy import MergeChoices, OnNan, StrategySetup, Update
from paceline.optim.watch import ModelWatch, refuse_scripted
from paceline.torch_hooks.optimizers import check_wrappable, share_hooks
from paceline.torch_hooks.untraced import apart
from paceline.torch_hooks.wrappers import refuse_wrapped
from paceline.worker import alone, notice


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer; the training loop stays as it is.

    PyTorch's losses give gradients that are means over the local batch. The update uses the mean over the samples of
    all workers. Every worker starts from rank 0's weights.

    With ``update="worker"`` (the default of ``dist_sync``) every backward pass ends with the merged gradients in
    ``param.grad``, as with DistributedDataParallel, and the wrapped optimizer steps in each worker. With
    ``update="server"`` (all that the other modes offer) the servers step. ``docs/pytorch.md`` has the rules for loops.

    Collective: every worker of the job creates it, with the same model and the same options.

    Args:
        optimizer: the optimizer. Its state is kept.
        kvstore: a store, or the type of one to create.
        model: the network. With it, keys have the parameters' names, frozen parameters and buffers are broadcast too,
            buffers follow rank 0's, and samples can be counted from the inputs.
        named_parameters: names for the keys, when there is no ``model``.
        update: side that steps: ``worker`` or ``server``.
        compression: ``{"type": "2bit", "threshold": 0.5}`` and the like; with ``"leg": "both"`` for pulls too, or a
            list for different codecs on the two legs (see ``KVStore.set_gradient_compression``).
        staleness: bound of ``dist_ssync`` and ``dist_gsync``, in rounds, when ``kvstore`` is a type.
        weighting: how stale updates are weighted, when ``kvstore`` is a type.
        lr_scale: unit of the learning rate, when ``kvstore`` is a type: an ``update``, or a ``sample``.
        age: missed updates beyond which a push is dropped, when ``kvstore`` is a type.
        reduction: ``mean`` over all samples, or ``sum`` over workers.
        samples: samples in a local batch; can be set at any time. Default: the number that a sampler of paceline
            dealt, or that ``batch_dim`` counts.
        batch_dim: dimension of the model's inputs that counts samples: 0 for ``[B, ...]``, 1 for ``[T, B]``.
        weigh: how much a worker counts in the mean: by its ``samples``, where their number is known, else equally;
            ``equal`` always, as with DistributedDataParallel; or by what its ``loss`` is divided by. A line at the
            start of the job says how it is; see ``docs/weights.md``.
        backward_passes_per_step: backward passes that are summed before a push. Gradient accumulation is correct
            without it; with it less is sent.
        overlap: push while backward runs, with ``update="worker"``. Where the servers step, what ``param.grad`` holds
            at ``step`` is pushed.
        clip_grad_norm: largest norm of the merged gradient over all parameters, as in
            ``torch.nn.utils.clip_grad_norm_``.
        clip_grad_value: largest absolute value of an element of the merged gradient.
        on_nan: what to do with gradients that are NaN or Inf: ``error``, ``skip`` the step on all workers (counted in
            ``skipped_steps``), or ``pass`` them on.
        local_steps: steps that a worker takes by itself between two exchanges, a time (``"30 s"``), ``"32 by speed"``:
            32 steps of the fastest worker, and as many of others as fit that time, or ``"auto"``: measured. For slow
            networks; ``docs/slow-networks.md`` says when it pays.
        outer: with ``local_steps``: options of the SGD that applies the workers' progress, or a function that makes an
            optimizer of a list of parameters. Default: Nesterov's momentum, 0.7 and 0.9 (DiLoCo).
        fragments: with ``local_steps``: parts of the model that are exchanged one after the other.
        delay: with ``local_steps``: steps for which the answer of an exchange is not waited for.
        blend: with ``delay``: share of the worker's own weights when the answer comes. Default: the answer, and all
            that the worker has done since its push.
        schedule: with ``local_steps``: ``"qsr"``, more steps as the learning rate falls; ``"qsr 0.2"`` with an alpha.

    Raises:
        ValueError: the optimizer does not support these settings; the text says why.
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
        lr_scale: Literal["update", "sample"] | None = None,
        age: int | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        samples: float | None = None,
        batch_dim: int | None = None,
        weigh: Weigh = "samples",
        backward_passes_per_step: int = 1,
        overlap: bool = True,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        on_nan: OnNan = "error",
        local_steps: int | str | None = None,
        outer: Outer | None = None,
        fragments: int = 1,
        delay: int = 0,
        blend: float | None = None,
        schedule: str | None = None,
    ) -> None:
        check_wrappable(optimizer)
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError("this optimizer is wrapped already")
        if hasattr(optimizer, "skip_synchronize"):
            raise ValueError(
                "this optimizer is one of Horovod's interface, which merges gradients by itself: give "
                "DistributedOptimizer the optimizer that it wraps"
            )
        refuse_scripted(model)
        choices = MergeChoices(reduction, backward_passes_per_step, overlap, clip_grad_norm, clip_grad_value, on_nan)
        local = LocalChoices.of(
            optimizer, local_steps, schedule, outer=outer, fragments=fragments, delay=delay, blend=blend
        )  # fmt: skip
        codecs.by_leg(compression)  # raises for wrong settings before anything is changed
        self.inner = optimizer
        super().__init__(optimizer.param_groups, optimizer.defaults)
        share_hooks(optimizer, self)
        self._named_model, self._samples = model, SampleCounter(samples, batch_dim, weigh)
        named = model.named_parameters() if model is not None and named_parameters is None else named_parameters
        self._names = name_parameters(self.param_groups, named)
        self._layout = _layout(self.param_groups)
        store = _store(kvstore, staleness=staleness, weighting=weighting, lr_scale=lr_scale, age=age)
        self._refuse_wrapped(store)
        setup = StrategySetup(optimizer, self._names, choices, model, self._samples, compression)
        # Wrappers have a _strategy of their own and copy all else, as LightningOptimizer does.
        self._merging = choose_strategy(setup, store, update, local)
        self.kvstore = self._merging.store
        self._own_stores = [one for one in dict.fromkeys((self.kvstore, store)) if one is not kvstore]
        if self.kvstore.num_workers > 1:
            alone.note_optimizer([param for _, param, _ in self._names])
        self._step_supports_amp_scaling = not self._merging.steps_here
        self._standing = Standing(self._merging, model)
        if model is not None:
            merging = self._merging
            merging.model_watch = ModelWatch(model, self._samples, merging.buffers, merging.weights)

    # ---- param groups ----------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups of the wrapped optimizer. With new parameters every worker sets them.

        Raises:
            PacelineError: parameters come, go or change their group, and the servers step.
        """
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if "_merging" in self.__dict__:  # else torch's constructor sets an empty list
            if _layout(groups) != self._layout:
                self._merging.check_extendable()
            self.inner.param_groups = groups
            self._add_new()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group. After wrapping every worker must add it, and ``update`` must be ``worker``.

        Raises:
            PacelineError: the servers step.
        """
        if "_merging" in self.__dict__:  # else torch's constructor adds the groups that are there
            self._merging.check_extendable()
            self.inner.add_param_group(param_group)
            self._add_new()

    def _add_new(self) -> None:
        """Share the parameters that are new in the param groups; every worker does."""
        named = () if self._named_model is None else self._named_model.named_parameters()
        added = name_added(self.param_groups, named, self._names)
        self._names, self._layout = self._names + added, _layout(self.param_groups)
        if added:
            self._merging.add(added)

    def _check_groups(self) -> None:
        """Raise if a list of parameters was changed in place: backward has not merged the gradients of new ones."""
        layout = _layout(self.inner.param_groups)
        if layout == self._layout:
            return
        self._merging.check_extendable()
        known = {id(param) for _, param, _ in self._names}
        now = (param for group in self.inner.param_groups for param in group["params"])
        if any(id(param) not in known and may_have_gradient(param) for param in now):
            raise PacelineError(
                f"worker {self.kvstore.rank}: param_groups has parameters that were put into it in place, so that the "
                "other workers do not share them: before the forward pass, call optimizer.add_param_group(...) or set "
                "optimizer.param_groups = [...] on every worker"
            )
        self._layout = layout

    # ---- a step ----------------------------------------------------------------------------------------------------

    @property
    def samples(self) -> float | None:
        """Samples in a local batch; None: those that a sampler of paceline dealt, or that ``batch_dim`` counts.

        Set before each of the passes that a step accumulates, numbers are added up; set once, it is that of the step.

        Raises:
            ValueError: the number is negative or not finite.
        """
        return self._samples.given

    @samples.setter
    def samples(self, samples: float | None) -> None:
        self._samples.give(samples)

    def count(self, batch: Any) -> None:
        """Count the samples of this batch in the next pushes, instead of those of the model's calls.

        For trainers that get batches from elsewhere, and do not call ``model`` itself.

        Args:
            batch: tensors, nested or not. What makes their number certain is the same as for the model's inputs.
        """
        self._samples.see_batch(batch)

    @property
    def round(self) -> int:
        """Steps of this optimizer whose updates the parameters hold, skipped ones included.

        If the job has failed, ``model.state_dict()`` still returns the parameters of this round.
        """
        return self._merging.weights.round

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because gradients were not finite."""
        return self._merging.skipped_steps

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @apart
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Apply the gradients of all workers; returns when the new weights are in place.

        With a closure and ``update="worker"`` the loss is merged too. So optimizers that use it to decide (LBFGS)
        decide the same on all workers.

        Raises:
            PeerDiedError: a member of the job died.
            DeadlineError: other workers did not push in time.
            NonFiniteError: a gradient is NaN or Inf.
            PacelineError: with ``update="server"``, a weight or the optimizer's state was changed in this process
                alone, so the servers do not have the change.
        """
        if self._merging.steps_here:
            return self._step(closure)  # the wrapped optimizer's step runs the hooks
        return self._hooked_step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch wraps other steps with hooks

    def _step(self, closure: Callable[[], float] | None) -> float | None:
        if self._merging.weights.round == 0:
            self._refuse_wrapped(self.kvstore)
            if self.kvstore.num_workers > 1:
                alone.note_exchange()  # of local steps it comes later
        self._check_groups()
        set_by_scaler = vars(self)
        meter.active.enter(UPDATE)
        try:
            loss = self._merging.step(closure, set_by_scaler.get("grad_scale"), set_by_scaler.get("found_inf"))
            self._merging.ended_step()
            notice.step()
            return loss  # type: ignore[no-any-return]
        finally:
            meter.active.step_ends()

    _hooked_step = torch.optim.Optimizer.profile_hook_step(_step)

    def _refuse_wrapped(self, store: KVStoreBase) -> None:
        """Raise if DDP or the like merges the gradients, too: before the start, and at the first step."""
        if store.num_workers > 1:
            refuse_wrapped((param for _, param, _ in self._names), self._named_model, store.rank)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate gradients, as with DistributedDataParallel.

        Raises:
            PacelineError: the servers step; use ``backward_passes_per_step``.
        """
        return self._merging.no_sync()

    def broadcast_weights(self) -> None:
        """Set the weights and buffers of all workers and servers to rank 0's. Every worker calls it."""
        if (buffers := self._merging.buffers) is not None and (sent := buffers.publish()) is not None:
            sent.wait()
        self._merging.broadcast_weights()
        if buffers is not None:
            buffers.settled()
        self.sync_buffers()

    def exchange_now(self) -> None:
        """With ``local_steps``: exchange what workers have done since the last exchange. Every worker calls it.

        At the end of training, so that the last steps of all workers count.

        Raises:
            PacelineError: there are no local steps.
        """
        if not isinstance(self._merging, LocalSteps):
            raise PacelineError("exchange_now is for local_steps=; without them each step is an exchange")
        self._merging.exchange_now()

    def refresh_weights(self) -> None:
        """Set this worker's weights to the newest of the servers that it knows, between two steps."""
        self._merging.refresh_weights()

    def sync_buffers(self) -> None:
        """Set buffers to rank 0's of its last step. Evaluation, ``state_dict`` and copies of ``model`` do so too."""
        if self._merging.buffers is not None:
            self._merging.buffers.take(is_asked=True)

    @apart
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, or to zeros."""
        super().zero_grad(set_to_none)
        self._merging.zeroed()

    def close(self) -> None:
        """Stop watching backward passes, and leave the stores that were made for this optimizer. Idempotent.

        A new DistributedOptimizer of the same parameters stops this one's watch too. But only after ``close`` of every
        worker the servers forget this optimizer's data.
        """
        watch, buffers = self._merging.model_watch, self._merging.buffers
        self._merging.close()
        if watch is not None:
            watch.close()
        if buffers is not None:
            buffers.close()
        for store in self._own_stores:
            store.close()

    # ---- state -----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The state of the wrapped optimizer. With ``update="server"`` it is pulled from the servers.

        With ``update="server"`` every worker sets it, and the servers get rank 0's.
        """
        if "_merging" in self.__dict__:
            self._merging.weights.read()
            self._merging.show_states()
        return self.inner.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        if "_merging" in self.__dict__:  # else torch's constructor sets an empty one
            self.inner.state = state
            self._merging.take_states()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as any torch optimizer does; with ``update="server"`` it is pulled from the servers.

        Compression adds the entry ``codec_states``: residuals of this worker's pushes and of its pulls. To resume with
        the same bits, every worker saves its own.

        Raises:
            PeerDiedError: with ``update="server"``: the job has failed, and the state is lost with the servers.
        """
        self._merging.weights.read()
        saved_besides = self._merging.fetch_states()  # before the user's optimizer is read
        return self.inner.state_dict() | saved_besides

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. With a distributed store every worker calls it; where servers step, rank 0's state is used.

        Residuals of pushes belong to one worker: if the state is another worker's, they start at 0.
        """
        self.inner.load_state_dict(state_dict)
        self._merging.give_states(state_dict)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the wrapped optimizer."""
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.optim.Optimizer:
        """Return a copy of the wrapped optimizer with its state. The copy is not part of the job."""
        self.state_dict()
        return copy.deepcopy(self.inner, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the wrapped optimizer with its state."""
        self.state_dict()
        return _the_same, (self.inner,)


def _layout(groups: Iterable[dict[str, Any]]) -> list[list[int]]:
    """Return which parameter is where in the param groups."""
    found = []
    for group in groups:
        found.append(list(map(id, group["params"])))
    return found


def _the_same(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the wrapped optimizer: what unpickling a DistributedOptimizer gives."""
    return optimizer


def _store(kvstore: str | KVStoreBase, **options: Any) -> KVStoreBase:
    """Return the given store, or create one of the given type."""
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(kvstore, str):
        return create(kvstore, **given)
    if given:
        raise ValueError(f"{', '.join(given)} belong to the store; give them to kvstore.create")
    return kvstore
