"""A store that all workers have left takes no memory on any server."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch

from paceline.consistency import Policy
from paceline.errors import KeyMismatchError
from paceline.testing.one_process import OneProcess

POLICIES = [Policy(), Policy("each"), Policy("groups", groups=((0, 1), (2,)))]


def used(policy: Policy, **settings: bool) -> tuple[OneProcess, list]:
    """Return a job of three workers on two hosts, and its stores after a few steps."""
    job = OneProcess("aab", "ab", **settings)
    stores = job.stores(policy)
    for store in stores:
        store.set_updater("add", rate=0.5)
        store.init("w", torch.zeros(3000))
    for store in stores:
        store.push("w", torch.ones(3000))
    for store in stores:
        store.pull("w", torch.zeros(3000))
    return job, stores


@pytest.mark.parametrize("policy", POLICIES, ids=lambda one: one.merge)
def test_servers_forget_a_store_when_the_last_worker_leaves_it(policy: Policy) -> None:
    job, stores = used(policy)
    for store in stores[:-1]:
        store.close()
        assert all("s" in service.stores for service in job.services)
    held = [weakref.ref(bucket) for service in job.services for bucket in service.stores["s"].own]
    assert held
    stores[-1].close()
    job.deliver_all()
    assert not any(service.stores for service in job.services)
    job.requests.clear()
    gc.collect()
    assert not any(one() for one in held)


def test_forwarded_values_are_freed_without_the_collector() -> None:
    job, stores = used(Policy())
    [held] = [weakref.ref(one.forward) for service in job.services if (one := service.stores["s"]).forward is not None]
    assert list(held())
    gc.disable()
    try:
        for service in job.services:
            one = service.stores.pop("s")
            one.close()
        del one
        assert held() is None
    finally:
        gc.enable()
    del stores


@pytest.mark.parametrize("policy", POLICIES, ids=lambda one: one.merge)
def test_workers_that_leave_the_job_leave_its_stores(policy: Policy) -> None:
    job, stores = used(policy)
    stores[0].close()
    for service in job.services:
        service.take_out(frozenset({1}))
        assert "s" in service.stores
        service.take_out(frozenset({1, 2}))
    job.deliver_all()
    assert not any(service.stores for service in job.services)


def test_a_store_that_is_opened_after_another_was_forgotten_is_left_by_those_who_are_gone() -> None:
    job, stores = used(Policy("each"))
    for service in job.services:
        service.take_out(frozenset({2}))
    for store in stores[:2]:
        store.close()
    assert not any(service.stores for service in job.services)
    first, second, _ = job.stores(Policy("each"))
    first.set_updater("add")
    for service in job.services:
        service.take_out(frozenset({2}))
        assert service.stores["s"].own.unpushed.live == {0, 1}
    first.close()
    second.close()
    assert not any(service.stores for service in job.services)


def test_files_of_a_forgotten_store_are_closed() -> None:
    gc.collect()  # of other tests
    before = len(os.listdir("/proc/self/fd"))
    job, stores = used(Policy())
    assert len(os.listdir("/proc/self/fd")) > before
    while stores:
        stores.pop().close()
    job.deliver_all()
    job.requests.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_values_of_a_closed_store_can_be_read_and_nothing_else_asked() -> None:
    _, stores = used(Policy())
    for store in stores:
        store.close()
    [block] = stores[0].table.blocks.values()
    assert block.value_of(0).unique().tolist() == [1.5]
    with pytest.raises(KeyMismatchError, match="was not opened on this server"):
        stores[0].stats()
