import logging
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import CheckpointError, PacelineError
from paceline.mx.callback import ProgressBar, Speedometer, TensorBoard, do_checkpoint, log_train_metric
from paceline.mx.context import cpu, gpu, num_gpus
from paceline.mx.module import Module

TWO = [cpu(0), cpu(1)]


def classifier():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(0)
    points = torch.randn(120, 4)
    return TensorDataset(points, (points @ torch.randn(4, 3)).argmax(1))


def loader(data, batch_size=20):
    return DataLoader(data, batch_size=batch_size)


SGD = {"optimizer": "sgd", "optimizer_params": {"learning_rate": 0.3, "momentum": 0.9}}


@pytest.mark.parametrize("work_load_list", [None, [3, 1], "auto"])
def test_fit_equals_a_plain_loop(data, work_load_list):
    module = Module(classifier(), TWO, work_load_list)
    module.fit(loader(data), kvstore="device", num_epoch=3, **SGD)
    plain = classifier()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    for _ in range(3):
        for points, labels in loader(data):
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(points), labels).backward()
            optimizer.step()
    for (name, mine), theirs in zip(module.net.state_dict().items(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4), name


def test_loop_of_the_user_equals_fit(data):
    ours, fitted = Module(classifier(), TWO), Module(classifier(), TWO)
    fitted.fit(loader(data), **SGD)
    ours.init_optimizer(**SGD)
    for points, labels in loader(data):
        outputs = ours.forward_backward(points, labels)
        assert [len(one) for one in outputs] == [10, 10]
        ours.update(len(points))
    for (name, mine), theirs in zip(ours.net.state_dict().items(), fitted.net.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


def test_fit_learns_and_reports(data):
    module = Module(classifier(), TWO)
    history = module.fit(loader(data), loader(data), ["acc", "loss"], num_epoch=12, **SGD)
    assert [one.epoch for one in history] == list(range(12))
    assert history[-1].train["accuracy"] > 0.9
    assert history[-1].evaluation["loss"] < history[0].evaluation["loss"]
    assert dict(module.score(loader(data)))["accuracy"] == history[-1].evaluation["accuracy"]


def test_batches_of_any_iterable_and_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Bilinear(2, 3, 2)

        def forward(self, left, right):
            return self.inner(left, right)

    module = Module(Two(), TWO)
    batch = ((torch.randn(4, 2), torch.randn(4, 3)), torch.tensor([0, 1, 0, 1]))
    history = module.fit([batch, batch], num_epoch=2)
    assert len(history) == 2
    assert module.predict([batch]).shape == (4, 2)


def test_mean_losses_count_like_losses_per_sample(data):
    kinds = [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="none")]
    modules = [Module(classifier(), TWO, [3, 1], loss=one) for one in kinds]
    for module in modules:
        module.fit(loader(data), num_epoch=1, **SGD)
    one, other = (module.net.state_dict()["0.weight"] for module in modules)
    assert torch.allclose(one, other, atol=1e-6)


def test_small_last_batch_is_evaluated_whole(data):
    module = Module(classifier(), [cpu(0), cpu(1), cpu(2)])
    assert module.predict(loader(TensorDataset(*data[:61]), 20)).shape == (61, 3)
    assert module.predict(loader(data), num_batch=2).shape == (40, 3)


def test_evaluation_leaves_training_mode_as_it_was(data):
    module = Module(classifier(), TWO)
    module.score(loader(data))
    assert all(one.training for one in module.net.replicas)


def test_fixed_parameters_stay(data):
    module = Module(classifier(), TWO, fixed_param_names=["0\\..*"])
    before = module.net.state_dict()["0.weight"].clone()
    module.fit(loader(data), num_epoch=1, **SGD)
    assert torch.equal(module.net.state_dict()["0.weight"], before)
    with pytest.raises(ValueError, match=r"'fc1' matches none of 0\.weight"):
        Module(classifier(), fixed_param_names=["fc1"])


def test_training_goes_on_from_a_checkpoint(data, tmp_path):
    prefix = tmp_path / "model"
    whole = Module(classifier(), TWO)
    whole.fit(loader(data), num_epoch=4, **SGD)
    half = Module(classifier(), TWO)
    half.fit(loader(data), num_epoch=2, epoch_end_callback=do_checkpoint(prefix, 2, save_optimizer_states=True), **SGD)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model-0002.safetensors", "model-0002.states"]
    resumed = Module.load(prefix, 2, nn.Sequential(*classifier()), load_optimizer_states=True, context=TWO)
    resumed.fit(loader(data), begin_epoch=2, num_epoch=4, **SGD)
    for name, value in whole.net.state_dict().items():
        assert torch.allclose(resumed.net.state_dict()[name], value, atol=1e-6), name


def test_states_of_another_save_are_refused(data, tmp_path):
    module = Module(classifier())
    module.fit(loader(data), num_epoch=1, **SGD)
    module.save_checkpoint(tmp_path / "m", 1, save_optimizer_states=True)
    module.trainer.set_learning_rate(0.5)
    module.save_checkpoint(tmp_path / "other", 1, save_optimizer_states=True)
    (tmp_path / "other-0001.states").replace(tmp_path / "m-0001.states")
    with pytest.raises(CheckpointError, match="they belong to different saves"):
        Module.load(tmp_path / "m", 1, classifier(), load_optimizer_states=True)


def test_missing_and_damaged_checkpoints_are_named(tmp_path):
    module = Module(classifier())
    module.save_checkpoint(tmp_path / "m", 3)
    with pytest.raises(FileNotFoundError, match=r"m-0004.safetensors; there are m-0003.safetensors"):
        Module.load(tmp_path / "m", 4, classifier())
    with pytest.raises(FileNotFoundError, match="save_optimizer_states=True"):
        Module.load(tmp_path / "m", 3, classifier(), load_optimizer_states=True)
    (tmp_path / "m-0003.safetensors").write_bytes(b"nonsense")
    with pytest.raises(PacelineError, match="damaged"):
        Module.load(tmp_path / "m", 3, classifier())


class Slow(nn.Module):
    """Computes for so many seconds per sample: a stand-in for a slower device."""

    def __init__(self, seconds):
        super().__init__()
        self.inner, self.seconds = nn.Linear(4, 3), seconds

    def forward(self, x):
        time.sleep(self.seconds * len(x))
        return self.inner(x)


def test_automatic_shares_settle_where_devices_are_unequal(data):
    module = Module(Slow(2e-3), TWO, "auto")
    module.net.replicas[1].seconds *= 3
    module.fit([(data.tensors[0][:32], data.tensors[1][:32])] * 20, eval_metric="loss")
    assert module.shares[0] == pytest.approx(0.75, rel=0.15)


# --- callbacks -----------------------------------------------------------------------------------------------------


def test_speedometer_measures_by_its_clock(data, caplog):
    ticks = iter(range(100))
    meter = Speedometer(frequent=2, clock=lambda: next(ticks))
    with caplog.at_level(logging.INFO, logger="paceline"):
        Module(classifier(), TWO).fit(loader(data), batch_end_callback=[meter, log_train_metric(5)], num_epoch=2, **SGD)
    assert meter.speed == 40.0
    lines = [one.message for one in caplog.records if "Speed" in one.message]
    assert lines[0].startswith("Epoch[0] Batch [0-2]\tSpeed: 40.00 samples/sec\taccuracy=")
    assert any(one.message.startswith("Iter[1] Batch[5] Train-accuracy=") for one in caplog.records)
    assert any(one.message.startswith("Epoch[1] Train-accuracy=") for one in caplog.records)


def test_progress_bar_reaches_its_end(data):
    bar = ProgressBar(total=6, disable=True)
    Module(classifier(), TWO).fit(loader(data), batch_end_callback=bar, num_epoch=2, **SGD)
    assert [task.completed for task in bar._progress.tasks] == [6, 6]


def test_tensorboard_gets_a_curve_per_metric(data, tmp_path):
    module = Module(classifier(), TWO)
    module.fit(loader(data), loader(data), num_epoch=3, epoch_end_callback=TensorBoard(tmp_path, "digits"), **SGD)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()["scalars"] == ["digits/train/accuracy", "digits/eval/accuracy"]
    assert [one.step for one in events.Scalars("digits/eval/accuracy")] == [0, 1, 2]


@pytest.mark.parametrize(
    "make", [lambda: Speedometer(frequent=0), lambda: do_checkpoint("x", 0), lambda: log_train_metric(0)]
)
def test_senseless_periods_are_refused(make):
    with pytest.raises(ValueError, match="at least 1"):
        make()


# --- what a user gets wrong ----------------------------------------------------------------------------------------


def test_nan_in_the_loss_stops_before_the_update(data):
    net = classifier()
    module = Module(net, TWO)
    before = {name: one.clone() for name, one in net.state_dict().items()}
    points = data.tensors[0][:8].clone()
    points[6] = float("nan")
    with pytest.raises(PacelineError, match=r"loss on cpu\(1\) is nan: nothing was updated") as caught:
        module.fit([(points, data.tensors[1][:8])])
    assert caught.value.__notes__ == ["in batch 0 of epoch 0"]
    assert all(torch.equal(before[name], one) for name, one in net.state_dict().items())


def test_batch_too_small_for_the_devices_is_refused(data):
    module = Module(classifier(), [cpu(0), cpu(1), cpu(2)])
    with pytest.raises(ValueError, match=r"batch of 2 over weights .* drop_last=True"):
        module.fit(loader(TensorDataset(*data[:62])), num_epoch=1)


@pytest.mark.parametrize(
    ("weights", "words"), [([1, 2, 3], "3 weights for 2 devices"), ([1, 0], "above 0"), ("even", "or 'auto'")]
)
def test_senseless_weights_are_refused_at_once(weights, words):
    with pytest.raises(ValueError, match=words):
        Module(classifier(), TWO, weights)


def test_labels_must_match_the_data(data):
    with pytest.raises(ValueError, match="8 samples but 7 labels"):
        Module(classifier(), TWO).fit([(data.tensors[0][:8], data.tensors[1][:7])])


def test_update_needs_an_optimizer():
    with pytest.raises(ValueError, match="init_optimizer"):
        Module(classifier()).update(1)


def test_epochs_must_go_forward(data):
    with pytest.raises(ValueError, match="begin_epoch 3 and num_epoch 2"):
        Module(classifier()).fit(loader(data), begin_epoch=3, num_epoch=2)


def test_loss_must_be_a_tensor(data):
    with pytest.raises(TypeError, match="returned float"):
        Module(classifier(), loss=lambda output, label: 0.5).fit(loader(data))


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() < 1, reason="needs a CUDA device")
@pytest.mark.parametrize("work_load_list", [[3, 1], "auto"])
def test_gpu_and_cpu_in_one_module(data, work_load_list):
    module = Module(classifier(), [gpu(0), cpu(0)], work_load_list)
    assert module.fit(loader(data), kvstore="device", num_epoch=12, **SGD)[-1].train["accuracy"] > 0.9
