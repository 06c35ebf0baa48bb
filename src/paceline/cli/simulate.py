"""``paceline simulate``: the forecast of a cluster's work, before it begins."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from paceline.cli.options import Option, Parser, UsageError, usage_errors
from paceline.consistency import Policy, parse_groups, policy_of, resolve_groups, weighting_names
from paceline.hetero import choose
from paceline.hetero.local_period import Period
from paceline.hetero.local_plan import ELEMENT_BYTES
from paceline.launch.preflight import read_text
from paceline.naming import listed, suggestion
from paceline.observe.table import table
from paceline.sim import Result, SimulatedCluster, SimulatedTraining, read_cluster, simulate
from paceline.sim.plots import check_path, draw
from paceline.sim.simulation import ShareKind, measure

if TYPE_CHECKING:
    from paceline.sim.problem import Problem

_SHARES = ", ".join(get_args(ShareKind))

OPTIONS = (
    Option(
        ("--kv-store",),
        f"type of store, or TYPE:SHARES with shares {_SHARES}; dist_auto measures first; repeated (default: dist_sync)",
        "TYPE",
        repeat=True,
    ),
    Option(
        ("--learn",),
        "what the workers learn: digits, or nothing (default: digits)",
        "NAME",
        default="digits",
        choices=("digits", "nothing"),
    ),
    Option(("--batch-size",), "samples per round and worker (default: 32)", "SAMPLES", int, default=32, least=1),
    Option(("--lr",), "learning rate (default: 0.1)", "RATE", float, default=0.1, positive=True),
    Option(("--target",), "accuracy at which to stop, up to 1", "ACCURACY", float, positive=True),
    Option(("--rounds",), "rounds of every worker", "ROUNDS", int, least=1),
    Option(("--seconds",), "simulated time (default: 1000, without --rounds)", "SECONDS", float, positive=True),
    Option(("--groups",), "groups file of dist_gsync (default: clusters of the workers' speeds)", "FILE"),
    Option(("--staleness",), "rounds a worker may be ahead of the slowest", "ROUNDS", int, least=0),
    Option(("--weighting",), "factor of a stale update", "NAME", choices=tuple(weighting_names())),
    Option(
        ("--lr-scale",),
        "learning rate of an update, or of a sample (default: update)",
        "update|sample",
        choices=("update", "sample"),
    ),
    Option(("--age",), "missed updates beyond which a push is dropped", "UPDATES", int, least=0),
    Option(("--first",), "pushes that make an update of dist_ksync (default: half of the workers)", "K", int, least=1),
    Option(("--grace",), "for which that update waits for further pushes (default: 0)", "SECONDS", float, least=0),
    Option(
        ("--local-steps",),
        "steps that workers take by themselves in a round, '32 by speed', or a time, '30 s'",
        "STEPS",
    ),
    Option(("--delay",), "local steps for which an answer is not waited for (default: 0)", "STEPS", int, least=0),
    Option(
        ("--compression",),
        "codec of pushes and answers; only sizes count",
        "CODEC",
        choices=tuple(ELEMENT_BYTES),
    ),
    Option(("--seed",), "of noise and data (default: 0)", "SEED", int, default=0, least=0),
    Option(("--plot",), "write a picture", "FILE"),
)

#: Types of store that an option is for; the others would leave it unread.
_ONLY_FOR = {
    "groups": ("dist_gsync",),
    "staleness": ("dist_ssync", "dist_gsync", "dist_ksync"),
    "weighting": ("dist_async", "dist_ssync", "dist_gsync", "dist_ksync"),
    "lr_scale": ("dist_async", "dist_ssync", "dist_gsync", "dist_ksync"),
    "age": ("dist_async", "dist_ssync", "dist_ksync"),
    "first": ("dist_ksync",),
    "grace": ("dist_ksync",),
}

DESCRIPTION = """\
Run jobs under a simulated clock on a cluster that a file describes: workers with speeds and noise, links, servers. The
servers' rule is the one of real jobs. Prints one line per type of store."""

EPILOG = """\
columns: time to the target accuracy; last accuracy; samples per second; part of the time in which workers compute;
updates; mean staleness; step mass (sum of learning rate times weight); largest and smallest part of one worker in what
was learned; bytes over the network.

example:
  paceline simulate cluster.toml --kv-store dist_sync --kv-store dist_sync:measured --kv-store dist_gsync --target 0.95
  paceline simulate cluster.toml --local-steps "32 by speed" --compression int4 --target 0.95

cluster.toml:
  [[workers]]
  count = 4
  batch_s = 0.15     # time of a step of `batch` samples (32), of which `fixed` (0) does not depend on the samples
  [[workers]]
  count = 4
  batch_s = 0.6
  [noise]
  jitter = 0.1       # also: spike_probability, spike_factor
  [servers]
  count = 2          # also: bandwidth (bytes/s), latency_s, merge_s, update_s
  [model]
  bytes = 4e6"""


def run(name: str, words: Sequence[str]) -> int:
    """Run ``paceline simulate`` and return 0."""
    usage = f"paceline {name} CLUSTER [options]"
    files, options = Parser(name, OPTIONS, usage, DESCRIPTION, EPILOG).parse_named(words)
    if len(files) != 1:
        raise UsageError(f"give one cluster file, not {len(files)}, as in: paceline simulate cluster.toml")
    kinds = options.kv_store or ["dist_sync"]
    _refuse_unused(options, {kind.partition(":")[0] for kind in kinds})
    cluster = read_cluster(files[0])
    results: dict[str, Result] = {}
    told = _told_options(options, [kind.partition(":")[0] for kind in kinds])
    with usage_errors():
        if options.plot is not None:
            check_path(options.plot)
        problem = _problem(options.learn)
        for kind in kinds:
            plan, sentence = _plan(kind, cluster, options)
            told += [sentence] if sentence else []
            results[kind] = simulate(cluster, plan, problem)
        if options.plot is not None:
            draw(results, options.plot)
    print("\n".join([*told, _table(results)]))
    return 0


def _refuse_unused(options: argparse.Namespace, types: set[str]) -> None:
    if options.target is not None and options.target > 1:
        raise UsageError(f"--target is {options.target:g}; an accuracy is at most 1")
    if options.target is not None and options.learn == "nothing":
        raise UsageError("--target changes nothing with --learn nothing: nobody learns, so there is no accuracy")
    if options.delay and options.local_steps is None:
        raise UsageError("--delay changes nothing without --local-steps: a worker has nothing to do meanwhile")
    for field, wanted in _ONLY_FOR.items():
        if getattr(options, field) is not None and not types & set(wanted):
            flag = "--" + field.replace("_", "-")
            raise UsageError(f"{flag} changes nothing for {', '.join(sorted(types))}; it is for {', '.join(wanted)}")


def _told_options(options: argparse.Namespace, types: Sequence[str]) -> list[str]:
    """Return for each option that some of the jobs do without, or share, which jobs have it."""
    lines = []
    for field, wanted in _ONLY_FOR.items():
        having = [one for one in dict.fromkeys(types) if one in wanted]
        if (value := getattr(options, field)) is not None and len(set(types)) > 1:
            lines.append(f"--{field.replace('_', '-')} {value} counts for {listed(having)}")
    return lines


def _table(results: dict[str, Result]) -> str:
    head = ["", "target", "accuracy", "samples/s", "computing", "updates", "staleness", "step mass", "data", "bytes"]
    return table(head, [[name, *_cells(result)] for name, result in results.items()])


def _cells(result: Result) -> list[str]:
    stats = result.stats
    mean = sum(age * count for age, count in stats.staleness.items()) / max(1, stats.updates)
    mass = [stats.data_mass[worker] for worker in range(len(result.rounds))]
    total = sum(mass) or 1.0
    return [
        "-" if result.target_s is None else f"{result.target_s:.1f} s",
        f"{result.curve[-1][1]:.3f}" if result.curve else "-",
        f"{result.samples_per_s:.1f}",
        f"{result.computing:.1%}",
        str(stats.updates),
        f"{mean:.2f}",
        f"{result.step_mass:.4g}",
        f"{max(mass) / total:.1%} {min(mass) / total:.1%}",
        f"{result.network_bytes:.3g}",
    ]


def _problem(name: str) -> Problem | None:
    if name == "nothing":
        return None
    from paceline.sim.problem import Digits

    return Digits()


def _plan(kind: str, cluster: SimulatedCluster, options: argparse.Namespace) -> tuple[SimulatedTraining, str]:
    """Return how a job trains, and with ``dist_auto`` why."""
    store_type, _, shares = kind.partition(":")
    sentence = ""
    if kind == "dist_auto":
        choice = choose(measure(cluster, options.batch_size, seed=options.seed)[0])
        policy, shares, sentence = choice.policy, choice.shares, f"dist_auto: {choice.sentence}"
    elif shares not in ("", *get_args(ShareKind)):
        raise UsageError(f"--kv-store {kind!r}: shares {shares!r} are unknown{suggestion(shares, get_args(ShareKind))}")
    else:
        policy = _policy(store_type, cluster, options)
    seconds = 1000.0 if options.seconds is None and options.rounds is None else options.seconds
    fastest = min(machine.speed.seconds(options.batch_size) for machine in cluster.workers)
    plan = SimulatedTraining(
        policy,
        shares or "equal",  # type: ignore[arg-type]
        batch=options.batch_size,
        lr=options.lr,
        rounds=options.rounds,
        seconds=seconds,
        target=options.target,
        evaluate_s=0.0 if options.learn == "nothing" else 2 * fastest,
        seed=options.seed,
        period=_period(options.local_steps),
        delay=options.delay or 0,
        codec=options.compression or "",
    )
    return plan, sentence


def _period(text: str | None) -> Period | None:
    return None if text is None else Period.parse(int(text) if text.isdigit() else text)


def _policy(store_type: str, cluster: SimulatedCluster, options: argparse.Namespace) -> Policy:
    count = len(cluster.workers)
    is_sync = store_type == "dist_sync"
    return policy_of(
        store_type,
        groups=_groups(cluster, options) if store_type == "dist_gsync" else (),
        first=options.first,
        grace_s=options.grace if store_type == "dist_ksync" else None,
        staleness=options.staleness,
        weighting=None if is_sync else options.weighting,
        lr_scale=None if is_sync else options.lr_scale,
        age=options.age if store_type in ("dist_async", "dist_ssync", "dist_ksync") else None,
        num_workers=count,
    )


def _groups(cluster: SimulatedCluster, options: argparse.Namespace) -> tuple[tuple[int, ...], ...]:
    if options.groups is None:
        from paceline.hetero import group_by_speed

        return group_by_speed([machine.speed.seconds(options.batch_size) for machine in cluster.workers])
    found = parse_groups(read_text(options.groups, "the groups file"))
    return resolve_groups(found, [("", rank) for rank in range(len(cluster.workers))])
