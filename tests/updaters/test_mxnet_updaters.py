"""Our own optimizers, most of them MXNet's, against their published formulas in numpy with double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paceline.updaters import (
    DCASGD,
    NAG,
    SGLD,
    DelayedNesterov,
    FlatUpdater,
    Ftrl,
    KeyOptions,
    MXNetSGD,
    Piece,
    SignSGD,
    Signum,
    StepOptions,
    UpdaterSpec,
    make_spec,
    make_updater,
)
from paceline.updaters.mxnet import sgld_noise

STEPS, NUMEL = 20, 37
Array = np.ndarray[Any, np.dtype[np.float64]]
#: (weights, gradient, state, number of the step from 1 on, options) -> weights
Step = Callable[[Array, Array, dict[str, Array], int, dict[str, Any]], Array]


def nag(w: Array, g: Array, state: dict[str, Array], t: int, o: dict[str, Any]) -> Array:
    g = g + o["weight_decay"] * w
    state["v"] = o["momentum"] * state.get("v", 0 * w) + o["lr"] * g
    return w - (o["momentum"] * state["v"] + o["lr"] * g)


def mxnet_sgd(w: Array, g: Array, state: dict[str, Array], t: int, o: dict[str, Any]) -> Array:
    state["v"] = o["momentum"] * state.get("v", 0 * w) - o["lr"] * (g + o["weight_decay"] * w)
    return w + state["v"]


def ftrl(w: Array, g: Array, state: dict[str, Array], t: int, o: dict[str, Any]) -> Array:
    z, n = state.get("z", 0 * w), state.get("n", 0 * w)
    z = z + g - (np.sqrt(n + g**2) - np.sqrt(n)) * w / o["lr"]
    n = n + g**2
    state["z"], state["n"] = z, n
    rate = (o["beta"] + np.sqrt(n)) / o["lr"] + o["weight_decay"]
    return (np.sign(z) * o["lamda1"] - z) / rate * (np.abs(z) > o["lamda1"])


def signum(w: Array, g: Array, state: dict[str, Array], t: int, o: dict[str, Any]) -> Array:
    g = g + o["weight_decay"] * w
    state["m"] = o["momentum"] * state.get("m", 0 * w) + (1 - o["momentum"]) * g
    return (1 - o["lr"] * o["wd_lh"]) * w - o["lr"] * np.sign(state["m"])


def signsgd(w: Array, g: Array, state: dict[str, Array], t: int, o: dict[str, Any]) -> Array:
    return (1 - o["lr"] * (o["weight_decay"] + o.get("wd_lh", 0.0))) * w - o["lr"] * np.sign(g)


def dcasgd(w: Array, g: Array, state: dict[str, Array], t: int, o: dict[str, Any]) -> Array:
    g = g + o["weight_decay"] * w
    previous = state.get("previous", w)
    compensated = g + o["lamda"] * g * g * (w - previous)
    state["v"] = o["momentum"] * state.get("v", 0 * w) - o["lr"] * compensated
    state["previous"] = w
    return w + state["v"]


def sgld(w: Array, g: Array, state: dict[str, Array], t: int, o: dict[str, Any]) -> Array:
    noise = sgld_noise((o["seed"], "w", t), 0, w.size).double().numpy()
    return w - o["lr"] / 2 * (g + o["weight_decay"] * w) + np.sqrt(o["lr"]) * noise


def delayed_nesterov(w: Array, g: Array, state: dict[str, Array], t: int, o: dict[str, Any]) -> Array:
    """The form of the paper, with its c = 0."""
    state["sum"] = state.get("sum", 0 * w) + g
    if t % o["every"]:
        return w - o["lr"] * g / o["every"]
    state["m"] = o["momentum"] * state.get("m", 0 * w) + state.pop("sum") / o["every"]
    return w - o["lr"] * (o["momentum"] * state["m"] + g / o["every"])


CASES: dict[str, tuple[str, Step, dict[str, Any]]] = {
    "nag": ("nag", nag, {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.02}),
    "nag without momentum": ("nag", nag, {"lr": 0.05, "momentum": 0.0, "weight_decay": 0.02}),
    "mxnet_sgd": ("mxnet_sgd", mxnet_sgd, {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.02}),
    "mxnet_sgd without momentum": ("mxnet_sgd", mxnet_sgd, {"lr": 0.05, "momentum": 0.0, "weight_decay": 0.0}),
    "ftrl": ("ftrl", ftrl, {"lr": 0.1, "lamda1": 0.3, "beta": 0.7, "weight_decay": 0.02}),
    "signum": ("signum", signum, {"lr": 0.01, "momentum": 0.8, "wd_lh": 0.1, "weight_decay": 0.02}),
    "signum without momentum": (
        "signum",
        signsgd,
        {"lr": 0.01, "momentum": 0.0, "wd_lh": 0.1, "weight_decay": 0.02},
    ),
    "signsgd": ("signsgd", signsgd, {"lr": 0.01, "weight_decay": 0.02}),
    "dcasgd": ("dcasgd", dcasgd, {"lr": 0.1, "momentum": 0.5, "lamda": 0.9, "weight_decay": 0.02}),
    "dcasgd without momentum": ("dcasgd", dcasgd, {"lr": 0.1, "momentum": 0.0, "lamda": 0.9, "weight_decay": 0.0}),
    "sgld": ("sgld", sgld, {"lr": 0.01, "weight_decay": 0.02, "seed": 5}),
    "delayed_nesterov": ("delayed_nesterov", delayed_nesterov, {"lr": 0.7, "momentum": 0.9, "every": 3}),
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "nag": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0},
    "ftrl": {"lr": 0.1, "lamda1": 0.01, "beta": 1.0, "weight_decay": 0.0},
    "signum": {"lr": 0.01, "momentum": 0.9, "wd_lh": 0.0, "weight_decay": 0.0},
    "signsgd": {"lr": 0.01, "wd_lh": 0.0, "weight_decay": 0.0},
    "dcasgd": {"lr": 0.1, "momentum": 0.0, "lamda": 0.04, "weight_decay": 0.0},
    "sgld": {"lr": 0.1, "weight_decay": 0.0, "seed": 0},
    "delayed_nesterov": {"lr": 0.7, "momentum": 0.9, "every": 1},
}


def start() -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gradient(step: int) -> torch.Tensor:
    """Gradients of which some elements are zero, now and then or always."""
    drawn = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return drawn * (torch.arange(NUMEL) % 7 != step % 7) * (torch.arange(NUMEL) != 3)


def by_formula(step: Step, options: dict[str, Any], rates: Callable[[int], float] | None = None) -> torch.Tensor:
    w, state = start().numpy(), dict[str, Array]()
    for t in range(1, STEPS + 1):
        now = options | ({"lr": rates(t)} if rates else {})
        w = step(w, gradient(t).numpy(), state, t, now)
    return torch.from_numpy(w)


def run(parts: list[tuple[int, FlatUpdater]], steps: range, rates: Callable[[int], float] | None = None) -> None:
    for t in steps:
        told = StepOptions([{"lr": rates(t)}]) if rates else None
        for begin, part in parts:
            part.update(gradient(t)[begin : begin + part.value.numel()].to(part.value.dtype), 1.0, told)


def updater(name: str, options: dict[str, Any], value: torch.Tensor, **more: Any) -> FlatUpdater:
    return make_updater(make_spec(name, **options, **more), value, [Piece("w", 0, NUMEL, (NUMEL,))])


def halving(t: int) -> float:
    return 0.1 * 0.5 ** (t // 5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rates", [None, halving], ids=["one rate", "falling rate"])
def test_twenty_steps_are_the_formula(case: str, rates: Callable[[int], float] | None) -> None:
    name, step, options = CASES[case]
    value = start()
    run([(0, updater(name, options, value))], range(1, STEPS + 1), rates)
    torch.testing.assert_close(value, by_formula(step, options, rates), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_mxnets(name: str) -> None:
    value = start()
    run([(0, updater(name, {}, value))], range(1, STEPS + 1))
    torch.testing.assert_close(value, by_formula(CASES[name][1], DEFAULTS[name]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_cut_and_saved_in_the_middle_goes_on_the_same(case: str) -> None:
    name, step, options = CASES[case]
    value = start()
    whole = updater(name, options, value)
    run([(0, whole)], range(1, 6))
    left, right = whole.split(11)
    run([(0, left), (11, right)], range(6, 11))
    again = updater(name, options, value)
    for begin, part in ((0, left), (11, right)):
        again.load_state(Piece("w", begin, part.value.numel()), part.state(part.pieces[0]))
    run([(0, again)], range(11, STEPS + 1))
    torch.testing.assert_close(value, by_formula(step, options), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_class_is_an_optimizer_for_plain_loops_too(case: str) -> None:
    name, step, options = CASES[case]
    classes = {
        "nag": NAG,
        "mxnet_sgd": MXNetSGD,
        "ftrl": Ftrl,
        "signum": Signum,
        "signsgd": SignSGD,
        "dcasgd": DCASGD,
        "sgld": SGLD,
        "delayed_nesterov": DelayedNesterov,
    }
    param = torch.nn.Parameter(start())
    optimizer: torch.optim.Optimizer = classes[name]([{"params": [param], "key": "w"}], **options)  # type: ignore[operator]
    losses = []
    for t in range(1, STEPS + 1):

        def closure(t: int = t) -> float:
            optimizer.zero_grad()
            loss = (param * gradient(t)).sum()
            loss.backward()
            return float(loss)

        losses.append(optimizer.step(closure))
    assert all(isinstance(loss, float) for loss in losses)
    torch.testing.assert_close(param.detach(), by_formula(step, options), rtol=1e-10, atol=1e-10)


# ---- momentum forms --------------------------------------------------------------------------------------------------


def torch_sgd(w: Array, g: Array, state: dict[str, Array], t: int, o: dict[str, Any]) -> Array:
    state["v"] = o["momentum"] * state.get("v", 0 * w) + g
    return w - o["lr"] * state["v"]


@pytest.mark.parametrize(("form", "step"), [("torch", torch_sgd), ("mxnet", mxnet_sgd)])
def test_momentum_forms_differ_when_the_rate_changes(form: str, step: Step) -> None:
    options = {"lr": 0.1, "momentum": 0.9}
    value = start()
    run([(0, updater("sgd", options, value, momentum_form=form))], range(1, STEPS + 1), halving)
    expected = {one: by_formula(one, options | {"weight_decay": 0.0}, halving) for one in (torch_sgd, mxnet_sgd)}
    torch.testing.assert_close(value, expected[step], rtol=1e-10, atol=1e-10)
    assert (expected[torch_sgd] - expected[mxnet_sgd]).abs().max() > 0.05


def test_momentum_form_belongs_to_sgd() -> None:
    assert make_spec("sgd", momentum=0.9) == make_spec("sgd", momentum=0.9, momentum_form="torch")
    assert make_spec(torch.optim.SGD, momentum_form="mxnet").name == "mxnet_sgd"
    with pytest.raises(ValueError, match="option of 'sgd', not of 'adam'"):
        make_spec("adam", momentum_form="mxnet")
    with pytest.raises(ValueError, match="'torch' or 'mxnet'"):
        make_spec("sgd", momentum_form="nesterov")
    with pytest.raises(TypeError, match="instance itself"):
        make_spec(torch.optim.SGD([torch.zeros(1)], lr=0.1), momentum_form="mxnet")
    with pytest.raises(TypeError, match="no option 'nesterov'"):
        make_spec("sgd", nesterov=True, momentum_form="mxnet")


# ---- single optimizers -----------------------------------------------------------------------------------------------


def test_noise_is_the_same_however_it_is_cut_and_different_everywhere_else() -> None:
    whole = sgld_noise((0, "w", 1), 0, 10_000)
    parts = [
        sgld_noise((0, "w", 1), begin, end - begin) for begin, end in ((0, 1), (1, 4096), (4096, 9000), (9000, 10_000))
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert abs(float(whole.mean())) < 0.05
    assert abs(float(whole.std()) - 1) < 0.05
    others = [sgld_noise(seed, 0, 10_000) for seed in ((1, "w", 1), (0, "v", 1), (0, "w", 2), (0, 7, 1), (0, "7", 1))]
    chunks = [*whole.split(4096)[:2], *(one[:4096] for one in others)]
    correlations = torch.corrcoef(torch.stack(chunks)) - torch.eye(len(chunks))
    assert correlations.abs().max() < 0.08


def test_noise_of_a_chain_has_the_variance_of_its_rate_and_depends_on_the_seed() -> None:
    moved = []
    for seed in (0, 0, 1):
        value = torch.zeros(50_000)
        piece = Piece("w", 0, 50_000)
        make_updater(make_spec("sgld", lr=0.25, seed=seed), value, [piece]).update(torch.zeros(50_000), 1.0, None)
        moved.append(value)
    assert torch.equal(moved[0], moved[1])
    assert not torch.equal(moved[0], moved[2])
    assert float(moved[0].var()) == pytest.approx(0.25, rel=0.05)


def test_parts_of_a_key_on_two_servers_have_the_noise_of_the_whole_key() -> None:
    spec = make_spec("sgld", lr=0.1, seed=3)
    whole, halves = torch.zeros(NUMEL), torch.zeros(NUMEL)
    make_updater(spec, whole, [Piece("w", 0, NUMEL)]).update(torch.zeros(NUMEL), 1.0, None)
    for begin, end in ((0, 20), (20, NUMEL)):
        piece = Piece("w", 0, end - begin, (), begin)
        make_updater(spec, halves[begin:end], [piece]).update(torch.zeros(end - begin), 1.0, None)
    assert torch.equal(whole, halves)


def test_parameters_of_a_plain_loop_have_noise_of_their_own() -> None:
    params = [torch.nn.Parameter(torch.zeros(9)) for _ in range(2)]
    for param in params:
        param.grad = torch.zeros(9)
    SGLD(params, lr=0.1).step()
    assert not torch.equal(params[0], params[1])


def test_ftrl_keeps_weights_without_much_gradient_at_zero() -> None:
    value = torch.zeros(2)
    ftrl_updater = make_updater(make_spec("ftrl", lamda1=1.0), value, [Piece("w", 0, 2)])
    for _ in range(3):
        ftrl_updater.update(torch.tensor([0.1, 5.0]), 1.0, None)
    assert value[0] == 0
    assert value[1] < 0


def test_rate_of_zero_leaves_everything_as_it_is() -> None:
    for name in DEFAULTS:
        value = start()
        run([(0, updater(name, {"lr": 0.0}, value))], range(1, 4))
        assert torch.equal(value, start()), name


@pytest.mark.parametrize("name", [*DEFAULTS, "mxnet_sgd"])
def test_impossible_numbers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="needs lr >= 0"):
        updater(name, {"lr": -1.0}, start())
    if "momentum" in DEFAULTS.get(name, {}):
        with pytest.raises(ValueError, match="momentum < 1"):
            updater(name, {"momentum": 1.0}, start())


@pytest.mark.parametrize("name", ["ftrl", "mxnet_sgd", "add"])
def test_row_sparse_gradient_updates_only_its_rows(name: str) -> None:
    options: dict[str, Any] = {} if name == "add" else {"weight_decay": 0.1}
    value = torch.arange(12.0)
    dense, before = value[3:9].clone(), value.clone()
    rows = torch.tensor([[1, 2]])
    lazy = make_updater(make_spec(name, **options), value, [Piece("w", 0, 12, (4, 3))])
    reference = make_updater(make_spec(name, **options), dense, [Piece("w", 0, 6)])
    for step in range(3):
        grad = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
        lazy.update_rows(torch.sparse_coo_tensor(rows, grad, (4, 3)).coalesce(), 0.5, None)
        reference.update(grad.view(-1).clone(), 0.5, None)
    torch.testing.assert_close(value[3:9], dense)
    assert torch.equal(value[:3], before[:3])
    assert torch.equal(value[9:], before[9:])


def test_multipliers_and_groups_reach_the_keys() -> None:
    keys: dict[str | int, KeyOptions] = {"b": KeyOptions(1, lr_mult=0.5)}
    spec = UpdaterSpec("nag", [{"lr": 0.1, "momentum": 0.0}, {"lr": 1.0, "momentum": 0.0}], keys)
    value = torch.zeros(4)
    make_updater(spec, value, [Piece("a", 0, 2), Piece("b", 2, 2)]).update(torch.ones(4), 1.0, None)
    torch.testing.assert_close(value, torch.tensor([-0.1, -0.1, -0.5, -0.5]))
