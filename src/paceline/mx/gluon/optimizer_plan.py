"""Class and options of a trainer's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from paceline.kvstore.agreement import Fact
from paceline.kvstore.options import in_force, own_class, start_at
from paceline.kvstore.start_checks import option_facts
from paceline.layout.keys import Key
from paceline.mx.gluon.parameter import Parameter
from paceline.updaters import KeyedOptimizer, KeyOptions, Options, check_options, make_spec, option_groups
from paceline.updaters.classes import SIMPLE
from paceline.updaters.gradient import GRADIENT_OPTIONS

OptimizerLike: TypeAlias = str | type[torch.optim.Optimizer] | torch.optim.Optimizer


class OptimizerPlan:
    """Class, options per param group and multipliers per parameter, read again at every step.

    Args:
        optimizer: a name, a class or an instance of ``torch.optim``. Only the class and the options of an instance are
            used; changes of its ``param_groups`` (by a scheduler, for example) apply from the next step on.
        options: options of the class. ``learning_rate`` is accepted for ``lr`` and ``wd`` for ``weight_decay``. Further
            options are ``lr_scheduler`` (a function of the number of the step, from 1 on, that returns the learning
            rate), ``rescale_grad`` (a factor on all gradients), ``clip_gradient`` (largest absolute value of an element
            after that), ``multi_precision`` and ``momentum_form`` (see :func:`paceline.updaters.make_spec`).
        parameters: the trained parameters, by key.
    """

    def __init__(
        self, optimizer: OptimizerLike, options: Mapping[str, Any] | None, parameters: Mapping[str, Parameter]
    ) -> None:
        options = dict(options or {})
        self.scheduler: Callable[[int], float] | None = options.pop("lr_scheduler", None)
        if self.scheduler is not None:
            start_at(self.scheduler, options)
        self.rescale = float(options.pop("rescale_grad", 1.0))
        self.multi_precision = bool(options.pop("multi_precision", False))
        self.optimizer, self.options = optimizer, options
        self._of_gradient = {name: one for name, one in options.items() if name in GRADIENT_OPTIONS}
        self._parameters = parameters
        self.spec = make_spec(optimizer, **options)
        self._instance = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._groups = [dict(group) for group in self.spec.groups]
        self._check(optimizer)

    @property
    def cls(self) -> type[torch.optim.Optimizer]:
        """The optimizer's class."""
        return own_class(self.spec, self.optimizer)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first param group, without multipliers."""
        return float(in_force(self.groups(), self.cls)[0]["lr"])  # type: ignore[arg-type]

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of all param groups.

        Raises:
            ValueError: not a rate, or a scheduler sets it.
        """
        if self.scheduler is not None:
            raise ValueError("the lr_scheduler sets the learning rate; change the scheduler instead")
        if not 0 <= rate < float("inf"):
            raise ValueError(f"learning rate {rate} is not a finite number of 0 or more")
        self._set_rate(rate)

    def groups_at(self, step: int) -> list[Options]:
        """Return the options per param group for step number ``step``, counted from 0."""
        if self.scheduler is not None:
            self._set_rate(float(self.scheduler(step + 1)))
        if self._instance is not None:
            # torch's learning-rate schedulers warn if the optimizer that they watch makes no steps.
            self._instance._opt_called = True  # type: ignore[attr-defined]
        return self.groups()

    def groups(self) -> list[Options]:
        """Return the current options per param group."""
        groups = option_groups(self._instance) if self._instance is not None else self._groups
        return [group | self._of_gradient for group in groups]

    def set_groups(self, groups: Sequence[Options]) -> None:
        """Set the options per param group, as :meth:`groups` returned them and :meth:`check_groups` takes them."""
        for group, options in zip(self._own_groups, groups, strict=True):
            group.update(options)

    def check_groups(self, groups: Sequence[Options]) -> None:
        """Check that :meth:`set_groups` can set options.

        Raises:
            ValueError: another number of groups.
        """
        if len(groups) != len(self._own_groups):
            raise ValueError(f"options of {len(groups)} param groups, but the optimizer has {len(self._own_groups)}")

    def key_options(self) -> dict[Key, KeyOptions]:
        """Return param group and multipliers of the parameters that differ from group 0 and 1.0."""
        of_param = self._membership()
        table = {
            key: KeyOptions(of_param.get(key, 0), one.lr_mult, one.wd_mult) for key, one in self._parameters.items()
        }
        return {key: one for key, one in table.items() if one != KeyOptions()}

    def facts(self) -> list[Fact]:
        """Return the facts that must be the same on all workers: name, options and multipliers."""
        facts = [Fact("the optimizer", self.spec.name)]
        for index, group in enumerate(self.groups()):
            facts += option_facts(f"param group {index}", group)
        for key, one in self.key_options().items():
            facts += option_facts(f"parameter {key!r}", {name: getattr(one, name) for name in one.__struct_fields__})
        return [*facts, *option_facts("the optimizer", {"multi_precision": self.multi_precision})]

    def build(self, keys: Mapping[Key, KeyOptions]) -> KeyedOptimizer:
        """Build an optimizer for the tensors of one replica."""
        spec = make_spec(self.optimizer, keys=keys, multi_precision=self.multi_precision, **self.options)
        return KeyedOptimizer(spec, self.cls)

    def _check(self, optimizer: OptimizerLike) -> None:
        if self.spec.name in SIMPLE:
            raise ValueError(f"{self.spec.name!r} is an updater of stores, not an optimizer")
        if self._instance is None:
            check_options(self.cls, self.spec.groups)
        elif self._instance.state:
            raise ValueError("the optimizer has made steps already; save its progress with Trainer.save_states instead")
        else:
            self._membership()

    def _membership(self) -> dict[Key, int]:
        """Return the param group of every key of an optimizer instance."""
        if self._instance is None:
            return {}
        group_of = {id(one): i for i, group in enumerate(self._instance.param_groups) for one in group["params"]}
        table: dict[Key, int] = {}
        for key, one in self._parameters.items():
            index = next((group_of[id(tensor)] for tensor in one.tensors() if id(tensor) in group_of), None)
            if index is None:
                raise ValueError(
                    f"the optimizer does not hold parameter {key!r}: make it from the parameters of the replicated "
                    "module (net.parameters() before or after replicate), or set grad_req of the parameter to 'null'"
                )
            table[key] = index
        return table

    def _set_rate(self, rate: float) -> None:
        for group in self._own_groups:
            group["lr"] = rate

    @property
    def _own_groups(self) -> list[Options]:
        return self._groups if self._instance is None else self._instance.param_groups
