"""Which parameters are taken to have sparse gradients."""

from __future__ import annotations

import torch
from torch import nn

from paceline.optim.sparse_exchange import find_sparse


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3, sparse=True)
        self.bags = nn.EmbeddingBag(5, 3, sparse=True)
        self.plain = nn.Embedding(5, 3)
        self.tied = nn.Embedding(5, 3, sparse=True)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.tied.weight
        self.own = nn.Parameter(torch.zeros(5, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def found(model: nn.Module, optimizer: torch.optim.Optimizer, seen: nn.Module | None) -> list[str]:
    return [name for name, _ in find_sparse(model.named_parameters(), optimizer, seen)]


def test_tables_that_nothing_but_sparse_modules_own_are_sparse() -> None:
    model = Net()
    assert found(model, sgd(model), model) == ["words.weight", "bags.weight"]


def test_what_is_found_is_what_autograd_makes() -> None:
    model, ids = Net(), torch.tensor([[1, 1, 4]])
    seen = model.words(ids).mean(1) + model.bags(ids) + model.plain(ids).mean(1) + model.tied(ids).mean(1)
    (model.out(seen).sum() + model.own.sum()).backward()
    sparse = found(model, sgd(model), model)
    for name, param in model.named_parameters():
        assert param.grad is not None
        assert param.grad.is_sparse == (name in sparse), name


def test_table_that_two_sparse_modules_share_is_sparse() -> None:
    model = nn.ModuleList([nn.Embedding(5, 3, sparse=True), nn.EmbeddingBag(5, 3, sparse=True)])
    model[1].weight = model[0].weight
    assert found(model, sgd(model), model) == ["0.weight"]


def test_sparse_adam_takes_nothing_but_rows() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    assert found(table, torch.optim.SparseAdam(table.parameters()), None) == ["weight"]


def test_user_can_say_what_cannot_be_seen() -> None:
    model = Net()
    assert found(model, sgd(model), None) == []
    model.own.sparse_grad = True  # type: ignore[attr-defined]
    assert found(model, sgd(model), None) == ["own"]


def test_tables_without_elements_are_left_alone() -> None:
    table = nn.Embedding(0, 3, sparse=True)
    assert found(table, sgd(table), table) == []
