"""Training loops of plain PyTorch users do in a job what they do in one process; a selection of ``nox -s oracle``."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from paceline.testing import Faults
from tests.clusters.hosts import why_no_hosts
from tests.oracle.jobs import Outcome, Way, outcomes, reference
from tests.oracle.registry import all_scripts

ALL = all_scripts()
EQUAL = [name for name, script in ALL.items() if script.worker == "equal"]
EQUAL_ON_SERVERS = [name for name, script in ALL.items() if script.server == "equal"]
REFUSED_AT_ONCE = [name for name, script in ALL.items() if script.server == "refused at once"]

#: One of each kind of loop, for slower networks; all of them with ``nox -s oracle``.
SOME = [
    "accumulation_untold", "batch_norm", "checkpointing_reentrant", "clip_norm", "experts", "frozen_in_the_middle",
    "gan", "lbfgs_with_line_search", "lookahead", "optimizer_adamw", "scaler_with_clipping",
    "sparse_embedding_with_sgd",
]  # fmt: skip
SOME_ON_SERVERS = [name for name in SOME if name in EQUAL_ON_SERVERS]

#: Weights, param groups and states that were written: one of each kind.
SOME_REFUSED = {
    "accumulation_no_sync": "backward_passes_per_step",
    "back_to_earlier_weights": "broadcast_weights",
    "group_added_in_the_middle": "update='worker'",
    "state_cleared": "load_state_dict",
    "state_of_the_wrapped_optimizer_cleared": "load_state_dict",
    "wgan_with_clamped_weights": "broadcast_weights",
}
#: The batch with which what is refused happens first, where that is not the first.
FIRST_BATCH = {
    "accumulation_no_sync": -1, "back_to_earlier_weights": 20,
    "group_added_in_the_middle": 20, "state_cleared": 20, "wgan_with_clamped_weights": 1,
    "state_of_the_wrapped_optimizer_cleared": 20,
}  # fmt: skip

#: The ways out of what the modes without merged gradients refuse.
ERRORS_IN_OTHER_MODES = {
    "accumulation_no_sync": "backward_passes_per_step",
    "back_to_earlier_weights": "broadcast_weights",
    "group_added_in_the_middle": "before it is given",
    "lookahead": "broadcast_weights",
    "not_finite": "on_nan='skip'",
    "wgan_with_clamped_weights": "broadcast_weights",
}
IN_OTHER_MODES = [
    name for name, script in ALL.items() if script.other == "equal" and (script.server != "equal" or name in SOME)
]

pytestmark = pytest.mark.timeout(600)


@functools.cache
def found(names: tuple[str, ...], workers: int, transport: str, update: str, seed: int | None) -> dict[str, Outcome]:
    """Return what scripts did, run one after the other in as few jobs as possible; ``seed`` is that of faults."""
    faults = None if seed is None else Faults(seed=seed)
    return dict(outcomes(names, Way(workers, transport, options={"update": update}, faults=faults)))


@functools.cache
def found_on(devices: tuple[str, ...], names: tuple[str, ...], update: str) -> dict[str, Outcome]:
    return dict(outcomes(names, Way(2, options={"update": update}, devices=devices)))


def problems(
    name: str, names: list[str], workers: int, transport: str, update: str, seed: int | None = None
) -> list[str]:
    outcome = found(tuple(names), workers, transport, update, seed)[name]
    return outcome.problems(reference(name, workers))


@pytest.mark.parametrize("name", EQUAL)
def test_loops_train_as_one_process_does(name: str) -> None:
    assert problems(name, EQUAL, 2, "shm", "worker") == []


@pytest.mark.parametrize("name", EQUAL_ON_SERVERS)
def test_loops_train_as_one_process_does_when_servers_step(name: str) -> None:
    assert problems(name, EQUAL_ON_SERVERS, 2, "shm", "server") == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", EQUAL)
def test_loops_on_gpus_train_as_one_process_does(name: str) -> None:
    outcome = found_on(("cuda",), tuple(EQUAL), "worker")[name]
    assert outcome.problems(reference(name, 2, "cuda")) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", SOME_ON_SERVERS)
def test_a_gpu_and_a_cpu_train_as_one_process_does(name: str) -> None:
    outcome = found_on(("cuda", "cpu"), tuple(SOME_ON_SERVERS), "server")[name]
    assert outcome.problems(reference(name, 2, "cuda"), alike=False) == []


@pytest.mark.parametrize("name", ["calls_for_several_tasks", "sparse_embedding_at_some_steps"])
def test_loops_train_as_one_process_does_by_all_reduce(name: str) -> None:
    [(_, outcome)] = outcomes([name], Way(2, kvstore="allreduce"))
    assert outcome.problems(reference(name, 2)) == []


@pytest.mark.parametrize("name", SOME)
def test_three_workers_over_a_bad_network_train_as_one_process_does(name: str) -> None:
    assert problems(name, SOME, 3, "tcp", "worker", 1) == []


@pytest.mark.parametrize("name", SOME_ON_SERVERS)
def test_servers_step_as_one_process_does_behind_a_bad_network(name: str) -> None:
    assert problems(name, SOME_ON_SERVERS, 3, "tcp", "server", 2) == []


@pytest.mark.root
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "possible")
@pytest.mark.parametrize("name", ["clip_norm", "experts", "gan", "gpt"])
def test_two_hosts_train_as_one_process_does(name: str) -> None:
    assert problems(name, ["clip_norm", "experts", "gan", "gpt"], 3, "hosts", "worker", 3) == []


@pytest.mark.parametrize("name", SOME)
def test_other_faults_change_no_bit(name: str) -> None:
    """Also not on another way: memory that is shared is read when a slow server comes to it."""
    one = found(tuple(SOME), 3, "tcp", "worker", 1)[name]
    other = found(tuple(SOME), 3, "shm", "worker", 4)[name]
    assert other.errors == [""] * 3
    assert other.values == one.values


@pytest.mark.parametrize("name", SOME_REFUSED)
def test_what_servers_would_not_see_is_an_error_in_its_step_on_all_workers(name: str) -> None:
    outcome = found((name,), 2, "shm", "server", None)[name]
    way_out = SOME_REFUSED[name]
    for text, step in zip(outcome.errors, outcome.steps, strict=True):
        assert text.startswith("PacelineError: ")
        assert way_out in text
        assert "update='worker'" in text
        assert step == FIRST_BATCH.get(name, 0)


def test_gradients_that_are_not_finite_are_an_error_that_names_whose_they_are() -> None:
    outcome = found(("not_finite",), 2, "shm", "worker", None)["not_finite"]
    for rank, text in enumerate(outcome.errors):
        assert re.match(rf"NonFiniteError: worker {rank}: .*'0\.weight'.* in round 4: worker 1 pushed that of ", text)
        assert "on_nan='skip'" in text
    assert outcome.steps == [3, 3]


def test_servers_get_no_gradients_that_are_not_finite() -> None:
    outcome = found(("not_finite",), 2, "shm", "server", None)["not_finite"]
    assert re.match(r"NonFiniteError: worker 1: .*on_nan='skip'", outcome.errors[1])
    assert outcome.steps[1] == 3
    assert outcome.values == [None, None]


def test_gradient_that_comes_twice_in_one_backward_is_an_error_that_says_how_it_can_be_right() -> None:
    outcome = found(("checkpointing_reentrant_twice_untold",), 2, "shm", "worker", None)
    for text in outcome["checkpointing_reentrant_twice_untold"].errors:
        assert re.match(r"PacelineError: .*'middle\.bias'.*overlap=False", text)


@functools.cache
def found_asynchronous(names: tuple[str, ...]) -> dict[str, Outcome]:
    return dict(outcomes(names, Way(1, kvstore="dist_async")))


@pytest.mark.parametrize("name", IN_OTHER_MODES)
def test_one_asynchronous_worker_trains_as_one_process_does(name: str) -> None:
    """What gradients are at ``step`` is pushed, so a loop may do with them what it likes."""
    outcome = found_asynchronous(tuple(IN_OTHER_MODES))[name]
    assert outcome.problems(reference(name, 1)) == []


@pytest.mark.parametrize("name", ERRORS_IN_OTHER_MODES)
def test_what_other_modes_cannot_do_is_an_error_in_its_step(name: str) -> None:
    outcome = found_asynchronous((name,))[name]
    assert ALL[name].other == "refused in its step"
    assert re.match(r"(Paceline|NonFinite)Error: ", outcome.errors[0])
    assert ERRORS_IN_OTHER_MODES[name] in outcome.errors[0]
    assert outcome.steps == [{"lookahead": 5, "not_finite": 3}.get(name, FIRST_BATCH.get(name))]


@pytest.mark.parametrize("name", REFUSED_AT_ONCE)
def test_optimizers_that_servers_cannot_run_are_refused_when_they_are_wrapped(name: str) -> None:
    outcome = found((name,), 2, "shm", "server", None)[name]
    for text, step in zip(outcome.errors, outcome.steps, strict=True):
        assert text.startswith("ValueError: ")
        assert "update='worker' runs any optimizer" in text
        assert step == -1
