"""Uses of paceline that a program may repeat for ever, as worker functions; no repetition may leave anything."""

from __future__ import annotations

import gc
import importlib
import os
import random
import weakref
from collections.abc import Callable, Sequence

import torch

import paceline
from paceline import kvstore
from paceline.net import sockets
from paceline.net.endpoints import end
from paceline.testing import listen, tell
from paceline.worker import key_table
from paceline.worker.current import current_session
from tests.soak.census import census, leave_out_what_is_there
from tests.soak.worker import CODEC, net, work

Use = Callable[[int], object]


def stores() -> Use:
    """Open a store, use it and close it."""

    def use(number: int) -> None:
        store = kvstore.create("dist_sync")
        store.set_optimizer("sgd", lr=0.1)
        store.init(["a", "b"], [torch.zeros(3000), torch.zeros(10)])
        out = [torch.zeros(3000), torch.zeros(10)]
        store.pushpull(["a", "b"], out)
        store.barrier()
        store.close()

    return use


def unused_stores() -> Use:
    """Open a store and close it; initialise keys that nobody uses."""

    def use(number: int) -> None:
        store = kvstore.create("dist_async")
        if number % 2:
            store.set_optimizer("sgd", lr=0.1)
            store.init("never used", torch.zeros(50))
        store.close()

    return use


def optimizers() -> Use:
    """Wrap the same model again, train a step, and close the optimizer."""
    model, store = net(), kvstore.create("dist_sync")

    def use(number: int) -> None:
        inner = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        update = ("worker", "server")[number % 2]
        wrapped = paceline.DistributedOptimizer(inner, store, model=model, update=update)
        wrapped.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        wrapped.step()
        wrapped.close()

    return use


def states() -> Use:
    """Ask for state that is in this process and on the servers."""
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    wrapped = paceline.DistributedOptimizer(inner, "dist_sync", model=model, update="server", compression=CODEC)
    model(torch.randn(4, 8)).sum().backward()
    wrapped.step()

    def use(number: int) -> None:
        model.state_dict()
        wrapped.state_dict()
        if number % 10 == 0:
            wrapped.load_state_dict(wrapped.state_dict())

    return use


def settings() -> Use:
    """Set the same things again, and read counters."""
    store = kvstore.create("dist_sync")
    store.set_gradient_compression(CODEC)
    store.set_optimizer("sgd", lr=0.1)
    store.init("a", torch.zeros(100))

    def use(number: int) -> None:
        store.set_gradient_compression(CODEC)
        store.set_optimizer("sgd", lr=0.1)
        store.set_options([{"lr": 0.1 / (1 + number % 20)}])  # servers remember some options that they have decoded
        store.pushpull("a", torch.ones(100))
        store.stats()

    return use


def barriers() -> Use:
    """Wait for the others."""
    store = kvstore.create("dist_sync")
    store.init("a", torch.zeros(100))

    def use(number: int) -> None:
        store.barrier()
        current_session().gather("uses", b"%d" % number)

    return use


def lists() -> Use:
    """Push and pull another choice of keys each time."""
    store = kvstore.create("dist_sync")
    keys = list(range(40))
    store.init(keys, [torch.zeros(5) for _ in keys])

    def use(number: int) -> None:
        # All keys now and then: pushes of some cut the slots of the servers, which are joined again by that.
        chosen = keys if number % 20 == 19 else random.Random(number).sample(keys, 5)
        store.push(chosen, [torch.ones(5) for _ in chosen])
        store.pull(chosen, [torch.zeros(5) for _ in chosen])

    return use


def reconnects() -> Use:
    """Lose a connection to the servers or the scheduler in the middle of a step."""
    sockets.FIRST_RETRY_S = 0.0
    store = kvstore.create("dist_sync")
    store.init("a", torch.zeros(20000))

    def use(number: int) -> None:
        session = store.session
        hubs = [session._client._hub, session._lifeline._hub]
        channels = [one for hub in hubs for one in hub._channels]
        store.push("a", torch.ones(20000))
        end(channels[number % len(channels)].socket)
        store.pull("a", torch.zeros(20000))

    return use


USES = {
    one.__name__: one
    for one in (stores, unused_stores, optimizers, states, settings, barriers, lists, reconnects)
}  # fmt: skip


def repeat(times: dict[str, tuple[int, int]]) -> None:
    """Use one thing after the other so many times, tell what this process holds, use it again, tell again."""
    importlib.import_module("torch._dynamo")  # as an optimizer would
    leave_out_what_is_there()
    _repeat(times)


def work_and_repeat(
    modes: Sequence[str],
    fronts: Sequence[str],
    phases: Sequence[tuple[int, float]],
    times: dict[str, tuple[int, int]],
) -> None:
    """Train as :func:`~tests.soak.worker.work` does, then repeat: the short form, in one job."""
    work(modes, fronts, phases)
    key_table._MIN_PLANS = 16  # else it takes hundreds of lists of keys until old ones are forgotten
    _repeat(times)


def _repeat(times: dict[str, tuple[int, int]]) -> None:
    for name, counts in times.items():
        use, number = USES[name](), 0
        for more in counts:
            for _ in range(more):
                use(number)
                number += 1
            current_session().gather("done", b"")
            tell(census())
            listen(600.0)


def memory_of_a_closed_store() -> list[bool]:
    """Return whether the arena and the files of a closed store live on when nobody refers to it."""
    gc.disable()  # arenas are large and few: they must not wait for a collection
    store = kvstore.create("dist_sync")
    store.init("a", torch.zeros(1 << 20))
    out = torch.zeros(1 << 20)
    store.pushpull("a", out, out=out)
    [block] = store.table.blocks.values()
    arena = weakref.ref(block)
    assert _files() > 0
    store.close()
    del store, block
    return [_files() > 0, arena() is not None]


def _files() -> int:
    """Return how many shared files of paceline this process has open."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += "memfd:paceline" in os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of listdir
            continue
    return found
