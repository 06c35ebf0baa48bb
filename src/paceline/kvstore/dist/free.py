"""Stores of ``dist_auto`` whose workers can change groups while they train."""

from __future__ import annotations

from paceline.hetero import free_policy
from paceline.kvstore.dist.store_policy import revises
from paceline.kvstore.dist.store import DistStore


def able_to_regroup(store: DistStore) -> DistStore:
    """Return a store in the form in which ``dist_auto`` can change its workers' groups, if it can; else the same store.

    For one optimizer at a time, which moves its workers between rounds (:meth:`Lifecycle.follow_groups`), and whose
    updates are means: those of a larger group are then no larger. Every worker calls it in the same order.
    """
    session = store.session
    policy = free_policy(store.policy, store.num_workers)
    if policy.merge != "groups" or not session.auto or session.grouped_store or not revises(session.settings):
        return store
    session.auto = "free"
    if policy == store.policy:
        return store
    free = store.sibling("free", policy=policy)
    for leg, codec in store.traffic.codecs.items():
        free.set_gradient_compression(codec.params() | {"leg": leg})
    return free
