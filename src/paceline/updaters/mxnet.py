"""MXNet's optimizers that torch does not have, from their published formulas.

In all of them g is the gradient after ``rescale_grad`` and ``clip_gradient``, w a weight, and sqrt, sign and products
act element by element.
"""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import torch

from paceline.updaters.formula import Formula, Group, State, buffer, decayed

#: Elements of the noise of SGLD that are drawn together: few calls for large tensors, little waste for small ones.
_CHUNK = 4096


class MXNetSGD(Formula):
    """SGD with MXNet's form of momentum (Polyak 1964): ``sgd`` with ``momentum_form="mxnet"``.

    The rate is part of the momentum, so a change of the rate only applies to later gradients::

        v = momentum * v - lr * (g + weight_decay * w)
        w = w + v

    In torch the rate is outside of the momentum (``v = momentum * v + g; w = w - lr * v``), so a change applies at once
    to all past gradients in v. The two are equal while the rate does not change.
    """

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        grad = decayed(grad, param, group)
        if group["momentum"] == 0:
            param.add_(grad, alpha=-group["lr"])
        else:
            param.add_(_velocity(grad, param, state, group))


class NAG(Formula):
    """Nesterov's accelerated gradient in MXNet's form (Nesterov 1983; Sutskever et al. 2013)::

        v = momentum * v - lr * (g + weight_decay * w)
        w = w + momentum * v - lr * (g + weight_decay * w)

    torch's SGD with ``nesterov=True`` is equal to it while the rate does not change.
    """

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        grad = decayed(grad, param, group)
        if group["momentum"] != 0:
            param.add_(_velocity(grad, param, state, group), alpha=group["momentum"])
        param.add_(grad, alpha=-group["lr"])


class Ftrl(Formula):
    """FTRL-Proximal (McMahan et al. 2013, "Ad Click Prediction: a View from the Trenches")::

        z = z + g - (sqrt(n + g * g) - sqrt(n)) / lr * w
        n = n + g * g
        w = -sign(z) * max(|z| - lamda1, 0) / ((beta + sqrt(n)) / lr + weight_decay)

    A weight is a function of its z and n, so a weight that never had a gradient becomes 0 at its first step. With
    row-sparse gradients only their rows are updated, as in MXNet. With a rate of 0 no weight is updated. ``lr`` is the
    paper's alpha, ``lamda1`` the L1 coefficient, ``weight_decay`` the L2 coefficient (lambda2).
    """

    def __init__(
        self, params: Any, lr: float = 0.1, lamda1: float = 0.01, beta: float = 1.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "lamda1": lamda1, "beta": beta, "weight_decay": weight_decay})

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        lr = group["lr"]
        if lr == 0:
            return
        z, n = buffer(state, "z", param), buffer(state, "n", param)
        before = n.sqrt()
        root = n.addcmul_(grad, grad).sqrt()
        z.add_(grad).addcmul_(before.neg_().add_(root), param, value=-1 / lr)
        denominator = root.add_(group["beta"]).div_(lr).add_(group["weight_decay"])
        torch.div(torch.nn.functional.softshrink(z, group["lamda1"]), denominator.neg_(), out=param)


class Signum(Formula):
    """The sign of the momentum (Bernstein et al. 2018, arXiv:1802.04434), with decoupled decay (arXiv:1711.05101)::

        m = momentum * m + (1 - momentum) * (g + weight_decay * w)
        w = (1 - lr * wd_lh) * w - lr * sign(m)

    With a momentum of 0 it is signSGD; then both decays are decoupled, as in MXNet::

        w = (1 - lr * (weight_decay + wd_lh)) * w - lr * sign(g)
    """

    def __init__(
        self, params: Any, lr: float = 0.01, momentum: float = 0.9, wd_lh: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "wd_lh": wd_lh, "weight_decay": weight_decay})

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        lr, momentum, decay = group["lr"], group["momentum"], group["wd_lh"]
        if momentum == 0:
            direction, decay = grad, decay + group["weight_decay"]
        else:
            direction = buffer(state, "momentum_buffer", param).mul_(momentum)
            direction.add_(decayed(grad, param, group), alpha=1 - momentum)
        if decay:
            param.mul_(1 - lr * decay)
        param.add_(direction.sign(), alpha=-lr)


class SignSGD(Signum):
    """The sign of the gradient (Bernstein et al. 2018, arXiv:1802.04434): :class:`Signum` without momentum."""

    def __init__(self, params: Any, lr: float = 0.01, wd_lh: float = 0.0, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, 0.0, wd_lh, weight_decay)


class DCASGD(Formula):
    """SGD with delay compensation (Zheng et al. 2017, arXiv:1609.08326) in MXNet's form::

        g = g + weight_decay * w
        v = momentum * v - lr * (g + lamda * g * g * (w - previous))
        previous = w
        w = w + v

    In the paper ``previous`` is the weight with which the worker computed g, one per worker. MXNet keeps one for all
    workers: the weight before the last update of any worker. So does this class. It is exact for a gradient that has
    missed one update, and an approximation if it has missed more or none. ``w - previous`` is the last v, so only v is
    kept. ``lamda`` is the strength of the compensation, the paper's lambda.
    """

    def __init__(
        self, params: Any, lr: float = 0.1, momentum: float = 0.0, lamda: float = 0.04, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "lamda": lamda, "weight_decay": weight_decay})

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        grad = decayed(grad, param, group)
        last = buffer(state, "last_update", param)
        compensated = torch.addcmul(grad, grad * grad, last, value=group["lamda"])
        param.add_(last.mul_(group["momentum"]).add_(compensated, alpha=-group["lr"]))


class SGLD(Formula):
    """Stochastic gradient Langevin dynamics (Welling and Teh 2011; MXNet cites Patterson and Teh 2013)::

        w = w - lr / 2 * (g + weight_decay * w) + N(0, lr)

    The noise of an element is a function of ``seed``, its key, its position there and the number of the step. So a run
    can be repeated, and it is the same with any number of servers and after a checkpoint. Give each chain its own seed.
    Weight decay is a Gaussian prior.
    """

    per_key: ClassVar[bool] = True

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0, seed: int = 0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "seed": seed})

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        steps = state.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu"))
        steps += 1
        key = group["key"] if "key" in group else self._index(param)
        noise = sgld_noise((group["seed"], key, int(steps)), group.get("key_start", 0), param.numel())
        param.add_(decayed(grad, param, group), alpha=-group["lr"] / 2)
        param.add_(noise.view(param.shape).to(param.device, param.dtype), alpha=group["lr"] ** 0.5)

    def _index(self, param: torch.Tensor) -> int:
        """Return the index of a parameter, which names it if it has no key."""
        every = [id(one) for group in self.param_groups for one in group["params"]]
        return every.index(id(param))


def sgld_noise(seed: tuple[object, ...], start: int, length: int) -> torch.Tensor:
    """Return a range of a standard normal sequence, as float32 in CPU memory.

    The elements of the sequence that a seed names are the same in every process, and for any cut into ranges.
    """
    out = torch.empty(length, dtype=torch.float32, device="cpu")
    position, stop = start, start + length
    while position < stop:
        chunk = position // _CHUNK
        first = chunk * _CHUNK
        last = min(stop, first + _CHUNK)
        digest = hashlib.blake2b(repr((*seed, chunk)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        noise = torch.randn(_CHUNK, generator=generator, dtype=torch.float32, device="cpu")
        out[position - start : last - start] = noise[position - first : last - first]
        position = last
    return out


class Assign(Formula):
    """Replaces the value by pushes. ``w = g``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        param.copy_(grad)


class Add(Formula):
    """Adds pushes to the value: MXNet's ``test`` optimizer. ``w = w + rate * g``."""

    def __init__(self, params: Any, rate: float = 1.0) -> None:
        super().__init__(params, {"rate": rate})

    def _update(self, param: torch.Tensor, grad: torch.Tensor, state: State, group: Group) -> None:
        param.add_(grad, alpha=group["rate"])


def _velocity(grad: torch.Tensor, param: torch.Tensor, state: State, group: Group) -> torch.Tensor:
    """Return ``momentum * v - lr * grad``, the new v."""
    return buffer(state, "momentum_buffer", param).mul_(group["momentum"]).add_(grad, alpha=-group["lr"])
