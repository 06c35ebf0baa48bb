"""A worker of the benchmark: it computes true gradients, and takes for each batch as long as its machine would.

Unlike speeds come by deadline: a worker computes the gradient at once, then sleeps until the time that a batch takes on
its class of machine has passed. So twelve machines fit on two cores. Sleeping is the experiment here.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import paceline
from paceline.hetero import Speed
from paceline.hetero.measured import sizes
from paceline.kvstore.dist import DistStore
from paceline.sim.problem import OwnData
from paceline.worker.round_times import WARM_UP

#: A batch that begins its push this part of its time late has overrun its deadline: the processors were busy.
TOLERANCE = 0.05
#: The digits are 45 batches, one second of these workers. Samplers see so many copies as one data set, because at the
#: end of each epoch of a pool fast workers wait for slow ones.
COPIES = 200
#: Of the digits' network.
MODEL_ELEMENTS = 64 * 32 + 32 + 32 * 10 + 10
#: Accuracies whose mean must reach the target.
MEAN_OF = 3


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Train until worker 0 has reached the target, or the time is over; returns what this worker saw.

    Args:
        task: the fields of :class:`benchmarks.unequal.trial.Trial`, and what :func:`benchmarks.unequal.real.run` adds.
    """
    torch.set_num_threads(1)
    store = paceline.kvstore.create(task["store_type"], mean=True, **task["options"])
    assert isinstance(store, DistStore)
    data = {name: torch.from_numpy(array) for name, array in np.load(task["data"]).items()}
    model = _model(data)
    clock = _Clock(Speed(*task["speeds"][store.rank]), task["jitter"], random.Random(f"{task['seed']} {store.rank}"))
    flag = np.memmap(task["flag"], dtype=np.uint8, mode="r+", shape=1)
    keys, weights = list(range(4)), [one.data for one in model.parameters()]
    store.set_optimizer("sgd", lr=task["lr"])
    store.init(keys, weights)
    watch = _Watch(task, model, data) if store.rank == 0 else None
    batches = _batches(task, store, len(data["labels"]))
    store.barrier()
    begun, cpu = time.monotonic(), time.process_time()
    while not flag[0]:
        indices = next(batches)
        clock.start()
        loss = F.cross_entropy(model(data["images"][indices]), data["labels"][indices])
        gradients = list(torch.autograd.grad(loss, list(model.parameters())))
        clock.sleep(len(indices))
        store.samples = float(len(indices))
        store.pushpull(keys, gradients, weights)
        clock.stop()
        if watch is not None and watch.look(time.monotonic() - begun):
            flag[0] = 1
    seconds = time.monotonic() - begun
    seen = clock.seen() | {"seconds": seconds, "cpu_s": time.process_time() - cpu}
    return seen if watch is None else seen | watch.seen() | {"stats": _counters(store)}


def measure(task: dict[str, Any]) -> list[tuple[float, float, float]]:
    """Train some rounds in lock step; returns samples, computed and waited seconds of each, as dist_auto sees them.

    Args:
        task: ``speeds`` of the workers, ``jitter`` and ``batch``.
    """
    store = paceline.kvstore.create("dist_sync")
    assert isinstance(store, DistStore)
    clock = _Clock(Speed(*task["speeds"][store.rank]), task["jitter"], random.Random(store.rank))
    weights = torch.zeros(MODEL_ELEMENTS)
    store.set_optimizer("sgd", lr=0.0)
    store.init(0, weights)
    store.barrier()
    for samples in [task["batch"]] * WARM_UP + sizes(task["batch"]):
        clock.start()
        clock.sleep(samples)
        store.samples = float(samples)
        store.pushpull(0, torch.zeros(MODEL_ELEMENTS), weights)
        clock.stop()
    return [tuple(one) for one in store.session.pace.steps]


def _model(data: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return the simulator's network with its first weights."""
    hidden = len(data["b1"])
    model = torch.nn.Sequential(torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10))
    with torch.no_grad():
        for parameter, name in zip(model.parameters(), ("w1", "b1", "w2", "b2"), strict=True):
            parameter.copy_(data[name].T if name[0] == "w" else data[name])
    return model


def _batches(task: dict[str, Any], store: DistStore, length: int) -> Iterator[torch.Tensor]:
    """Yield indices of batches without end."""
    batch, seed = task["batch"], task["seed"]
    if task["shares"] in ("equal", "data"):
        own = OwnData(length, task["weights"], seed)
        while True:
            yield torch.from_numpy(own.next(store.rank, batch))
    sampler: Iterator[list[int]] | Any
    if task["shares"] == "pool":
        sampler = paceline.data.PooledBatchSampler(length * COPIES, store, batch_size=batch, seed=seed)
    else:
        sampler = paceline.data.SharedBatchSampler(
            length * COPIES, store, global_batch_size=batch * store.num_workers, shares="measured", seed=seed
        )
    for _ in itertools.count():
        for indices in sampler:
            yield torch.tensor(indices) % length


class _Clock:
    """Makes each batch take the time of this worker's class, and notes how well that worked."""

    def __init__(self, speed: Speed, jitter: float, noise: random.Random) -> None:
        self._speed, self._jitter, self._noise = speed, jitter, noise
        self._begun = self._pushed = self._answered = 0.0
        self._fetched: list[float] = []
        self._computed: list[float] = []
        self._exchanged: list[float] = []
        self._overruns = self._samples = 0

    def start(self) -> None:
        """Note that a batch begins."""
        self._begun = time.monotonic()
        if self._pushed:
            self._fetched.append(self._begun - self._answered)
        self._cpu = time.thread_time()

    def sleep(self, samples: int) -> None:
        """Wait until the batch's time has passed."""
        self._computed.append(time.thread_time() - self._cpu)
        seconds = self._speed.seconds(samples) * self._noise.lognormvariate(0.0, self._jitter)
        self._samples += samples
        time.sleep(max(0.0, self._begun + seconds - time.monotonic()))
        self._pushed = time.monotonic()
        self._overruns += self._pushed - self._begun > seconds * (1 + TOLERANCE)

    def stop(self) -> None:
        """Note that the push was answered."""
        self._answered = time.monotonic()
        self._exchanged.append(self._answered - self._pushed)

    def seen(self) -> dict[str, Any]:
        """Return counters: plain numbers."""
        return {
            "batches": len(self._exchanged),
            "samples": self._samples,
            "overruns": self._overruns,
            "gradient_s": float(np.median(self._computed or [0.0])),
            "fetch_s": float(np.mean(self._fetched or [0.0])),
            "exchange_s": float(np.median(self._exchanged or [0.0])),
        }


class _Watch:
    """Worker 0's curve of accuracy, and whether the job is to end."""

    def __init__(self, task: dict[str, Any], model: torch.nn.Module, data: dict[str, torch.Tensor]) -> None:
        self._target, self._seconds, self._every = task["target"], task["seconds"], task["evaluate_s"]
        self._model, self._data = model, data
        self._server = f"/proc/{task['server']}/schedstat"
        self._server_s, self._busy_s, self._began = _cpu_of(self._server), _busy_s(), time.monotonic()
        self._curve = [(0.0, self._accuracy())]

    def look(self, now: float) -> bool:
        """Evaluate when that is due; returns whether the job ends."""
        if now - self._curve[-1][0] >= self._every:
            self._curve.append((now, self._accuracy()))
        return now >= self._seconds or self._reached()

    def seen(self) -> dict[str, Any]:
        """Return the curve, and how busy the server and the machine were."""
        seconds = time.monotonic() - self._began
        server_s, load = _cpu_of(self._server) - self._server_s, (_busy_s() - self._busy_s) / seconds
        target_s = self._curve[-1][0] if self._reached() else None
        return {"curve": self._curve, "target_s": target_s, "server_cpu_s": server_s, "busy_cores": load}

    def _reached(self) -> bool:
        last = [accuracy for _, accuracy in self._curve[-MEAN_OF:]]
        return self._target is not None and len(last) == MEAN_OF and sum(last) / MEAN_OF >= self._target

    def _accuracy(self) -> float:
        with torch.no_grad():
            found = self._model(self._data["test_images"]).argmax(1) == self._data["test_labels"]
        return float(found.float().mean())


def _counters(store: DistStore) -> dict[str, Any]:
    stats = store.stats()
    updates = max(1.0, float(stats["updates"]))
    mean = sum(int(age) * count for age, count in stats["staleness"].items()) / sum(stats["staleness"].values())
    return {"updates": updates, "staleness": mean, "step_mass": stats["step_mass"]}


def _cpu_of(schedstat: str) -> float:
    """Return the processor time of a process's threads."""
    seconds = 0.0
    for thread in (Path(schedstat).parent / "task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            seconds += int((thread / "schedstat").read_text().split()[0]) / 1e9
    return seconds


def _busy_s() -> float:
    """Return the processor time that the machine has spent on anything."""
    fields = [int(one) for one in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
