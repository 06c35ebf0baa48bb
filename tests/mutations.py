"""Changes one line of the core at a time and runs the tests of that area: every change must make one of them fail.

``make mutations``, or ``python tests/mutations.py`` with words that must occur in the file or the line. What is changed
is a copy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: A failure is all that is asked for: the smallest example of it would take longer than all the rest.
PROFILE = """
from hypothesis import Phase, settings

settings.register_profile("mutations", phases=[Phase.explicit, Phase.generate], database=None, derandomize=True)
settings.load_profile("mutations")
"""


@dataclass(frozen=True)
class Area:
    """A file of the core, the tests that guard it, and (line before, line after) of every change."""

    file: str
    tests: Sequence[str]
    changes: Sequence[tuple[str, str]]


#: Not those with many random pushes, which take longer than all the rest.
BUCKETS = (
    "server/test_bucket.py::test_worker_is_answered_once_when_all_its_stretches_are_released",
    "server/test_bucket.py::test_first_k_takes_what_was_pushed_and_not_what_the_worker_computes_next",
    "server/test_bucket.py::test_stale_update_counts_with_its_weight",
    "server/test_bucket.py::test_push_that_is_sent_again_before_its_answer_counts_once_and_who_asked_last_is_answered",
)

AREAS = (
    Area(
        "consistency/rule.py",
        ("consistency/test_rule.py", "consistency/test_age.py"),
        (
            (
                "self.version - self.read[worker] > self.policy.age",
                "self.version - self.read[worker] >= self.policy.age",
            ),
            ("self.finished[push.worker] = push.round", "self.finished[push.worker] = push.round - 1"),
            ("self.stats.dropped[push.worker] += 1", "self.stats.dropped[push.worker] += 2"),
            ("staleness = self.version - cohort.oldest + 1", "staleness = self.version - cohort.oldest"),
            ("self.stats.data_mass[worker] += samples * weight", "self.stats.data_mass[worker] += samples"),
            ("cohort.samples.keys().isdisjoint(workers)", "True"),
            ("return self._required(cohort) <= set(cohort.samples)", "return bool(set(cohort.samples))"),
            ("min(self.policy.first, len(self._active))", "self.policy.first"),
            ("if first.round <= self.pushed[first.worker]:", "if first.round < self.pushed[first.worker]:"),
            ("if not one.before_barrier:", "if one.before_barrier:"),
            ("                self.read[worker] = self.version", "                pass"),
            ("self._slowest(worker) <= self.policy.bound", "self._slowest(worker) <= self.policy.bound + 1"),
            ("self._slowest(worker) <= self.policy.bound", "self._slowest(worker) < self.policy.bound"),
            ("for cohort in self._open[1:]) else None", "for cohort in self._open) else None"),
            ("self._level = list(self.finished)", "self._level = list(self._level)"),
            ('if self.policy.merge != "groups" and', "if"),
            ("return self.live - self.paused", "return self.live"),
        ),
    ),
    Area(
        "consistency/cohort.py",
        ("consistency/test_rule.py", "consistency/test_age.py"),
        (("self.oldest = min(self.oldest, read)", "self.oldest = read"),),
    ),
    Area(
        "server/merge.py",
        ("server/test_merge.py",),
        (
            ("self._held.pop(host.pop(0)))", "self._held.pop(host[0])), host.pop()"),
            ("([worker] for worker in sorted(self._held))", "([worker] for worker in self._held)"),
            ("factor = self.tensor(), unit / self.unit", "factor = self.tensor(), self.unit / unit"),
            ("self._samples += one.samples", "self._samples = one.samples"),
            ("values, scale = found[0], weight * found[1]", "values, scale = found[0], found[1]"),
            ("if one.samples == 0:", "if one.samples < 0:"),
            ("        if self.options is None:", "        if True:"),
            ("common(self._absent, one.absent)", "one.absent"),
            ("self.skip = self.skip or one.skip", "self.skip = one.skip"),
            ("self.shares.get(worker, 0.0) + contribution.samples", "contribution.samples"),
            ("return not values.is_sparse and not self.borrowed", "return not values.is_sparse"),
        ),
    ),
    Area(
        "server/store.py",
        BUCKETS,
        (
            ("values=one.values.clone(), borrowed=False", "values=one.values, borrowed=False"),
            ("slot.cohorts.pop(action.cohort), action", "slot.cohorts[action.cohort], action"),
            ("accumulator.result(action.weight * factor), action.weight", "accumulator.result(factor), action.weight"),
            ("if not known or rule.answered[first.worker] < first.round:", "if not known:"),
        ),
    ),
    Area(
        "server/bucket.py",
        BUCKETS,
        (
            ("slot.rule.copy(), right_updater", "slot.rule, right_updater"),
            ("pending.remaining += 1", "pending.remaining += 0"),
        ),
    ),
    Area(
        "peer/shared_hub.py",
        ("peer/test_client.py",),
        (
            ("self._hub.wake()  # under the mutex", "pass  # under the mutex"),
            ("        if self._followers:", "        if False:"),
            ("if self._driver != threading.get_ident():", "if True:"),
            ("lambda: self._driver is None or self._closed or is_done()", "lambda: is_done()"),
        ),
    ),
    Area(
        "peer/client.py",
        ("peer/test_client.py", "peer/test_sequence.py"),
        (
            ("return call.error if call.crashed else None", "return None"),
            ("connection.probe(now, at_once)", "connection.probe(now)"),
            ("self._shared.post(lambda: connection.admit(self._clock()))", "pass"),
        ),
    ),
    Area(
        "peer/connection.py",
        ("peer/test_client.py", "peer/test_sequence.py"),
        (
            ("            self._held = []", "            pass"),
            ("return unanswered + self.turn_away()", "return unanswered"),
        ),
    ),
    Area(
        "wire/sequence.py",
        ("peer/test_sequence.py",),
        (
            ("        if seq <= self._acked or seq in self._seen:", "        if seq in self._seen:"),
            ("        if seq <= self._acked or seq in self._seen:", "        if seq <= self._acked:"),
            ("for seq in self._seen if seq <= acked]", "for seq in self._seen if seq < acked]"),
            ("return next(iter(self._sent), self._next) - 1", "return self._next - 1"),
            ("self._acked = acked", "self._acked = max(acked, *self._seen, 0)"),
            ("return self._sent.pop(seq, None) is not None", "return self._sent.get(seq, None) is not None"),
            ("now - sent.asked >= after_s", "now - sent.asked > after_s"),
            ("self._sent[seq].asked = now", "self._sent[seq].asked = 0.0"),
            ("            self._seen[seq] = result", "            pass"),
        ),
    ),
    Area(
        "worker/versions.py",
        ("worker/test_versions.py",),
        (
            ("return set(self._versions[first:last])", "return set(self._versions[first : last + 1])"),
            ("self._versions.insert(index, self._versions[index - 1])", "self._versions.insert(index, 0)"),
            ("self._starts[first:last] = [start]", "self._starts[first:last] = [start + length]"),
        ),
    ),
    Area(
        "worker/block.py",
        ("worker/test_rounds.py",),
        (
            ("if start <= segment.start < start + length:", "if start < segment.start < start + length:"),
            ("if start <= segment.start < start + length:", "if start <= segment.start <= start + length:"),
            ("if pushed and pushed[-1][2] == segment.round:", "if pushed:"),
            ("one.start + one.length - at, one.round)", "one.start + one.length - at, 0)"),
            ("if one.start < at < one.start + one.length:", "if one.start < at <= one.start + one.length:"),
            ("self._cut(start + length)", "self._cut(start)"),
        ),
    ),
)


def passes(folder: Path, tests: Sequence[str]) -> bool:
    """Run tests on the sources in a folder."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    env = os.environ | {"PYTHONPATH": str(folder / "src")}
    done = subprocess.run(
        [*command, *(f"tests/{one}" for one in tests)],
        check=False,
        cwd=folder,
        env=env,
        capture_output=True,
        timeout=300,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"the tests could not run:\n{done.stdout.decode()}{done.stderr.decode()}")
    return done.returncode == 0


def survives(folder: Path, area: Area, before: str, after: str) -> bool:
    """Tell whether the tests of an area pass although one line was changed."""
    path = folder / "src" / "paceline" / area.file
    text = path.read_text()
    if text.count(before) != 1:
        raise RuntimeError(f"{area.file} has {text.count(before)} places with {before.strip()!r}; one is needed")
    path.write_text(text.replace(before, after))
    try:
        return passes(folder, area.tests)
    finally:
        path.write_text(text)


def main(words: Sequence[str]) -> int:
    """Try all changes whose file or line contains all words; returns how many survived."""
    if not any(all(word in f"{area.file} {one[0]}" for word in words) for area in AREAS for one in area.changes):
        raise ValueError(f"no change has {' and '.join(words)} in its file and line")
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="paceline-mutations-") as name:
        folder = Path(name)
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        (folder / "conftest.py").write_text(PROFILE)
        for area in AREAS:
            chosen = [one for one in area.changes if all(word in f"{area.file} {one[0]}" for word in words)]
            if chosen and not passes(folder, area.tests):
                raise RuntimeError(f"{', '.join(area.tests)} fail without any change")
            for before, after in chosen:
                survived = survives(folder, area, before, after)
                survivors += survived
                verdict = "SURVIVES" if survived else "caught"
                print(f"{verdict:8}  {area.file:22}  {before.strip()}  ->  {after.strip()}", flush=True)
    print(f"{survivors} survived")
    return survivors


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
