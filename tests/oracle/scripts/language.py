"""A small GPT, trained as its public programs train it, and a recurrent language model."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.oracle.registry import script
from tests.oracle.run import STEPS, Result, Run
from tests.oracle.scripts.parts import tokens

WORDS, LENGTH, WIDTH = 13, 8, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        count, length, _ = inputs.shape
        heads = self.qkv(self.norm_1(inputs)).view(count, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(count, length, WIDTH)
        inputs = inputs + self.out(seen)
        return inputs + self.narrow(F.gelu(self.wide(self.norm_2(inputs))))


class GPT(nn.Module):
    """The word embedding is also the matrix of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.words.weight = self.head.weight
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, text: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.words(text) + self.places(torch.arange(text.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        assert targets is not None
        return logits, F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))

    def optimizer(self) -> torch.optim.Optimizer:
        params = dict(self.named_parameters())
        groups = [
            {"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def rate_at(step: int) -> float:
    """Warm-up, then a cosine down to a tenth."""
    if step < 5:
        return 1e-2 * (step + 1) / 5
    return 1e-3 + 0.5 * 9e-3 * (1 + math.cos(math.pi * (step - 5) / (STEPS - 5)))


def train_gpt(run: Run, untold: bool, clip: bool) -> Result:
    passes = 2
    net = GPT()
    options = {} if untold else {"backward_passes_per_step": passes}
    optimizer = run.distribute(net.optimizer(), net, **options)
    batches = run.batches(tokens(LENGTH, WORDS), passes * STEPS, alike=1 if untold else passes)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        for _ in range(passes):
            _, loss = net(*next(batches))
            (loss / passes).backward()
        if clip:
            losses.append(nn.utils.clip_grad_norm_(net.parameters(), 0.3))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return net, losses


@script("at step", dtype=torch.float64)
def gpt(run: Run) -> Result:
    """Clipping, accumulation, groups by decay, tied weights, cosine schedule: all of it unmodified."""
    return train_gpt(run, untold=True, clip=True)


@script("equal", dtype=torch.float64)
def gpt_told_of_its_passes(run: Run) -> Result:
    return train_gpt(run, untold=False, clip=False)


@script("equal")
def gpt_in_float32(run: Run) -> Result:
    """Without what amplifies rounding: SGD, 20 steps."""
    net = GPT()
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    for text, targets in run.batches(tokens(LENGTH, WORDS), 20):
        optimizer.zero_grad(set_to_none=True)
        net(text, targets)[1].backward()
        optimizer.step()
    return net


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.recurrent = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.words(text))[0])


@script("at step", dtype=torch.float64)
def recurrent_language_model(run: Run) -> Result:
    """Clipped hard, and the rate falls by 4 at a time that all workers know."""
    net = Recurrent()
    rate = 2.0
    optimizer = run.distribute(torch.optim.SGD(net.parameters(), lr=rate), net)
    for step, (text, targets) in enumerate(run.batches(tokens(LENGTH, WORDS))):
        net.zero_grad()
        F.cross_entropy(net(text).transpose(1, 2), targets).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.25)
        if step == 15:
            optimizer.param_groups[0]["lr"] = rate / 4
        optimizer.step()
    return net
