"""Merge-and-run network, DFN-MR (Zhao et al. 2016): two residual branches that share the mean of their inputs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .blocks import conv_bn, conv_bn_relu


class MergeAndRun(nn.Module):
    """One block: each branch adds its own convolutions to the mean of both inputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.branches = nn.ModuleList(
            nn.Sequential(conv_bn_relu(inputs, outputs, 3, stride), conv_bn(outputs, outputs, 3)) for _ in range(2)
        )
        same = inputs == outputs
        self.shortcuts = nn.ModuleList(nn.Identity() if same else conv_bn(inputs, outputs, 1, stride) for _ in range(2))

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = pair
        merged = 0.5 * (self.shortcuts[0](first) + self.shortcuts[1](second))
        return F.relu(merged + self.branches[0](first)), F.relu(merged + self.branches[1](second))


class DeepFusion(nn.Module):
    """The whole network, for images [N, 3, 28, 28] or [N, 3, 32, 32]."""

    def __init__(self, num_classes: int, blocks: int, width: int) -> None:
        super().__init__()
        self.stem = conv_bn_relu(3, width, 3)
        stages: list[nn.Module] = []
        channels = width
        for outputs in (width, 2 * width, 4 * width):
            for _ in range(blocks):
                stages.append(MergeAndRun(channels, outputs))
                channels = outputs
        self.stages = nn.Sequential(*stages)
        self.classes = nn.Linear(channels, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        stem = self.stem(images)
        first, second = self.stages((stem, stem))
        return self.classes((first + second).mean((2, 3)))


def merge_and_run(num_classes: int = 100, num_layers: int = 56, width: int = 16) -> nn.Module:
    """DFN-MR for CIFAR; the published DFN-MR1 has 56 layers, width 16 and 1.7 M parameters.

    Raises:
        ValueError: ``num_layers`` is not 6n + 2.
    """
    blocks, rest = divmod(num_layers - 2, 6)
    if rest or blocks < 1:
        raise ValueError(f"a merge-and-run network has 6n + 2 layers; num_layers is {num_layers}")
    return DeepFusion(num_classes, blocks, width)
