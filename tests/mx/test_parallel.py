import threading

import pytest
import torch

from paceline.errors import DeadlineError, PacelineError
from paceline.mx.context import cpu
from paceline.mx.gluon.parallel import Meeting, current_call, run_replicas

TWO = [cpu(0), cpu(1)]


def test_jobs_run_side_by_side_in_order():
    both = threading.Barrier(2)

    def job(result):
        both.wait(10)
        return result

    assert run_replicas(TWO, [lambda: job("a"), lambda: job("b")]) == ["a", "b"]


def test_a_replica_keeps_its_thread():
    first = run_replicas(TWO, [threading.get_ident] * 2)
    assert run_replicas(TWO, [threading.get_ident] * 2) == first
    assert len({*first, threading.get_ident()}) == 3


def test_grad_mode_and_autocast_follow_the_work():
    def modes():
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()

    assert run_replicas(TWO, [modes] * 2) == [(True, False, False)] * 2
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert run_replicas(TWO, [modes] * 2) == [(False, True, False)] * 2
    with torch.inference_mode():
        assert run_replicas(TWO, [modes] * 2) == [(False, False, True)] * 2
    assert run_replicas(TWO, [modes] * 2) == [(True, False, False)] * 2


def test_cores_are_shared_and_the_callers_threads_stay():
    before = torch.get_num_threads()
    assert run_replicas(TWO, [torch.get_num_threads] * 2) == [max(1, before // 2)] * 2
    assert torch.get_num_threads() == before


def test_one_job_runs_in_the_callers_thread():
    assert run_replicas([cpu()], [threading.get_ident]) == [threading.get_ident()]
    assert run_replicas([cpu()], [current_call]) == [None]


def test_error_names_its_replica():
    def fail():
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError) as caught:
        run_replicas(TWO, [lambda: 1, fail])
    assert caught.value.__notes__ == ["in replica 1 on cpu(1)"]


def test_gather_gives_all_values_in_replica_order():
    def job():
        call = current_call()
        return [call.meeting.gather(call.index, "x", (round_, call.index)) for round_ in range(50)]

    wanted = [[(round_, 0), (round_, 1)] for round_ in range(50)]
    assert run_replicas(TWO, [job, job]) == [wanted, wanted]


def test_failure_of_one_replica_frees_the_waiting_ones():
    def wait():
        call = current_call()
        call.meeting.gather(call.index, "x", 1)

    def fail():
        raise ZeroDivisionError("no")

    with pytest.raises(ZeroDivisionError):
        run_replicas(TWO, [wait, fail])


@pytest.mark.parametrize("other", ["y", None])
def test_replicas_that_go_different_ways_are_told_so(other):
    def job(label):
        call = current_call()
        if label is not None:
            call.meeting.gather(call.index, label, 1)

    with pytest.raises(PacelineError, match="same layers in order"):
        run_replicas(TWO, [lambda: job("x"), lambda: job(other)])


def test_a_meeting_has_a_deadline():
    with pytest.raises(DeadlineError, match=r"cpu\(0\) waited 0.01 s at x for replica cpu\(1\)"):
        Meeting(TWO, timeout_s=0.01).gather(0, "x", 1)


def test_nested_calls_run_in_place():
    def outer():
        return run_replicas(TWO, [threading.get_ident] * 2) == [threading.get_ident()] * 2

    assert run_replicas(TWO, [outer, outer]) == [True, True]
