"""Options that ``set_optimizer`` takes with an optimizer's name, for type checkers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypedDict

from paceline.updaters.spec import KeyOptions


class OptimizerOptions(TypedDict, total=False):
    """Options of all named optimizers together. That an optimizer has an option is checked when it is set."""

    lr: float
    learning_rate: float
    momentum: float
    momentum_decay: float
    momentum_form: str
    dampening: float
    every: int
    nesterov: bool
    weight_decay: float
    wd: float
    wd_lh: float
    decoupled_weight_decay: bool
    lr_decay: float
    betas: tuple[float, float]
    beta: float
    beta2_decay: float
    eps: float | tuple[float | None, float]
    amsgrad: bool
    alpha: float
    centered: bool
    rho: float
    etas: tuple[float, float]
    step_sizes: tuple[float, float]
    initial_accumulator_value: float
    lambd: float
    lamda: float
    lamda1: float
    t0: float
    d: float
    trust_coefficient: float
    ns_coefficients: tuple[float, float, float]
    ns_steps: int
    adjust_lr_fn: str | None
    maximize: bool
    seed: int
    rate: float
    rescale_grad: float
    clip_gradient: float | None
    multi_precision: bool
    keys: Mapping[str | int, KeyOptions] | None
    lr_scheduler: Callable[[int], float] | None
    begin_num_update: int
