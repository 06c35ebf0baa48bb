"""Times of grace: an update of the first K pushes takes those that come a little later, too."""

import math
import time

import torch

from paceline import kvstore
from paceline.consistency import Policy
from paceline.testing import LocalJob, listen, tell
from paceline.testing.one_process import OneProcess

POLICY = Policy("first", first=1, grace_s=60.0)


def value(store):
    found = torch.zeros(4)
    store.pull("w", found)
    return found.tolist()


def new_stores(job, policy=POLICY):
    stores = job.stores(policy)
    for store in stores:
        store.set_updater("add")
    for store in stores:
        store.init("w", torch.zeros(4))
    return stores


def test_update_waits_for_later_pushes_until_its_time_is_over():
    job = OneProcess("aaa")
    stores = new_stores(job)
    [service] = job.services
    assert service.end_graces(time.monotonic()) == math.inf
    stores[0].push("w", torch.ones(4))
    job.deliver_all()
    left_s = service.end_graces(time.monotonic())
    assert 50 < left_s <= 60
    stores[1].push("w", torch.full((4,), 10.0))
    job.deliver_all()
    assert value(stores[2]) == [0.0] * 4
    assert service.end_graces(time.monotonic() + 61) == math.inf
    assert value(stores[2]) == [11.0] * 4
    assert stores[0].stats()["updates"] == 1


def test_time_of_grace_is_that_of_the_range_also_where_it_is_cut_meanwhile():
    job = OneProcess("aa")
    stores = job.stores(POLICY)
    for store in stores:
        store.set_updater("add")
    for store in stores:
        store.init(["v", "w"], [torch.zeros(4), torch.zeros(4)])
    stores[0].push(["v", "w"], [torch.ones(4)] * 2)
    job.deliver_all()
    stores[1].push("w", torch.ones(4))
    job.deliver_all()
    found = torch.zeros(4)
    stores[1].pull("v", found)
    assert (found.tolist(), value(stores[1])) == ([0.0] * 4, [2.0] * 4), "of w all have come"
    job.services[0].end_graces(time.monotonic() + 61)
    stores[1].pull("v", found)
    assert found.tolist() == [1.0] * 4


def wait_for_the_update():
    store = kvstore.create("dist_ksync", k=1, grace_s=0.5)
    store.set_updater("add")
    store.init("w", torch.zeros(4))
    store.barrier()
    began = time.monotonic()
    if store.rank:
        listen()
        return 0.0
    store.push("w", torch.ones(4))
    while value(store) == [0.0] * 4:
        assert time.monotonic() < began + 60
    waited_s = time.monotonic() - began
    tell("updated")
    return waited_s


def test_server_ends_the_time_by_itself():
    with LocalJob(2, 1) as job:
        first, second = job.start_all(wait_for_the_update)
        assert first.heard() == "updated"
        second.tell("end")
        assert first.result() >= 0.4
