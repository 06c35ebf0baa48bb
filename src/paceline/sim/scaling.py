"""How a job scales: step time, efficiency and cost of each layout of servers and of all-reduce, and a recommendation.

Every figure is a step in lock step under :func:`paceline.sim.lock_step.step_seconds`, with the model placed as a store
places it. Without overlap the whole model is one stage; with overlap a stage is a bucket of the placement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from paceline.config import Settings
from paceline.hetero import Measured, StepNoise, choose, split_evenly
from paceline.hetero.local_plan import CODECS, COMPUTING, ELEMENT_BYTES, ExchangeCost, LocalPlan, plan_local
from paceline.layout.placement import Bucket, KeySize, place
from paceline.sim.lock_step import AllReduce, Hosts, Servers, Stage, step_seconds
from paceline.sim.models import Array
from paceline.sim.simulated_cluster import SimulatedCluster, SimulatedWorker

#: Layouts in the order of tables, with servers per host of workers; those on hosts need no hosts of their own.
LAYOUTS = ("one server", "1:1", "2:1", "co-located", "all-reduce")

#: Numbers of workers of which a job's scaling is shown.
SIZES = (*(2**power for power in range(14)), 10_000)

#: Stages of a step at most; of more buckets, neighbours make one stage.
_MOST_STAGES = 48

#: Stages times servers on the hosts of workers; with more, the hosts of a kind count as one.
_MOST_FLOWS = 1000

#: Arrays of more than their part of a model are cut, and so many parts show how even servers are.
_MOST_PARTS, _PARTS_PER_SERVER = 5000, 4

#: How much better compressed gradients must be to be recommended, as they change what is learned; and layouts whose
#: costs differ by less count as equal.
LEAD, EQUAL = 1.05, 0.99


@dataclass(frozen=True)
class ExchangePlan:
    """How gradients are exchanged."""

    layout: str
    """One of :data:`LAYOUTS`, or a number of servers on hosts of their own."""
    overlap: bool = False
    merge: bool = False
    """Whether workers of a host add up their gradients first; of all-reduce, whether it is hierarchical."""
    compression: str = ""
    """Codec, both ways; empty: none."""

    @property
    def words(self) -> str:
        """The way without its layout, in words."""
        on = [("overlap", self.overlap), ("local merge", self.merge), (self.compression, bool(self.compression))]
        return ", ".join(word for word, is_on in on if is_on) or "push, then pull"


@dataclass(frozen=True)
class Training:
    """A model on a cluster, and prices."""

    arrays: tuple[Array, ...]
    cluster: SimulatedCluster
    """Workers of each kind are taken in proportion for other numbers of workers; its servers' number is not read."""
    batch: int = 32
    per_host: int = 1
    """Workers of a host, which share its link."""
    bound: int = Settings.bigarray_bound
    """Arrays of up to so many elements stay whole on one server."""
    epoch_samples: int = 1_281_167
    host_price: float | None = None
    """Per hour; None: costs are hours of hosts."""
    server_price: float | None = None
    """Per hour of a host that only serves; None: as for other hosts."""

    @property
    def model_bytes(self) -> float:
        """Bytes of all gradients in float32."""
        return 4.0 * sum(one.numel for one in self.arrays)

    @cached_property
    def kinds(self) -> Counter[SimulatedWorker]:
        """Kinds of workers, and how many there are."""
        return Counter(self.cluster.workers)

    @property
    def noise(self) -> StepNoise:
        """Noise of every step."""
        return StepNoise(self.cluster.jitter, self.cluster.spike_probability, self.cluster.spike_factor)


@dataclass(frozen=True)
class Estimate:
    """Step time, rate and cost of a way to exchange gradients, with a number of workers."""

    way: ExchangePlan
    workers: int
    hosts: int
    servers: int
    server_hosts: int
    """Hosts besides the workers'."""
    step_s: float
    samples_per_s: float
    efficiency: float
    """Throughput over what as many single workers would do."""
    epoch_cost: float
    """Price of an epoch; without prices, hours of hosts."""


@dataclass(frozen=True)
class Recommendation:
    """The way to take."""

    best: Estimate
    mode: str
    """Type of store, with what it needs."""
    sentences: str


@dataclass
class Planner:
    """Estimates ways of a training, each once."""

    training: Training
    _layouts: dict[int, tuple[tuple[Bucket, ...], float]] = field(default_factory=dict)
    _workers: dict[int, _Workers] = field(default_factory=dict)
    _estimates: dict[tuple[ExchangePlan, int], Estimate] = field(default_factory=dict)

    def estimate(self, way: ExchangePlan, count: int) -> Estimate:
        """Return the estimate of a way with a number of workers."""
        if (way, count) not in self._estimates:
            self._estimates[way, count] = self._simulated(way, count)
        return self._estimates[way, count]

    def _simulated(self, way: ExchangePlan, count: int) -> Estimate:
        training, workers = self.training, self._of(count)
        servers = _servers(way.layout, workers.host_count)
        buckets, largest = self._placed(max(1, servers))
        element_bytes = ELEMENT_BYTES[way.compression] if way.compression else 4.0
        stages = _stages(training.arrays, buckets if way.overlap else buckets[:0], element_bytes)
        cluster, hosts = training.cluster, workers.hosts
        exchange: Servers | AllReduce = AllReduce()
        if servers:
            on_hosts = way.layout == "co-located"
            exchange = Servers(servers, largest, cluster.bandwidth, on_hosts, cluster.merge_s, cluster.update_s)
            if on_hosts and len(stages) * servers <= _MOST_FLOWS:
                hosts = [replace(one, count=1) for one in hosts for _ in range(one.count)]
        step_s = step_seconds(hosts, stages, exchange, merges=way.merge, latency_s=cluster.latency_s)
        rate = count * training.batch / step_s
        server_hosts = 0 if way.layout == "co-located" else servers
        price = 1.0 if training.host_price is None else training.host_price
        server_price = price if training.server_price is None else training.server_price
        per_hour = workers.host_count * price + server_hosts * server_price
        return Estimate(
            way, count, workers.host_count, servers, server_hosts, step_s, rate, rate / workers.ideal_rate,
            per_hour * training.epoch_samples / rate / 3600,
        )  # fmt: skip

    def ways(self, count: int, codec: str) -> list[Estimate]:
        """Return estimates of all layouts, each with and without overlap, local merge and compression."""
        merges = (False, True) if self.training.per_host > 1 else (True,)
        settings = product(("", codec), merges, (False, True), LAYOUTS)
        return [
            self.estimate(ExchangePlan(layout, overlap, merge, used), count)
            for used, merge, overlap, layout in settings
        ]

    def scaling(self, counts: Sequence[int]) -> list[Estimate]:
        """Return estimates of all layouts with local merge, with and without overlap, for numbers of workers."""
        settings = product(counts, (False, True), LAYOUTS)
        return [self.estimate(ExchangePlan(layout, overlap, True), count) for count, overlap, layout in settings]

    def recommend(self, count: int, codec: str) -> Recommendation:
        """Return the way that costs least, and why: with overlap and local merge, compressed only if it gains much."""
        hosts = self._of(count).host_count
        numbers = [str(2**power) for power in range(1, hosts.bit_length()) if 2**power < hosts]
        layouts = ("co-located", "all-reduce", "one server", *numbers, "1:1", "2:1")
        plain, compressed = (
            [self.estimate(ExchangePlan(layout, True, True, used), count) for layout in layouts] for used in ("", codec)
        )
        mode = self._mode(count, _cheapest(plain[:1] + plain[2:]))
        if mode != "dist_sync":  # only servers can do without lock step
            plain, compressed = ([*one[:1], *one[2:]] for one in (plain, compressed))
        best = _cheapest(plain)
        if _cheapest(compressed).epoch_cost * LEAD < best.epoch_cost:
            best = _cheapest(compressed)
        if best.way.layout == "all-reduce":
            mode = "allreduce"
        fastest = min([*plain, *compressed], key=lambda one: (one.step_s, one.server_hosts))
        one_server = self.estimate(ExchangePlan("one server", True, True, best.way.compression), count)
        return Recommendation(best, mode, self._sentences(best, mode, fastest, one_server))

    def local(self, best: Estimate) -> LocalPlan | None:
        """Return local steps with which workers compute nearly all of the time; None: they do so without."""
        workers = self._of(best.workers)
        if workers.compute_s >= COMPUTING * best.step_s or best.workers == 1:
            return None
        layout = "co-located" if best.way.layout == "all-reduce" else best.way.layout
        exchanges = {}
        for codec in CODECS:
            step_s = self.estimate(ExchangePlan(layout, False, True, codec), best.workers).step_s
            exchanges[codec] = ExchangeCost(max(0.0, step_s - workers.compute_s))
        fastest_s = min(kind.speed.seconds(self.training.batch) for kind, _ in workers.kinds)
        return plan_local(fastest_s, exchanges)

    def _mode(self, count: int, estimate: Estimate) -> str:
        """Return how workers synchronise, as ``dist_auto`` would choose it."""
        workers, training = self._of(count), self.training
        if len(training.kinds) == 1 and not training.noise.jitter and not training.noise.spike_share:
            return "dist_sync"
        speeds = [kind.speed for kind, number in workers.kinds for _ in range(number)]
        order = sorted({speed.seconds(training.batch) for speed in speeds})
        groups = tuple(
            tuple(rank for rank, speed in enumerate(speeds) if speed.seconds(training.batch) == seconds)
            for seconds in order
        )
        update_s = training.cluster.update_s / max(1, estimate.servers)
        exchange_s = max(update_s, estimate.step_s - workers.compute_s)
        choice = choose(Measured(tuple(speeds), training.batch, training.noise, exchange_s, update_s), groups)
        return "dist_sync" if (choice.store_type, choice.shares) == ("dist_sync", "equal") else choice.words

    def _sentences(self, best: Estimate, mode: str, fastest: Estimate, one_server: Estimate) -> str:
        codec = f", {best.way.compression} compression" if best.way.compression else ""
        first = f"Use {mode} with {_place(best)}{codec}: {self._figures(best)}."
        if fastest.step_s < EQUAL * best.step_s:
            codec = f" and {fastest.way.compression} compression" if fastest.way.compression else ""
            return f"{first} The fastest would be {_place(fastest)}{codec}: {self._figures(fastest)}."
        tied = f"{first} It is the fastest, too, or less than 1% behind"
        return f"{tied}." if best.servers == 1 else f"{tied}; one server would give {self._figures(one_server)}."

    def _figures(self, one: Estimate) -> str:
        return f"{one.efficiency:.0%} efficiency, {1e3 * one.step_s:.4g} ms per step, {self.cost_words(one)} per epoch"

    def cost_words(self, one: Estimate) -> str:
        """Return what an epoch costs, with the unit."""
        unit = " host hours" if self.training.host_price is None else ""
        return f"{one.epoch_cost:.3g}{unit}"

    def _placed(self, servers: int) -> tuple[tuple[Bucket, ...], float]:
        if servers not in self._layouts:
            keys = [KeySize(number, one.numel) for number, one in enumerate(self.training.arrays)]
            least = sum(one.numel for one in keys) // max(_MOST_PARTS, _PARTS_PER_SERVER * servers)
            buckets = place(keys, servers, bound=max(self.training.bound, least)).buckets
            loads: Counter[int] = Counter()
            for one in buckets:
                loads[one.server] += one.length
            self._layouts[servers] = buckets, max(loads.values()) / sum(loads.values())
        return self._layouts[servers]

    def _of(self, count: int) -> _Workers:
        if count not in self._workers:
            self._workers[count] = _Workers(self.training, count)
        return self._workers[count]


class _Workers:
    def __init__(self, training: Training, count: int) -> None:
        parts = split_evenly(count, list(training.kinds.values()))
        self.kinds = [(kind, part) for kind, part in zip(training.kinds, parts, strict=True) if part]
        seconds = [kind.speed.seconds(training.batch) for kind, part in self.kinds for _ in range(part)]
        noise = training.noise
        factor = noise.slowest(seconds) / max(seconds)
        self.compute_s = factor * max(seconds)
        self.ideal_rate = sum(training.batch / one / noise.mean for one in seconds)
        self.hosts: list[Hosts] = []
        for kind, part in self.kinds:
            full, rest = divmod(part, training.per_host)
            for number, workers in ((full, training.per_host), (1, rest)):
                if number and workers:
                    compute_s = factor * kind.speed.seconds(training.batch)
                    self.hosts.append(Hosts(number, workers, compute_s, kind.bandwidth))
        self.host_count = sum(one.count for one in self.hosts)


def _servers(layout: str, hosts: int) -> int:
    fixed = {"one server": 1, "1:1": hosts, "2:1": 2 * hosts, "co-located": hosts, "all-reduce": 0}
    return fixed[layout] if layout in fixed else int(layout)


def _stages(arrays: Sequence[Array], buckets: Sequence[Bucket], element_bytes: float) -> list[Stage]:
    """Return buckets as stages, or one stage if there are none.

    All of an array's gradient appears at once, and its computation needs all of its values. So the time of an array
    belongs to the bucket with its end, which comes first in backward and last in forward.
    """
    total = sum(one.multiplications for one in arrays)
    if not buckets:
        return [Stage(element_bytes * sum(one.numel for one in arrays), 1.0)]
    each = -(-len(buckets) // _MOST_STAGES)
    stages = []
    for start in range(0, len(buckets), each):
        some = buckets[start : start + each]
        ended = [
            arrays[part.key].multiplications
            for one in some
            for part in one.parts
            if part.key_start + part.length == arrays[part.key].numel
        ]
        holder = some[0].server if each == 1 else None
        stages.append(Stage(element_bytes * sum(one.length for one in some), sum(ended) / total, holder))
    return stages


def _cheapest(estimates: Sequence[Estimate]) -> Estimate:
    """Return the estimate of least cost; of those that cost as much, the first of those with the fewest hosts."""
    least = min(one.epoch_cost for one in estimates)
    equal = [one for one in estimates if EQUAL * one.epoch_cost <= least]
    return min(equal, key=lambda one: one.server_hosts)


def _place(one: Estimate) -> str:
    if not one.servers:
        return "all-reduce, without servers"
    servers = "1 server" if one.servers == 1 else f"{one.servers} servers"
    if one.way.layout == "co-located":
        return (
            f"{servers} on the host of the workers" if one.servers == 1 else f"{servers}, one on each host of workers"
        )
    return f"{servers} on {'a host of its own' if one.servers == 1 else 'hosts of their own'}"
