"""Changes one line of the core at a time and runs the tests of that area: every change must make one of them fail.

``nox -s mutations``, or ``python tests/mutations.py`` with words that must occur in the file or the line. What is
changed is a copy.
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
    "server/test_bucket.py::test_worker_is_answered_once_when_all_its_ranges_are_released",
    "server/test_bucket.py::test_first_k_takes_what_was_pushed_and_not_what_the_worker_computes_next",
    "server/test_bucket.py::test_stale_update_counts_with_its_weight",
    "server/test_bucket.py::test_push_that_is_sent_again_before_its_answer_counts_once_and_who_asked_last_is_answered",
)

FORWARDING = ("server/test_forward.py",)

JOINS = (
    "server/test_bucket.py::test_requests_that_are_refused_or_only_ask_cut_nothing",
    "server/test_bucket.py::test_slots_that_are_pushed_as_a_whole_again_are_one_and_as_if_they_had_never_been_joined",
    "server/test_bucket.py::test_neighbours_that_have_come_less_far_stay_apart",
    "server/test_bucket.py::test_slots_in_which_something_goes_on_stay_apart",
    "server/test_bucket.py::test_what_was_absent_is_known_of_joined_slots",
    "server/test_bucket.py::test_who_reads_a_slot_part_by_part_has_read_it_when_all_parts_are_of_one_version",
    "server/test_bucket.py::test_parts_that_were_read_stay_so_when_slots_are_cut_and_joined",
)

AREAS = (
    Area(
        "consistency/rule.py",
        ("consistency/test_rule.py", "consistency/test_age.py", "consistency/test_regroup.py"),
        (
            (
                "self.version - self.read[first.worker] > self.policy.age",
                "self.version - self.read[first.worker] >= self.policy.age",
            ),
            ("finish(push.worker, push.round)", "finish(push.worker, push.round - 1)"),
            ("self.stats.dropped[push.worker] += 1", "self.stats.dropped[push.worker] += 2"),
            ("staleness = self.version - cohort.oldest + 1", "staleness = self.version - cohort.oldest"),
            ("self.stats.data_mass[worker] += pushed * weight", "self.stats.data_mass[worker] += pushed"),
            ("cohort.samples.keys().isdisjoint(workers)", "True"),
            (
                "return len(cohort.samples) >= len(required) and required <= cohort.samples.keys()",
                "return bool(cohort.samples)",
            ),
            ("min(self.policy.first, len(self._activity.workers))", "self.policy.first"),
            ("if first.round <= self.pushed[first.worker]:", "if first.round < self.pushed[first.worker]:"),
            ("and worker not in self.paused):", "):"),
            ("                self.read[worker] = self.version", "                pass"),
            ("slowest(worker) <= self.policy.bound", "slowest(worker) <= self.policy.bound + 1"),
            ("slowest(worker) <= self.policy.bound", "slowest(worker) < self.policy.bound"),
            ("for cohort in self._open[1:]) else None", "for cohort in self._open) else None"),
            ('if self.policy.merge != "groups" or self.units.is_alone(self.unit[worker]):', "if True:"),
            ("low != self._seen_low or", "False or"),
            ("return cohort.is_over or (self._has_enough(cohort)", "return (self._has_enough(cohort)"),
            ("self.policy.grace_s and not self._activity.workers <= cohort.samples.keys()", "self.policy.grace_s"),
            ("if one.number == cohort and one.has_grace:", "if one.has_grace:"),
            ("if one.number == cohort and one.has_grace:", "if one.number == cohort:"),
            ("cohort.has_grace = True", "pass"),
        ),
    ),
    Area(
        "consistency/activity.py",
        ("consistency/test_rule.py", "consistency/test_age.py", "consistency/test_regroup.py"),
        (
            ("self.workers = self._live - self._paused - self._away", "self.workers = self._live - self._away"),
            ("self.workers = self._live - self._paused - self._away", "self.workers = self._live - self._paused"),
            ("if self.phase[worker] <= phase}", "if self.phase[worker] == phase}"),
            ("here -= {worker for worker in self._away if self.phase[worker] == phase}", "here -= self._away"),
            ("self.phase[worker] = phase", "pass"),
            ("self._at_low -= 1", "self._at_low -= 0"),
            ("self.level = list(self._finished)", "self.level = list(self.level)"),
            ("self._low = self._at_low = 0", "pass"),
            ("self.oldest = min(self.oldest, read)", "self.oldest = read"),
        ),
    ),
    Area(
        "server/merge.py",
        ("server/test_merge.py",),
        (
            ("self._held.pop(host.pop(0)))", "self._held.pop(host[0])), host.pop()"),
            ("([worker] for worker in sorted(self._held))", "([worker] for worker in self._held)"),
            ("factor = self.tensor(), unit / self.unit", "factor = self.tensor(), self.unit / unit"),
            ("self._samples += one.samples", "self._samples = one.samples"),
            (
                "weight * (found[1] / self._samples if self._mean else 1.0)",
                "(found[1] / self._samples if self._mean else 1.0)",
            ),
            ("            self._host.close()\n", ""),
            ("        if self._held or self._expected:", "        if self._held:"),
            ("if one.samples == 0:", "if one.samples < 0:"),
            ("        if self.options is None:", "        if True:"),
            ("common(self.absent, one.absent)", "one.absent"),
            ("self.skip = self.skip or one.skip", "self.skip = one.skip"),
            ("self.shares.get(worker, 0.0) + contribution.samples", "contribution.samples"),
            ("is_ours = not (so_far.is_sparse or self.borrowed)", "is_ours = not so_far.is_sparse"),
        ),
    ),
    Area(
        "server/bucket_store.py",
        BUCKETS,
        (
            ("values=one.values.clone(), borrowed=False", "values=one.values, borrowed=False"),
            ("slot.cohorts.pop(action.cohort), action", "slot.cohorts[action.cohort], action"),
            ("slot.pending[push.worker] = request", "slot.pending.setdefault(push.worker, request)"),
            ("if actions and isinstance(actions[0], Repeat)", "if False"),
        ),
    ),
    Area(
        "server/sinks.py",
        BUCKETS,
        (("accumulator.result(action.weight * factor)", "accumulator.result(factor)"),),
    ),
    Area(
        "server/forward.py",
        FORWARDING,
        (
            ("values.to(dtype), unit, shares", "values.to(dtype), 1.0, shares"),
            ("outgoing, self._outgoing = self._outgoing, []", "outgoing = self._outgoing"),
        ),
    ),
    Area(
        "server/notices.py",
        FORWARDING,
        (("if two_ways and", "if False and"),),
    ),
    Area(
        "server/bucket.py",
        (*BUCKETS, *JOINS),
        (
            ("        if self.unreleased == 0 and not", "        if self.unreleased <= 1 and not"),
            (
                "return self.slots if span.length == self._slots.length else self._slots",
                "return self.cut(span) if span else self._slots",
            ),
            ("        if not left.stands_like(right):", "        if False:"),
            (
                "        if len(self.slots) == 1 and span.length == self._slots.length:",
                "        if span.length == self._slots.length:",
            ),
            ("        self._slots.join(start, stop, self._joined)", "        pass"),
            ("self._slots.cut(start, stop, Slot.split)", "self._slots.touched(start, stop)"),
            ("self.rule.copy() if number else", "self.rule if number else"),
            ("            request.unreleased += 1", "            pass"),
            ("bool(self.cohorts or self.pending or", "bool(self.pending or"),
            ("bool(self.cohorts or self.pending or", "bool(self.cohorts or"),
            ("            and self.rule.is_like(right.rule)\n", ""),
        ),
    ),
    Area(
        "server/readers.py",
        ("server/test_parts.py", *JOINS),
        (
            (
                "        if span.start <= slot.start and span.start + span.length >= slot.start + slot.length:",
                "        if True:",
            ),
            ("            if self.parts.add(worker, version, start, stop, slot.length):", "            if False:"),
            ("            self.parts.within(start, stop),", "            Parts(),"),
            ("((at + a, at + b) for a, b in right.absent.get(worker, ()))", "right.absent.get(worker, ())"),
            ("(parts if last == version else ())", "parts"),
            ("        if length == 0 or is_all(parts, length):", "        if is_all(parts, length):"),
            ("self._seen[worker] = version, parts", "pass"),
            ("            if last <= version:", "            if True:"),
            ("(before if last == version else ())", "before"),
            ("((at + a, at + b) for a, b in parts)", "parts"),
        ),
    ),
    Area(
        "server/readers.py",
        ("server/test_readers.py",),
        (
            ("        if self.holds.get(worker) == self.version(unit):", "        if True:"),
            ("            self.jump(unit)", "            pass"),
            ("            self.holds[worker] = version\n", "            pass\n"),
            ("self.told.add(worker, version, start, stop, slot.length):", "True:"),
        ),
    ),
    Area(
        "server/norms.py",
        ("server/test_clip_sink.py",),
        (
            ("if one.overlaps(span)}", "}"),
            ("one.squares | right.norms[unit].squares", "one.squares"),
            (
                "            right.questions[unit] = [one for one in asked if one.span.stop > position]",
                "            right.questions[unit] = list(asked)",
            ),
            ("one.question.waiting += one.span.start < position < one.span.stop", "one.question.waiting += 1"),
        ),
    ),
    Area(
        "updaters/torch_optim.py",
        ("updaters/test_updaters.py",),
        (
            ("        if self._whole or not state_parts.fit(", "        if not state_parts.fit("),
            ("        if self._whole or not state_parts.fit(", "        if self._whole or state_parts.fit("),
            ("            if all(piece.start != edge for piece in pieces):", "            if True:"),
            ("            apart.add(edge)", "            pass"),
            ("(right._spec, right._applied) != (self._spec, self._applied)", "right._spec != self._spec"),
            ("(right._spec, right._applied) != (self._spec, self._applied)", "right._applied != self._applied"),
        ),
    ),
    Area(
        "updaters/state_parts.py",
        ("updaters/test_updaters.py",),
        (
            (
                "return one.clone() if where is None or one.dim() == 0 else one[where]",
                "return one if where is None or one.dim() == 0 else one[where]",
            ),
            ("left.keys() == right.keys() and all(", "all("),
            ("(one.dim() > 0 or torch.equal(one, other))", "True"),
            ("right.storage_offset() != end or", ""),
            ("    if not same_memory or", "    if"),
            ("    if not same_memory or", "    if True or"),
        ),
    ),
    Area(
        "net/client.py",
        ("net/test_client.py", "net/test_sequence.py"),
        (
            ("                if self._followers:", "                if False:"),
            ("self._driver is None or self._closed or (call is not", "(call is not"),
            ("                self._hub.wake()\n                if not", "                if not"),
            ("return call.error if call.crashed else None", "return None"),
            ("partial(requests.probe, now, at_once=True)", "partial(requests.probe, now)"),
            ("self._send(requests, lambda: requests.admit(self._clock()))", "pass"),
        ),
    ),
    Area(
        "net/call.py",
        ("net/test_client.py", "net/test_sequence.py"),
        (
            ("            self._held = []", "            pass"),
            ("or probe <= self._repeated", ""),
            ("self.since(min(unknown))", "self.since(max(unknown))"),
            ("        self._probes += 1", "        pass"),
            ("return super().drop() + self.turn_away()", "return super().drop()"),
        ),
    ),
    Area(
        "wire/sequence.py",
        ("net/test_sequence.py",),
        (
            ("        if seq != self._last + 1:", "        if seq <= self._last:"),
            ("        if seq != self._last + 1:", "        if seq > self._last + 1:"),
            ("acked, max(self._last, acked)", "acked, self._last"),
            ("result, max(self._last, seq)", "result, self._last"),
            ("if one >= seq]", "if one > seq]"),
            ("                if one <= acked:", "                if one < acked:"),
            ("return next(iter(self._sent), self._next) - 1", "return self._next - 1"),
            ("sent = self._sent.pop(seq, None)", "sent = self._sent.get(seq)"),
            ("now - sent.asked >= after_s", "now - sent.asked > after_s"),
            ("self._sent[seq].asked = now", "self._sent[seq].asked = 0.0"),
        ),
    ),
    Area(
        "layout/interval_map.py",
        ("layout/test_interval_map.py",),
        (
            ("        if start < position < self.length:", "        if start <= position < self.length:"),
            ("        if start < position < self.length:", "        if start < position:"),
            ("self._starts.insert(index + 1, position)", "self._starts.insert(index, position)"),
            ("            self._cut_at(stop, split)", "            self._cut_at(start, split)"),
            ("self.values[first:last] = [start], [value]", "self.values[first:last] = [stop], [value]"),
            ("index = max(1, bisect_right(self._starts, start))", "index = max(1, bisect_left(self._starts, start))"),
            ("self._starts[index] < stop:", "self._starts[index] <= stop:"),
            ("                index += 1", "                break"),
            ("starts = [start, *self._starts[first + 1 : last]]", "starts = self._starts[first:last]"),
            ("bisect_left(self._starts, stop)", "bisect_right(self._starts, stop)"),
            ("return (0, 1) if self.length == 0 else (0, 0)", "return 0, 0"),
            ("left if left == right else None)", "left)"),
        ),
    ),
    Area(
        "worker/block.py",
        ("worker/test_rounds.py",),
        (
            ("        if len(rounds.values) == 1 and length == rounds.length:", "        if len(rounds.values) == 1:"),
            ("        if len(rounds.values) == 1 and length == rounds.length:", "        if length == rounds.length:"),
            ("rounds.put(*one)", "pass"),
            ("for first, last, round in rounds.over(start, stop)]", "for first, last, round in rounds.over(0, stop)]"),
        ),
    ),
    Area(
        "membership/liveness.py",
        ("membership/test_liveness.py",),
        (
            (
                "is_gone = record.code is not None or self._state(record, now) in GONE",
                "is_gone = record.code is not None",
            ),
            ("is_gone = record.code is not None or", "is_gone ="),
            ("(record.heard if closed is None else closed) > LAST_WORDS_S", "0.0 > LAST_WORDS_S"),
            ("and self._is_unknown(record, now) and now - closed", "and now - closed"),
            ("return not (self._state(record, now) or self._is_supervised)", "return not self._state(record, now)"),
            ("return min(now - record.heard, record.host_silent_s or 0.0)", "return now - record.heard"),
            ("<= self._settings.stall_timeout_s:", "<= self._settings.heartbeat_timeout_s:"),
            ("if is_complete or record.closed_since is not None:", "if True:"),
            ("(silent or record.closed_since is not None)", "silent"),
            ("return record.state if now - record.state_at <= valid_s", "return record.state if True"),
            ("            record.warned = True\n", "            pass\n"),
            (
                "record.heard, record.starved_s, record.warned = now, 0.0, False",
                "record.heard, record.starved_s = now, 0.0",
            ),
            ("record.heard = min(now, record.heard + lost_s)", "pass"),
            ("record.closed_since = min(now, record.closed_since + lost_s)", "pass"),
        ),
    ),
    Area(
        "host/start_clock.py",
        ("membership/test_joining.py",),
        (
            ("passed if sleeps else min(used, passed)", "min(used, passed)"),
            ("min(used, passed)", "passed"),
            ("min(used, passed)", "used"),
            ("return self._counted if self._is_told else", "return"),
            ("        self._since += lost_s", "        pass"),
        ),
    ),
    Area("membership/joining.py", ("membership/test_joining.py",), (("now + limit_s / 2", "now + 2 * limit_s"),)),
    Area(
        "host/own_time.py",
        ("membership/test_liveness.py",),
        (
            ("turn - self._longest_turn_s", "turn"),
            ("turn, self._last = now - self._last, now", "turn = now - self._last"),
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
