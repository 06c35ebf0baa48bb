"""Local steps: workers step by themselves, and push after a period how far they have gone.

    step 1 ... step H: the user's optimizer, on this worker's own gradients; no exchange
    step H: delta = (weights at the last exchange) - (weights now) ─► push ─► merge ─► outer optimizer ─► new weights

``dist_sync`` with local steps is DiLoCo (Douillard et al. 2023, arXiv 2311.08105), ``dist_async`` is asynchronous local
SGD (Liu et al. 2024, arXiv 2401.09135). Fragments and late answers are those of Streaming DiLoCo (Douillard et al.
2025, arXiv 2501.18512). A delta points in the direction of descent, so servers treat it as a gradient.

| state of a fragment | event                                         | action                           | next      |
|---------------------|-----------------------------------------------|----------------------------------|-----------|
| at rest             | a step, and its part of the period has passed | push the delta                   | in flight |
| in flight           | ``delay`` more steps; or the next push        | wait for the answer; blend it in | at rest   |

Buffers are averaged, and never optimised: they are a fragment with an outer learning rate of 1, without codec.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.compression import by_leg
from paceline.errors import PacelineError
from paceline.hetero.local_period import Pace, Progress
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.observe import meter
from paceline.optim.auto_period import AutoPeriod
from paceline.optim.backward import BackwardWatch
from paceline.optim.exchange import Exchange, ServerExchange
from paceline.optim.local_choices import LocalChoices
from paceline.optim.reduce import ReduceExchange
from paceline.optim.shared_tensors import FollowingBuffers, broadcast, buffers_of, shared_of
from paceline.optim.strategy import Closure, Named, Strategy, StrategySetup
from paceline.optim.told import ToldBatches
from paceline.updaters import make_spec, option_groups
from paceline.worker.traffic import Carried

logger = logging.getLogger(__name__)

#: Entry of a ``state_dict``.
_ENTRY = "local_steps"


@dataclass
class Fragment:
    """A part of the model that is exchanged at once.

    Attributes:
        shadows: weights at the last exchange, as the servers have them.
        live: returns this worker's own weights: a module may replace a buffer.
        store: its keys on servers, where the outer optimizer steps; None: the exchange brings merged deltas, and it
            steps in this process.
        samples: samples behind the steps since the last push.
        due: step after which the answer in flight is waited for; None: nothing is in flight.
        is_late: that step comes after the push.
    """

    names: list[str]
    exchange: Exchange
    shadows: list[torch.nn.Parameter]
    live: Callable[[], list[torch.Tensor]]
    outer: torch.optim.Optimizer
    store: DistStore | None
    blend: float | None
    samples: float = 0.0
    rows: float = 0.0
    pushes: int = 0
    due: int | None = None
    is_late: bool = False

    def restart(self) -> None:
        """Set this worker's weights to those of the last exchange; what it has done since is dropped."""
        _copy(self.live(), self.shadows)
        self.samples, self.rows = 0.0, 0.0

    def push(self, nan: str, step: int, delay: int) -> None:
        """Send how far this worker has gone since the last exchange. Does not wait."""
        self.pushes += 1
        for shadow, live in zip(self.shadows, self.live(), strict=True):
            if shadow.requires_grad:  # fresh memory of the model's size costs as much as the difference
                shadow.grad = torch.empty_like(shadow) if shadow.grad is None else shadow.grad
                torch.sub(shadow.data, live, out=shadow.grad)
        options = self.exchange.encoded(option_groups(self.outer))
        carried = Carried(self.samples, self.rows, options, round=self.pushes, nan=nan)  # type: ignore[arg-type]
        self.samples, self.rows, self.due, self.is_late = 0.0, 0.0, step + delay, delay > 0
        self.sent = [live.clone() for live in self.live()] if delay and self.blend is None else ()
        self.exchange.push_rest(carried)

    def settle(self, delayed: bool) -> None:
        """Wait for the answer, and set this worker's weights to it; a late answer is blended into them."""
        self.due, keeps = None, delayed and self.blend is None
        self.exchange.settle()
        if keeps:  # what came since the push: the weights now, less those at the push
            for live, shadow in zip(self.live(), self.shadows, strict=True):
                live.sub_(shadow.data)
                if shadow.grad is not None:
                    live.add_(shadow.grad)
        self.exchange.take()
        if self.store is None:
            self.outer.step()
        for live, shadow in zip(self.live(), self.shadows, strict=True):
            if keeps:
                live.add_(shadow.data)
            elif delayed and self.blend:
                live.copy_(torch.lerp(shadow.data.to(live.dtype), live, self.blend))
            else:
                live.copy_(shadow.data)


class OwnExchange(Exchange):
    """One worker without servers: its own deltas are the merged ones."""


class LocalSteps(Strategy):
    """The wrapped optimizer steps on this worker's own gradients; deltas are exchanged once in a period.

    Attributes:
        outer: the outer optimizers, one per fragment: their learning rates may be changed between steps.
    """

    def __init__(self, setup: StrategySetup, store: KVStoreBase, local: LocalChoices) -> None:
        super().__init__(setup, store)
        self._local, self._samples, self._setup = local, setup.samples, setup
        self._steps = 0
        self._fragments: list[Fragment] = []
        self._watch = BackwardWatch(lambda param: self._samples.touch(), self._samples.ended)
        self._watch.watch(param for _, param, _ in setup.named)
        if not self._is_plain():
            for number in range(local.fragments):
                if part := setup.named[number :: local.fragments]:
                    self._fragments.append(self._of_parameters(part))
        if isinstance(store, DistStore):
            is_shared = store.session.kind.has_measured_shares or local.period.follows_speed
            store.session.trains(is_local=True, has_measured_shares=is_shared)
        self.outer = [one.outer for one in self._fragments]
        self._told = ToldBatches(
            setup.samples, self._fragments[0].exchange.merge if self._fragments else "each", store.rank
        )
        if store.num_workers > 1:
            setup.samples.read_losses(store.rank)
        self._delay, self._own_s = local.delay if isinstance(store, DistStore) else 0, 0.0
        """Steps of delay now (other stores answer at once), and seconds of own work for exchanges in this period."""
        self._auto = self._new_auto() if local.period.is_auto and isinstance(store, DistStore) else None
        self._progress = Progress(local.period, len(self.outer), local.schedule, time.monotonic())
        if self._fragments and store.num_workers > 1 and setup.model is not None:
            self._share_the_rest(setup.model)
        logger.info(
            "worker %d: %s, in %d fragments; outer optimizer %s", store.rank, local.period, len(self.outer),
            type(self.outer[0]).__name__ if self.outer else "none",
        )  # fmt: skip

    def _is_plain(self) -> bool:
        """Return whether an exchange changes nothing: one worker, whose delta is applied as it is."""
        outer = self._local.outer
        plain = {"lr": 1.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
        return self.store.num_workers == 1 and isinstance(outer, Mapping) and {**plain, **outer} == plain

    def _of_parameters(self, part: Named) -> Fragment:
        """Make the fragment of some parameters; every worker does, in the same order."""
        params = [param for _, param, _ in part]
        shadows = [torch.nn.Parameter(one.detach().clone(), one.requires_grad) for one in params]
        outer = self._local.optimizer(shadows, self.store.num_workers, self._merge)
        return self._fragment([name for name, _, _ in part], shadows, lambda: [one.data for one in params], outer)

    def _share_the_rest(self, model: torch.nn.Module) -> None:
        """Have rank 0's buffers and untrained parameters; from then on, floating-point buffers are averaged."""
        shared = shared_of([[model]], [param for _, param, _ in self.named])
        rest = self.store.sibling("rest") if isinstance(self.store, DistStore) else self.store
        broadcast(rest, shared)
        names = [name for name, copies in buffers_of([[model]]).items() if copies[0].is_floating_point()]
        if not names:
            return

        following = FollowingBuffers([[model]], self.store.rank)
        shadows = [torch.nn.Parameter(one[0].detach().clone()) for one in map(following.current().__getitem__, names)]

        def live() -> list[torch.Tensor]:
            now = following.current()
            return [now[name][0] if name in now else shadow.data for name, shadow in zip(names, shadows, strict=True)]

        self._fragments.append(self._fragment(names, shadows, live, self._mean(shadows), is_buffers=True))

    @property
    def _merge(self) -> str:
        return self.store.policy.merge if isinstance(self.store, DistStore) else "all"

    def _mean(self, shadows: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return the outer optimizer that makes weights the mean of all workers'."""
        return torch.optim.SGD(shadows, lr=1 / self.store.num_workers if self._merge == "each" else 1.0)

    def _fragment(
        self,
        names: list[str],
        shadows: list[torch.nn.Parameter],
        live: Callable[[], list[torch.Tensor]],
        outer: torch.optim.Optimizer,
        is_buffers: bool = False,
    ) -> Fragment:
        named = [(name, shadow, 0) for name, shadow in zip(names, shadows, strict=True)]
        store = None
        if isinstance(self.store, DistStore):
            store = self.store.sibling("buffers" if is_buffers else "local steps", mean=True)
            store.set_gradient_compression(() if is_buffers else self._setup.compression or ())
            store.set_spec(make_spec(outer))
        exchange = self._exchange_of(store, outer)
        exchange.add(named)
        # A variance that is added to may fall below 0.
        blend = self._local.blend or 0.0 if is_buffers else self._local.blend
        one = Fragment(names, exchange, shadows, live, outer, store, blend)
        one.restart()
        return one

    def _exchange_of(self, store: DistStore | None, outer: torch.optim.Optimizer) -> Exchange:
        if store is not None:
            return ServerExchange(store, outer, None, "server")
        return ReduceExchange(self.store, outer, None, "mean") if self.store.num_workers > 1 else OwnExchange()

    # ---- steps -----------------------------------------------------------------------------------------------------

    def step(
        self, closure: Closure | None, scale: torch.Tensor | None = None, found_inf: torch.Tensor | None = None
    ) -> Any:
        """Step by the wrapped optimizer, and exchange what is due. See :class:`Strategy`."""
        loss = super().step(closure, scale, found_inf)
        self._count()
        meter.active.note_local_step()
        began, waited_s = time.monotonic(), self._waited_s
        with torch.no_grad():
            self._steps += 1
            self._settle_due()
            due = self._progress.step(time.monotonic(), self._pace) if self._fragments else ()
            if due and self._auto is not None and self._auto.plan is None:
                self._decide(self._auto)
                began, waited_s = time.monotonic(), self._waited_s
            for number in due:
                self._push(number)
        self._own_s += time.monotonic() - began - (self._waited_s - waited_s)
        return loss

    @property
    def _waited_s(self) -> float:
        return self.store.session.waited_s if isinstance(self.store, DistStore) else 0.0

    def _pace(self) -> Pace:
        """Return what this worker knows of its speed and of its learning rate."""
        lr = max((float(group.get("lr", 0.0)) for group in self.inner.param_groups), default=0.0)
        if not isinstance(self.store, DistStore):
            return Pace(lr=lr)
        return Pace(self.store.session.step_s, self.store.session.fastest_s, lr)

    def _count(self) -> None:
        """Add the samples of this step to all fragments."""
        count = self._samples.take(lambda: True)
        for one in self._fragments:
            one.samples, one.rows = one.samples + count.samples, one.rows + count.rows

    def zeroed(self) -> None:
        """Note that the gradients of passes since the last step were dropped."""
        self._samples.forget()

    def ended_step(self) -> None:
        """Tell how this worker weighs."""
        batch = self._told.of_step(self._steps)
        if batch is not None and self._fragments:
            self._fragments[0].exchange.tell_step(self._steps, {}, batch)

    def _push(self, number: int) -> None:
        is_last = number == len(self.outer) - 1
        parts = [self._fragments[number], *(self._fragments[len(self.outer) :] if is_last else ())]
        for one in parts:
            if one.due is not None:
                self._settle(one, delayed=True)
            if self._auto is not None and one.store is not None and number == 0:
                one.store.traffic.tell(self._auto.tell(self._pace().step_s))
            one.push(self.choices.on_nan, self._steps, self._delay)
        if not self._delay:
            self._settle_due()

    def _settle_due(self) -> None:
        for one in self._fragments:
            if one.due is not None and self._steps >= one.due:
                self._settle(one, delayed=one.is_late)

    def _settle(self, one: Fragment, delayed: bool) -> None:
        """Wait for an answer; with the last one of a period, ``auto`` learns how long they took."""
        one.settle(delayed)
        if self._auto is None or one.store is None:
            return
        if one is self._fragments[0]:
            self._follow(self._auto, one.store)
        if one is self._fragments[len(self.outer) - 1]:
            exchanges = [part.exchange for part in self._fragments[: len(self.outer)]]
            travel_s = sum(part.travel_s for part in exchanges if isinstance(part, ServerExchange))
            self._auto.note(travel_s, self._own_s)
            self._own_s = 0.0

    # ---- auto ------------------------------------------------------------------------------------------------------

    def _new_auto(self) -> AutoPeriod:
        """Return the choice of the period: of a codec, too, where none was given and servers can decode all weights."""
        assert isinstance(self.store, DistStore)
        params = [param for _, param, _ in self.named]
        given = by_leg(self._setup.compression).get("push")
        codec = given.name if given is not None else None
        if codec is None and any(one.dtype != torch.float32 for one in params):
            codec = ""
        return AutoPeriod(self.store, sum(one.numel() for one in params), codec, self._local.delay or None)

    def _decide(self, auto: AutoPeriod) -> None:
        """Plan with all workers, and set the codec before the first push."""
        plan = auto.decide(self._pace().step_s)
        self._progress.base, self._delay = plan.steps, plan.delay
        if self._setup.compression or not plan.codec:
            return
        for one in self._fragments[: len(self.outer)]:
            assert one.store is not None
            one.store.set_gradient_compression({"type": plan.codec, "leg": "both"})
            if plan.codec == "chunktopk" and self._local.outer is None:  # its error feedback is momentum enough
                one.outer = self._mean(one.shadows)
                one.store.set_spec(make_spec(one.outer))
        self.outer = [one.outer for one in self._fragments[: len(self.outer)]]

    def _follow(self, auto: AutoPeriod, store: DistStore) -> None:
        """Plan the next period with what all workers have told, or with what this one knows."""
        notes = store.traffic.heard().values() if store.policy.merge == "all" else [auto.tell(self._pace().step_s)]
        plan = auto.follow(list(notes))
        if plan is not None:
            self._progress.base, self._delay = plan.steps, plan.delay

    def exchange_now(self) -> None:
        """Exchange what all workers have done since the last exchange. Every worker calls it."""
        with torch.no_grad():
            for one in self._fragments:
                if one.due is not None:
                    self._settle(one, delayed=one.is_late)
            for one in self._fragments:
                one.push(self.choices.on_nan, self._steps, 0)
            for one in self._fragments:
                one.settle(delayed=False)
        self._progress.begin(time.monotonic())

    # ---- weights and state -----------------------------------------------------------------------------------------

    def broadcast_weights(self) -> None:
        """Set the weights of all workers and servers to rank 0's. Every worker calls it. A new period begins."""
        with torch.no_grad():
            for one in self._fragments:
                if one.due is not None:
                    one.settle(delayed=True)
                self._give(one, one.live())
                one.restart()
        self._progress.begin(time.monotonic())

    def _give(self, one: Fragment, values: Sequence[torch.Tensor]) -> None:
        """Set the values at the last exchange, on all workers and servers, to rank 0's."""
        _copy(one.shadows, values)
        if one.store is not None:
            one.exchange.broadcast_weights()
        elif self.store.num_workers > 1:
            broadcast(self.store, {name: [shadow.data] for name, shadow in zip(one.names, one.shadows, strict=True)})

    def fetch_states(self) -> dict[str, Any]:
        """Return the entry of a ``state_dict`` with which a job goes on: exactly, if no worker is within a period."""
        parts = [
            {
                "shadows": [shadow.detach().clone() for shadow in one.shadows],
                "live": [tensor.detach().clone() for tensor in one.live()],
                "outer": one.outer.state_dict()["state"] if one.store is None else one.store.optimizer_states(),
                "residuals": {} if one.store is None else one.store.codec_states(),
                "counts": [one.samples, one.rows],
            }
            for one in self._fragments
        ]
        entry = {"rank": self.store.rank, "parts": parts, "progress": self._progress.state()}
        return super().fetch_states() | {_ENTRY: entry}

    def give_states(self, saved: Mapping[str, Any]) -> None:
        """Load the entry of :meth:`fetch_states`: rank 0's, but for this worker's own weights. Every worker calls it.

        A worker whose own weights were not saved takes those of the last exchange. Without an entry a period begins.
        """
        super().give_states(saved)
        entry = saved.get(_ENTRY)
        if entry is None or len(entry["parts"]) != len(self._fragments):
            self.broadcast_weights()
            return
        with torch.no_grad():
            for one, part in zip(self._fragments, entry["parts"], strict=True):
                self._give(one, part["shadows"])
                one.restart()
                is_own = entry["rank"] == self.store.rank
                if one.store is None:
                    one.outer.load_state_dict(one.outer.state_dict() | {"state": part["outer"]})
                else:
                    one.store.set_codec_states(part["residuals"] if is_own else {})
                    one.store.replace_optimizer_states(part["outer"])
                if is_own:
                    _copy(one.live(), part["live"])
                    one.samples, one.rows = part["counts"]
        self._progress.load(entry["progress"], time.monotonic())

    def check_extendable(self) -> None:
        """Raise an error: fragments are made at the start.

        Raises:
            PacelineError: always.
        """
        raise PacelineError(
            "with local_steps the optimizer needs all parameters from the start: give it its parameters before it is "
            "given to DistributedOptimizer"
        )

    def close(self) -> None:
        """Stop watching backward passes, after the answers in flight have come."""
        with torch.no_grad():
            for one in self._fragments:
                if one.due is not None:
                    one.settle(delayed=True)
        self._watch.close()


def _copy(targets: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value.data)
