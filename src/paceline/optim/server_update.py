"""Strategy of ``update="server"``: the optimizer runs on the servers.

    ``step``: gradients ─► arena ─► push ─► merge, update ─► new weights ─► copied to the parameters

What ``p.grad`` holds when ``step`` is called is pushed, so a loop may change it until then: it is this worker's own.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from paceline.compression.base import UNSENT
from paceline.errors import PacelineError, PeerDiedError
from paceline.kvstore.dist import DistStore
from paceline.layout.keys import Key
from paceline.optim.backward import BackwardWatch, KeptGradients
from paceline.optim.binding import all_finite
from paceline.optim.buffers import Buffers
from paceline.optim.exchange import ServerExchange
from paceline.optim.strategy import (
    Closure,
    ExchangingStrategy,
    Named,
    StrategySetup,
    codec_entry,
    set_residuals,
    unsent_in,
)
from paceline.updaters import KeyOptions, Options, UpdaterSpec, make_spec, option_groups
from paceline.updaters.state_parts import COUNTERS
from paceline.worker.traffic import Carried

logger = logging.getLogger(__name__)

#: Backward passes in a row that train this worker alone until a line says so. Loops that change weights for a while and
#: put them back before the step (sharpness-aware ones, inner loops) make fewer.
_MOST_ALONE = 32


class ServedState(defaultdict[torch.Tensor, Any]):
    """The state in an optimizer for which servers step: it notes that entries were removed.

    They hold the real state; here it is empty until it is shown, and a ``clear()`` of it would leave no trace.
    """

    has_lost = False

    def clear(self) -> None:
        """See :meth:`dict.clear`."""
        self.has_lost = True
        super().clear()

    def pop(self, *args: Any) -> Any:
        """See :meth:`dict.pop`."""
        self.has_lost = True
        return super().pop(*args)

    def popitem(self) -> tuple[torch.Tensor, Any]:
        """See :meth:`dict.popitem`."""
        self.has_lost = True
        return super().popitem()

    def __delitem__(self, param: torch.Tensor) -> None:
        self.has_lost = True
        super().__delitem__(param)


class ServerUpdate(ExchangingStrategy):
    """Pushes gradients, and copies the servers' new weights to the parameters.

    Raises:
        ValueError: servers cannot run this optimizer, or not with these options; the text says what to do instead.
        TypeError: an option of the optimizer is not plain data.
    """

    #: All workers take part in each round, so the servers must know of a step that a GradScaler skips.
    steps_here = False
    store: DistStore
    _exchange: ServerExchange

    def __init__(self, setup: StrategySetup, store: DistStore, buffers: Buffers | None) -> None:
        or_worker = ", or use update='worker'" if store.policy.merge == "all" else ""
        exchange = ServerExchange(store, setup.inner, setup.model, "server")
        super().__init__(setup, store, exchange, buffers)
        self._or_worker = or_worker
        spec = _spec_of(self.inner, self.named)
        self._merged = store.policy.merges_rounds
        self._nan = "error" if self.choices.on_nan == "error" else "pass"
        self._stepped_on: KeptGradients | None = None
        """The gradients of the last step."""
        try:
            store.set_spec(spec)
        except ValueError as error:
            raise ValueError(f"{error}{_OR_WORKER}") from error
        exchange.add(self.named)
        if self.inner.state and store.session.is_lead:
            store.set_optimizer_states(self._own_states())
        self._passes = 0
        """Backward passes since the last step."""
        self._versions = self._passes_alone = 0
        self._watch = BackwardWatch(self._touch, self._on_end)
        self._watch.watch(param for _, param, _ in self.named)
        self._keep_state()
        self._is_shown = False
        """The state in the user's optimizer is that of the servers, not an earlier one."""
        self._hooks = [
            self.inner.register_step_pre_hook(self._refuse_own_step),
            self.inner.register_state_dict_pre_hook(lambda inner: self.show_states()),
        ]

    # ---- backward --------------------------------------------------------------------------------------------------

    def _on_end(self) -> None:
        self._samples.ended()
        self._keep()
        self._passes += 1
        if self._passes > self.choices.passes and self._passes_alone < _MOST_ALONE:
            self._note_alone()

    def _note_alone(self) -> None:
        """Say once that the weights change here, pass after pass, and no step gives gradients to the servers."""
        versions, self._versions = self._versions, sum(param._version for _, param, _ in self.named)
        self._passes_alone += bool(versions) and versions != self._versions
        if self._passes_alone == _MOST_ALONE:
            logger.warning(
                "worker %d: its weights have changed between %d backward passes, and DistributedOptimizer has made no "
                "step meanwhile: this worker trains alone. Call step() of the DistributedOptimizer, not of another "
                "optimizer with the same parameters",
                self.store.rank, _MOST_ALONE,
            )  # fmt: skip

    def _refuse_own_step(self, inner: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raise where a loop steps the optimizer that was wrapped: no other worker, and no server, would get it.

        The DistributedOptimizer has the same hooks; its own step is the one that reaches the servers.
        """
        if inner is self.inner and self._watch.is_watching:
            raise PacelineError(
                f"worker {self.store.rank}: {type(inner).__name__}.step() of the wrapped optimizer would train this "
                "worker alone, because the servers step: call step() of the DistributedOptimizer"
            )

    def _current_options(self) -> list[Options]:
        groups = option_groups(self.inner)
        if self.choices.clip_value is not None:
            groups = [group | {"clip_gradient": self.choices.clip_value} for group in groups]
        return groups

    def _carried(self) -> Carried:
        """Return the data that this round's pushes carry. Its first push is in the group that fits by then.

        So a worker that waits for samples after a round is in its old group, whose others do not wait for it. Only
        a round in which groups change waits for the servers here, which may be in a hook.
        """
        if self._open is None:
            self.store.lifecycle.follow_groups()
        return super()._carried()

    # ---- step ------------------------------------------------------------------------------------------------------

    def step(
        self, closure: Closure | None, scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None
    ) -> Any:
        """Let the servers apply the round's gradients. See :class:`Strategy`; the closure is called once."""
        self.inner._opt_called = True  # type: ignore[attr-defined]  # schedulers made before wrapping look at it
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._check_state()
            if self._merged and self._unpushed is not None and not self._unpushed.are_unchanged():
                self._say_changed("where the servers step, they get them at step", "Use update='worker'")
            skip = self._must_skip(scale, found_inf)
            if not self._merged and self.choices.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([param for _, param, _ in self.named], self.choices.clip_norm)
            if self._unpushed is not None and not self._has_gradients():
                self.zeroed()
            self._push_rest(replace(self._carried(), skip=skip))
            self._open = self._unpushed = None
            self._stepped_on = KeptGradients(param for _, param, _ in self.named)
            self._passes = self._versions = self._passes_alone = 0
            if self._merged and self.choices.clip_norm is not None:
                self.store.clip_round()
            self._settle()  # before any weight changes, so that a failure leaves those of the last round
            self._exchange.take()
            self.weights.ended()
        return loss

    def _repeats(self) -> bool:
        return self._stepped_on is not None and self._stepped_on.are_unchanged()

    def _must_skip(self, scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> bool:
        """Divide the gradients by a GradScaler's scale; returns whether no worker may apply this round."""
        skip = found_inf is not None and bool(found_inf)
        if scale is not None or self.choices.on_nan == "skip":
            grads = [param.grad for _, param, _ in self.named if param.grad is not None]
            for grad in grads if scale is not None else ():
                grad.div_(scale.to(grad.device))  # type: ignore[union-attr]
            skip = skip or (self.choices.on_nan == "skip" and not all_finite(grads))
        self.skipped_steps += skip
        return skip

    def _own_weights(self) -> dict[str, torch.Tensor]:
        """Return those that come in rows, too: the others of this optimizer are checked bit by bit at each push."""
        sparse = self._exchange.sparse
        return {name: param.data for name, param, _ in self.named if param in sparse} | super()._own_weights()

    # ---- weights and state -----------------------------------------------------------------------------------------

    def refresh_weights(self) -> None:
        """Set this worker's weights to the newest of the servers that it knows."""
        with self.weights.changing({name: [param] for name, param, _ in self.named}, rounds=0):
            self._exchange.refresh_weights()

    def zeroed(self) -> None:
        """Note that the gradients of passes since the last step were dropped."""
        self._unpushed = None
        self._samples.forget()

    def no_sync(self) -> AbstractContextManager[None]:
        """Raise an error: the servers step.

        Raises:
            PacelineError: always; ``backward_passes_per_step`` accumulates gradients.
        """
        raise PacelineError("no_sync needs update='worker'; with the servers stepping set backward_passes_per_step")

    def check_extendable(self) -> None:
        """Raise an error: the servers need all param groups from the start.

        Raises:
            PacelineError: always.
        """
        raise PacelineError(
            "the servers step, and they need all param groups from the start: give the optimizer its parameters before "
            f"it is given to DistributedOptimizer{self._or_worker}"
        )

    def close(self) -> None:
        """Stop watching backward passes."""
        self._watch.close()
        for hook in self._hooks:
            hook.remove()

    def _own_states(self) -> dict[Key, dict[str, Any]]:
        return {
            name: {
                key: value
                for key, value in self.inner.state[param].items()
                if isinstance(value, torch.Tensor | int | float)
            }
            for name, param, _ in self.named
            if self.inner.state.get(param)
        }

    def fetch_states(self) -> dict[str, Any]:
        """Put the servers' state into the user's optimizer; returns the states of codecs.

        Raises:
            PeerDiedError: the job has failed, and the servers' state with it.
        """
        try:
            states = self.store.optimizer_states()
        except PeerDiedError as error:
            raise PeerDiedError(
                f"worker {self.store.rank}: the optimizer's state was on the servers and is lost; the weights of round "
                f"{self.weights.round} are here, and the model's state_dict has them ({error})"
            ) from error
        unsent = {name: {UNSENT: state.pop(UNSENT)} for name, state in states.items() if UNSENT in state}
        for name, param, _ in self.named:
            for key, value in states.get(name, {}).items():
                self.inner.state[param][key] = value if key in COUNTERS else value.to(param.device)
        self._seen, self._is_shown = self._own_versions(), True
        return codec_entry(self.store, unsent)

    def show_states(self) -> None:
        """Put the servers' state into the user's optimizer, unless it is there, or another optimizer uses that now.

        Nor where a loop has put another state there: the next step refuses it.
        """
        if not self._is_shown and self.inner.state is self._state and self._watch.is_watching:
            self.fetch_states()

    def _own_versions(self) -> dict[tuple[str, str], tuple[Any, int]]:
        """Return the state in this process, with torch's counts of in-place changes."""
        return {
            (name, key): (one, getattr(one, "_version", 0))
            for name, param, _ in self.named
            for key, one in self.inner.state.get(param, {}).items()
        }

    def _keep_state(self) -> None:
        """Make the state in this process one that notes its changes; the servers have its present content."""
        self.inner.state = self._state = ServedState(dict, self.inner.state)
        self._seen = self._own_versions()

    def _check_state(self) -> None:
        """Raise if the state in this process was changed: the servers would not see it."""
        self._is_shown = False
        is_ours = self.inner.state is self._state and not self._state.has_lost
        if is_ours and not (self._state or self._seen):
            return
        now = self._own_versions()
        if (
            not is_ours
            or self._seen.keys() != now.keys()
            or any(_differ(one, now[key]) for key, one in self._seen.items())
        ):
            raise PacelineError(
                f"worker {self.store.rank}: optimizer.state was changed in this process, where the servers do not see "
                "it; they hold the state. To change theirs, set all of it on every worker (optimizer.state = ...) or "
                f"call load_state_dict of the DistributedOptimizer{self._or_worker}"
            )

    def take_states(self) -> None:
        """Replace the servers' state by that of the user's optimizer. Every worker calls it; rank 0's is used."""
        self.store.replace_optimizer_states(self._own_states())
        self._keep_state()
        self._is_shown = True

    def give_states(self, saved: Mapping[str, Any]) -> None:
        """Send the state of the user's optimizer to the servers. Every worker calls it; rank 0's state is used."""
        set_residuals(self.store, saved)
        self.take_states()
        if self.store.session.is_lead:
            self.store.set_optimizer_states(unsent_in(saved))
        self.store.barrier()


def _differ(one: tuple[Any, int], other: tuple[Any, int]) -> bool:
    return one[0] is not other[0] or one[1] != other[1]


def _spec_of(inner: torch.optim.Optimizer, named: Named) -> UpdaterSpec:
    """Describe an optimizer for the servers.

    Raises:
        ValueError: servers cannot run it, or not on these parameters; the text says what to do instead.
        TypeError: an option is not plain data.
    """
    pairs = next((name for name, param, _ in named if param.is_complex()), None)
    if pairs is not None:
        raise ValueError(
            f"parameter {pairs!r} is complex, and servers step on real numbers: make it a real one of pairs, and use "
            f"torch.view_as_complex of it{_OR_WORKER}"
        )
    keys: dict[str | int, KeyOptions] = {name: KeyOptions(group) for name, _, group in named if group}
    try:
        return make_spec(inner, keys=keys)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}{_OR_WORKER}") from error


_OR_WORKER = ". In dist_sync update='worker' runs any optimizer"
