import copy

import pytest
import torch
from torch import nn

from paceline.gluon import SyncBatchNorm, backward, replicate, split_and_load
from paceline.mx.context import cpu


def model():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4)
    )


@pytest.mark.parametrize("weights", [[1, 1], [3, 1], [1, 2, 5], [1, 1, 1, 1]])
def test_statistics_and_gradients_are_those_of_the_whole_batch(weights):
    torch.manual_seed(0)
    single, data = model(), 3 + 2 * torch.randn(16, 2, 4, 4)
    devices = [cpu(i) for i in range(len(weights))]
    net = replicate(SyncBatchNorm.convert(copy.deepcopy(single)), devices)
    for _ in range(3):
        wanted = single(data)
        outputs = net(split_and_load(data, devices, work_load_list=weights))
        assert torch.allclose(torch.cat(outputs), wanted, atol=1e-5)
        wanted.pow(3).sum().backward()
        backward([one.pow(3).sum() for one in outputs])
    for name, param in single.named_parameters():
        total = sum(net.collect_params()[name].list_grad())
        assert torch.allclose(total, param.grad, rtol=1e-4, atol=1e-3), name
    for replica in net.replicas:
        assert torch.allclose(replica[1].running_var, single[1].running_var, atol=1e-5)
        assert torch.allclose(replica[5].running_mean, single[5].running_mean, atol=1e-5)
        assert replica[1].num_batches_tracked == 3


def test_one_replica_is_plain_batch_norm():
    torch.manual_seed(0)
    data = torch.randn(8, 3)
    assert torch.allclose(SyncBatchNorm(3)(data), nn.BatchNorm1d(3)(data))


def test_evaluation_uses_running_statistics():
    net = replicate(SyncBatchNorm(3), [cpu(0), cpu(1)]).eval()
    data = torch.randn(4, 3)
    assert torch.allclose(torch.cat(net(split_and_load(data, net.contexts))), data, atol=1e-4)


def test_cumulative_average_without_momentum():
    torch.manual_seed(0)
    data = torch.randn(3, 8, 2)
    single, net = nn.BatchNorm1d(2, momentum=None), replicate(SyncBatchNorm(2, momentum=None), [cpu(0), cpu(1)])
    for batch in data:
        single(batch)
        net(split_and_load(batch, net.contexts))
    assert torch.allclose(net.replicas[1].running_mean, single.running_mean, atol=1e-6)


def test_conversion_keeps_values_and_order():
    net = SyncBatchNorm.convert(model())
    assert [type(one).__name__ for one in net][1::4] == ["SyncBatchNorm", "SyncBatchNorm"]
    assert list(net.state_dict()) == list(model().state_dict())


def test_wrong_shape_is_refused():
    net = replicate(SyncBatchNorm(3), [cpu(0), cpu(1)])
    with pytest.raises(ValueError, match=r"SyncBatchNorm\(3\) got a slice of shape"):
        net([torch.zeros(2, 4), torch.zeros(2, 4)])
