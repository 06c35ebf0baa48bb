"""Chooses the strategy of a DistributedOptimizer.

| store                                            | ``update``           | strategy, exchange                   |
|--------------------------------------------------|----------------------|--------------------------------------|
| of one process, one worker, without compression  | ``worker`` (default) | ``Strategy``                         |
| of one process with compression; a third party's | ``worker`` (default) | ``MergedUpdate``, ``ReduceExchange`` |
| ``dist_sync``                                    | ``worker`` (default) | ``MergedUpdate``, ``ServerExchange`` |
| ``dist_sync``                                    | ``server``           | ``ServerUpdate``, ``ServerExchange`` |
| any other distributed store                      | ``server`` (default) | ``ServerUpdate``, ``ServerExchange`` |
| any, with ``local_steps``                        | ``worker`` (default) | ``LocalSteps``, one for each part    |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from paceline import compression as codecs
from paceline.hetero import free_policy
from paceline.kvstore.base import KVStoreBase
from paceline.kvstore.dist import DistStore
from paceline.kvstore.dist.store_policy import revises
from paceline.kvstore.start_checks import agree_on_store, optimizer_facts, option_facts, state_facts, tensor_facts
from paceline.net.allocator import give_back_freed_memory
from paceline.optim.buffers import Buffers
from paceline.optim.exchange import ServerExchange
from paceline.optim.local_choices import LocalChoices
from paceline.optim.local_steps import LocalSteps
from paceline.optim.merged_update import MergedUpdate
from paceline.optim.reduce import ReduceExchange
from paceline.optim.server_update import ServerUpdate
from paceline.optim.shared_tensors import shared_of
from paceline.optim.states import share_states
from paceline.optim.strategy import Strategy, StrategySetup, Update
from paceline.optim.watch import refuse_renormalising
from paceline.updaters import UpdaterSpec

#: Only reentrant checkpointing computes a gradient twice in one backward pass.
_COMPUTED_AGAIN = (
    "One backward pass computes it twice, or the pass before has failed in the middle: give torch.utils.checkpoint "
    "use_reentrant=False, or DistributedOptimizer overlap=False, which sends nothing before a pass has ended"
)


def choose_strategy(
    setup: StrategySetup, store: KVStoreBase, update: Update | None, local: LocalChoices | None = None
) -> Strategy:
    """Make the strategy for a store. Collective if the store is distributed.

    Raises:
        ValueError: the store or the optimizer does not support these settings.
        KeyMismatchError: the models or options of the workers differ.
    """
    if update not in (None, "worker", "server"):
        raise ValueError(f"update is 'worker' or 'server', not {update!r}")
    if local is not None:
        return _make_local(setup, store, update, local)
    if isinstance(store, DistStore):
        in_lock_step = store.policy.merge == "all"
        if update == "worker" and not in_lock_step:
            raise ValueError(f"{store.type} has no merged gradients; update='worker' needs dist_sync")
        return _make_worker(setup, store) if in_lock_step and update != "server" else _make_server(setup, store)
    if update == "server":
        raise ValueError(f"a {store.type} store has no servers; update='server' needs a distributed one")
    if codecs.by_leg(setup.compression) or store.num_workers > 1:
        return _make_reduced(setup, store)
    return Strategy(setup, store)


def _make_reduced(setup: StrategySetup, store: KVStoreBase) -> MergedUpdate:
    if codecs.by_leg(setup.compression):
        store.set_gradient_compression(setup.compression or ())
    share_states(store, setup.inner, setup.named)
    return MergedUpdate(setup, store, ReduceExchange(store, setup.inner, setup.model, setup.choices.reduction))


def _make_local(setup: StrategySetup, store: KVStoreBase, update: Update | None, local: LocalChoices) -> LocalSteps:
    if update == "server" or setup.choices.reduction == "sum":
        raise ValueError("with local_steps workers step, and deltas are means: leave out update= and reduction=")
    if not isinstance(store, DistStore) and codecs.by_leg(setup.compression):
        raise ValueError(f"a {store.type} store has no servers, which compression of local_steps needs: leave it out")
    if not isinstance(store, DistStore) and local.period.by_speed and store.num_workers > 1:
        raise ValueError(
            f"a {store.type} store knows no speeds: give local_steps= a number of steps, or a time ('30 s')"
        )
    if isinstance(store, DistStore):
        store = store.for_optimizer(mean=True)
        _agree(setup, store, "worker", local.described())
    strategy = LocalSteps(setup, store, local)
    if isinstance(store, DistStore):
        _wait_for_all(store)
    return strategy


def _make_worker(setup: StrategySetup, store: DistStore) -> MergedUpdate:
    own = store.for_optimizer(setup.choices.reduction == "mean")
    buffers = _prepare(setup, own, "worker")
    share_states(own, setup.inner, setup.named)
    own.set_spec(UpdaterSpec())
    exchange = ServerExchange(own, setup.inner, setup.model, "worker", _COMPUTED_AGAIN)
    strategy = MergedUpdate(setup, own, exchange, buffers, "push" in own.traffic.codecs)
    _wait_for_all(own)
    return strategy


def _make_server(setup: StrategySetup, store: DistStore) -> ServerUpdate:
    if setup.choices.reduction == "mean" and setup.choices.clip_norm is None:
        store = _able_to_regroup(store)
    clip_norm = setup.choices.clip_norm if store.policy.merges_rounds else None
    own = store.for_optimizer(setup.choices.reduction == "mean", clip_norm or 0.0)
    buffers = _prepare(setup, own, "server")
    strategy = ServerUpdate(setup, own, buffers)
    _wait_for_all(own)
    return strategy


def _able_to_regroup(store: DistStore) -> DistStore:
    """Return a store in the form in which ``dist_auto`` can change its workers' groups, if it can; else the same store.

    For one optimizer at a time, which moves its workers between rounds (:meth:`StoreLifecycle.follow_groups`), and
    whose updates are means: those of a larger group are then no larger.
    """
    session = store.session
    policy = free_policy(store.policy, store.num_workers)
    if policy.merge != "groups" or not session.kind.auto or session.kind.grouped_store or not revises(session.settings):
        return store
    session.trains(auto="free")
    if policy == store.policy:
        return store
    free = store.sibling("free", policy=policy)
    for leg, codec in store.traffic.codecs.items():
        free.set_gradient_compression(codec.params() | {"leg": leg})
    return free


def _prepare(setup: StrategySetup, store: DistStore, update: Update) -> Buffers | None:
    """Compare the workers, set codecs and share the model's buffers; returns them, None if it has none to share."""
    _agree(setup, store, update)
    store.set_gradient_compression(setup.compression or ())
    if setup.model is None:
        return None
    if store.num_workers > 1:
        refuse_renormalising(setup.model)
    trained = [param for _, param, _ in setup.named]
    return Buffers(store, [[setup.model]], trained) if shared_of([[setup.model]], trained) else None


def _agree(setup: StrategySetup, store: DistStore, update: Update, more: Mapping[str, str] | None = None) -> None:
    """Compare the model and all options with the other workers, before anything is sent."""
    by_leg = codecs.by_leg(setup.compression or ())
    legs = sorted((leg, sorted(codec.params().items())) for leg, codec in by_leg.items())
    options = dataclasses.asdict(setup.choices) | {
        "update": update, "compression": str(legs), "batch_dim": str(setup.samples.batch_dim),
        "weigh": setup.samples.weigh, **(more or {}),
    }  # fmt: skip
    facts = [*optimizer_facts(setup.inner, setup.named), *option_facts("DistributedOptimizer", options)]
    if update == "worker":  # the servers get worker 0's
        facts += state_facts(setup.inner, setup.named)
    if setup.model is not None:
        facts += tensor_facts(setup.model.named_buffers(), "buffer")
    agree_on_store(store, "the optimizer", facts)


def _wait_for_all(store: DistStore) -> None:
    """Wait until all workers have rank 0's weights, and return freed memory to the system."""
    store.barrier()
    give_back_freed_memory()
