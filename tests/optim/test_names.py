"""Names of parameters, by which workers match keys."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.optim.names import name_added, name_parameters


def groups_of(*params: torch.Tensor) -> list[dict[str, object]]:
    return [{"params": list(params)}]


def named(*pairs: tuple[str, torch.Tensor]) -> list[tuple[str, int]]:
    return [(name, id(param)) for name, param in pairs]


def test_of_several_names_of_a_parameter_the_first_counts() -> None:
    shared, own = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    table = [("encoder.words", shared), ("decoder.words", shared), ("decoder.out", own)]
    found = name_parameters(groups_of(shared, own), table)
    assert [name for name, _, _ in found] == ["encoder.words", "decoder.out"]


def test_names_of_different_parameters_must_differ() -> None:
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="two parameters are named 'x'"):
        name_parameters(groups_of(one, other), [("x", one), ("x", other)])


def test_parameter_beside_the_model_is_refused_with_the_way_out() -> None:
    net, scale = nn.Linear(2, 1), nn.Parameter(torch.zeros(()))
    with pytest.raises(ValueError, match=r"1 parameters .* named_parameters=\[\*model\.named_parameters\(\), "):
        name_parameters(groups_of(*net.parameters(), scale), net.named_parameters())


def test_integers_are_left_out() -> None:
    codes = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    one = nn.Parameter(torch.zeros(2))
    table = [("codes", codes), ("one", one)]
    known = name_parameters(groups_of(codes, one), table)
    assert [name for name, _, _ in known] == ["one"]
    assert name_added(groups_of(codes, one), table, known) == []
