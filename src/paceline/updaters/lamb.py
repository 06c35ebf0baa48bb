"""Layer-wise optimizers for large batches: LARS and LAMB."""

from __future__ import annotations

from typing import Any

import torch

from paceline.updaters.formula import Formula, Group, State, buffer


def _ratio(param: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Return |param| / |update|, or 1 if one of them is zero."""
    weight_norm, update_norm = param.norm(), update.norm()
    both = (weight_norm > 0) & (update_norm > 0)
    return torch.where(both, weight_norm / update_norm, torch.ones_like(weight_norm))


class LARS(Formula):
    """SGD with momentum and layer-wise adaptive rates (You, Gitman, Ginsburg 2017, arXiv:1708.03888).

    Weight decay is part of the norm of the update; ``trust_coefficient`` is the paper's eta.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient},
        )

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        update = grad.add(param, alpha=group["weight_decay"])
        update.mul_(_ratio(param, update) * group["trust_coefficient"])
        momentum = buffer(state, "momentum_buffer", param).mul_(group["momentum"]).add_(update)
        param.add_(momentum, alpha=-group["lr"])


class LAMB(Formula):
    """Adam with layer-wise adaptive rates (You et al. 2019, arXiv:1904.00962), with bias correction.

    Weight decay is decoupled, and part of the norm of the update.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if not lr >= 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"LAMB needs lr >= 0 and betas in [0, 1), not lr={lr}, betas={betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        if not state:
            state |= {
                "step": torch.zeros((), dtype=torch.float32, device="cpu"),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = (state["exp_avg"] / (1 - beta1**step)).div_(denominator).add_(param, alpha=group["weight_decay"])
        param.sub_(update.mul_(_ratio(param, update) * group["lr"]))
