"""Whom the launcher blames, evidence by evidence; tests/launch/supervise/test_lifecycle.py plays whole jobs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.host.exitcodes import PEER_FAILED, WORKER_LOST, describe_code, why_ended
from paceline.launch import ProcessName
from paceline.launch.supervise.blame import Blame, describe

SCHEDULER, SERVER, W0, W1 = (
    ProcessName("scheduler", 0),
    ProcessName("server", 0),
    ProcessName("worker", 0),
    ProcessName("worker", 1),
)


@pytest.fixture
def blame() -> Blame:
    return Blame(100.0, has_scheduler=True)


def blamed(blame: Blame) -> tuple[ProcessName, int, str, float]:
    assert blame.cause is not None
    return blame.cause.member, blame.cause.code, blame.cause.reason, blame.cause.after_s


def test_exits_with_zero_are_no_failure(blame: Blame) -> None:
    for member in (W0, W1, SERVER, SCHEDULER):
        blame.note_exit(member, 0, 101.0)
    assert (blame.cause, blame.code, blame.aftermath) == (None, 0, {})


def test_victim_that_the_scheduler_only_repeats_is_not_blamed(blame: Blame) -> None:
    blame.note_exit(W0, PEER_FAILED, 103.0)
    blame.name(W0, why_ended(PEER_FAILED), 103.1)
    assert blame.is_settled
    blame.note_exit(W1, 137, 103.2)
    assert blamed(blame) == (W1, 137, "killed by SIGKILL (exit code 137)", pytest.approx(3.2))
    assert blame.aftermath == {W0: PEER_FAILED}


def test_victim_is_blamed_if_the_scheduler_knows_nobody_else(blame: Blame) -> None:
    blame.note_exit(W1, PEER_FAILED, 103.0)
    blame.name(W1, why_ended(PEER_FAILED), 103.1)
    blame.suspect_scheduler(False, 110.0)
    assert blamed(blame)[:2] == (W1, PEER_FAILED)


def test_process_that_is_silent_and_ends_as_a_victim_is_the_cause(blame: Blame) -> None:
    blame.name(W1, "it was not heard for 30.0 s", 130.0)
    blame.note_exit(W0, PEER_FAILED, 130.5)
    blame.note_exit(W1, PEER_FAILED, 131.0)
    assert blamed(blame) == (W1, PEER_FAILED, "exit code 76: it was not heard for 30.0 s", 30.0)


def test_detail_of_an_exit_outlives_the_schedulers_echo(blame: Blame) -> None:
    blame.note_exit(W1, 255, 101.0, "its host was lost")
    blame.name(W1, why_ended(255), 101.1)
    assert blamed(blame)[2] == "exit code 255: its host was lost" == describe(255, "its host was lost")


def test_verdict_of_the_launcher_is_not_replaced_by_the_exit_that_it_brings_about(blame: Blame) -> None:
    blame.name(W1, "did not exit, and has used no CPU time for 300 s", 400.0)
    blame.name(W1, why_ended(143), 401.0)
    assert blamed(blame) == (W1, 1, "did not exit, and has used no CPU time for 300 s", 300.0)


def test_death_in_question_is_the_cause_if_another_fails_meanwhile() -> None:
    blame = Blame(100.0, has_scheduler=True, may_go_on=True)
    blame.note_exit(W0, 3, 101.0)
    assert blame.awaits_verdict
    blame.note_exit(SERVER, PEER_FAILED, 102.0)
    assert blamed(blame) == (W0, 3, "exit code 3", 1.0)
    assert blame.note_survived(W0, why_ended(3), 103.0) is None
    assert blame.aftermath == {SERVER: PEER_FAILED}


def test_worker_that_others_survived_is_no_cause_of_a_later_failure() -> None:
    blame = Blame(100.0, has_scheduler=True, may_go_on=True)
    blame.note_exit(W0, 139, 101.0)
    death = blame.note_survived(W0, why_ended(139), 101.1)
    assert death is not None
    assert death.reason == "killed by SIGSEGV (exit code 139)"
    assert (blame.awaits_verdict, blame.code) == (False, WORKER_LOST)
    blame.note_exit(SERVER, 9, 105.0)
    assert blamed(blame) == (SERVER, 9, "exit code 9", 5.0)
    assert (blame.aftermath, blame.survived[W0].code) == ({}, 139)


def test_exit_code_is_said_once_where_the_scheduler_was_told_it() -> None:
    early = "its process ended before it joined: "
    assert describe(4, early + describe_code(4)) == "exit code 4: its process ended before it joined"
    killed = "killed by SIGKILL (exit code 137)"
    assert describe(137, early + describe_code(137)) == f"{killed}: its process ended before it joined"
    assert describe(0, early + describe_code(0)) == early + "exit code 0"


def test_exit_code_decides_once_all_workers_have_said_goodbye() -> None:
    blame = Blame(100.0, has_scheduler=True, may_go_on=True)
    blame.note_goodbyes()
    blame.note_exit(W0, 3, 101.0)
    assert blamed(blame)[:2] == (W0, 3)


@given(st.permutations([(W0, 1), (SERVER, PEER_FAILED), (SCHEDULER, 0), (W1, 5)]), st.integers(0, 4))
def test_named_process_is_the_cause_wherever_the_word_comes(ends: list[tuple[ProcessName, int]], place: int) -> None:
    blame = Blame(0.0, has_scheduler=True)
    for number in range(5):
        if number == place:
            blame.name(W1, "it raised ArithmeticError: NaN", 1.0 * number)
        if number < len(ends):
            blame.note_exit(*ends[number], 1.0 * number)
    assert blamed(blame)[:3] == (W1, 5, "exit code 5: it raised ArithmeticError: NaN")
    assert {**blame.aftermath, W1: 5}.items() >= {(W0, 1), (SERVER, PEER_FAILED)}
