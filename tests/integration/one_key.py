"""Training of one key by ones, in lock step: the job that tests disturb."""

import time

import torch

from paceline import kvstore
from paceline.errors import PacelineError
from paceline.testing import tell


def new_store(namespace="train"):
    store = kvstore.create("dist_sync", namespace=namespace)
    store.set_updater("add")
    store.init("w", torch.zeros(1000))
    return store


def one_round(store):
    value = torch.ones(1000)
    store.pushpull("w", value)
    return value[0].item()


def train_until_failure():
    """Train for ever; return [error type, text, when, dead members] of the error that ends it."""
    store = new_store()
    one_round(store)
    assert store.num_dead_nodes() == 0
    tell("training")
    try:
        while True:
            one_round(store)
    except PacelineError as error:
        return [type(error).__name__, str(error), time.monotonic(), store.num_dead_nodes()]
