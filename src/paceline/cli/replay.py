"""``paceline replay``: who was in a job from when on, and whether each sample was trained on once per epoch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.cli.options import Parser
from paceline.cli.story import find_folder
from paceline.naming import workers_text
from paceline.observe import ring
from paceline.observe.job_view import change_text
from paceline.observe.table import plural

if TYPE_CHECKING:
    from paceline.data.replay import Replay

DESCRIPTION = f"""\
Replay the log of a job's membership, of one that has ended, too: who came, who left, why, and in which round; and how
often each sample was trained on, where workers step together. By default that of the last job whose scheduler ran on
this host, which keeps the logs of its last {ring.KEPT_JOBS} jobs."""


def run(name: str, words: Sequence[str]) -> int:
    """Print the log of a job.

    Raises:
        UsageError: more than one job is named.
        LaunchError: there is no such log on this host.
    """
    from paceline.data.replay import Replay  # its package imports torch

    job, _ = Parser(name, (), "paceline replay [JOB]", DESCRIPTION).parse_job(words)
    path, _ = find_folder(job)
    log = Replay.of(path)
    print(f"job {ring.start_of(path)[0]}")
    for when, change in log.changes:
        clock = time.strftime("%H:%M:%S", time.localtime(when))
        print(f"generation {change.generation}, {clock}: {change_text(change)}")
    for sampler in log.samplers:
        print("\n".join(_epochs(log, sampler)))
    return 0


def _epochs(log: Replay, sampler: str) -> Iterator[str]:
    """Yield a line per epoch of a sampler."""
    epochs: dict[int, tuple[Counter[int], set[int], int]] = {}
    for step in log.steps(sampler):
        trained, workers, rounds = epochs.get(step.epoch, (Counter[int](), set[int](), 0))
        for rank, samples in step.parts.items():
            trained.update(samples)
            workers.add(rank)
        epochs[step.epoch] = trained, workers, rounds + 1
    for epoch, (trained, workers, rounds) in sorted(epochs.items()):
        again = sum(count > 1 for count in trained.values())
        left = log.length(sampler) - len(trained)
        what = [plural(len(trained), "sample", "samples"), *([f"{again} of them more than once"] if again else [])]
        what += [f"{left} not"] if left else []
        where = f"in {plural(rounds, 'round', 'rounds')} of {workers_text(workers)}"
        yield f"{sampler}, epoch {epoch}: {', '.join(what)}, {where}"
