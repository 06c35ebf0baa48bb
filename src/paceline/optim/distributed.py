"""DistributedOptimizer: a torch optimizer whose gradients, or whose whole update, go through a key-value store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal, overload

import torch

from paceline import compression as codecs
from paceline.errors import PacelineError
from paceline.kvstore import create
from paceline.kvstore.base import KVStore, KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.kvstore.dist_states import UNSENT, States
from paceline.optim.binding import Bound, bind
from paceline.optim.names import name_parameters
from paceline.optim.reducer import Reducer
from paceline.transport.allocator import give_back_freed_memory
from paceline.updaters import KeyOptions, UpdaterSpec, make_spec, option_groups

logger = logging.getLogger(__name__)


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer; the training loop stays as it is.

    Gradients are means over the local batch, as PyTorch's losses make them; what is applied is the mean over the
    samples of all workers. Every worker starts from rank 0's weights. Pushes leave from gradient hooks while backward
    still runs. Options of ``param_groups`` (learning rates, schedules) travel with the pushes and count from the next
    backward on.

    Collective: every worker of the job makes it, with the same model.

    Args:
        optimizer: any elementwise or whole-tensor optimizer that :mod:`paceline.updaters` knows; others work with
            ``dist_sync``, where the update can run in the worker. Its state is kept.
        kvstore: a store, or the type of one to create.
        model: the network. With it keys have the parameters' names, frozen parameters and buffers are broadcast too,
            the number of samples is seen from the input's first dimension, and the wait for new weights moves from
            ``step`` to the forward pass of the layer that needs them.
        named_parameters: names for the keys, when there is no ``model``.
        compression: ``{"type": "2bit", "threshold": 0.5}`` and the like; with ``"leg": "both"`` for pulls too, or a
            list for different codecs on the two legs (see ``KVStore.set_gradient_compression``).
        staleness: bound of ``dist_ssync`` and ``dist_gsync``, in rounds, when ``kvstore`` is a type.
        weighting: of stale updates, when ``kvstore`` is a type.
        update_on_kvstore: run the optimizer on the servers (True), or in the worker on merged gradients (False; only in
            ``dist_sync``). Default: on the servers where possible.
        reduction: ``mean`` over all samples, or ``sum`` over workers.
        samples: samples in a local batch; settable any time. Default: seen by ``model``, else all workers count alike.
        backward_passes_per_step: gradient accumulation: how many backward passes come before a ``step``.
        overlap: push while backward runs. Set False where gradients change between ``backward`` and ``step``
            (GradScaler, clipping).

    Raises:
        ValueError: the optimizer cannot work this way; the text says why.
        KeyMismatchError: the models of the workers differ.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kvstore: str | KVStoreBase = "dist_sync",
        *,
        model: torch.nn.Module | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        compression: codecs.Compression | None = None,
        staleness: int | None = None,
        weighting: str | None = None,
        update_on_kvstore: bool | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        samples: float | None = None,
        backward_passes_per_step: int = 1,
        overlap: bool = True,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{type(optimizer).__name__} is not a torch.optim.Optimizer")
        if isinstance(optimizer, DistributedOptimizer):
            raise ValueError("this optimizer is wrapped already")
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is 'mean' or 'sum', not {reduction!r}")
        if backward_passes_per_step < 1:
            raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}; it must be at least 1")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = optimizer.state
        self.inner = optimizer
        self.samples = samples
        self._seen = 0.0
        self._skip = False
        self._overlap, self._model = overlap, model
        named = model.named_parameters() if model is not None and named_parameters is None else named_parameters
        self._named = name_parameters(self.param_groups, named)
        by_leg = codecs.by_leg(compression)
        self.kvstore = _store(kvstore, staleness, weighting, reduction == "mean")
        self._reducer: Reducer | None = None
        self._bound: list[Bound] = []
        self._by_module: dict[torch.nn.Module, list[Bound]] = {}
        self._on_store = False
        self._mean = reduction == "mean"
        if isinstance(self.kvstore, DistStore):
            self._set_up(self.kvstore, update_on_kvstore, compression or (), backward_passes_per_step)
        elif by_leg:
            self.kvstore.set_gradient_compression(compression)  # type: ignore[attr-defined]
        if not isinstance(self.kvstore, DistStore):
            self._through_store = bool(by_leg) or self.kvstore.num_workers > 1
            self._broadcast_plain()

    # ---- setting up ------------------------------------------------------------------------------------------------

    def _set_up(self, store: DistStore, on_store: bool | None, compression: codecs.Compression, passes: int) -> None:
        names = [name for name, _, _ in self._named]
        params = [param for _, param, _ in self._named]
        spec = self._spec(store, on_store)
        self._on_store = spec.name != "assign"
        store.set_spec(spec)
        store.set_gradient_compression(compression)
        blocks = store.add_keys(names, [param.data for param in params], [group for _, _, group in self._named])
        store.traffic.refresh(store.table.plan(tuple(names)))
        self._bound = bind(names, params, blocks, values_in_place=self._on_store)
        for one in self._bound:
            one.give_value()
        if self._on_store and self.state and store.rank == 0:
            store.set_optimizer_states(self._states_of_inner())
        self._broadcast_the_rest(store)
        self._reducer = Reducer(store, self._bound, passes, self._before_round, self._on_store)
        if self._overlap:
            self._reducer.attach()
        if self._model is not None:
            self._watch_model(self._model)
        store.barrier()
        give_back_freed_memory()  # where the parameters were before they moved into the arena

    def _spec(self, store: DistStore, on_store: bool | None) -> UpdaterSpec:
        """Describe the optimizer for the servers; ``assign`` when it is to run in the worker."""
        keys: dict[str | int, KeyOptions] = {name: KeyOptions(group) for name, _, group in self._named if group}
        lock_step = store.policy.merge == "all"
        if on_store is False and not lock_step:
            raise ValueError(
                f"{store.type} updates where the values are stored; update_on_kvstore=False needs dist_sync"
            )
        if on_store is False:
            return UpdaterSpec()
        try:
            return make_spec(self.inner, keys=keys)
        except (TypeError, ValueError) as error:
            if on_store or not lock_step:
                raise
            logger.info("the optimizer runs in the workers: %s", error)
            return UpdaterSpec()

    def _broadcast_the_rest(self, store: DistStore) -> None:
        """Give every worker rank 0's frozen parameters and buffers."""
        if self._model is None:
            return
        ours = {id(one.param) for one in self._bound}
        rest = {name: param.data for name, param in self._model.named_parameters() if id(param) not in ours}
        rest |= {f"buffer {name}": buffer for name, buffer in self._model.named_buffers()}
        rest = {name: tensor for name, tensor in rest.items() if tensor.numel()}
        if not rest:
            return
        travelling = [tensor.detach().cpu() for tensor in rest.values()]
        travelling = [one if one.is_floating_point() else one.to(torch.float64) for one in travelling]
        other = store.sibling("rest")
        other.broadcast(list(rest), travelling, travelling)
        for tensor, value in zip(rest.values(), travelling, strict=True):
            tensor.copy_(value)

    def _broadcast_plain(self) -> None:
        """Start from rank 0's weights with a store that only broadcasts and reduces."""
        if self._through_store:
            names = [name for name, _, _ in self._named]
            values = [param.data for _, param, _ in self._named]
            self.kvstore.broadcast(names, values, values)

    def _watch_model(self, model: torch.nn.Module) -> None:
        by_id = {id(one.param): one for one in self._bound}
        for module in model.modules():
            mine = [by_id[id(param)] for param in module.parameters(recurse=False) if id(param) in by_id]
            if mine:
                self._by_module[module] = mine
                module.register_forward_pre_hook(self._before_forward)
        model.register_forward_pre_hook(self._see_samples)
        model.register_state_dict_pre_hook(lambda *_: self.synchronize())  # type: ignore[no-untyped-call]

    def _before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        assert self._reducer is not None
        if self._reducer.tickets and self._on_store:
            for one in self._by_module[module]:
                self._reducer.wait(one)

    def _see_samples(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        first = next((one for one in inputs if isinstance(one, torch.Tensor) and one.dim() > 0), None)
        if first is not None and module.training and torch.is_grad_enabled():
            self._seen += first.shape[0]

    # ---- a step ----------------------------------------------------------------------------------------------------

    def _before_round(self) -> None:
        """Say with the pushes of this round what they weigh and what the optimizer's options are now."""
        assert isinstance(self.kvstore, DistStore)
        samples = self.samples if self.samples is not None else self._seen or 1.0
        # A worker that skips its step takes part without samples, so that the others need not wait for it.
        self.kvstore.traffic.samples = 0.0 if self._skip else float(samples)
        if self._on_store:
            self.kvstore.set_options(option_groups(self))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Send what is not sent yet, and have it applied.

        Without ``model`` the new weights are here when it returns; with it, when a layer, ``state_dict`` or
        :meth:`synchronize` needs them.

        Raises:
            PeerDiedError: a member of the job died.
            DeadlineError: other workers did not come in time.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if self._reducer is None:
                self._plain_step()
            else:
                self._store_step(self._reducer)
        self._seen = 0.0
        return loss

    def _store_step(self, reducer: Reducer) -> None:
        for one in self._bound:
            one.check()
        self._skip = self._unscale(reducer)
        reducer.finish()
        self._skip = False
        if not self._on_store:
            reducer.wait_all()
            self._inner_step()
        elif self._model is None:
            reducer.wait_all()

    def _unscale(self, reducer: Reducer) -> bool:
        """Undo the scaling of a GradScaler; True when its step is to be skipped."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is None and found_inf is None:
            return False
        if reducer.started:
            raise PacelineError(
                "gradients were pushed during backward, before GradScaler could unscale them; "
                "make the optimizer with overlap=False"
            )
        for one in self._bound:
            if one.param.grad is not None and scale is not None:
                one.param.grad.div_(scale.to(one.param.grad.device))
        return found_inf is not None and bool(found_inf)

    def _inner_step(self) -> None:
        """Run the optimizer here, on the merged gradients that the store holds as values."""
        for one in self._bound:
            # A copy: other workers may look at the same values, and compressed answers add to them.
            one.grad.copy_(one.value)
            one.param.grad = one.grad if one.param.device.type == "cpu" else one.grad.to(one.param.device)
        self.inner.step()

    def _plain_step(self) -> None:
        """Reduce through a store of one process or a third party's, and run the optimizer here."""
        if self._through_store:
            ready = [(name, param) for name, param, _ in self._named if param.grad is not None]
            grads = [param.grad for _, param in ready if param.grad is not None]
            self.kvstore.pushpull([name for name, _ in ready], grads, grads)
            if self._mean:
                torch._foreach_div_(grads, float(self.kvstore.num_workers))
        self.inner.step()

    def synchronize(self) -> None:
        """Wait until the weights of the last step are here."""
        if self._reducer is not None and not self._reducer.started:
            self._reducer.wait_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. Zeroing them in place waits until nobody reads them any more."""
        if not set_to_none:
            self.synchronize()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; possible only before wrapping."""
        if hasattr(self, "kvstore"):
            raise PacelineError("param groups are added to the optimizer before it is given to DistributedOptimizer")
        super().add_param_group(param_group)

    # ---- state -----------------------------------------------------------------------------------------------------

    def _states_of_inner(self) -> dict[str | int, dict[str, torch.Tensor]]:
        return {
            name: {key: value for key, value in self.state[param].items() if isinstance(value, torch.Tensor)}
            for name, param, _ in self._named
            if self.state.get(param)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state like any torch optimizer, gathered from the servers where they hold it.

        With compression there is ``codec_states`` besides: what this worker's codec has not pushed yet, and what the
        servers have not told it yet. To go on bit for bit every worker saves its own.
        """
        self.synchronize()
        unsent: States = {}
        if self._on_store and isinstance(self.kvstore, DistStore):
            states = self.kvstore.optimizer_states()
            unsent = {name: {UNSENT: state.pop(UNSENT)} for name, state in states.items() if UNSENT in state}
            for name, param, _ in self._named:
                for key, value in states.get(name, {}).items():
                    shaped = value.view_as(param) if value.dim() == 1 and value.numel() == param.numel() else value
                    self.state[param][key] = shaped.to(param.device) if value.dim() else value
        return super().state_dict() | self._codec_states(unsent)

    def _codec_states(self, unsent: States) -> dict[str, Any]:
        store = self.kvstore
        if not isinstance(store, KVStore) or not (store.keeps_residuals or unsent):
            return {}
        return {"codec_states": {"rank": store.rank, "pushes": store.codec_states(), "unsent": unsent}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; with a distributed store every worker calls it, and rank 0's counts.

        Each worker's own are the residuals of its pushes: where the state is another worker's they start at 0.
        """
        self.synchronize()
        super().load_state_dict(state_dict)
        self.inner.param_groups, self.inner.state = self.param_groups, self.state
        codec_states = state_dict.get("codec_states", {})
        if isinstance(self.kvstore, KVStore) and self.kvstore.keeps_residuals:
            mine = codec_states.get("rank") == self.kvstore.rank
            self.kvstore.set_codec_states(codec_states["pushes"] if mine else {})
        if self._on_store and isinstance(self.kvstore, DistStore):
            if self.kvstore.rank == 0:
                self.kvstore.set_optimizer_states(self._states_of_inner())
                self.kvstore.set_optimizer_states(codec_states.get("unsent", {}))
            self.kvstore.barrier()


def _store(kvstore: str | KVStoreBase, staleness: int | None, weighting: str | None, mean: bool) -> KVStoreBase:
    if isinstance(kvstore, str):
        options = {
            name: value for name, value in (("staleness", staleness), ("weighting", weighting)) if value is not None
        }
        kvstore = create(kvstore, **options)
    elif staleness is not None or weighting is not None:
        raise ValueError("staleness and weighting belong to the store; give them to kvstore.create")
    if isinstance(kvstore, DistStore):
        return kvstore.for_optimizer(mean)
    return kvstore
