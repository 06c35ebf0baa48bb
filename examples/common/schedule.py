"""The learning rate over the epochs. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def rate_factor(args: argparse.Namespace, num_workers: int, steps_per_epoch: int) -> Callable[[int], float]:
    """Return a function from the number of the step to the factor of ``--lr``.

    The rate grows from 0 to its full value during the warm-up (Goyal et al. 2017) and is multiplied by
    ``--lr-factor`` after the epochs of ``--lr-step-epochs``, or every ``--lr-factor-epoch`` epochs.
    """
    changes = sorted(float(epoch) for epoch in args.lr_step_epochs.split(",") if epoch)
    full = float(num_workers) if args.scale_lr else 1.0

    def factor(step: int) -> float:
        epoch = step / steps_per_epoch
        if epoch < args.warmup_epochs:
            return full * (step + 1) / (args.warmup_epochs * steps_per_epoch)
        passed = sum(epoch >= change for change in changes)
        if args.lr_factor_epoch:
            passed += int(epoch / args.lr_factor_epoch)
        return full * args.lr_factor**passed

    return factor
