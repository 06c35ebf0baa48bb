import math

import pytest
import torch
import torchmetrics

from paceline.mx.metric import CompositeEvalMetric, Loss, TopKAccuracy, create


def test_names_and_torchmetrics_mix():
    metrics = CompositeEvalMetric(["acc", torchmetrics.Accuracy("multiclass", num_classes=3, top_k=3), "loss"])
    metrics.update(torch.tensor([0, 1, 0]), torch.eye(3), torch.tensor(0.5))
    metrics.update(torch.tensor([0]), torch.eye(3)[:1], torch.tensor(0.9))
    assert metrics.get_name_value() == [("accuracy", 0.75), ("MulticlassAccuracy", 1.0), ("loss", pytest.approx(0.6))]


def test_regression_metrics_and_reset():
    metrics = create(["mse", "mae"])
    metrics.update(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 2.0]))
    assert metrics.get() == (["mse", "mae"], [2.0, 1.0])
    metrics.reset()
    assert all(math.isnan(value) for _, value in metrics.get_name_value())


def test_no_batch_is_nan():
    assert math.isnan(CompositeEvalMetric("acc").get()[1][0])


def test_outputs_of_one_number_are_binary():
    metric = create("accuracy")
    metric.update(torch.tensor([1, 1]), torch.tensor([0.9, 0.2]))
    metric.update(torch.tensor([1, 0]), torch.tensor([[3.0], [-1.0]]))
    assert metric.get() == ("accuracy", 0.75)


def test_misspelt_metric_gets_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'accuracy'"):
        CompositeEvalMetric("acuracy")
    with pytest.raises(TypeError, match="torchmetrics"):
        CompositeEvalMetric([3])


def test_sets_of_metrics_take_those_of_other_sets():
    metrics = CompositeEvalMetric([create(["acc", "mse"]), "mae"])
    assert [name for name, _ in metrics.get_name_value()] == ["accuracy", "mse", "mae"]


def test_losses_need_no_labels_as_in_mxnet():
    loss = Loss()
    loss.update(0, [torch.tensor([1.0, 3.0]), torch.tensor([5.0])])
    assert loss.get() == ("loss", 3.0)


def test_metrics_take_the_outputs_of_several_devices():
    metric = CompositeEvalMetric(["acc"])
    metric.add(TopKAccuracy(2))
    scores = torch.tensor([[0.1, 0.3, 0.6], [0.5, 0.2, 0.3], [0.2, 0.5, 0.3]])
    metric.update([torch.tensor([1, 0]), torch.tensor([0.0])], [scores[:2], scores[2:]])
    assert metric.get() == (["accuracy", "top_k_accuracy_2"], [pytest.approx(1 / 3), pytest.approx(2 / 3)])
    metric.reset()
    assert math.isnan(metric.get_name_value()[0][1])


def test_predictions_may_be_classes_or_losses():
    accuracy, loss, error = create("accuracy"), create("loss"), create("rmse")
    accuracy.update(torch.tensor([2, 1]), torch.tensor([2, 0]))
    loss.update(torch.zeros(2), torch.tensor([1.0, 3.0]))
    for pred in (0.0, 4.0):
        error.update(torch.tensor([1.0]), torch.tensor([[pred]]))
    assert [one.get()[1] for one in (accuracy, loss, error)] == [0.5, 2.0, pytest.approx(math.sqrt(5))]
