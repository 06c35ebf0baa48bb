"""Nets, data and losses that scripts share."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.oracle.run import Make, Tensors

FEATURES, CLASSES = 8, 4


def mlp(hidden: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES))


def labelled(count: int, generator: torch.Generator) -> Tensors:
    inputs = torch.randn(count, FEATURES, generator=generator)
    return inputs, (inputs[:, :CLASSES] + 0.3 * torch.randn(count, CLASSES, generator=generator)).argmax(1)


def tokens(length: int, words: int) -> Make:
    def make(count: int, generator: torch.Generator) -> Tensors:
        text = torch.randint(words, (count, length + 1), generator=generator)
        text[:, 1::2] = (text[:, 0::2][:, : text[:, 1::2].shape[1]] * 3 + 1) % words  # something to learn
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return make


def loss_of(net: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(inputs), targets)


def norm_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([one.detach().norm() for one in tensors]).norm()
