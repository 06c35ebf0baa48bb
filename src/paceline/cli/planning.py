"""``paceline plan``: how a job would scale with each layout of servers, and which one to take."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence

from paceline.cli.options import Option, Parser, UsageError, usage_errors
from paceline.config import from_environment
from paceline.errors import ConfigError
from paceline.hetero import Speed
from paceline.hetero.files import parse_speeds
from paceline.hetero.local_plan import ELEMENT_BYTES
from paceline.launch.preflight import read_text
from paceline.observe.table import plural, table
from paceline.sim import SimulatedCluster, SimulatedWorker, read_cluster
from paceline.sim.models import Array, arrays, even
from paceline.sim.plots import check_path, draw_scaling
from paceline.sim.scaling import LAYOUTS, SIZES, Estimate, ExchangePlan, Planner, Training
from paceline.sim.simulated_cluster import MOST_WORKERS

#: Workers whose measured times differ by less than this part count as alike.
_ALIKE = 0.05

OPTIONS = (
    Option(("--model",), "a published network: resnet50, vgg16, alexnet, inception-v3, ...", "NAME"),
    Option(("--bytes",), "size of a model's float32 gradients instead, as in 102MB", "SIZE"),
    Option(
        ("--gpus",), "workers, one per GPU (default: those of the cluster or speeds file)", "N", int, least=1,
        most=MOST_WORKERS,
    ),
    Option(("--per-host",), "workers per host, which share its link (default: 1)", "N", int, default=1, least=1),
    Option(("--rate",), "samples per second that one worker trains on by itself", "SAMPLES", float, positive=True),
    Option(("--speeds",), "speeds file of paceline profile, instead of --rate", "FILE"),
    Option(("--batch",), "samples per step and worker (default: 32)", "SAMPLES", int, default=32, least=1),
    Option(("--nic",), "rate of a host's link each way, as in 25Gbit or 3.1GB, per second", "RATE"),
    Option(("--server-nic",), "the same of hosts that only serve (default: as --nic)", "RATE"),
    Option(("--latency",), "of a message (default: 5e-5)", "SECONDS", float, least=0),
    Option(
        ("--compression",), "codec to compare, on both ways (default: fp16)", "|".join(ELEMENT_BYTES), default="fp16",
        choices=tuple(ELEMENT_BYTES),
    ),
    Option(
        ("--epoch-samples",), "samples of an epoch (default: 1281167, ImageNet)", "N", int, default=1_281_167, least=1
    ),
    Option(("--price-per-hour",), "price of a host (default: costs are in hours of hosts)", "PRICE", float, least=0),
    Option(
        ("--server-price-per-hour",), "of a host that only serves (default: as --price-per-hour)", "PRICE", float,
        least=0,
    ),
    Option(("--plot",), "write a picture of throughput and efficiency by workers", "FILE"),
    Option(("--json",), "print everything as JSON"),
)  # fmt: skip

DESCRIPTION = """\
Say how a job would scale: time of a step, efficiency and cost of an epoch with one server, one and two servers per
host, servers on the hosts of the workers, and all-reduce; each with and without overlap, local merge and compression.
Recommends servers, their hosts, and the type of store. Steps are in lock step, over the links of paceline simulate,
with the placement of real stores."""

EPILOG = """\
efficiency: throughput over what as many workers would do that exchange nothing.
overlap: layers are pushed and pulled during backward; without it a step pushes, then pulls.
local merge: the workers of a host add up their gradients first (of all-reduce: hierarchical). That takes no time here,
and so do merging and updating, unless a cluster file says otherwise (merge_s, update_s; see paceline simulate --help).

example:
  paceline plan --model resnet50 --gpus 64 --per-host 8 --rate 760 --batch 256 --nic 25Gbit --plot plan.png
  paceline plan cluster.toml --model vgg16 --per-host 4
  paceline profile -n 4 --speeds speeds -- python train.py --batch-size 32
  paceline plan --speeds speeds --batch 32 --bytes 44MB --nic 1Gbit"""


def run(name: str, words: Sequence[str]) -> int:
    """Run ``paceline plan`` and return 0."""
    usage = f"paceline {name} [CLUSTER] [options]"
    files, options = Parser(name, OPTIONS, usage, DESCRIPTION, EPILOG).parse_named(words)
    if options.server_price_per_hour is not None and options.price_per_hour is None:
        raise UsageError("--server-price-per-hour needs --price-per-hour: without it costs are in hours of hosts")
    cluster = _cluster(files, options)
    model = _model(options, cluster)
    count = len(cluster.workers)
    planner = Planner(
        Training(
            tuple(model), cluster, options.batch, options.per_host, from_environment().bigarray_bound,
            options.epoch_samples, options.price_per_hour, options.server_price_per_hour,
        )
    )  # fmt: skip
    if options.plot is not None:
        check_path(options.plot)
    scaling = planner.scaling(sorted({*SIZES, count}))
    if options.plot is not None:
        draw_scaling(scaling, options.plot)
    ways = planner.ways(count, options.compression)
    recommended = planner.recommend(count, options.compression)
    local = planner.local(recommended.best)
    if options.json:
        found = {
            "sentences": recommended.sentences,
            "mode": recommended.mode,
            "recommended": dataclasses.asdict(recommended.best),
            "local": None if local is None else dataclasses.asdict(local),
            "ways": [dataclasses.asdict(one) for one in ways],
            "scaling": [dataclasses.asdict(one) for one in scaling],
        }
        print(json.dumps(found))
    else:
        print("\n\n".join([_assumptions(planner, count), *_tables(planner, ways), _scaling(scaling)]))
        print(f"\n{recommended.sentences}")
        if local is not None:
            print(f"\nLocal steps, at some loss: {local}.\n  paceline.DistributedOptimizer(..., {local.arguments})")
    return 0


# ---- what the words of the command line mean -------------------------------------------------------------------------


def _cluster(files: Sequence[str], options: argparse.Namespace) -> SimulatedCluster:
    """Return the cluster of a file, of measured speeds, or of workers that are alike."""
    if len(files) > 1:
        raise UsageError(f"give one cluster file, not {len(files)}, as in: paceline plan cluster.toml --model resnet50")
    given = [one for one in (*files, options.speeds and "--speeds", options.rate and "--rate") if one]
    if len(given) != 1:
        which = " and ".join(given) or "nothing"
        raise UsageError(f"the speed of workers comes from a cluster file, --speeds or --rate; {which} was given")
    if files:
        for flag in ("nic", "server_nic", "latency"):
            if getattr(options, flag) is not None:
                raise UsageError(f"--{flag.replace('_', '-')} has no use here: links are those of {files[0]}")
        cluster = read_cluster(files[0])
        return dataclasses.replace(cluster, workers=_repeated(cluster.workers, options.gpus))
    if options.nic is None:
        raise UsageError("--nic is missing: the rate of a host's link, as in --nic 25Gbit")
    link = _rate("--nic", options.nic)
    if options.speeds is None and options.gpus is None:
        raise UsageError("--gpus is missing: the number of workers, as in --gpus 64")
    speeds = _measured(options) if options.speeds is not None else [Speed(0.0, 1 / options.rate)]
    servers = link if options.server_nic is None else _rate("--server-nic", options.server_nic)
    workers = tuple(SimulatedWorker(one, link) for one in speeds)
    latency_s = 5e-5 if options.latency is None else options.latency
    return SimulatedCluster(_repeated(workers, options.gpus), bandwidth=servers, latency_s=latency_s)


def _repeated(workers: Sequence[SimulatedWorker], count: int | None) -> tuple[SimulatedWorker, ...]:
    return tuple(workers[rank % len(workers)] for rank in range(len(workers) if count is None else count))


def _measured(options: argparse.Namespace) -> list[Speed]:
    try:
        seconds = sorted(parse_speeds(read_text(options.speeds, "the speeds file")).values())
    except ValueError as error:
        raise ConfigError(f"--speeds {options.speeds} cannot be used: {error}") from error
    kinds: list[list[float]] = []
    for one in seconds:
        if not kinds or one > (1 + _ALIKE) * kinds[-1][0]:
            kinds.append([])
        kinds[-1].append(one)
    return [Speed(0.0, sum(kind) / len(kind) / options.batch) for kind in kinds for _ in kind]


def _model(options: argparse.Namespace, cluster: SimulatedCluster) -> list[Array]:
    if options.model is not None and options.bytes is not None:
        raise UsageError("--model and --bytes both say the size of the model; give one")
    if options.model is not None:
        with usage_errors("--model: "):
            return arrays(options.model)
    if options.bytes is None and not cluster.model_bytes:
        raise UsageError(
            "--model or --bytes is missing: the size of the model, as in --model resnet50 or --bytes 102MB"
        )
    size = _bytes("--bytes", options.bytes) if options.bytes is not None else cluster.model_bytes
    return even(max(1, round(size / 4)))


_UNITS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def _bytes(flag: str, text: str) -> float:
    return _quantity(flag, text, r"B?", "a size, as in 102MB")


def _rate(flag: str, text: str) -> float:
    """Return bytes per second."""
    bits = re.search(r"bit(/s|ps)?$", text)
    number = _quantity(flag, text, r"(?:bit|B)(?:/s|ps)?", "a rate with its unit, as in 25Gbit or 3.1GB")
    return number / 8 if bits else number


def _quantity(flag: str, text: str, unit: str, wanted: str) -> float:
    found = re.fullmatch(rf"([0-9.]+(?:e[0-9]+)?) ?([kKMGT]?|[KMG]i){unit}", text)
    try:
        number = float(found[1]) * _UNITS[found[2]] if found else math.nan
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise UsageError(f"{flag}: {text!r} is not {wanted}")
    return number


# ---- what is printed -------------------------------------------------------------------------------------------------


def _assumptions(planner: Planner, count: int) -> str:
    training, cluster = planner.training, planner.training.cluster
    times = [1e3 * one.speed.seconds(training.batch) * training.noise.mean for one in training.kinds]
    alone = " to ".join(dict.fromkeys(f"{one:.4g}" for one in (min(times), max(times))))
    size = f"{training.model_bytes / 4e6:.4g} M parameters, {training.model_bytes / 1e6:.4g} MB of gradients"
    step = f"{alone} ms per step of {training.batch} samples"
    hosts = plural(planner.estimate(ExchangePlan("all-reduce"), count).hosts, "host", "hosts")
    links = sorted({8e-9 * one.bandwidth for one in training.kinds})
    rates = " to ".join(f"{one:.4g}" for one in dict.fromkeys((links[0], links[-1])))
    return "\n".join(
        [
            f"model: {size}; an epoch has {training.epoch_samples} samples",
            f"{plural(count, 'worker', 'workers')} on {hosts}: {step} without an exchange",
            f"links: {rates} Gbit/s, those of servers {8e-9 * cluster.bandwidth:.4g}; "
            f"{1e3 * cluster.latency_s:.4g} ms per message",
        ]
    )


def _tables(planner: Planner, ways: Sequence[Estimate]) -> list[str]:
    """Return tables of efficiency, time and cost: a line for each way, a column for each layout."""
    count = ways[0].workers
    layouts = {one.way.layout: one for one in ways}
    servers = ["servers", *(str(layouts[layout].servers) for layout in LAYOUTS)]
    unit = "hours of hosts" if planner.training.host_price is None else "price"
    shown: dict[str, Callable[[Estimate], str]] = {
        f"efficiency, {plural(count, 'worker', 'workers')}": lambda one: f"{one.efficiency:.0%}",
        "ms per step": lambda one: f"{1e3 * one.step_s:.4g}",
        f"{unit} per epoch": lambda one: f"{one.epoch_cost:.3g}",
    }
    found = []
    for title, cell in shown.items():
        rows: dict[str, list[str]] = {}
        for one in ways:
            rows.setdefault(one.way.words, []).append(cell(one))
        found.append(table([title, *LAYOUTS], [servers, *([words, *cells] for words, cells in rows.items())]))
    return found


def _scaling(estimates: Sequence[Estimate]) -> str:
    rows: dict[int, dict[str, list[str]]] = {}
    for one in estimates:
        rows.setdefault(one.workers, {}).setdefault(one.way.layout, []).append(f"{one.efficiency:4.0%}")
    head = ["workers", *(f"{layout}" for layout in LAYOUTS)]
    lines = [[str(count), *(" ".join(cells[layout]) for layout in LAYOUTS)] for count, cells in rows.items()]
    title = "efficiency with local merge, without overlap and with it"
    return f"{title}\n{table(head, lines)}"
