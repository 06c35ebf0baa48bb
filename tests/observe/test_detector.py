"""Who is slow, and why: simulated rounds of a job, most of them with noise, in lock step and without."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.observe.account import (
    APPLY,
    BUSY,
    COMPUTE,
    COPY,
    DATA,
    FAULTS,
    FIGURES,
    GC,
    INTERVAL,
    OTHER,
    QUEUED,
    RECEIVE,
    REREAD,
    SEND,
    SERVER_PARTS,
    STALLED,
    STOLEN,
    STOPPED,
    THROTTLED,
    UPDATE,
    WAIT,
    WORKER_PARTS,
    Steps,
)
from paceline.observe.detector import Detector
from paceline.observe.verdicts import CAUSES, OF_SERVERS, Verdict, sentence, summary

#: A fault changes the parts of a round, the figures of the host, and returns the samples of the batch.
Fault = Callable[[list[float], list[int], int], float]

WORKERS, SLOW, ONSET, BATCH = 4, 2, 40, 32.0

#: Rounds without a fault.
ROUNDS = int(os.environ.get("PACELINE_TEST_ROUNDS", "2000"))


class Job:
    """Workers that compute for a tenth of a second per round."""

    def __init__(self, seed: int, jitter: float, workers: int = WORKERS, lock_step: bool = True) -> None:
        self.chance, self.jitter, self.workers, self.lock_step = random.Random(seed), jitter, workers, lock_step
        self.detector, self.round, self.chance_of_ways = Detector(), 0, random.Random(seed)
        self.said: list[Verdict] = []
        self.hosts = [f"node{worker}" for worker in range(workers)]
        self.send_s = [0.0] * workers
        self.group = 0
        self.exchange_s = 0.005
        """Time that the servers need for a round."""
        self.way_s = [0.002] * workers
        """Time of the waits in which a worker's messages are on the way."""
        self.compute_s = [0.1] * workers
        self.late_s = 0.0
        """Time that the pushes of the slow worker need longer than the others'."""
        self.queued_s: Callable[[int], float] = lambda worker: 0.0
        """Time for which a worker waits for a processor in each round."""
        self.stalled = 0.0
        """Part of the time for which the host of all workers is short of memory."""

    def noise(self) -> float:
        return self.chance.lognormvariate(0, self.jitter) if self.jitter else 1.0

    def step(self, fault: Fault | None = None) -> None:
        self.round += 1
        times, figures, samples = [], [], []
        for worker in range(self.workers):
            parts, host = [0.0] * len(WORKER_PARTS), [0] * len(FIGURES)
            for part, usual in (
                (DATA, 0.002),
                (COMPUTE, self.compute_s[worker]),
                (SEND, 0.001),
                (COPY, 0.0005),
                (UPDATE, 0.003),
            ):
                parts[part] = usual * self.noise()
            parts[SEND] += self.send_s[worker]
            queued_s = self.queued_s(worker)
            parts[COMPUTE] += queued_s
            host[QUEUED], host[STALLED] = round_us(queued_s), round_us(0.2 * self.stalled)
            is_faulty = fault is not None and worker == min(SLOW, self.workers - 1)
            samples.append(fault(parts, host, self.round) if fault is not None and is_faulty else BATCH)
            times.append(parts)
            figures.append(host)
        came = [sum(parts) + (self.late_s if worker == SLOW else 0.0) for worker, parts in enumerate(times)]
        order = sorted(range(self.workers), key=lambda worker: came[worker])
        if self.lock_step and self.workers > 1:
            self.detector.note_late([(order[-1], 1, came[order[-1]] - came[order[-2]])])
        for worker, parts in enumerate(times):
            whole = max(came) if self.lock_step else came[worker]
            parts[WAIT] = whole - sum(parts) + self.exchange_s
            figures[worker][INTERVAL] = round(1e6 * sum(parts))
            way_s = self.way_s[worker] * self.chance_of_ways.lognormvariate(0, self.jitter)
            windows = [Steps(self.round, 1, samples[worker], parts, way_s)]
            self.said += self.detector.note_worker(worker, self.hosts[worker], windows, figures[worker], self.group)

    def run(self, rounds: int, fault: Fault | None = None) -> list[Verdict]:
        before = len(self.said)
        for _ in range(rounds):
            self.step(fault)
        return self.said[before:]


def longer(part: int, seconds: float, every: int = 1) -> Fault:
    def change(parts: list[float], host: list[int], round: int) -> float:
        parts[part] += seconds if round % every == 0 else 0.0
        return BATCH

    return change


def host(figure: int, part: float) -> Fault:
    """Take a tenth of a second longer, most of it because of something that the kernel counts."""

    def change(parts: list[float], figures: list[int], round: int) -> float:
        parts[COMPUTE] += 0.1
        figures[figure] = round_us(part * 0.1)
        return BATCH

    return change


def round_us(seconds: float) -> int:
    return round(1e6 * seconds)


def stops(parts: list[float], figures: list[int], round: int) -> float:
    if round % 5 == 0:
        parts[COMPUTE] += 1.0
        figures[STOPPED] = 900_000
    return BATCH


def large_batch(parts: list[float], figures: list[int], round: int) -> float:
    parts[COMPUTE] *= 2
    return 2 * BATCH


CASES = [
    ("data", longer(DATA, 0.15)),
    ("compute", longer(COMPUTE, 0.2)),
    ("other", longer(OTHER, 0.15)),
    ("update", longer(UPDATE, 0.15)),
    ("send", longer(SEND, 0.15)),
    ("gc", longer(GC, 0.1, every=2)),
    ("throttled", host(THROTTLED, 0.8)),
    ("busy", host(QUEUED, 0.9)),
    ("memory", host(STALLED, 0.7)),
    ("stolen", host(STOLEN, 0.7)),
    ("batch", large_batch),
]


@pytest.mark.parametrize("lock_step", [True, False])
@pytest.mark.parametrize("jitter", [0.0, 0.1])
@pytest.mark.parametrize(("cause", "fault"), CASES)
def test_right_worker_and_cause_are_said_once_within_five_rounds(
    cause: str, fault: Fault, jitter: float, lock_step: bool
) -> None:
    for seed in range(4 if jitter else 1):
        job = Job(seed, jitter, lock_step=lock_step)
        assert job.run(ONSET) == []
        found = job.run(5, fault)
        assert [(one.rank, one.cause) for one in found] == [(SLOW, cause)]
        assert abs(found[0].round - ONSET) <= 2
        assert job.run(40, fault) == []
        assert found[0].lost > 0


@pytest.mark.parametrize("cause", ["data", "compute", "other", "update"])
def test_noise_of_thirty_percent_hides_no_cause(cause: str) -> None:
    fault, rounds = dict(CASES)[cause], []
    for seed in range(10):
        job = Job(seed, 0.3)
        job.run(ONSET)
        found = [job.run(1, fault) for _ in range(12)]
        assert {(one.rank, one.cause) for said in found for one in said} == {(SLOW, cause)}
        rounds.append(next(count for count, said in enumerate(found, 1) if said))
    assert sorted(rounds)[len(rounds) // 2] <= 5


@pytest.mark.parametrize(
    ("jitter", "rounds", "lock_step"), [(0.3, ROUNDS, True), (0.3, 1000, False), (0.1, 1000, True)]
)
def test_workers_that_are_alike_are_never_named(jitter: float, rounds: int, lock_step: bool) -> None:
    """Four workers. ``nox -s soak`` takes the 10,000 rounds that are promised."""
    assert Job(11, jitter, lock_step=lock_step).run(rounds) == []


def test_pauses_now_and_then_are_named_after_the_second_one() -> None:
    for cause, fault, rounds in (("gc", longer(GC, 0.1, every=10), 11), ("stopped", stops, 6)):
        job = Job(1, 0.1)
        job.run(ONSET - 1)
        assert [(one.rank, one.cause) for one in job.run(rounds, fault)] == [(SLOW, cause)]


def test_slow_link_is_told_by_the_worker_that_comes_last_although_it_computes_as_long() -> None:
    for seed in range(5):
        job = Job(seed, 0.1)
        assert job.run(ONSET) == []
        job.late_s = 0.06
        assert [(one.rank, one.cause) for one in job.run(40)] == [(SLOW, "link")]


def test_slow_link_shows_in_waits_where_nobody_waits_for_others() -> None:
    job = Job(0, 0.1, lock_step=False)
    job.run(ONSET)
    found = job.run(5, longer(WAIT, 0.0)) + job.run(0)
    assert found == []

    def slow_answers(parts: list[float], figures: list[int], round: int) -> float:
        job.late_s = 0.1
        return BATCH

    assert [(one.rank, one.cause) for one in job.run(8, slow_answers)] == [(SLOW, "link")]


@pytest.mark.parametrize("jitter", [0.0, 0.1, 0.3])
def test_slow_link_is_told_within_five_rounds_where_the_way_is_known(jitter: float) -> None:
    for seed in range(10 if jitter else 1):
        job = Job(seed, jitter)
        assert job.run(ONSET) == []
        job.late_s, job.way_s[SLOW] = 0.08, 0.08
        (found,) = job.run(6)
        assert (found.rank, found.cause) == (SLOW, "link")
        assert abs(found.round - ONSET) <= 3
        job.late_s, job.way_s[SLOW] = 0.0, 0.002
        assert [(one.rank, one.cause) for one in job.run(60)] == [(SLOW, "")]


@pytest.mark.parametrize(("host", "found"), [("node2", []), ("node0", [(SLOW, "link")])])
def test_worker_beside_the_servers_has_no_slow_link(host: str, found: list[tuple[int, str]]) -> None:
    for way_s in (0.08, 0.0):  # the way is known; or servers see it come last
        job = Job(0, 0.1)
        job.run(ONSET)
        job.late_s, job.way_s[SLOW] = 0.08, way_s
        said = []
        for _ in range(40):
            job.detector.note_server(0, host, server_times(0.1), [0] * len(FIGURES))
            said += job.run(1)
        assert [(one.rank, one.cause) for one in said] == found


def test_link_that_cannot_be_hides_no_other_cause() -> None:
    job = Job(0, 0.1)
    job.run(ONSET)
    job.late_s, job.way_s[SLOW] = 0.3, 0.3
    said = []
    for _ in range(20):
        job.detector.note_server(0, "node2", server_times(0.1), [0] * len(FIGURES))
        said += job.run(1, longer(DATA, 0.1))
    assert [(one.rank, one.cause) for one in said] == [(SLOW, "data")]


def test_slow_link_that_delays_nobody_is_not_named() -> None:
    job = Job(0, 0.0)
    job.compute_s = [0.1, 0.1, 0.1, 0.3]
    assert {one.rank for one in job.run(ONSET)} <= {3}
    job.way_s[SLOW] = 0.1
    assert {one.rank for one in job.run(60)} <= {3}


def test_way_that_is_longer_for_all_is_no_link_of_a_worker() -> None:
    job = Job(0, 0.1)
    job.run(ONSET)
    job.exchange_s, job.way_s = 0.2, [0.1] * WORKERS
    assert job.run(60) == []


def test_stalls_at_the_start_of_a_process_are_no_stops() -> None:
    job, figures = Job(0, 0.1), [0] * len(FIGURES)
    figures[INTERVAL], figures[STOPPED] = 3_000_000, 2_000_000
    for _ in range(5):
        job.detector.note_worker(SLOW, "node2", [], figures)
    assert job.run(40) == []


def test_worker_that_is_quick_again_is_told_once() -> None:
    job = Job(0, 0.1)
    job.run(ONSET)
    job.run(20, longer(DATA, 0.15))
    found = job.run(60)
    assert [(one.rank, one.cause) for one in found] == [(SLOW, "")]
    assert job.detector.verdicts == []
    (loss,) = job.detector.losses
    assert (loss.rank, loss.causes) == (SLOW, ("data",))
    assert 0.1 * 10 < loss.seconds < 0.2 * 25


def test_another_cause_is_told() -> None:
    job = Job(0, 0.1)
    job.run(ONSET)
    job.run(20, longer(DATA, 0.15))
    assert "compute" in [one.cause for one in job.run(40, longer(COMPUTE, 0.3)) if one.cause]


def test_all_workers_that_become_slower_at_once_are_not_named() -> None:
    job = Job(0, 0.1)
    job.run(ONSET)
    noise = job.noise
    job.noise = lambda: 3 * noise()  # type: ignore[method-assign]
    assert job.run(60) == []


def test_worker_without_others_is_compared_with_its_past() -> None:
    job = Job(0, 0.1, workers=1)
    assert job.run(60) == []
    (found,) = job.run(60, longer(DATA, 0.15))
    assert (found.rank, found.cause, found.alone) == (0, "data", True)
    (end,) = job.run(40)
    assert "as quick as before again" in sentence(end)


def test_groups_are_not_compared_with_each_other() -> None:
    detector = Detector()
    said = []
    for round in range(1, 60):
        for worker in range(4):
            parts = [0.0] * len(WORKER_PARTS)
            parts[COMPUTE] = 0.1 if worker < 2 else 0.3
            said += detector.note_worker(worker, "h", [Steps(round, 1, BATCH, parts)], [], 1 + worker // 2)
    assert said == []


def test_worker_that_nobody_waits_for_is_not_named_for_one_long_part() -> None:
    job = Job(0, 0.0, workers=3)

    def slowest(parts: list[float], host: list[int], round: int) -> float:
        parts[COMPUTE] += 0.3
        return BATCH

    job.run(ONSET, slowest)
    job.send_s[1] = 0.05
    assert job.run(40, slowest) == []
    assert {one.rank for one in job.detector.verdicts} == {SLOW}


def test_short_hiccup_is_not_named() -> None:
    job = Job(0, 0.1)
    job.run(ONSET)
    assert job.run(2, longer(COMPUTE, 0.5)) == []
    assert job.run(20) == []


def starved(mean_s: float, slow: float = 1.0, spread: float = 1.0, seed: int = 3) -> Job:
    """Return a job on one host that has too much to do; the slow worker waits so many times as long as the others.

    Args:
        mean_s: of each worker's waits in a round.
        slow: multiple for the slow worker.
        spread: how unlike the rounds are; 1: exponential.
        seed: of the random numbers.
    """
    job = Job(seed, 0.1)
    job.hosts = ["node"] * WORKERS
    job.run(ONSET)
    job.queued_s = lambda worker: (
        mean_s * (1 - spread + spread * job.chance.expovariate(1)) * (slow if worker == SLOW else 1)
    )
    return job


@pytest.mark.parametrize(("mean_s", "slow"), [(0.1, 1.0), (0.3, 1.0), (0.3, 2.0), (1.0, 1.5)])
def test_nobody_is_named_where_all_wait_for_processors(mean_s: float, slow: float) -> None:
    assert starved(mean_s, slow).run(400) == []


def test_worker_that_waits_for_processors_far_longer_than_the_others_is_named() -> None:
    assert [(one.rank, one.cause) for one in starved(0.03, 8.0, spread=0.2).run(30)] == [(SLOW, "busy")]


@pytest.mark.parametrize("jitter", [0.1, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_one_long_round_of_a_worker_that_waits_for_processors_is_not_named(seed: int, jitter: float) -> None:
    """Its waits are longer than the others' all the time, and not by so much that other processes were the reason."""
    job = Job(seed, jitter)
    job.queued_s = lambda worker: 0.05 if worker == SLOW else 0.02
    assert job.run(ONSET) == []
    assert job.run(1, longer(COMPUTE, 0.5)) == []
    assert job.run(20) == []
    assert [(one.rank, one.cause) for one in job.run(10, longer(COMPUTE, 0.5))] == [(SLOW, "compute")]


def test_fault_that_is_larger_than_all_waits_for_processors_is_named() -> None:
    assert [(one.rank, one.cause) for one in starved(0.1, spread=0.2).run(60, longer(COMPUTE, 0.4))] == [
        (SLOW, "compute")
    ]


def test_page_faults_tell_which_worker_of_a_host_is_short_of_memory() -> None:
    job = Job(0, 0.1)
    job.run(ONSET)
    job.stalled = 0.1

    def reads_again(parts: list[float], figures: list[int], round: int) -> float:
        parts[COMPUTE] += 0.1
        figures[FAULTS] = 4
        return BATCH

    assert [(one.rank, one.cause) for one in job.run(8, reads_again)] == [(SLOW, "memory")]


def test_few_page_faults_that_bring_back_many_pages_are_a_shortage_of_memory() -> None:
    """The kernel reads many pages ahead, so there are few faults; and it does not count the first waits as such."""
    job = Job(0, 0.1)
    job.run(ONSET)

    def reads_again(parts: list[float], figures: list[int], round: int) -> float:
        parts[OTHER] += 0.1
        figures[FAULTS], figures[REREAD] = 1, 4096
        return BATCH

    assert [(one.rank, one.cause) for one in job.run(8, reads_again)] == [(SLOW, "memory")]


def test_shortage_of_memory_on_all_hosts_is_no_fault_of_a_worker() -> None:
    job = Job(0, 0.1)
    job.run(ONSET)
    job.stalled = 0.6
    assert job.run(20, longer(COMPUTE, 0.1)) == []


def test_stops_in_time_that_a_worker_has_to_spare_are_not_told() -> None:
    job = Job(1, 0.1)
    job.send_s = [0.5, 0.5, 0.0, 0.5]

    def short_stops(parts: list[float], figures: list[int], round: int) -> float:
        figures[STOPPED] = 300_000 if round % 3 == 0 else 0
        return BATCH

    assert job.run(100, short_stops) == []


def test_cost_is_the_rate_without_the_excess() -> None:
    job = Job(0, 0.0)
    job.run(ONSET)
    (found,) = job.run(5, longer(DATA, 0.1))
    whole = 4 * BATCH / 0.2115  # 211.5 ms with the exchange
    assert found.lost == pytest.approx(4 * BATCH / 0.1115 - whole, rel=0.02)
    assert found.ratio == pytest.approx(0.2065 / 0.1065, rel=0.02)
    assert found.share == pytest.approx(0.102 / 0.2065, rel=0.02)


def server_times(busy: float) -> list[list[float]]:
    parts = [0.0] * len(SERVER_PARTS)
    parts[RECEIVE], parts[APPLY] = 0.1 * (1 - busy), 0.1 * busy
    return [parts] * 3


def serve(job: Job, rounds: int, busy: float, throttled: float = 0.0) -> list[Verdict]:
    said = []
    figures = [0] * len(FIGURES)
    figures[INTERVAL], figures[THROTTLED] = 500_000, round_us(0.5 * throttled)
    for _ in range(rounds):
        job.step()
        said += job.detector.note_server(0, "node0", server_times(0.1), [0] * len(FIGURES))
        said += job.detector.note_server(1, "node1", server_times(busy), figures)
    return said


def test_busy_server_is_named_if_workers_wait_for_it_and_again_when_they_do_no_more() -> None:
    job = Job(0, 0.1)
    assert serve(job, 40, 0.9) == []  # nobody waits
    job.exchange_s = 0.1
    (found,) = serve(job, 40, 0.9)
    assert (found.role, found.rank, found.cause) == ("server", 1, "apply")
    assert sentence(found).startswith("server 1 on node1 holds the workers up since round ")
    assert "most of that is the optimizer" in sentence(found)
    assert "To do: let PACELINE_PLACEMENT=balanced" in sentence(found)
    assert "PLACEMENT" not in sentence(replace(found, ratio=1.2)) + sentence(replace(found, cause="throttled"))
    assert job.detector.verdicts == [found]
    job.exchange_s = 0.005
    (end,) = serve(job, 40, 0.1)
    assert (end.role, end.cause) == ("server", "")
    assert job.detector.verdicts == []


def test_server_that_only_waits_for_a_processor_is_not_busy() -> None:
    job, figures = Job(0, 0.1), [0] * len(FIGURES)
    job.exchange_s = 0.1
    figures[INTERVAL], figures[QUEUED] = 500_000, 400_000
    for _ in range(60):
        job.step()
        assert job.detector.note_server(0, "node0", server_times(0.1), [0] * len(FIGURES)) == []
        assert job.detector.note_server(1, "node1", server_times(0.9), figures) == []


def test_server_out_of_its_quota_is_named_even_if_it_is_not_busier_than_others() -> None:
    job = Job(0, 0.1)
    job.exchange_s = 0.1
    assert serve(job, 40, 0.1) == []
    (found,) = serve(job, 40, 0.1, throttled=0.5)
    assert (found.rank, found.cause) == (1, "throttled")
    for cause in (*OF_SERVERS, ""):
        assert "server 1 on node1" in sentence(replace(found, cause=cause))
    assert set(SERVER_PARTS) - {"receive"} <= set(OF_SERVERS)


def test_server_that_only_waits_for_its_quota_is_named() -> None:
    job = Job(0, 0.1)
    job.exchange_s = 0.1
    (found,) = serve(job, 40, 0.0, throttled=0.5)
    assert (found.rank, found.cause) == (1, "throttled")


def test_server_is_named_when_a_sixth_of_all_rounds_are_waits_for_it() -> None:
    job = Job(0, 0.1)
    job.exchange_s = 0.018
    (found,) = serve(job, 40, 0.5)
    assert (found.rank, found.cause) == (1, "apply")


def test_sentences_name_worker_reason_cost_and_way_out() -> None:
    verdict = Verdict(3, "node7", "data", DATA, 2.3, 0.81, 1204, 120.0)
    assert sentence(verdict) == (
        "worker 3 on node7 takes 2.3 times as long as the others since round 1,204: 81% of its step is its data "
        "loader; it costs the job 120 samples/s. To do: raise num_workers of the loader, or put the data on a faster "
        "disk"
    )
    for cause in CAUSES:
        assert "To do: " in sentence(Verdict(3, "node7", cause, -1, 2.3, 0.0, 7, 0.5))
    assert set(WORKER_PARTS) - {"wait"} <= set(CAUSES)


def test_summary_names_the_most_expensive_worker_first() -> None:
    job = Job(0, 0.1)
    assert summary(job.detector.losses) == ""
    job.run(ONSET)
    job.run(20, longer(DATA, 0.15))
    assert summary(job.detector.losses).startswith(
        "slow workers of this job, and the time that they cost: worker 2 on node2 (its data loader): "
    )


def in_ddp(slow: float, is_shared: bool = False) -> Detector:
    """Return what is known of a DDP job of four workers, of which one computes so many times as long."""
    detector = Detector()
    for round in range(1, 40):
        for worker in range(4):
            own_s = 0.1 * (slow if worker == 3 else 1.0)
            parts = [0.0] * len(WORKER_PARTS)
            parts[COMPUTE], parts[WAIT] = own_s, 0.1 * slow - own_s + 0.01
            figures = [0] * len(FIGURES)
            detector.note_worker(
                worker, "h", [Steps(round, 1, BATCH, parts)], figures, is_ddp=True, is_shared=is_shared
            )
    return detector


def test_slow_rank_of_a_ddp_job_is_named_with_the_gain_of_measured_shares() -> None:
    detector = in_ddp(2.1)
    (one,) = detector.verdicts
    assert (one.rank, one.cause, round(one.ratio, 1)) == (3, "compute", 2.1)
    gain = (0.21 + 0.01) / (4 / (3 / 0.1 + 1 / 0.21) + 0.01)
    assert one.gain == pytest.approx(gain, rel=0.01)
    text = sentence(one)
    assert "worker 3 on h takes 2.1 times as long as the others" in text
    assert "with measured shares this job would run up to 1.8 times as fast" in text
    assert text.endswith("To do: start the job with --ddp --shares measured")
    detector.leave(3)
    end = summary(detector.losses)
    assert "worker 3 on h (computation): " in end
    assert "With measured shares it would run up to 1.8 times as fast: paceline launch --ddp --shares measured" in end
    assert "paceline.DistributedOptimizer(optimizer, kvstore=store)" in end


def test_job_whose_samples_go_by_speed_is_not_told_to_share_them_so() -> None:
    detector = in_ddp(2.1, is_shared=True)
    (one,) = detector.verdicts
    assert (one.rank, one.cause, one.gain) == (3, "compute", 0.0)
    assert one.lost == pytest.approx(BATCH / 0.11 - BATCH / 0.22, rel=0.05), "the others do not wait for it"
    assert "measured" not in sentence(one) + summary(detector.losses)
    assert sentence(one).endswith("its share of the samples follows its speed")


def test_ranks_that_wait_for_each_other_in_ddp_are_not_slow() -> None:
    assert in_ddp(1.0).verdicts == []


def in_periods(steps: list[int], step_s: list[float]) -> Detector:
    """Return what is known of workers in lock step with so many local steps in each period."""
    detector, is_shared = Detector(), len(set(steps)) > 1
    for round in range(1, 40):
        own = [taken * (one + 0.005) for taken, one in zip(steps, step_s, strict=True)]
        last = own.index(max(own))
        detector.note_late([(last, 1, max(own) - sorted(own)[-2])])
        for worker, taken in enumerate(steps):
            parts = [0.0] * len(WORKER_PARTS)
            parts[COMPUTE], parts[DATA], parts[UPDATE] = taken * step_s[worker], taken * 0.002, taken * 0.003
            parts[WAIT] = max(own) - sum(parts) + 0.1
            windows = [Steps(round, 1, taken * BATCH, parts)]
            detector.note_worker(worker, "h", windows, [0] * len(FIGURES), is_shared=is_shared, is_local=True)
    return detector


def test_worker_with_fewer_local_steps_in_the_same_time_is_not_slow() -> None:
    assert in_periods([32, 32, 32, 8], [0.1, 0.1, 0.1, 0.4]).verdicts == []
    assert in_periods([32, 8], [0.1, 0.4]).verdicts == []


def test_slow_worker_with_as_many_local_steps_is_advised_to_take_fewer() -> None:
    detector = in_periods([32] * 4, [0.1, 0.1, 0.1, 0.4])
    (one,) = detector.verdicts
    assert (one.rank, one.cause) == (3, "compute")
    text, end = sentence(one), summary(detector.losses)
    assert "with local steps by speed this job would run up to 3.1 times as fast" in text
    assert text.endswith('To do: give it fewer of the local steps: local_steps="32 by speed"')
    assert 'With local steps by speed it would run up to 3.1 times as fast: local_steps="32 by speed"' in end


def test_gain_is_told_where_fewer_samples_help_only() -> None:
    for part, has_gain in ((DATA, True), (COMPUTE, True), (SEND, False), (OTHER, False)):
        job = Job(0, 0.05)
        (one,) = job.run(ONSET) + job.run(30, longer(part, 0.15))
        assert (one.gain > 1.2) == has_gain
        assert ("with measured shares" in sentence(one)) == has_gain
        assert "--ddp" not in sentence(one) + summary(job.detector.losses)


def test_worker_that_does_no_rounds_for_hours_takes_no_more_memory() -> None:
    detector, figures = Detector(), [1] * len(FIGURES)
    for round in range(1, 12):
        detector.note_worker(0, "h", [Steps(round, 1, 1.0, [0.1] * len(WORKER_PARTS))], figures)
    before = len(pickle.dumps(detector))
    for _ in range(10_000):
        detector.note_worker(0, "h", [], figures)
    assert len(pickle.dumps(detector)) < before + 10_000


def test_workers_that_come_and_go_take_no_more_memory() -> None:
    """They are slow, and each time in another group."""
    job, sizes = Job(0, 0.0), []
    for turn in range(10):
        for worker in range(WORKERS):
            job.detector.leave(worker)
        job.group = 1 + turn
        job.run(ONSET)
        assert [(one.rank, one.cause) for one in job.run(8, longer(DATA, 0.15))] == [(SLOW, "data")]
        sizes.append(len(pickle.dumps(job.detector)))
    assert sizes[-1] < sizes[2] + 200
    for worker in range(WORKERS):
        job.detector.leave(worker)
    (loss,) = job.detector.losses
    assert (loss.rank, loss.causes) == (SLOW, ("data",))
    assert loss.seconds > 10 * 0.15


@pytest.mark.parametrize("figure", [QUEUED, THROTTLED, STALLED, STOLEN, FAULTS, REREAD])
def test_worker_that_has_left_is_compared_with_none(figure: int) -> None:
    detector, said = Detector(), []
    for round in range(1, 80):
        if round == 30:
            detector.leave(3)
        detector.note_late([(1, 1, 0.4) if round > 40 else (round % 3, 1, 0.01)])
        for rank in range(4 if round < 30 else 3):
            parts, figures = [0.0] * len(WORKER_PARTS), [0] * len(FIGURES)
            is_slow = rank == 1 and round > 40
            parts[COMPUTE] = 0.5 if is_slow else 0.1
            parts[WAIT] = (0.55 if round > 40 else 0.15) - parts[COMPUTE]
            figures[INTERVAL], figures[BUSY], figures[figure] = 1_000_000, 300_000, 700_000 if is_slow else 1_000
            said += detector.note_worker(rank, "h", [Steps(round, 1, 32.0, parts)], figures)
    assert {one.rank for one in said} == {1}
