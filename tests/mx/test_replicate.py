import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.gluon import as_in_context, backward, replicate, split_and_load
from paceline.mx.context import cpu, gpu, num_gpus

DEVICES = [cpu(0), cpu(1), cpu(2)]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.out = nn.Linear(4, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.embed(x))


def lazy_net():
    return nn.Sequential(nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))


def test_every_device_starts_from_the_same_values_in_its_own_memory():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    both = replicate(net, DEVICES)
    assert both.replicas[0] is net
    for name, param in both.collect_params().items():
        values = param.list_data()
        assert len({one.data_ptr() for one in values}) == 3, name
        assert all(torch.equal(one, values[0]) for one in values)


def test_outputs_and_gradients_equal_one_device():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    data = torch.randn(6, 5)
    net(data).square().sum().backward()
    wanted = [param.grad.clone() for param in net.parameters()]
    net.zero_grad()
    all_three = replicate(net, DEVICES)
    outputs = all_three(split_and_load(data, DEVICES))
    assert torch.allclose(torch.cat(outputs), net(data), atol=1e-6)
    backward([one.square().sum() for one in outputs])
    for param, grad in zip(all_three.collect_params().values(), wanted, strict=True):
        assert torch.allclose(sum(param.list_grad()), grad, atol=1e-5)


def test_losses_may_go_backward_one_by_one():
    both = replicate(nn.Linear(2, 1), DEVICES[:2])
    for loss in both([torch.ones(1, 2), torch.ones(1, 2)]):
        loss.sum().backward()
    assert [one.tolist() for one in both.collect_params()["weight"].list_grad()] == [[[1.0, 1.0]]] * 2


def squared(output, label):
    return (output - label).square().sum()


def test_every_slice_finds_the_replica_of_its_device():
    """Gluon's usual loop; through two networks, whose second one gets no slices but outputs of the first."""
    torch.manual_seed(0)
    first, second = replicate(nn.Linear(3, 4), DEVICES), replicate(nn.Linear(4, 1), DEVICES)
    data, label = torch.randn(6, 3), torch.randn(6, 1)
    xs, ys = split_and_load(data, DEVICES), split_and_load(label, DEVICES)
    losses = [squared(second(first(x)), y) for x, y in zip(xs, ys, strict=True)]
    for loss in losses:
        loss.backward()
    for net in (first, second):
        one_by_one = [param.list_grad() for param in net.collect_params().values()]
        net.zero_grad()
        assert all(len(grads) == 3 and all(float(one.abs().sum()) > 0 for one in grads) for grads in one_by_one)
    backward([squared(out, y) for out, y in zip(second(first(xs)), ys, strict=True)])
    for param, replica in zip(second.collect_params()["weight"].list_grad(), range(3), strict=True):
        assert torch.allclose(param, second.replicas[replica].weight.grad)
    assert torch.allclose(sum(second.collect_params()["bias"].list_grad()), sum(one_by_one[1]), atol=1e-5)


def test_changed_slices_are_placed_by_hand_and_mixed_ones_are_refused():
    both = replicate(nn.Bilinear(2, 2, 1), DEVICES[:2])
    left, right = split_and_load(torch.ones(2, 2), DEVICES[:2])
    moved = as_in_context(right.double().float(), cpu(1))
    both(moved, right).sum().backward()
    assert [replica.weight.grad is None for replica in both.replicas] == [True, False]
    both(torch.ones(1, 2), torch.ones(1, 2)).sum().backward()
    assert both.replicas[0].weight.grad is not None
    with pytest.raises(ValueError, match=r"cpu\(0\) and cpu\(1\)"):
        both(left, right)


def test_marks_do_not_travel_with_what_is_saved(tmp_path):
    part = split_and_load(torch.ones(2, 2), DEVICES[:2])[1]
    torch.save(part, tmp_path / "part")
    assert torch.equal(torch.load(tmp_path / "part", weights_only=True), part)
    assert not part.__dict__


def test_backward_sums_losses_per_sample():
    both = replicate(nn.Linear(2, 1), DEVICES[:2])
    both.backward(both([torch.ones(4, 2), torch.ones(2, 2)]))
    assert [one.tolist() for one in both.collect_params()["bias"].list_grad()] == [[4.0], [2.0]]


def test_tied_parameters_stay_tied_on_every_device():
    both = replicate(Tied(), DEVICES[:2])
    assert list(both.collect_params()) == ["embed.weight"]
    for replica in both.replicas:
        assert replica.out.weight is replica.embed.weight


def test_several_inputs_are_each_a_list():
    both = replicate(nn.Bilinear(2, 3, 1), DEVICES[:2])
    left, right = torch.randn(4, 2), torch.randn(4, 3)
    outputs = both(split_and_load(left, DEVICES[:2]), split_and_load(right, DEVICES[:2]))
    assert torch.allclose(torch.cat(outputs), both(left, right), atol=1e-6)


def test_lazy_shapes_come_from_the_first_batch():
    torch.manual_seed(0)
    both = replicate(lazy_net(), DEVICES[:2])
    params = both.collect_params()
    with pytest.raises(PacelineError, match="before the first batch"):
        params["0.weight"].data()
    assert "shape=?" in repr(params["0.weight"])
    outputs = both([torch.randn(4, 1, 5, 5), torch.randn(3, 1, 5, 5)])
    assert [tuple(one.shape) for one in outputs] == [(4, 2), (3, 2)]
    assert all(torch.equal(*param.list_data()) for param in params.values())


def test_inferring_shapes_leaves_running_statistics_alone():
    both = replicate(lazy_net(), DEVICES[:2])
    both.infer_shapes(torch.randn(4, 1, 5, 5))
    norm = both.replicas[1][1]
    assert norm.running_mean.abs().sum() == 0
    assert norm.running_var.tolist() == [1, 1, 1]
    assert norm.num_batches_tracked == 0


def test_modes_reach_all_replicas():
    both = replicate(nn.Dropout(), DEVICES[:2])
    assert [one.training for one in both.eval().replicas] == [False, False]
    assert [one.training for one in both.train().replicas] == [True, True]


def test_state_averages_running_statistics_and_loads_everywhere():
    both = replicate(nn.BatchNorm1d(1), DEVICES[:2])
    both([torch.full((4, 1), 10.0), torch.full((4, 1), 30.0)])
    state = both.state_dict()
    assert state["running_mean"].item() == pytest.approx(2.0)
    assert state["num_batches_tracked"].item() == 1
    both.load_state_dict(state)
    assert [one.running_mean.item() for one in both.replicas] == pytest.approx([2.0, 2.0])


def test_lazy_network_takes_a_saved_state():
    source = replicate(lazy_net(), DEVICES[:2])
    source.infer_shapes(torch.randn(2, 1, 5, 5))
    target = replicate(lazy_net(), DEVICES[:2])
    target.load_state_dict(source.state_dict())
    data = torch.randn(2, 1, 5, 5)
    assert torch.equal(target.eval()([data, data])[1], source.eval()([data, data])[0])


def test_parameters_can_be_set_and_cleared_everywhere():
    both = replicate(nn.Linear(2, 1), DEVICES[:2])
    weight = both.collect_params()["weight"]
    weight.set_data(torch.tensor([[3.0, 4.0]]))
    assert [one.tolist() for one in weight.list_data()] == [[[3.0, 4.0]]] * 2
    both.backward(both([torch.ones(1, 2), torch.ones(1, 2)]))
    assert weight.grad(cpu(1)).abs().sum() > 0
    both.zero_grad()
    assert weight.grad(cpu(1)).abs().sum() == 0
    with pytest.raises(ValueError, match=r"shape \(1, 2\), not \(2,\)"):
        weight.set_data(torch.zeros(2))


def test_grad_req_null_freezes_on_every_device():
    both = replicate(nn.Linear(2, 1), DEVICES[:2])
    bias = both.collect_params()["bias"]
    bias.grad_req = "null"
    assert [one.requires_grad for one in bias.on_devices()] == [False, False]
    with pytest.raises(PacelineError, match="grad_req is 'null'"):
        bias.grad()
    with pytest.raises(ValueError, match="write, add, null"):
        bias.grad_req = "none"


def test_frozen_parameters_are_seen():
    net = nn.Linear(2, 1).requires_grad_(False)
    assert replicate(net, DEVICES[:2]).collect_params()["weight"].grad_req == "null"


def test_parameters_are_selected_by_pattern():
    both = replicate(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), DEVICES[:2])
    assert list(both.collect_params(".*bias")) == ["0.bias", "1.bias"]
    both.collect_params(".*bias").setattr("wd_mult", 0.0)
    assert both.collect_params()["1.bias"].wd_mult == 0.0
    with pytest.raises(AttributeError, match="wd_mul"):
        both.collect_params().setattr("wd_mul", 0.0)


def test_device_that_holds_no_replica_is_named():
    weight = replicate(nn.Linear(2, 1), DEVICES[:2]).collect_params()["weight"]
    assert weight.list_ctx() == [cpu(0), cpu(1)]
    with pytest.raises(ValueError, match=r"lives on cpu\(0\), cpu\(1\), not on cpu\(5\)"):
        weight.data(cpu(5))


def test_number_of_slices_is_checked():
    both = replicate(nn.Linear(2, 1), DEVICES[:2])
    with pytest.raises(ValueError, match="3 slices, but the network has 2 replicas"):
        both([torch.ones(1, 2)] * 3)


@pytest.mark.parametrize("wrong", [lambda x: x, "net", None])
def test_only_modules_are_replicated(wrong):
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        replicate(wrong, "cpu")


def test_missing_device_is_named_at_once():
    with pytest.raises(ValueError, match=r"gpu\(99\) does not exist"):
        replicate(nn.Linear(1, 1), [cpu(), gpu(99)])


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() < 1, reason="needs a CUDA device")
def test_gpu_and_cpu_replicas_agree():
    torch.manual_seed(0)
    net, devices = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)), [gpu(0), cpu(0)]
    both, data = replicate(net, devices), torch.randn(8, 5)
    outputs = both(split_and_load(data, devices, work_load_list=[3, 1]))
    backward([one.sum() for one in outputs])
    assert torch.allclose(outputs[1], both.replicas[0](data[6:].cuda()).cpu(), atol=1e-4)
    assert [one.device.type for one in both.collect_params()["0.weight"].list_grad()] == ["cuda", "cpu"]


@pytest.mark.gpu
@pytest.mark.skipif(num_gpus() < 1, reason="needs a CUDA device")
def test_replicas_run_on_the_stream_of_their_caller():
    net = replicate(nn.Linear(5, 2), [gpu(0), cpu(0)])
    with torch.cuda.stream(torch.cuda.Stream()):
        inputs = [as_in_context(torch.zeros(4, 5), one) for one in net.contexts]
        torch.cuda._sleep(200_000_000)  # some 0.1 s of the GPU
        for one in inputs:
            one.fill_(1.0)
        outputs = net(inputs)
        torch.testing.assert_close(outputs[0].cpu(), outputs[1])
