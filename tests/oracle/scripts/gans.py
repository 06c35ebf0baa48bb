"""Two nets, two optimizers, and losses that cross from one to the other."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.oracle.registry import script
from tests.oracle.run import STEPS, Result, Run, Tensors

NOISE, SHAPE = 4, 6


def nets() -> tuple[nn.Sequential, nn.Sequential]:
    generator = nn.Sequential(nn.Linear(NOISE, 12), nn.Tanh(), nn.Linear(12, SHAPE))
    critic = nn.Sequential(nn.Linear(SHAPE, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1))
    return generator, critic


def pictures(count: int, generator: torch.Generator) -> Tensors:
    real = torch.randn(count, SHAPE, generator=generator) * 0.5 + torch.linspace(-1, 1, SHAPE)
    return real, torch.randn(count, NOISE, generator=generator)


@script("equal", dtype=torch.float64)
def gan(run: Run) -> Result:
    """The loss of real and that of made pictures go backward apart; the generator's goes through the critic."""
    maker, critic = nets()
    of_critic = run.distribute(torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.999)), critic)
    of_maker = run.distribute(torch.optim.Adam(maker.parameters(), lr=1e-2, betas=(0.5, 0.999)), maker)
    judge = F.binary_cross_entropy_with_logits
    for real, noise in run.batches(pictures):
        yes, no = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        critic.zero_grad()
        judge(critic(real), yes).backward()
        made = maker(noise)
        judge(critic(made.detach()), no).backward()
        of_critic.step()

        maker.zero_grad()
        judge(critic(made), yes).backward()
        of_maker.step()
    return maker, critic


@script("equal", dtype=torch.float64)
def gan_with_the_critic_frozen(run: Run) -> Result:
    """One loss each; gradients of the critic are switched off while the generator learns."""
    maker, critic = nets()
    of_critic = run.distribute(torch.optim.Adam(critic.parameters(), lr=1e-2), critic)
    of_maker = run.distribute(torch.optim.Adam(maker.parameters(), lr=1e-2), maker)
    judge = F.binary_cross_entropy_with_logits
    for real, noise in run.batches(pictures):
        yes, no = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        critic.requires_grad_(True)
        of_critic.zero_grad()
        (judge(critic(real), yes) + judge(critic(maker(noise).detach()), no)).backward()
        of_critic.step()

        critic.requires_grad_(False)
        of_maker.zero_grad()
        judge(critic(maker(noise)), yes).backward()
        of_maker.step()
    return maker, critic


@script("refused in its step", other="refused in its step", dtype=torch.float64)
def wgan_with_clamped_weights(run: Run) -> Result:
    """Arjovsky et al. 2017: after each step the critic's weights are clamped, through ``.data``."""
    maker, critic = nets()
    of_critic = run.distribute(torch.optim.RMSprop(critic.parameters(), lr=5e-3), critic)
    of_maker = run.distribute(torch.optim.RMSprop(maker.parameters(), lr=5e-3), maker)
    largest = 0.0
    for step, (real, noise) in enumerate(run.batches(pictures)):
        of_critic.zero_grad()
        (-critic(real).mean() + critic(maker(noise).detach()).mean()).backward()
        of_critic.step()
        for param in critic.parameters():
            largest = max(largest, param.data.abs().max().item())
            param.data.clamp_(-0.05, 0.05)
        if step % 5 == 4:
            of_maker.zero_grad()
            (-critic(maker(noise)).mean()).backward()
            of_maker.step()
    return {"maker": maker, "critic": critic, "largest": largest}


@script("equal", dtype=torch.float64)
def wgan_with_penalty(run: Run) -> Result:
    """Gulrajani et al. 2017: the loss holds a gradient by the inputs, so backward goes through a backward."""
    maker, critic = nets()
    of_critic = run.distribute(torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.0, 0.9)), critic)
    of_maker = run.distribute(torch.optim.Adam(maker.parameters(), lr=5e-3, betas=(0.0, 0.9)), maker)
    batches = run.batches(pictures, 2 * STEPS)
    for _ in range(STEPS):
        real, noise = next(batches)
        made = maker(noise).detach()
        between = (0.5 * real + 0.5 * made).requires_grad_(True)
        [slope] = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        of_critic.zero_grad()
        (critic(made).mean() - critic(real).mean() + 10 * penalty).backward()
        of_critic.step()

        of_maker.zero_grad()
        (-critic(maker(next(batches)[1])).mean()).backward()
        of_maker.step()
    return maker, critic


@script("equal", dtype=torch.float64)
def gan_in_one_optimizer(run: Run) -> Result:
    """Cycle losses: one optimizer for two nets, which no module joins."""
    there, back = (nn.Sequential(nn.Linear(SHAPE, 10), nn.Tanh(), nn.Linear(10, SHAPE)) for _ in range(2))
    params = [*there.parameters(), *back.parameters()]
    optimizer = run.distribute(torch.optim.Adam(params, lr=1e-2), None)
    for real, _ in run.batches(pictures):
        if not run.joined:
            optimizer.samples = len(real)
        optimizer.zero_grad()
        loss = F.mse_loss(back(there(real)), real) + F.l1_loss(there(real), real.flip(1))
        loss.backward()
        optimizer.step()
    return there, back
