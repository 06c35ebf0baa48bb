import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CheckpointError, KeyMismatchError, PacelineError
from paceline.kvstore.checkpoint import tensor_file
from paceline.kvstore.inprocess import LocalStore


@pytest.fixture
def store():
    """A device store is the same on one device; ``tests/integration/test_stores_alike.py`` compares both."""
    return LocalStore()


def pulled(store, key, like):
    out = torch.empty_like(like)
    store.pull(key, out)
    return out


def rows(indices, values, size):
    return torch.sparse_coo_tensor(torch.tensor([indices]), torch.tensor(values), size, check_invariants=True)


def test_push_without_optimizer_replaces_the_value(store):
    store.init(3, torch.ones(2, 3))
    store.push(3, torch.full((2, 3), 2.0))
    store.push(3, torch.full((2, 3), 7.0))
    assert torch.equal(pulled(store, 3, torch.ones(2, 3)), torch.full((2, 3), 7.0))


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_device_values_are_summed(numbers):
    store = LocalStore()
    store.init("w", torch.zeros(4))
    store.push("w", [torch.full((4,), one) for one in numbers])
    assert torch.allclose(pulled(store, "w", torch.zeros(4)), torch.full((4,), sum(numbers)), atol=1e-4)


def test_repeated_keys_of_one_call_are_summed(store):
    store.init([1, 2], [torch.zeros(2), torch.zeros(2)])
    store.push([1, 2, 1], [torch.ones(2), torch.ones(2), [torch.ones(2), torch.ones(2)]])
    assert pulled(store, 1, torch.zeros(2)).tolist() == [3, 3]
    assert pulled(store, 2, torch.zeros(2)).tolist() == [1, 1]


def test_no_tensor_of_the_caller_is_kept(store):
    value, grad = torch.ones(3), torch.full((3,), 5.0)
    store.init("w", value)
    value.zero_()
    assert pulled(store, "w", value).tolist() == [1, 1, 1]
    store.push("w", grad)
    grad.zero_()
    out = pulled(store, "w", grad)
    assert out.tolist() == [5, 5, 5]
    out.zero_()
    assert pulled(store, "w", grad).tolist() == [5, 5, 5]


def test_updates_leave_the_pushed_gradient_alone(store):
    store.init("w", torch.zeros(3))
    store.set_optimizer("sgd", learning_rate=1.0)
    store.scale = 0.5
    grad = torch.ones(3)
    store.push("w", grad)
    assert grad.tolist() == [1, 1, 1]
    assert pulled(store, "w", grad).tolist() == [-0.5] * 3


def test_pushpull_reduces_in_place_without_out(store):
    store.init("w", torch.zeros(2))
    values = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    store.pushpull("w", values)
    assert [one.tolist() for one in values] == [[11, 22], [11, 22]]


def test_broadcast_initialises_and_fills_out(store):
    outs = [[torch.zeros(2), torch.zeros(2)], [torch.zeros(3)]]
    store.broadcast(["a", "b"], [torch.ones(2), torch.full((3,), 4.0)], outs)
    assert outs[0][1].tolist() == [1, 1]
    assert outs[1][0].tolist() == [4, 4, 4]


def test_pull_casts_to_the_dtype_of_out(store):
    store.init("w", torch.full((2,), 1.5))
    assert pulled(store, "w", torch.zeros(2, dtype=torch.float64)).tolist() == [1.5, 1.5]


def test_callable_updater_works_in_place(store):
    seen = []
    store.set_updater(lambda key, merged, stored: seen.append(key) or stored.add_(merged, alpha=2.0))
    store.init(["w", "v"], [torch.ones(2), torch.ones(2)])
    store.push(["w", "v"], [[torch.ones(2), torch.ones(2)]] * 2)
    assert pulled(store, "w", torch.ones(2)).tolist() == [5, 5]
    assert seen == ["w", "v"]


@pytest.mark.parametrize(("name", "result"), [("assign", 3.0), ("add", 7.0), ("test", 7.0)])
def test_named_updaters(store, name, result):
    store.init("w", torch.full((2,), 4.0))
    store.set_updater(name)
    store.push("w", torch.full((2,), 3.0))
    assert pulled(store, "w", torch.ones(2)).tolist() == [result] * 2


# --- errors --------------------------------------------------------------------------------------------------------


def test_second_init_is_refused(store):
    store.init("w", torch.zeros(2))
    with pytest.raises(KeyMismatchError, match="'w' is initialised twice"):
        store.init("w", torch.ones(2))
    with pytest.raises(KeyMismatchError, match="'v' is initialised twice"):
        store.init("v", [torch.ones(2), torch.ones(2)])
    assert pulled(store, "w", torch.zeros(2)).tolist() == [0, 0]


@pytest.mark.parametrize("verb", ["push", "pull", "pushpull"])
def test_unknown_key_is_named_and_changes_nothing(store, verb):
    store.init(["weight", "bias"], [torch.zeros(2), torch.zeros(2)])
    with pytest.raises(KeyMismatchError, match=r"'wieght' is not initialised.*did you mean 'weight'"):
        getattr(store, verb)(["bias", "wieght"], [torch.ones(2), torch.ones(2)])
    assert pulled(store, "bias", torch.ones(2)).tolist() == [0, 0]


def test_wrong_shape_is_refused_at_the_push(store):
    store.init(["a", "b"], [torch.zeros(2), torch.zeros(2)])
    with pytest.raises(ValueError, match=r"key 'b' has shape \(2,\), but the pushed value has \(3,\)"):
        store.push(["a", "b"], [torch.ones(2), torch.ones(3)])
    assert pulled(store, "a", torch.ones(2)).tolist() == [0, 0]


def test_wrong_dtype_and_wrong_out_are_refused(store):
    store.init("a", torch.zeros(2))
    with pytest.raises(ValueError, match="key 'a' has dtype"):
        store.push("a", torch.ones(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"the out value has \(5,\)"):
        store.pushpull("a", torch.ones(2), out=torch.ones(5))
    assert pulled(store, "a", torch.ones(2)).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_optimizer_for_a_key_of_integers_is_refused_by_name(store, dtype):
    store.set_updater("add")
    store.init(["w", "n"], [torch.ones(2), torch.ones(2, dtype=dtype)])
    with pytest.raises(TypeError, match=f"key 'n' is {dtype}: an optimizer or updater by name changes floats only"):
        store.push(["w", "n"], [torch.ones(2), torch.ones(2, dtype=dtype)])
    assert pulled(store, "w", torch.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize(("value", "name"), [(1.0, "float"), (np.ones(2), "ndarray"), (None, "NoneType")])
def test_value_that_is_no_tensor_is_named_with_its_key(store, value, name):
    with pytest.raises(TypeError, match=f"the value of key 'w' is {name}, not a tensor"):
        store.init("w", value)


def test_a_number_and_its_text_are_different_keys(store):
    store.init([0, 1], [torch.zeros(1), torch.ones(1)])
    with pytest.raises(KeyMismatchError, match="there is 0, but that is int and this is str"):
        store.push("0", torch.zeros(1))


@pytest.mark.parametrize("keys", [(0, "w"), ("w", 0)])
def test_numbers_and_names_are_not_mixed_in_one_store(store, keys):
    words = "the keys of one store are all int or all str; use one kind, or a second store"
    with pytest.raises(TypeError, match=words):
        store.init(keys, [torch.zeros(1), torch.ones(1)])
    store.init(keys[0], torch.zeros(1))
    with pytest.raises(TypeError, match=words):
        store.init(keys[1], torch.ones(1))
    with pytest.raises(TypeError, match=words):
        store.broadcast(keys[1], torch.ones(1), torch.ones(1))


def test_misspelt_optimizer_gets_a_suggestion(store):
    with pytest.raises(ValueError, match="did you mean 'adamw'"):
        store.set_optimizer("adanw")


def test_option_that_the_optimizer_lacks_is_refused_at_once(store):
    with pytest.raises(TypeError, match="momentun"):
        store.set_optimizer("sgd", lr=0.1, momentun=0.9)


# --- optimizers ----------------------------------------------------------------------------------------------------

OPTIMIZERS = [
    ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, torch.optim.SGD),
    ("adam", {"lr": 0.01}, torch.optim.Adam),
    ("adagrad", {"lr": 0.1}, torch.optim.Adagrad),
    ("rmsprop", {"lr": 0.01}, torch.optim.RMSprop),
]


@pytest.mark.parametrize(("name", "options", "cls"), OPTIMIZERS)
def test_updates_equal_torch(store, name, options, cls):
    torch.manual_seed(0)
    mine = {key: torch.randn(4, 3) for key in "ab"}
    theirs = [torch.nn.Parameter(one.clone()) for one in mine.values()]
    store.set_optimizer(name, **options)
    store.init(list("ab"), list(mine.values()))
    optimizer = cls(theirs, **options)
    for _ in range(5):
        grads = [[torch.randn(4, 3) for _ in range(3)] for _ in "ab"]
        store.pushpull(list("ab"), grads, out=list(mine.values()))
        for param, parts in zip(theirs, grads, strict=True):
            param.grad = sum(parts)
        optimizer.step()
    for param, value in zip(theirs, mine.values(), strict=True):
        assert torch.allclose(param, value, atol=1e-6)


def test_scaled_double_precision_stays_double(store):
    store.set_optimizer("sgd", lr=1.0)
    store.scale = 1 / 3
    store.init("w", torch.zeros(2, dtype=torch.float64))
    store.push("w", torch.ones(2, dtype=torch.float64))
    assert (pulled(store, "w", torch.zeros(2, dtype=torch.float64)) + 1 / 3).abs().max() < 1e-15
    store.scale = 0.3
    store.push("w", torch.ones(2, dtype=torch.float64))
    assert (pulled(store, "w", torch.zeros(2, dtype=torch.float64)) + 1 / 3 + 0.3).abs().max() < 1e-15


def test_class_that_cannot_be_imported_works(store):
    class HalfStep(torch.optim.SGD):
        pass

    store.set_optimizer(HalfStep, lr=0.5)
    store.init("w", torch.zeros(2))
    store.push("w", torch.ones(2))
    assert pulled(store, "w", torch.ones(2)).tolist() == [-0.5, -0.5]


def test_step_that_a_subclass_writes_itself_gets_scaled_gradients(store):
    class Plain(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.add_(param.grad, alpha=-group["lr"])

    store.set_optimizer(Plain, lr=1.0)
    store.scale = 0.5
    store.init("w", torch.zeros(2))
    store.push("w", torch.ones(2))
    assert pulled(store, "w", torch.ones(2)).tolist() == [-0.5, -0.5]


def test_misspelt_option_of_a_class_that_cannot_be_imported_is_refused(store):
    class Own(torch.optim.SGD):
        pass

    with pytest.raises(TypeError, match="no option 'momentun'; did you mean 'momentum'"):
        store.set_optimizer(Own, lr=0.1, momentun=0.9)


def test_learning_rates_change_without_touching_the_state(store):
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0, momentum=0.9)
    store.set_optimizer(optimizer)
    store.init("w", torch.zeros(2))
    for lr in (1.0, 0.5, 0.1):
        optimizer.param_groups[0]["lr"] = lr
        store.set_options([{"lr": lr, "momentum": 0.9}])
        store.push("w", torch.ones(2))
        param.grad = torch.ones(2)
        optimizer.step()
    assert torch.allclose(pulled(store, "w", param.detach()), param.detach())


def test_float16_with_a_float32_master_accumulates_small_steps(store):
    store.set_optimizer("sgd", lr=1.0, multi_precision=True)
    store.init("w", torch.ones(2, dtype=torch.float16))
    for _ in range(100):
        store.push("w", torch.full((2,), 1e-4, dtype=torch.float16))
    assert pulled(store, "w", torch.ones(2)).tolist() == pytest.approx([0.99, 0.99], abs=1e-3)


@pytest.mark.parametrize(("name", "options", "cls"), OPTIMIZERS)
def test_saved_states_go_on_as_if_never_interrupted(store, tmp_path, name, options, cls):
    torch.manual_seed(0)
    grads = [torch.randn(4, 3) for _ in range(6)]
    whole = type(store)()
    for one in (whole, store):
        one.set_optimizer(name, **options)
        one.init("w", torch.ones(4, 3))
    for grad in grads:
        whole.push("w", grad)
    for grad in grads[:3]:
        store.push("w", grad)
    store.save_optimizer_states(tmp_path / "states", dump_optimizer=True)
    resumed = type(store)()
    resumed.set_optimizer(name, **options)
    resumed.load_optimizer_states(tmp_path / "states")
    resumed.init("w", pulled(store, "w", grads[0]))
    for grad in grads[3:]:
        resumed.push("w", grad)
    assert torch.equal(pulled(resumed, "w", grads[0]), pulled(whole, "w", grads[0]))


def test_factored_state_fits_its_key(store, tmp_path):
    for one in (store, resumed := type(store)()):
        one.set_optimizer("adafactor")
        one.init("w", torch.ones(4, 3))
    store.push("w", torch.ones(4, 3))
    store.save_optimizer_states(tmp_path / "states")
    resumed.load_optimizer_states(tmp_path / "states")
    states, expected = resumed.optimizer_states()["w"], store.optimizer_states()["w"]
    assert states["col_var"].shape == (1, 3)
    assert all(torch.equal(states[name], expected[name]) for name in expected)


def test_states_that_do_not_fit_are_refused_and_change_nothing(store, tmp_path):
    path = tmp_path / "states"
    store.set_optimizer("sgd", lr=1.0, momentum=0.9)
    store.init("w", torch.zeros(2))
    store.push("w", torch.ones(2))
    store.save_optimizer_states(path)
    other = type(store)()
    other.set_optimizer("adam")
    with pytest.raises(ValueError, match="holds states of 'sgd', but the optimizer is 'adam'"):
        other.load_optimizer_states(path)
    other = type(store)()
    other.set_optimizer("sgd", lr=1.0, momentum=0.9)
    other.init("w", torch.zeros(3))
    with pytest.raises(ValueError, match="another model"):
        other.load_optimizer_states(path)
    path.write_bytes(b"\x08" + path.read_bytes()[1:20])
    with pytest.raises(PacelineError, match="damaged"):
        store.load_optimizer_states(path)
    with pytest.raises(FileNotFoundError, match="no file"):
        store.load_optimizer_states(tmp_path / "missing")


def test_states_are_safetensors_with_a_manifest(store, tmp_path):
    from safetensors import safe_open

    store.set_optimizer("adam")
    store.init(7, torch.zeros(2))
    store.push(7, torch.ones(2))
    store.save_optimizer_states(tmp_path / "states")
    with safe_open(tmp_path / "states", framework="pt") as file:
        manifest = json.loads(file.metadata()["paceline"])
    assert manifest["optimizer"] == "adam"
    assert manifest["keys"][0] == {"key": 7, "tensors": ["exp_avg", "exp_avg_sq", "step"], "numbers": {}}


def test_states_need_an_optimizer(store, tmp_path):
    with pytest.raises(ValueError, match="no optimizer"):
        store.save_optimizer_states(tmp_path / "states")


# --- compression ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["push", "pushpull"])
def test_two_bit_pushes_keep_the_rest_for_later(store, verb):
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.init("w", torch.zeros(3))
    seen = []
    for _ in range(3):
        grads = [torch.tensor([0.3, 2.0, -0.1]) for _ in range(2)]
        getattr(store, verb)("w", grads)
        seen.append(pulled(store, "w", grads[0]).tolist())
    assert seen == [[0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    "params", [{"type": "fp16"}, {"type": "randomk", "ratio": 0.5}, {"type": "topk", "ratio": 0.5}]
)
def test_every_kind_of_codec_trains(store, params):
    torch.manual_seed(0)
    target = torch.randn(20)
    store.set_gradient_compression(params)
    store.set_optimizer("sgd", lr=0.05)
    weight = torch.zeros(20)
    store.init("w", weight)
    for _ in range(200):
        store.pushpull("w", [weight - target, weight - target], out=weight)
    assert torch.allclose(weight, target, atol=0.05)


def test_compression_is_refused_after_the_first_push(store):
    store.init("w", torch.zeros(2))
    store.push("w", torch.ones(2))
    with pytest.raises(ValueError, match="before the first push"):
        store.set_gradient_compression({"type": "2bit"})


def test_the_pull_leg_is_refused_where_nothing_travels(store):
    for leg in ("pull", "both"):
        with pytest.raises(ValueError, match="leg='push', or a distributed store"):
            store.set_gradient_compression({"type": "int8", "leg": leg})
    store.set_gradient_compression({"type": "int8", "leg": "push"})


def compressed_steps(store, params, seeds, path=None, load=False):
    """Push from two devices with Adam, save to ``path`` or go on from there; return the value."""
    store.set_optimizer("adam", lr=0.1)
    store.set_gradient_compression(params)
    weight = torch.load(f"{path}.weight") if load else torch.zeros(20)
    if load:
        store.load_optimizer_states(path)
    store.init("w", weight)
    for seed in seeds:
        chance = torch.Generator().manual_seed(seed)
        store.pushpull("w", [torch.randn(20, generator=chance) for _ in range(2)], out=weight)
    if path is not None and not load:
        store.save_optimizer_states(path)
        torch.save(weight, f"{path}.weight")
    return weight


@pytest.mark.parametrize("name", ["2bit", "int8", "randomk", "powersgd"])
def test_what_a_codec_holds_back_survives_a_break(store, tmp_path, name):
    another, third = type(store)(), type(store)()
    unbroken = compressed_steps(store, name, range(10))
    compressed_steps(another, name, range(5), tmp_path / "states")
    assert torch.equal(compressed_steps(third, name, range(5, 10), tmp_path / "states", load=True), unbroken)
    assert not [one for one in tmp_path.iterdir() if one.suffix == ".partial"]


def test_lost_residuals_start_at_zero_with_a_warning(store, tmp_path, caplog):
    plain = type(store)()
    plain.set_optimizer("adam", lr=0.1)
    plain.save_optimizer_states(tmp_path / "states")
    torch.save(torch.zeros(20), tmp_path / "states.weight")
    compressed_steps(store, "2bit", [], tmp_path / "states", load=True)
    assert "residuals start at 0" in caplog.text
    assert store.codec_states() == {}


def test_states_of_another_codec_or_model_are_refused_and_change_nothing(store, tmp_path):
    compressed_steps(store, "powersgd", range(3))
    states = store.codec_states()
    other = type(store)()
    other.set_gradient_compression("2bit")
    other.init("w", torch.zeros(20))
    other.push("w", torch.ones(20))
    held = other.codec_states()
    wrong = [states, {"w": {"residual 0": torch.zeros(3), "round 0": torch.tensor(1)}}, {"w": {"q 0": torch.zeros(3)}}]
    for one in wrong:
        with pytest.raises(ValueError, match=r"codec|model"):
            other.set_codec_states(one)
    assert torch.equal(other.codec_states()["w"]["residual 0"], held["w"]["residual 0"])
    with pytest.raises(ValueError, match="no codec that keeps states"):
        type(store)().set_codec_states(held)


def test_a_file_that_holds_something_else_is_no_optimizer_state(store, tmp_path):
    tensor_file.write(tmp_path / "states", "model", {"w": torch.zeros(20)}, {"workers": 1, "beside": {}})
    store.set_optimizer("adam")
    with pytest.raises(CheckpointError, match="holds model, not optimizer states"):
        store.load_optimizer_states(tmp_path / "states")


def test_unknown_compression_is_refused(store):
    with pytest.raises(ValueError, match="2bit"):
        store.set_gradient_compression({"type": "2bits"})


# --- row-sparse values ---------------------------------------------------------------------------------------------


def test_sparse_pushes_are_summed_by_row(store):
    store.set_updater("add")
    store.init("e", torch.zeros(5, 2))
    store.push("e", [rows([1, 3], [[1.0, 1], [2, 2]], (5, 2)), rows([3, 1], [[4.0, 4], [8, 8]], (5, 2))])
    assert pulled(store, "e", torch.zeros(5, 2))[:, 0].tolist() == [0, 9, 0, 6, 0]


@pytest.mark.parametrize("name", ["adam", "sparseadam", "adagrad"])
def test_untouched_rows_and_their_state_stay(store, name):
    torch.manual_seed(0)
    start = torch.randn(6, 3)
    cls = {"adam": torch.optim.SparseAdam, "sparseadam": torch.optim.SparseAdam, "adagrad": torch.optim.Adagrad}[name]
    param = torch.nn.Parameter(start.clone())
    reference = cls([param], lr=0.1)
    store.set_optimizer(name, lr=0.1)
    store.init("e", start.to_sparse(1))
    for touched in ([0, 2], [2, 5], [0, 5]):
        grad = rows(touched, torch.randn(2, 3).tolist(), (6, 3))
        store.push("e", grad)
        param.grad = grad.clone()
        reference.step()
    out = pulled(store, "e", start)
    assert torch.allclose(out, param, atol=1e-6)
    assert torch.equal(out[[1, 3, 4]], start[[1, 3, 4]])


def test_lazy_momentum_decays_only_where_touched(store):
    store.set_optimizer("sgd", lr=1.0, momentum=0.5)
    store.init("e", torch.zeros(3, 1).to_sparse(1))
    store.push("e", rows([0, 1], [[1.0], [1.0]], (3, 1)))
    store.push("e", rows([1], [[1.0]], (3, 1)))
    assert pulled(store, "e", torch.zeros(3, 1)).flatten().tolist() == [-1.0, -2.5, 0.0]


def test_optimizer_without_a_lazy_form_gets_dense_gradients(store):
    store.set_optimizer("lamb", lr=0.1)
    store.init("e", torch.ones(4, 2).to_sparse(1))
    store.push("e", rows([1], [[1.0, 1.0]], (4, 2)))
    assert pulled(store, "e", torch.ones(4, 2))[1, 0] < 1.0


def test_row_sparse_pull_gives_the_asked_rows_once(store):
    store.init("e", torch.arange(10.0).view(5, 2))
    out = torch.sparse_coo_tensor(size=(5, 2))
    store.row_sparse_pull("e", out, row_ids=torch.tensor([[3, 1], [3, 3]]))
    assert out.coalesce().indices()[0].tolist() == [1, 3]
    assert out.to_dense()[:, 1].tolist() == [0, 3, 0, 7, 0]
    store.row_sparse_pull("e", out, row_ids=torch.tensor([], dtype=torch.long))
    assert out.to_dense().abs().sum() == 0


def test_row_sparse_pull_refreshes_rows_of_dense_targets(store):
    store.init("e", torch.arange(10.0).view(5, 2))
    outs = [torch.full((5, 2), -1.0), torch.full((5, 2), -1.0)]
    store.row_sparse_pull("e", outs, row_ids=[torch.tensor([0]), torch.tensor([4])])
    assert outs[0][:, 0].tolist() == [0, -1, -1, -1, -1]
    assert outs[1][:, 0].tolist() == [-1, -1, -1, -1, 8]


@pytest.mark.parametrize(
    ("ids", "words"),
    [(None, "needs row_ids"), (torch.tensor([5]), "rows 0 to 4"), (torch.tensor([0.5]), "integers")],
)
def test_bad_row_ids_are_refused(store, ids, words):
    store.init("e", torch.zeros(5, 2))
    with pytest.raises(ValueError, match=words):
        store.row_sparse_pull("e", torch.zeros(5, 2), row_ids=ids)


def test_pull_leaves_sparse_targets_alone_unless_told(store):
    store.init("e", torch.ones(3, 1))
    out = torch.sparse_coo_tensor(size=(3, 1))
    store.pull("e", out)
    assert out.to_dense().sum() == 0
    store.pull("e", out, ignore_sparse=False)
    assert out.to_dense().sum() == 3


def test_pushpull_reduces_sparse_gradients_in_place(store):
    store.init("e", torch.zeros(4, 1))
    grads = [rows([0], [[1.0]], (4, 1)), rows([2], [[2.0]], (4, 1))]
    store.pushpull("e", grads)
    assert [one.to_dense().flatten().tolist() for one in grads] == [[1, 0, 2, 0]] * 2
