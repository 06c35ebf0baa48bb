"""Counters of a store, over all servers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline.wire import messages as m


def merge_stats(answers: Sequence[m.Body]) -> dict[str, Any]:
    """Merge the counters of all servers. Updates, masses and drops become means over all slots."""
    reports = [json.loads(answer.body) for answer in answers if isinstance(answer, m.StatsAre)]
    slots = max(1, sum(report["slots"] for report in reports))
    staleness: Counter[int] = Counter()
    data_mass: Counter[int] = Counter()
    dropped: Counter[int] = Counter()
    for report in reports:
        staleness.update({int(age): number for age, number in report["staleness"].items()})
        data_mass.update({int(worker): mass / slots for worker, mass in report["data_mass"].items()})
        dropped.update({int(worker): number for worker, number in report["dropped"].items()})
    return {
        "updates": sum(report["updates"] for report in reports) / slots,
        "skipped": sum(report["skipped"] for report in reports) / slots,
        "staleness": dict(sorted(staleness.items())),
        "step_mass": sum(report["step_mass"] for report in reports) / slots,
        "data_mass": dict(sorted(data_mass.items())),
        "dropped": dropped.total() / slots,
        "dropped_by_worker": {worker: number / slots for worker, number in sorted(dropped.items())},
        "network_bytes": sum(report["received_bytes"] + report["sent_bytes"] for report in reports),
    }
