"""Optimizers, parameters and options as facts."""

import pytest
import torch
from torch import nn

from paceline import kvstore
from paceline.kvstore.start_checks import agree_on_store, optimizer_facts, option_facts, state_facts, tensor_facts


def facts_of(net, optimizer):
    named = [(name, param, 0) for name, param in net.named_parameters()]
    return {fact.subject: fact.value for fact in optimizer_facts(optimizer, named)}


def test_optimizer_is_described_by_class_parameters_and_options_per_group():
    net = nn.Linear(4, 3, dtype=torch.float64)
    facts = facts_of(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    assert facts["the optimizer"] == "torch.optim.sgd.SGD"
    assert facts["parameter 'weight'"] == "(3, 4) float64 in param group 0"
    assert facts["lr of param group 0"] == "0.1"
    assert facts["momentum of param group 0"] == "0.9"
    assert facts["nesterov of param group 0"] == "False"


def test_state_of_an_optimizer_is_described_by_its_kinds_and_small_values():
    net = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(net.parameters())
    named = [(name, param, 0) for name, param in net.named_parameters()]
    assert state_facts(optimizer, named) == []
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    said = "{exp_avg: (3, 4) float32, exp_avg_sq: (3, 4) float32, step: 1}"
    assert state_facts(optimizer, named)[0] == ("the optimizer's state of 'weight'", said, False)


def test_numbers_of_a_state_that_machines_round_differently_do_not_count():
    net = nn.Linear(4, 3)
    optimizer = torch.optim.NAdam(net.parameters())
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    named = [("weight", net.weight, 0)]
    before = state_facts(optimizer, named)
    optimizer.state[net.weight]["mu_product"] *= 1.0 + 1e-6
    assert state_facts(optimizer, named) == before
    optimizer.state[net.weight]["step"] += 1
    assert state_facts(optimizer, named) != before


def test_how_torch_computes_does_not_count():
    net = nn.Linear(4, 3)
    plain = facts_of(net, torch.optim.Adam(net.parameters(), foreach=False))
    assert plain == facts_of(net, torch.optim.Adam(net.parameters(), fused=True))


def test_equal_options_have_equal_texts_whatever_their_type():
    texts = [
        option_facts("it", {"lr": lr, "betas": betas, "hook": hook})
        for lr, betas, hook in ((1, (0.9, 1), print), (1.0, [0.9, 1.0], repr), (torch.tensor(1.0), (0.9, 1), None))
    ]
    assert texts[0] == texts[1]
    assert texts[2] == [*texts[1][:1], ("hook of it", "None", False), *texts[1][1:]]
    assert texts[0] == [("betas of it", "(0.9, 1)", False), ("lr of it", "1", False)]


@pytest.mark.parametrize(
    ("one", "other"),
    [(0.1, 0.1 + 1e-16), (0.1, 0.2), ((0.9, 0.99), (0.9, 0.999)), ({"type": "2bit"}, {"type": "1bit"}), (None, 0)],
)
def test_unlike_options_have_unlike_texts(one, other):
    alike = option_facts("it", {"x": one}) == option_facts("it", {"x": other})
    assert alike == (one == other)


def test_large_tensor_option_is_described_by_its_kind():
    assert option_facts("it", {"mask": torch.zeros(8, 8)}) == [("mask of it", "(8, 8) float32", False)]


def test_parameters_of_a_lazy_module_are_refused_with_what_to_do():
    net = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    weight = net[0].weight
    for refused in (
        lambda: tensor_facts(net.named_parameters()),
        lambda: optimizer_facts(torch.optim.SGD(net.parameters()), [("0.weight", weight, 0)]),
        lambda: kvstore.create("local").init("0.weight", weight),
        lambda: kvstore.create("device").broadcast("0.weight", weight, weight),
    ):
        with pytest.raises(ValueError, match=r"'0.weight'.*no shape yet.*run one forward pass first"):
            refused()


def test_store_of_one_process_has_nobody_to_agree_with():
    agree_on_store(kvstore.create("local"), "it", option_facts("it", {"lr": 0.1}))
