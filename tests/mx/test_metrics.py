import math

import pytest
import torch
import torchmetrics

from paceline.mx.metric import CompositeEvalMetric, MetricSet, TopKAccuracy, create


def test_names_and_torchmetrics_mix():
    metrics = MetricSet(["acc", torchmetrics.Accuracy("multiclass", num_classes=3, top_k=3), "loss"])
    metrics.update(torch.eye(3), torch.tensor([0, 1, 0]), torch.tensor(0.5))
    metrics.update(torch.eye(3)[:1], torch.tensor([0]), torch.tensor(0.9))
    assert metrics.get() == [("accuracy", 0.75), ("MulticlassAccuracy", 1.0), ("loss", pytest.approx(0.6))]


def test_regression_metrics_and_reset():
    metrics = MetricSet(["mse", "mae"])
    metrics.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    assert metrics.get() == [("mse", 2.0), ("mae", 1.0)]
    metrics.reset()
    assert all(math.isnan(value) for _, value in metrics.get())


def test_no_batch_is_nan():
    assert math.isnan(MetricSet("acc").get()[0][1])


def test_outputs_of_one_number_are_binary():
    metrics = MetricSet("accuracy")
    metrics.update(torch.tensor([0.9, 0.2]), torch.tensor([1, 1]))
    assert metrics.get() == [("accuracy", 0.5)]


def test_misspelt_metric_gets_a_suggestion():
    with pytest.raises(ValueError, match="did you mean 'accuracy'"):
        MetricSet("acuracy")
    with pytest.raises(TypeError, match="torchmetrics"):
        MetricSet(3)


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
