"""The scheduler's machine under a simulated clock."""

from __future__ import annotations

import itertools
import random
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.config import Settings
from paceline.host.exitcodes import PEER_FAILED
from paceline.host.own_time import LONGEST_TURN_S
from paceline.membership import FAILED_TIMEOUT_S, LEAVE_TIMEOUT_S, Action, Answer, Finish, Membership, Warn
from paceline.membership.effects import MOST_NAMED, Waiting
from paceline.net.answerer import Answerer
from paceline.net.call import PROBE_AFTER_S
from paceline.net.client import Client
from paceline.observe.account import FIGURES, SERVER_PARTS, WORKER_PARTS
from paceline.wire import decode, encode
from paceline.wire import messages as m
from paceline.wire.limits import MAX_AMOUNT, MAX_BINS, MAX_GATHER_BYTES, MAX_KEYS, MAX_MEMBERS, MAX_NUMEL
from tests.net.memory_network import Fault, MemoryHub, MemoryListener, MemoryNetwork

JOB = Settings(
    job_id="j", num_workers=2, num_servers=1, start_timeout_s=60.0, heartbeat_timeout_s=15.0, stall_timeout_s=15.0
)
SEATS = [("worker", 0), ("worker", 1), ("server", 0)]
BLOCK = m.BlockSpec(0, "float32", [m.KeySpec("w", [2], 0), m.KeySpec(7, [2], 0)], [0], [1.0], 100, "balanced", False)


def hello(role: str, rank: int, **changes: object) -> m.Hello:
    sizes = {"num_workers": JOB.num_workers, "num_servers": JOB.num_servers}
    fields = {"job_id": "j", "local_rank": 0, "host": "h", "host_id": "x", "pid": 9}
    return m.Hello(**({"role": role, "rank": rank, "address": ""} | fields | sizes | changes))  # type: ignore[arg-type]


def peer_of(role: str, rank: int) -> bytes:
    return f"{role}-{rank}".encode()


class Steady(Membership):
    """A machine whose scheduler looks at the clock all the time."""

    last = 0.0

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while self.last < now and not any(isinstance(one, Finish) for one in actions):
            self.last = min(now, self.last + LONGEST_TURN_S)
            actions += super().tick(self.last)
        return actions


def machine(settings: Settings = JOB) -> Membership:
    tokens = itertools.count(1)
    return Steady(settings, 0.0, lambda: b"token-%d" % next(tokens))


def joined(settings: Settings = JOB) -> Membership:
    members = machine(settings)
    roster = [("worker", r) for r in range(settings.num_workers)] + [("server", r) for r in range(settings.num_servers)]
    sizes = {"num_workers": settings.num_workers, "num_servers": settings.num_servers}
    for role, rank in roster:
        members.handle(peer_of(role, rank), 1, hello(role, rank, **sizes), 0.0)
    assert members.complete
    return members


def answers(actions: list[Action]) -> list[tuple[bytes, int, m.Reply]]:
    return [(one.peer, one.seq, one.body) for one in actions if isinstance(one, Answer)]


def refusal(actions: list[Action]) -> str:
    ((_, _, body),) = answers(actions)
    assert isinstance(body, m.Failed)
    return body.text


# ---- joining ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(SEATS)))
def test_everybody_is_welcomed_when_the_last_has_come(order: tuple[tuple[str, int], ...]) -> None:
    members = machine()
    for number, (role, rank) in enumerate(order[:-1]):
        assert members.handle(peer_of(role, rank), 10 + number, hello(role, rank), 1.0) == []
    welcomes = answers(members.handle(peer_of(*order[-1]), 12, hello(*order[-1]), 2.0))
    assert [(peer, seq) for peer, seq, _ in welcomes] == [(peer_of(*record), 10 + i) for i, record in enumerate(order)]
    members.check()
    for peer, _, body in welcomes:
        assert isinstance(body, m.Welcome)
        assert [(one.role, one.rank) for one in body.members] == [("server", 0), ("worker", 0), ("worker", 1)]
        with_token = {(one.role, one.rank) for one in body.members if one.token}
        assert with_token == (set(SEATS) if peer == b"server-0" else {("worker", body.rank)})


def test_ranks_are_given_to_those_who_have_none() -> None:
    members = machine()
    members.handle(b"a", 1, hello("worker", 1), 0.0)
    members.handle(b"b", 1, hello("server", -1), 0.0)
    welcomes = answers(members.handle(b"c", 1, hello("worker", -1), 0.0))
    assert {peer: body.rank for peer, _, body in welcomes if isinstance(body, m.Welcome)} == {b"a": 1, b"b": 0, b"c": 0}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (hello("worker", 1, job_id="other"), "belongs to job 'other'"),
        (hello("worker", 1, num_workers=3), "expects 3 workers"),
        (hello("worker", 1, num_servers=2), "2 servers"),
        (hello("worker", 2), "ranks 0 to 1"),
        (hello("scheduler", 0), "0 schedulers"),
        (hello("worker", 0), "taken by worker 0 on h"),
    ],
)
def test_who_does_not_fit_is_refused_and_nothing_changes(wrong: m.Hello, why: str) -> None:
    members = machine()
    members.handle(b"first", 1, hello("worker", 0), 0.0)
    ((peer, seq, body),) = answers(members.handle(b"late", 5, wrong, 1.0))
    assert (peer, seq) == (b"late", 5)
    assert isinstance(body, m.Failed)
    assert body.kind == "RendezvousError"
    assert why in body.text
    assert not members.is_member(b"late")
    assert len(members.status(1.0).members) == 1


def test_one_too_many_without_a_rank_is_refused() -> None:
    members = machine()
    members.handle(b"a", 1, hello("server", -1), 0.0)
    assert "all 1 servers" in refusal(members.handle(b"b", 1, hello("server", -1), 0.0))


def test_repeated_hello_is_answered_again_once_the_job_is_complete() -> None:
    members = machine()
    members.handle(b"worker-0", 1, hello("worker", 0), 0.0)
    assert members.handle(b"worker-0", 1, hello("worker", 0), 0.0) == []
    members.handle(b"worker-1", 1, hello("worker", 1), 0.0)
    members.handle(b"server-0", 1, hello("server", 0), 0.0)
    ((peer, seq, body),) = answers(members.handle(b"worker-0", 1, hello("worker", 0), 0.0))
    assert (peer, seq) == (b"worker-0", 1)
    assert isinstance(body, m.Welcome)
    assert body.rank == 0


def test_hello_over_a_claimed_connection_is_refused() -> None:
    members = joined()
    members.handle(b"bulk", 1, m.Claim("worker", 0, b"token-1"), 1.0)
    assert "lifeline" in refusal(members.handle(b"bulk", 2, hello("worker", 0), 1.0))


def test_start_timeout_names_who_is_missing_and_ends_the_job() -> None:
    members = machine()
    members.handle(b"w", 4, hello("worker", 1), 0.0)
    members.handle(b"w", 5, m.Heartbeat(0), 59.0)
    (word,) = answers(members.tick(59.9))
    assert word == (b"w", 0, m.News([], False)), "it hears that the wait goes on"
    ((peer, seq, body),) = answers(members.tick(60.5))
    assert (peer, seq) == (b"w", 4)
    assert isinstance(body, m.Failed)
    assert "server 0, worker 0 did not join within 60 s" in body.text
    members.check()
    assert "job was ending" in refusal(members.handle(b"x", 1, hello("worker", 0), 61.0))
    assert "did not join" in refusal(members.handle(b"w", 4, hello("worker", 1), 61.0)), "told again when it asks again"
    assert members.tick(61.0) == []
    members.lost(b"w", 61.5)
    assert members.tick(61.6) == [Finish(1)]


def test_start_timeout_keeps_its_exit_code_when_members_go_one_by_one() -> None:
    members = machine()
    members.handle(b"w", 4, hello("worker", 1), 0.0)
    members.handle(b"s", 4, hello("server", 0), 0.0)
    for peer in (b"w", b"s"):
        members.handle(peer, 5, m.Heartbeat(0), 59.0)
    members.tick(60.5)
    members.lost(b"w", 61.0)
    members.tick(63.0)
    members.lost(b"s", 63.5)
    assert members.tick(63.6)[-1] == Finish(1)


def test_nobody_at_all_is_a_start_timeout_too() -> None:
    assert machine().tick(60.5) == [Finish(1)]


# ---- connections -----------------------------------------------------------------------------------------------------


def test_stranger_reaches_nothing() -> None:
    members = joined()
    for body in (m.Heartbeat(1), m.Enter("b"), m.Bye("x"), m.Publish("s", []), m.Lookup("s", [])):
        assert "no member" in refusal(members.handle(b"stranger", 1, body, 1.0))
    assert not members.deaths


def test_claim_needs_the_token_and_gives_the_member_a_further_connection() -> None:
    members = joined()
    for claim in (m.Claim("worker", 0, b"token-2"), m.Claim("worker", 5, b"token-1"), m.Claim("worker", 0, b"")):
        assert "wrong token" in refusal(members.handle(b"bulk", 1, claim, 1.0))
        assert not members.is_member(b"bulk")
    for _ in range(2):
        claimed = members.handle(b"bulk", 1, m.Claim("worker", 0, b"token-1"), 1.0)
        assert claimed == [Answer(b"bulk", 1, m.Done())]
    assert members.handle(b"bulk", 2, m.Enter("b"), 1.0) == []
    members.handle(b"new", 1, m.Claim("worker", 0, b"token-1"), 1.0)
    assert members.is_member(b"new")
    assert not members.is_member(b"bulk"), "a member has one further connection: the last one that it has claimed"
    members.handle(b"worker-0", 3, m.Claim("worker", 0, b"token-1"), 1.0)
    assert members.is_member(b"new"), "its lifeline is none of them"
    members.lost(b"new", 1.0)
    assert members.tick(10.0) == [], "only the lifeline tells of death"


class Secret(bytes):
    """A token that is not compared byte by byte, up to the first that differs: that takes a time that tells of it."""

    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared in a time that depends on the content")


def test_tokens_are_compared_in_a_time_that_tells_nothing_of_them() -> None:
    members = joined()
    for token in (b"token-1", b"token-2", b"t"):
        members.handle(token, 1, m.Claim("worker", 0, Secret(token)), 1.0)
        assert members.is_member(token) == (token == b"token-1")


@pytest.mark.parametrize(("role", "parts"), [("worker", 5), ("server", 10), ("worker", 0)])
def test_damaged_heartbeat_is_refused_and_nothing_changes(role: str, parts: int) -> None:
    members = joined()
    before = members.status(0.0)
    beat = m.Heartbeat(7, memory=99, account=m.AccountReport([m.Window(5, 1, 1.0, [1] * parts)]))
    assert "parts" in refusal(members.handle(peer_of(role, 0), 4, beat, 0.0))
    assert members.status(0.0) == before
    members.check()


def test_account_that_cannot_be_judged_ends_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    members = joined()
    monkeypatch.setattr(members.advice.verdicts, "note", lambda *told: 1 // 0)
    beat = m.Heartbeat(7, account=m.AccountReport([m.Window(5, 1, 1.0, [1] * len(WORKER_PARTS))]))
    (answer,) = members.handle(peer_of("worker", 0), 4, beat, 0.0)
    (warned,) = members.tick(0.1)
    assert isinstance(warned, Warn)
    assert "worker 0 on h could not be judged, verdicts begin anew: ZeroDivisionError" in warned.text
    assert isinstance(answer, Answer)
    assert isinstance(answer.body, m.News)
    assert members.advice.verdicts.recent(("worker", 0)) == []
    members.handle(peer_of("worker", 0), 5, beat, 1.0)
    assert members.tick(1.1) == []


def test_accounts_are_judged_together_with_the_next_look_at_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    members, judged = joined(), list[int]()
    monkeypatch.setattr(members.advice.verdicts, "note", lambda member, *told: judged.append(member.rank) or [])
    account = m.AccountReport([m.Window(5, 1, 1.0, [1] * len(WORKER_PARTS))])
    for rank in (1, 0):
        members.handle(peer_of("worker", rank), 4, m.Heartbeat(7, account=account), 0.0)
    assert judged == []
    assert members.tick(0.1) == []
    assert judged == [1, 0]
    members.handle(peer_of("worker", 0), 5, m.Heartbeat(7, account=account), 0.2)
    members.status(0.2)
    assert judged == [1, 0, 0], "a status has all that was told"
    for turn in range(1000):
        members.handle(peer_of("worker", 1), 6 + turn, m.Heartbeat(7, account=account), 0.2)
    assert judged.count(1) > 500, "a flood does not pile up"


@pytest.mark.parametrize("role", ["worker", "server"])
def test_largest_figures_make_a_status_that_can_be_sent(role: str) -> None:
    members = joined()
    parts, figures = len(WORKER_PARTS if role == "worker" else SERVER_PARTS), len(FIGURES)
    window = m.Window(2**63 - 1, MAX_NUMEL, MAX_AMOUNT, [MAX_AMOUNT] * parts)
    account = m.AccountReport(
        [window] * 50, [MAX_AMOUNT] * figures, [(0, MAX_NUMEL, MAX_AMOUNT)] * MAX_MEMBERS, 2**63 - 1,
        [(2**63 - 1, MAX_NUMEL)] * MAX_BINS, (MAX_NUMEL, MAX_NUMEL),
    )  # fmt: skip
    reports = [m.ReportedFigures(2**63 - 1, samples, {"loss": sys.float_info.max}) for samples in (0, 1, MAX_NUMEL)]
    progress = m.StepsLeft(2**63 - 1, 2**63 - 1, MAX_AMOUNT)
    for turn in range(9):
        for rank in (0, 1) if role == "worker" else (0,):
            numbers = {name: 2**63 - 1 for name in ("round", "memory", "sent", "received") if turn}
            amounts = dict.fromkeys(("step_s", "usual_s", "usual_samples"), MAX_AMOUNT)
            beat = m.Heartbeat(**{"round": 0} | numbers | amounts, account=account, reports=reports, progress=progress)
            [answer] = members.handle(peer_of(role, rank), 4 + turn, decode([encode(1, 0, beat)])[0].body, float(turn))
            assert isinstance(answer.body, m.News)
    members.tick(10.0)
    status = members.status(5.0)  # the clock of a caller that looked a little earlier
    assert decode([encode(1, 0, status)])[0].body == status


def test_account_of_a_worker_that_the_job_has_not_is_refused() -> None:
    beat = m.Heartbeat(1, account=m.AccountReport(late=[(2, 1, 1)]))
    assert "worker 2, and this job has 2 workers" in refusal(joined().handle(b"server-0", 3, beat, 1.0))


def test_members_send_their_events_while_a_trace_is_made_and_whoever_asked_gets_them() -> None:
    members = joined()
    ask = m.AskTrace(7, 1, 10.0, 0)
    [begun] = members.handle(b"somebody", 1, ask, 0.0)
    assert isinstance(begun, Answer)
    assert begun.body == m.TraceIs([], False, "")
    events = m.TraceEvents(7, 0.0, 0.0, 0.0, 0.0, 0.0, 0, b"x")
    [told] = members.handle(peer_of("worker", 0), 4, m.Heartbeat(1, trace=events), 0.1)
    assert isinstance(told, Answer)
    assert isinstance(told.body, m.News)
    assert told.body.trace == 7
    [found] = members.handle(b"somebody", 2, ask, 0.2)
    assert isinstance(found, Answer)
    assert isinstance(found.body, m.TraceIs)
    assert [(one.role, one.rank, one.events) for one in found.body.parts] == [("worker", 0, events)]
    assert members.member_of(peer_of("worker", 0)) == ("worker", 0)
    assert members.member_of(b"somebody") is None


def test_server_work_is_not_the_schedulers() -> None:
    assert "does not take Pause" in refusal(joined().handle(b"worker-0", 3, m.Pause("s"), 1.0))


# ---- barriers and keys -----------------------------------------------------------------------------------------------


def test_barrier_counts_identities_not_requests() -> None:
    members = joined()
    assert members.handle(b"worker-0", 2, m.Enter("b"), 1.0) == []
    assert members.handle(b"worker-0", 2, m.Enter("b"), 1.0) == []
    assert members.handle(b"worker-1", 2, m.Enter("other"), 1.0) == []
    assert answers(members.handle(b"worker-1", 3, m.Enter("b"), 1.0)) == [
        (b"worker-0", 2, m.Done()),
        (b"worker-1", 3, m.Done()),
    ]
    assert members.handle(b"worker-1", 4, m.Enter("b"), 1.0) == [], "the same name is a new barrier"
    members.check()


def test_barrier_says_when_some_pause_and_some_do_not() -> None:
    members = joined()
    for number, pauses, expected in ((1, False, m.Gathered([], mixed=True)), (2, True, m.Done())):
        members.handle(b"worker-0", 1 + number, m.Enter(f"s/{number}", "s", pauses=True), 1.0)
        found = answers(members.handle(b"worker-1", 1 + number, m.Enter(f"s/{number}", "s", pauses=pauses), 1.0))
        assert [answer for _, _, answer in found] == [expected, expected]


def test_who_has_not_come_to_a_barrier_can_be_asked() -> None:
    members = joined()
    members.handle(b"worker-0", 2, m.Enter("b"), 1.0)
    for barrier, missing in (("b", [1]), ("other", [0, 1])):
        asked = members.handle(b"worker-0", 3, m.AskAbsent(barrier), 1.0)
        assert asked == [Answer(b"worker-0", 3, m.Missing(missing))]


def test_barrier_of_a_store_does_not_wait_for_who_has_left_the_store() -> None:
    members = joined()
    members.handle(b"worker-0", 2, m.Enter("s/1", "s"), 1.0)
    members.handle(b"worker-0", 3, m.Enter("b"), 1.0)
    assert answers(members.handle(b"worker-1", 2, m.Leave("s"), 1.0)) == [
        (b"worker-1", 2, m.Done()),
        (b"worker-0", 2, m.Done()),
    ]
    assert answers(members.handle(b"worker-0", 4, m.Enter("s/2", "s"), 1.0)) == [(b"worker-0", 4, m.Done())]
    assert answers(members.handle(b"worker-1", 3, m.Enter("b"), 1.0)), "the job's own barrier waited for both"
    members.check()


def test_samples_of_a_pool_are_for_workers() -> None:
    members = joined()
    take = m.TakeSamples("p", 4, 1, 0, 4, 0)
    assert "samples are for workers, not for a server" in refusal(members.handle(b"server-0", 2, take, 1.0))
    given = m.PoolSamples([(0, 4)], False, False, 0)
    assert answers(members.handle(b"worker-0", 2, take, 1.0)) == [(b"worker-0", 2, given)]
    assert answers(members.handle(b"worker-1", 2, take, 1.0)) == [(b"worker-1", 2, m.PoolSamples([], False, True, 0))]
    assert members.handle(b"worker-1", 3, m.AwaitSamples("p"), 1.0) == []
    failed = answers(members.handle(b"server-0", 3, m.Bye("it raised"), 1.0))
    assert (b"worker-1", 3) in [(peer, seq) for peer, seq, body in failed if isinstance(body, m.Failed)]
    assert "died" in refusal(members.handle(b"worker-0", 4, take, 1.0)), "nobody waits for the dead"


def test_barrier_does_not_wait_for_who_has_left() -> None:
    members = joined()
    members.handle(b"worker-0", 2, m.Enter("b"), 1.0)
    assert answers(members.handle(b"worker-1", 2, m.Bye(""), 1.0)) == [
        (b"worker-1", 2, m.Done()),
        (b"server-0", 0, m.News([], False, [1], number=1)),
        (b"worker-0", 2, m.Gathered([], [(1, 0)])),
    ]


def test_gather_gives_everybody_what_all_have_said_by_rank() -> None:
    members = joined()
    assert members.handle(b"worker-1", 2, m.Gather("g", b"one"), 1.0) == []
    assert members.handle(b"worker-1", 2, m.Gather("g", b"one"), 1.0) == [], "a repeat counts once"
    asked = members.handle(b"worker-1", 3, m.AskAbsent("g"), 1.0)
    assert asked == [Answer(b"worker-1", 3, m.Missing([0]))]
    both = m.Gathered([b"zero", b"one"])
    assert answers(members.handle(b"worker-0", 2, m.Gather("g", b"zero"), 1.0)) == [
        (b"worker-1", 2, both),
        (b"worker-0", 2, both),
    ]
    members.check()


def test_gather_does_not_wait_for_who_has_left_and_says_nothing_in_its_place() -> None:
    members = joined()
    members.handle(b"worker-1", 2, m.Gather("g", b"one"), 1.0)
    told = answers(members.handle(b"worker-0", 2, m.Bye(""), 1.0))
    assert told == [
        (b"worker-0", 2, m.Done()),
        (b"server-0", 0, m.News([], False, [0], number=1)),
        (b"worker-1", 2, m.Gathered([b"", b"one"], [(0, 0)])),
    ]


def test_gather_fails_for_all_when_a_worker_dies_or_is_dead() -> None:
    members = joined()
    members.handle(b"worker-1", 2, m.Gather("g", b"one"), 1.0)
    told = members.handle(b"worker-0", 2, m.Bye("it raised ValueError"), 1.0)
    (failed,) = [body for peer, seq, body in answers(told) if (peer, seq) == (b"worker-1", 2)]
    assert isinstance(failed, m.Failed)
    assert (failed.kind, "worker 0 on h died: it raised ValueError" in failed.text) == ("PeerDiedError", True)
    assert "worker 0 on h died" in refusal(members.handle(b"worker-1", 3, m.Gather("g", b"one"), 1.0))


def test_gather_of_too_much_is_refused_to_all() -> None:
    members = joined()
    half = bytes(MAX_GATHER_BYTES // 2)
    members.handle(b"worker-0", 2, m.Gather("g", half), 1.0)
    told = answers(members.handle(b"worker-1", 2, m.Gather("g", half), 1.0))
    assert all(isinstance(body, m.Gathered) for _, _, body in told)
    members.handle(b"worker-0", 3, m.Gather("h", half), 1.0)
    told = answers(members.handle(b"worker-1", 3, m.Gather("h", half + b"1"), 1.0))
    for (_, _, body), record in zip(told, ((b"worker-0", 3), (b"worker-1", 3)), strict=True):
        assert isinstance(body, m.Failed), record
        assert f"gather 'h': the workers said {MAX_GATHER_BYTES + 1} bytes together" in body.text


def test_server_neither_enters_a_barrier_nor_speaks_in_a_gather() -> None:
    members = joined()
    for body in (m.Enter("b"), m.Gather("b", b"x")):
        assert "for workers, not for a server" in refusal(members.handle(b"server-0", 2, body, 1.0))


def test_barrier_before_everybody_is_there_waits_for_them() -> None:
    members = machine()
    members.handle(b"worker-0", 1, hello("worker", 0), 0.0)
    assert members.handle(b"worker-0", 2, m.Enter("b"), 0.0) == []


def test_lookup_waits_until_all_its_keys_are_published() -> None:
    members = joined()
    other = m.BlockSpec(1, "float32", [m.KeySpec("v", [1], 0)], [0], [1.0], 100, "balanced", False)
    assert members.handle(b"worker-1", 2, m.Lookup("s", ["w", "v"]), 1.0) == []
    assert members.handle(b"worker-1", 3, m.Lookup("s", [7]), 1.0) == []
    published = answers(members.handle(b"worker-0", 2, m.Publish("s", [BLOCK]), 1.0))
    assert published == [(b"worker-0", 2, m.Done()), (b"worker-1", 3, m.Found([BLOCK]))]
    assert answers(members.handle(b"worker-0", 3, m.Publish("t", [other]), 1.0)) == [(b"worker-0", 3, m.Done())]
    assert answers(members.handle(b"worker-0", 4, m.Publish("s", [BLOCK, other]), 1.0))[1:] == [
        (b"worker-1", 2, m.Found([BLOCK, other]))
    ]
    assert answers(members.handle(b"worker-1", 4, m.Lookup("s", ["v"]), 1.0)) == [(b"worker-1", 4, m.Found([other]))]


def test_keys_that_one_worker_waits_for_have_a_bound() -> None:
    members, half = joined(), list[int | str](range(MAX_KEYS // 2))
    for seq, store in ((2, "s"), (3, "t")):
        assert members.handle(b"worker-1", seq, m.Lookup(store, half), 1.0) == []
    text = refusal(members.handle(b"worker-1", 4, m.Lookup("s", ["w"]), 1.0))
    assert text == f"a lookup of 1 keys, when those of {MAX_KEYS} wait; at most {MAX_KEYS} are possible"
    assert members.handle(b"worker-0", 2, m.Lookup("s", ["w"]), 1.0) == []


def test_blocks_of_a_store_are_forgotten_when_all_workers_have_left_it_or_the_job() -> None:
    members = joined()
    for store in ("s", "t"):
        members.handle(b"worker-0", 2, m.Publish(store, [BLOCK]), 1.0)
        assert answers(members.handle(b"worker-0", 3, m.Leave(store), 1.0)) == [(b"worker-0", 3, m.Done())]
    find = m.Lookup("s", ["w"])
    assert answers(members.handle(b"worker-1", 2, find, 1.0)) == [(b"worker-1", 2, m.Found([BLOCK]))]
    members.handle(b"worker-1", 3, m.Leave("s"), 1.0)
    assert members.handle(b"worker-0", 4, find, 1.0) == []
    assert answers(members.handle(b"worker-0", 5, m.Publish("s", [BLOCK]), 1.0))[1:] == [
        (b"worker-0", 4, m.Found([BLOCK]))
    ]
    members.handle(b"worker-1", 4, m.Bye(""), 1.0)
    assert members.handle(b"worker-0", 6, m.Lookup("t", ["w"]), 1.0) == []
    assert answers(members.handle(b"worker-0", 7, find, 1.0)) == [(b"worker-0", 7, m.Found([BLOCK]))]


def test_status_tells_rounds_and_silence_but_no_tokens() -> None:
    members = joined()
    members.handle(b"worker-1", 2, m.Heartbeat(12), 3.0)
    ((_, _, status),) = answers(members.handle(b"worker-0", 2, m.AskStatus(), 5.0))
    assert isinstance(status, m.Status)
    assert [(one.role, one.rank) for one in status.members] == [("server", 0), ("worker", 0), ("worker", 1)]
    assert [(one.round, one.silent_s) for one in status.states] == [(0, 5.0), (0, 0.0), (12, 2.0)]
    assert not any(one.token for one in status.members)


def test_news_tell_the_step_of_the_fastest_worker_of_late() -> None:
    members = joined()
    told = []
    beats = [(0, 0.0, 1.0), (1, 0.5, 2.0), (0, 0.2, 2.1), (0, 0.2, 3.0), (1, 0.1, 3.0)]
    for seq, (rank, step_s, now) in enumerate(beats, 2):
        sent = members.handle(b"worker-%d" % rank, seq, m.Heartbeat(1, step_s=step_s), now)
        told += [body.fastest_s for _, _, body in answers(sent) if isinstance(body, m.News)]
    assert told == [0.0, 0.5, 0.5, 0.2, 0.2]


def test_status_tells_pace_memory_traffic_and_whom_a_worker_waits_for() -> None:
    members = joined()
    members.handle(b"worker-1", 2, m.Heartbeat(4, [], 100, 10, 20), 2.0)
    members.handle(b"worker-1", 3, m.Heartbeat(8, [], 200, 30, 40), 3.0)
    members.handle(b"worker-1", 4, m.Heartbeat(8, [], 200, 30, 40, work=9), 3.5)
    members.handle(b"worker-1", 5, m.Heartbeat(8, [], 200, 30, 40, work=9), 4.0)
    members.handle(b"worker-1", 6, m.Enter("end"), 4.0)
    ((_, _, status),) = answers(members.handle(b"stranger", 1, m.AskStatus(), 5.0))
    assert isinstance(status, m.Status)
    assert status.states[1:] == [
        m.MemberState(0, 0.0, 5.0, 0, 0, 0, "live", ""),
        m.MemberState(8, 0.7 * 2.0 + 0.3 * 4.0, 1.0, 200, 30, 40, "live", "0", still_s=1.5),
    ]


# ---- life and death --------------------------------------------------------------------------------------------------


def test_connection_that_comes_back_within_the_grace_is_forgiven() -> None:
    members = joined()
    members.lost(b"worker-0", 1.0)
    members.lost(b"worker-0", 2.0)
    members.lost(b"nobody", 2.0)
    assert members.tick(1.0 + JOB.disconnect_grace_s) == []
    members.handle(b"worker-0", 2, m.Heartbeat(1), 2.6)
    assert members.tick(9.0) == []


def test_connection_that_stays_closed_is_a_death_that_answers_all_who_wait() -> None:
    members = joined()
    members.handle(b"worker-1", 2, m.Enter("b"), 1.0)
    members.handle(b"worker-1", 3, m.Lookup("s", ["w"]), 1.0)
    members.lost(b"worker-0", 1.0)
    told = answers(members.tick(6.1))
    assert {(peer, seq) for peer, seq, _ in told} == {
        (b"worker-1", 0), (b"server-0", 0), (b"worker-1", 2), (b"worker-1", 3)
    }  # fmt: skip
    for _, seq, body in told:
        if seq == 0:
            assert isinstance(body, m.News)
            assert body.shutdown
            assert [(one.role, one.rank, one.host) for one in body.deaths] == [("worker", 0, "h")]
        else:
            assert isinstance(body, m.Failed)
            assert body.kind == "PeerDiedError"
            assert "worker 0 on h died: its connection closed 5.1 s ago" in body.text
    members.check()
    assert "died" in refusal(members.handle(b"worker-1", 4, m.Enter("c"), 2.7)), "nobody waits for the dead"
    assert "died" in refusal(members.handle(b"worker-1", 5, m.Lookup("s", ["x"]), 2.7))


def test_deaths_of_hundreds_are_told_once_and_in_a_text_that_a_message_takes() -> None:
    workers = 700
    sizes = {"num_workers": workers, "num_servers": 1}
    members = machine(JOB.replace(**sizes))
    members.is_supervised = True
    for role, rank in [("server", 0), *(("worker", rank) for rank in range(workers))]:
        host = f"node{rank}.{'long.' * 8}example.org"
        members.handle(peer_of(role, rank), 1, hello(role, rank, host=host, **sizes), 0.0)
    assert members.complete
    told = [one for rank in range(workers - 1) for one in answers(members.ended("worker", rank, 1, 1.0))]
    assert len(told) == workers, "a piece of news for each that lives at the first death"
    assert all(isinstance(body, m.News) for _, _, body in told)
    left = peer_of("worker", workers - 1)
    text = refusal(members.handle(left, 2, m.Enter("b"), 2.0))
    assert m.Failed("PeerDiedError", text) == decode([encode(2, 0, m.Failed("PeerDiedError", text))])[0].body
    assert "worker 0 on node0." in text
    assert text.endswith(f"exit code 1 and {workers - 1 - MOST_NAMED} more")
    (beat,) = [body for _, _, body in answers(members.handle(left, 3, m.Heartbeat(0), 2.0))]
    assert isinstance(beat, m.News)
    assert len(beat.deaths) == workers - 1


def test_start_without_hundreds_names_the_first_of_them() -> None:
    members = machine(JOB.replace(num_workers=20_000))
    members.handle(b"server-0", 1, hello("server", 0, num_workers=20_000), 0.0)
    (text,) = [body.text for _, _, body in answers(members.tick(61.0)) if isinstance(body, m.Failed)]
    assert text.startswith("worker 0, worker 1, ")
    assert f"worker 11 and {20_000 - MOST_NAMED} more did not join within 60 s" in text


def test_silence_is_a_death() -> None:
    members = joined()
    for peer in (b"worker-1", b"server-0"):
        members.handle(peer, 2, m.Heartbeat(0), 14.0)
    assert members.tick(15.0) == []
    for peer in members.lifelines(15.1):
        members.note_host(peer, 15.1)
    assert members.tick(15.1)
    ((rank, reason),) = [(one.rank, one.reason) for one in members.deaths]
    assert rank == 0
    assert reason.startswith("its host was not heard for 15.1 s; ")


def test_hosts_of_members_that_were_heard_are_not_asked() -> None:
    members = joined()
    everybody = members.lifelines(14.0)
    members.handle(b"worker-1", 2, m.Heartbeat(0), 14.0)
    assert members.lifelines(17.0) == [peer for peer in everybody if peer != b"worker-1"]
    assert members.lifelines(18.0) == everybody


def test_who_waits_for_others_to_join_may_be_silent_until_they_have() -> None:
    members = machine()
    members.handle(b"worker-0", 1, hello("worker", 0), 0.0)
    members.handle(b"server-0", 1, hello("server", 0), 0.0)
    assert [body for _, _, body in answers(members.tick(50.0))] == [m.News([], False)] * 2
    assert len(answers(members.handle(b"worker-1", 1, hello("worker", 1), 55.0))) == 3
    assert not answers(members.tick(70.0))
    members.handle(b"worker-1", 2, m.Heartbeat(0), 70.0)
    for suspect in members.suspects(70.1):
        members.note_state(suspect, "T", 0.0, 70.1)
    members.tick(70.1)
    assert [(one.role, one.rank) for one in members.deaths] == [("worker", 0), ("server", 0)]


def test_bye_with_a_reason_ends_the_job_for_all() -> None:
    members = joined()
    told = answers(members.handle(b"worker-1", 2, m.Bye("it raised ValueError"), 1.0))
    assert told[0] == (b"worker-1", 2, m.Done())
    assert {peer for peer, seq, _ in told if seq == 0} == {b"worker-0", b"server-0"}
    assert members.handle(b"worker-1", 3, m.Bye(""), 1.0) == [Answer(b"worker-1", 3, m.Done())]
    assert members.tick(1.0 + FAILED_TIMEOUT_S + 0.1)[-1] == Finish(PEER_FAILED)


def test_death_before_everybody_came_answers_the_hellos() -> None:
    members = machine()
    members.handle(b"worker-0", 7, hello("worker", 0), 0.0)
    members.handle(b"worker-1", 8, hello("worker", 1), 0.0)
    members.lost(b"worker-0", 1.0)
    told = answers(members.tick(6.1))
    assert [(peer, seq) for peer, seq, _ in told] == [(b"worker-1", 0), (b"worker-1", 8)]
    assert "job was ending" in refusal(members.handle(b"late", 1, hello("server", 0), 3.0))


def test_servers_go_home_when_all_workers_have_left() -> None:
    members = joined()
    members.handle(b"worker-0", 2, m.Bye(""), 1.0)
    told = answers(members.handle(b"worker-1", 2, m.Bye(""), 2.0))
    assert told == [(b"worker-1", 2, m.Done()), (b"server-0", 0, m.News([], True, [0, 1], number=2))]
    assert members.tick(2.5) == []
    members.handle(b"server-0", 2, m.Bye(""), 3.0)
    assert members.tick(3.1) == [Finish(0)]


def ended_well() -> Membership:
    members = joined()
    members.handle(b"worker-0", 2, m.Bye(""), 1.0)
    assert not members.has_succeeded
    members.handle(b"worker-1", 2, m.Bye(""), 1.0)
    assert members.has_succeeded
    return members


def test_scheduler_waits_for_a_slow_server_but_not_for_ever() -> None:
    members = ended_well()
    for second in range(2, int(LEAVE_TIMEOUT_S) + 2):
        members.handle(b"server-0", second, m.Heartbeat(0), float(second))
        assert members.tick(float(second)) == []
    assert members.tick(1.1 + LEAVE_TIMEOUT_S) == [Finish(0)]


@pytest.mark.parametrize("is_closed", [False, True])
def test_server_that_is_lost_after_the_last_goodbye_is_no_failure(is_closed: bool) -> None:
    members = ended_well()
    if is_closed:
        members.lost(b"server-0", 1.5)
    assert members.tick(1.0 + LEAVE_TIMEOUT_S) == [Finish(0)]
    assert members.cause is None


def test_server_that_fails_after_the_last_goodbye_fails_the_job() -> None:
    members = ended_well()
    members.ended("server", 0, 9, 2.0)
    assert not members.has_succeeded
    assert deaths_of(members) == [("server", 0, "its process ended: exit code 9")]


@pytest.mark.parametrize("is_early", [True, False])
def test_server_that_leaves_in_peace_before_the_workers_fails_the_job(is_early: bool) -> None:
    members = joined() if is_early else ended_well()
    members.handle(b"server-0", 2, m.Bye(""), 2.0)
    members.ended("server", 0, 0, 2.1)
    early = [("server", 0, "it left the job with exit code 0, before the workers did")]
    assert deaths_of(members) == (early if is_early else [])


def test_damage_is_noticed_by_check() -> None:
    members = joined()
    members._waits.barriers.enter("b", ("worker", 99), Waiting(b"peer", 1))
    with pytest.raises(AssertionError):
        members.check()


# ---- any order of events ---------------------------------------------------------------------------------------------


class Job(RuleBasedStateMachine):
    """A job of three; whatever is asked is answered, opened or failed."""

    @initialize(order=st.permutations(SEATS))
    def join(self, order: list[tuple[str, int]]) -> None:
        self.now, self.seq = 0.0, 1
        self.members = machine()
        self.asked: dict[tuple[bytes, int], str] = {}
        self.news: dict[bytes, m.News] = {}
        self.inside: dict[str, set[int]] = {}
        self.published = False
        self.live = set(SEATS)
        self.gone: set[bytes] = set()
        for record in order:
            self.ask(record, hello(*record))

    def ask(self, record: tuple[str, int], body: m.Body) -> None:
        self.seq += 1
        self.asked[peer_of(*record), self.seq] = type(body).__name__
        self.take(self.members.handle(peer_of(*record), self.seq, body, self.now))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Finish):
                assert action.code == (PEER_FAILED if self.members.deaths else 0)
            elif isinstance(action, Warn):
                assert action.text
            elif action.seq == 0:
                assert isinstance(action.body, m.News)
                self.news[action.peer] = action.body
            elif action.peer not in self.gone:
                assert self.asked.pop((action.peer, action.seq), None), "an answer that nobody waits for"
                if isinstance(action.body, m.Gathered):
                    for rank, payload in enumerate(action.body.payloads):
                        here = ("worker", rank) in self.live
                        assert payload == b"worker %d" % rank or (payload == b"" and not here)

    def somebody(self, data: st.DataObject, role: str = "") -> tuple[str, int]:
        return data.draw(st.sampled_from(sorted(record for record in self.live if role in ("", record[0]))))

    @precondition(lambda self: any(role == "worker" for role, _ in self.live))
    @rule(data=st.data(), barrier=st.sampled_from("ab"))
    def enter(self, data: st.DataObject, barrier: str) -> None:
        record = self.somebody(data, "worker")
        if (peer_of(*record), "Enter") not in {(peer, kind) for (peer, _), kind in self.asked.items()}:
            self.inside.setdefault(barrier, set()).add(record[1])
            self.ask(record, m.Enter(barrier))

    @precondition(lambda self: any(role == "worker" for role, _ in self.live))
    @rule(data=st.data(), name=st.sampled_from("cd"))
    def gather(self, data: st.DataObject, name: str) -> None:
        record = self.somebody(data, "worker")
        if (peer_of(*record), "Gather") not in {(peer, kind) for (peer, _), kind in self.asked.items()}:
            self.ask(record, m.Gather(name, b"worker %d" % record[1]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def look_up(self, data: st.DataObject) -> None:
        self.ask(self.somebody(data), m.Lookup("s", ["w"]))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.published = True
        self.ask(self.somebody(data), m.Publish("s", [BLOCK]))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), reason=st.sampled_from(["", "", "", "it raised"]))
    def leave(self, data: st.DataObject, reason: str) -> None:
        record = self.somebody(data)
        self.live.discard(record)
        self.ask(record, m.Bye(reason))
        self.gone.add(peer_of(*record))
        self.asked = {asked: kind for asked, kind in self.asked.items() if asked[0] != peer_of(*record)}

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        record = self.somebody(data)
        self.members.lost(peer_of(*record), self.now)

    @rule(
        seconds=st.sampled_from([0.2, 1.0, 3.0, 16.0]),
        beating=st.booleans(),
        host_silent_s=st.sampled_from([None, 0.0, 100.0]),
        state=st.sampled_from(["", "R", "T", "t"]),
        cpu_s=st.sampled_from([0.0, 1.0, 50.0]),
    )
    def wait(self, seconds: float, beating: bool, host_silent_s: float | None, state: str, cpu_s: float) -> None:
        self.now += seconds
        for record in sorted(self.live) if beating else []:
            self.ask(record, m.Heartbeat(1, [m.Sighting("worker", 0, state, cpu_s)]))
        for suspect in self.members.suspects(self.now):
            assert (suspect.member.role, suspect.member.rank) in self.live
            self.members.note_state(suspect, state, cpu_s, self.now)
        for peer in self.members.lifelines(self.now):
            self.members.note_host(peer, host_silent_s)
        self.take(self.members.tick(self.now))
        dead = {(one.role, one.rank) for one in self.members.deaths}
        self.live -= dead
        self.gone |= {peer_of(*record) for record in dead}
        self.asked = {asked: kind for asked, kind in self.asked.items() if asked[0] not in self.gone}

    @invariant()
    def machine_is_sound(self) -> None:
        self.members.check()

    @invariant()
    def nobody_waits_without_a_reason(self) -> None:
        kinds = set(self.asked.values())
        assert kinds <= {"Enter", "Gather", "Lookup"}
        if self.members.deaths:
            assert not kinds, "somebody waits for the dead"
        if self.published:
            assert "Lookup" not in kinds

    @invariant()
    def everybody_hears_of_a_death(self) -> None:
        if self.members.deaths:
            assert all(self.news[peer_of(*record)].deaths for record in self.live)


TestJob = Job.TestCase
TestJob.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(20))
def test_everybody_joins_over_a_network_that_loses_messages(seed: int) -> None:
    chance = random.Random(seed)
    faults: list[Fault] = ["deliver", "drop", "repeat", "late"]
    network = MemoryNetwork(lambda: chance.choices(faults, [5, 4, 1, 1])[0])
    listener, members = MemoryListener(network, "memory://scheduler"), machine()
    answerer = Answerer(listener, members.is_member)
    now = 0.0
    clients = [Client(MemoryHub(network), clock=lambda: now) for _ in SEATS]
    calls = []
    for client, record in zip(clients, SEATS, strict=True):
        channel = client.connect("memory://scheduler", record[0], "scheduler")
        calls.append(client.ask(channel, hello(*record), "joining"))
    while not all(call.done for call in calls):
        now += PROBE_AFTER_S / 2
        assert now < 1000, "somebody was never welcomed"
        for peer, frames in listener.receive(0.0):
            taken = answerer.take(peer, frames)
            for action in members.handle(peer, taken[0], taken[1], 0.0) if taken else []:
                assert isinstance(action, Answer)
                answerer.answer(action.peer, action.seq, action.body)
        for client in clients:
            client.poll()
    assert all(isinstance(call.body, m.Welcome) for call in calls)


# ---- exit codes, as a launcher tells them ----------------------------------------------------------------------------


def supervised() -> Membership:
    members = joined()
    members.is_supervised = True
    return members


def deaths_of(members: Membership) -> list[tuple[str, int, str]]:
    return [(one.role, one.rank, one.reason) for one in members.deaths]


def test_goodbye_counts_when_the_exit_code_is_0() -> None:
    members = supervised()
    members.handle(b"worker-0", 2, m.Enter("b"), 1.0)
    assert answers(members.handle(b"worker-1", 2, m.Bye(""), 1.0)) == [(b"worker-1", 2, m.Done())]
    assert members.tick(1.2) == []
    assert members.ended("worker", 1, 0, 1.3) == []
    told = answers(members.tick(1.4))
    assert told == [(b"server-0", 0, m.News([], False, [1], number=1)), (b"worker-0", 2, m.Gathered([], [(1, 0)]))]
    members.check()


def test_goodbye_counts_after_a_moment_without_an_exit_code() -> None:
    members = supervised()
    members.handle(b"worker-1", 2, m.Bye(""), 1.0)
    members.lost(b"worker-1", 1.1)
    assert members.tick(5.9) == []
    assert answers(members.tick(6.1)) == [(b"server-0", 0, m.News([], False, [1], number=1))]


@pytest.mark.parametrize("has_left", [False, True])
def test_goodbye_with_another_exit_code_is_a_failure(has_left: bool) -> None:
    members = supervised()
    members.handle(b"worker-1", 2, m.Bye(""), 1.0)
    if has_left:
        members.tick(9.0)
    told = answers(members.ended("worker", 1, 3, 9.0))
    assert deaths_of(members) == [("worker", 1, "its process ended: exit code 3")]
    assert members.cause == members.deaths[0]
    assert {peer for peer, _, _ in told} == {b"worker-0", b"server-0"}


def test_end_without_a_goodbye_is_a_failure_once_the_goodbye_can_no_more_come() -> None:
    members = supervised()
    members.ended("worker", 1, 0, 1.0)
    members.handle(b"worker-1", 2, m.Heartbeat(3), 1.1)
    assert members.tick(2.4) == []
    members.tick(2.6)
    assert deaths_of(members) == [("worker", 1, "its process ended with exit code 0 and did not leave the job before")]


def test_who_lost_another_is_not_the_cause_if_that_one_is_known() -> None:
    members = supervised()
    members.handle(b"worker-1", 2, m.Bye("it raised ValueError"), 1.0)
    members.ended("worker", 0, PEER_FAILED, 1.1)
    assert [one.rank for one in members.deaths] == [1]
    alone = supervised()
    alone.ended("worker", 0, PEER_FAILED, 1.1)
    assert [one.rank for one in alone.deaths] == [0]


@pytest.mark.parametrize("code", [0, 1])
def test_end_before_joining_fails_who_waits(code: int) -> None:
    members = machine()
    members.handle(b"worker-0", 1, hello("worker", 0), 0.0)
    ((_, _, body),) = [one for one in answers(members.ended("worker", 1, code, 1.0)) if one[1] == 1]
    assert isinstance(body, m.Failed)
    assert f"worker 1 died: its process ended before it joined: exit code {code}" in body.text


def test_workers_that_never_join_fail_nobody() -> None:
    members = machine()
    members.ended("worker", 1, 0, 1.0)
    assert members.handle(b"server-0", 1, hello("server", 0), 2.0) == []
    assert members.ended("worker", 0, 0, 3.0) == []
    assert members.cause is None


def test_worker_that_joins_after_another_has_ended_is_told_at_once() -> None:
    members = machine()
    members.ended("worker", 1, 0, 1.0)
    told = answers(members.handle(b"worker-0", 1, hello("worker", 0), 2.0))
    assert any(isinstance(body, m.Failed) and "worker 1 died" in body.text for _, _, body in told)
    assert "worker 1 died" in refusal(members.handle(b"server-0", 1, hello("server", 0), 2.0))


def test_cause_of_a_failed_start_is_who_is_missing() -> None:
    members = machine()
    members.handle(b"worker-0", 1, hello("worker", 0), 0.0)
    members.handle(b"server-0", 1, hello("server", 0), 0.0)
    members.tick(60.5)
    assert members.cause is not None
    assert (members.cause.role, members.cause.rank) == ("worker", 1)


def test_exit_code_of_a_dead_member_is_no_second_death() -> None:
    members = supervised()
    members.handle(b"worker-1", 2, m.Bye("it raised ValueError"), 1.0)
    assert members.ended("worker", 1, 1, 1.2) == []
    assert deaths_of(members) == [("worker", 1, "it raised ValueError")]


def test_who_ends_after_a_failed_start_is_not_its_cause() -> None:
    members = machine()
    members.handle(b"worker-0", 1, hello("worker", 0), 0.0)
    members.ended("worker", 1, 7, 1.0)
    cause = members.cause
    assert members.ended("server", 0, 9, 1.1) == []
    assert members.cause == cause
    assert len(members.deaths) == 1
