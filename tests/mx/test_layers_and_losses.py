"""Gluon's layers, losses and loader give what torch's give."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from paceline.mx import gluon
from paceline.mx.gluon import loss, nn

PRED, LABEL = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2, 1, 1])
TARGET = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("made", "label", "wanted"),
    [
        (loss.SoftmaxCrossEntropyLoss(), LABEL.float(), F.cross_entropy(PRED, LABEL, reduction="none")),
        (loss.SoftmaxCrossEntropyLoss(axis=1, weight=2.0), LABEL, 2 * F.cross_entropy(PRED, LABEL, reduction="none")),
        (loss.SoftmaxCELoss(sparse_label=False), F.one_hot(LABEL), F.cross_entropy(PRED, LABEL, reduction="none")),
        (loss.SoftmaxCELoss(from_logits=True), LABEL, F.nll_loss(PRED, LABEL, reduction="none")),
        (loss.L2Loss(), TARGET.flatten(), (PRED - TARGET).square().mean(1) / 2),
        (loss.L1Loss(), TARGET, (PRED - TARGET).abs().mean(1)),
        (loss.HuberLoss(0.5), TARGET, 2 * F.huber_loss(PRED, TARGET, reduction="none", delta=0.5).mean(1)),
        (loss.SigmoidBCELoss(), TARGET, F.binary_cross_entropy_with_logits(PRED, TARGET, reduction="none").mean(1)),
    ],
)
def test_losses_have_one_value_per_sample(made, label, wanted):
    assert torch.allclose(made(PRED, label), wanted, atol=1e-6)


def test_samples_and_elements_have_weights_as_in_mxnet():
    weights = torch.tensor([[1.0], [0.0], [2.0], [0.5]])
    plain = loss.SoftmaxCrossEntropyLoss(weight=None)(PRED, LABEL)
    assert torch.equal(loss.SoftmaxCrossEntropyLoss()(PRED, LABEL, weights), plain * weights.flatten())
    assert torch.equal(loss.L2Loss()(PRED, TARGET, weights), loss.L2Loss()(PRED, TARGET) * weights.flatten())
    masked = loss.L1Loss()(PRED, TARGET, torch.tensor([[1, 0, 0]] * 4))
    assert torch.allclose(masked, (PRED - TARGET).abs()[:, 0] / 3)


def test_a_loss_of_a_sequence_is_the_mean_over_its_places():
    pred, label = torch.randn(2, 5, 3), torch.randint(3, (2, 5))
    wanted = F.cross_entropy(pred.transpose(1, 2), label, reduction="none").mean(1)
    assert torch.allclose(loss.SoftmaxCrossEntropyLoss()(pred, label), wanted, atol=1e-6)


def test_layers_take_their_sizes_from_the_first_batch():
    net = nn.HybridSequential()
    with net.name_scope():
        net.add(nn.Conv2D(4, 3, padding=1, use_bias=False, activation="relu"), nn.AvgPool2D())
        net.add(
            nn.Conv2D(6, (3, 3), strides=2, in_channels=4), nn.GlobalAvgPool2D(), nn.Dropout(0.5), nn.LeakyReLU(0.1)
        )
        net.add(nn.Dense(5, activation="tanh"), nn.Dense(2, use_bias=False, flatten=False, in_units=5))
    assert net(torch.rand(2, 3, 8, 8)).shape == (2, 2)
    shapes = {name: tuple(one.shape) for name, one in net.named_parameters()}
    assert shapes == {
        "0.conv.weight": (4, 3, 3, 3),
        "2.conv.weight": (6, 4, 3, 3),
        "2.conv.bias": (6,),
        "6.dense.weight": (5, 6),
        "6.dense.bias": (5,),
        "7.dense.weight": (2, 5),
    }
    assert nn.Embedding(7, 2, sparse_grad=True).sparse
    assert nn.GlobalMaxPool2D()(torch.rand(1, 2, 3, 3)).shape == (1, 2, 1, 1)
    with pytest.raises(ValueError, match="activation 'rellu' is unknown; did you mean 'relu'"):
        nn.Activation("rellu")


def test_loader_keeps_or_discards_the_last_batch():
    data = gluon.data.ArrayDataset([1, 2, 3], [4, 5, 6])
    assert [x.tolist() for x, _ in gluon.data.DataLoader(data, 2)] == [[1, 2], [3]]
    assert [y.tolist() for _, y in gluon.data.DataLoader(data, 2, last_batch="discard")] == [[4, 5]]
    assert sorted(int(x) for x, _ in gluon.data.DataLoader(data, 1, shuffle=True)) == [1, 2, 3]
    batches = torch.utils.data.BatchSampler(range(3), 2, drop_last=False)
    assert len(gluon.data.DataLoader(data, batch_sampler=batches)) == 2
    with pytest.raises(ValueError, match="'keep' or 'discard'"):
        gluon.data.DataLoader(data, 2, last_batch="rollover")
    with pytest.raises(ValueError, match="batch_size is missing"):
        gluon.data.DataLoader(data)
