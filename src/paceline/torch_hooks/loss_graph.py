"""What a loss is divided by, read from its graph, whose names and fields no page of PyTorch documents.

| the last operation of a term                          | the number                                          |
|-------------------------------------------------------|-----------------------------------------------------|
| a cross entropy, a negative log-likelihood            | the labels that count, or the weights of their      |
|                                                       | classes                                             |
| a sum of elements that one number divides             | that number                                         |
| ``mean()`` of elements; another loss that is a mean   | the elements                                        |
| something of parameters alone                         | none: it is the same on all workers                 |
| all else: sums that nothing divides, or two numbers;  | unknown, and the reason                             |
| norms; products of terms; means of means; several     |                                                     |
| terms that are divided one by one; what               |                                                     |
| ``torch.compile``, a checkpointed segment or an       |                                                     |
| ``autograd.Function`` hides                           |                                                     |

A term may be multiplied or divided by numbers that have no gradient. Several terms may be divided by one number, as
``(a.sum() + b.sum()) / n``; but of ``a.mean() + b.mean()`` the graph does not show whether both have the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.torch_hooks.losses import Losses

#: The numbers by which losses of PyTorch save their ``reduction``.
_MEAN, _SUM = 1, 2

#: Operations of one loss that are looked at: a loss may be the sum of thousands of terms, or use each of them often.
_MOST_OPERATIONS = 200

#: Operations that are looked at between the elements of a sum or a mean and those of another shape.
_MOST_ELEMENTWISE = 20

#: PyTorch's own functions that hide a loss.
_HIDING = {"CompiledFunction": "torch.compile", "CheckpointFunction": "a checkpointed segment"}
_PACKED = "a checkpointed segment, or with other hooks of saved tensors, as save_on_cpu"

_OF_TERMS = ("AddBackward", "SubBackward", "RsubBackward")
_SCALES = ("MulBackward", "DivBackward")
_SUMS = ("SumBackward", "NansumBackward", "DotBackward", "VdotBackward")
_MEANS = ("MeanBackward",)
_NORMS = ("Norm", "LinalgVectorNorm")
_REDUCTIONS, _JOINS = (*_SUMS, *_MEANS, *_NORMS), ("Stack", "Cat")
_OF_ELEMENTS = ("PowBackward", "AbsBackward", "MulBackward")
_ELEMENTWISE = (
    *_OF_TERMS, *_SCALES, "Abs", "Clamp", "Clone", "Exp", "Gather", "Log", "MaskedFill", "Neg", "Nll", "Permute", "Pow",
    "Relu", "Sigmoid", "Softmax", "Softplus", "Sqrt", "Squeeze", "Tanh", "ToCopy", "Transpose", "Unsqueeze", "View",
    "Where",
)  # fmt: skip
_PLAIN = ("ToCopyBackward", "CloneBackward", "SqueezeBackward", "NegBackward", "ViewBackward", "CppFunction")


@dataclass(frozen=True)
class Divisor:
    """What the losses of one backward pass are divided by.

    Attributes:
        number: shape ``()``; None: nothing in the losses has to do with samples, or it is not known.
        factors: by which each term is multiplied besides; shape ``()``.
        unknown: why the graph does not show it; empty: it does.
    """

    number: torch.Tensor | None
    factors: Sequence[torch.Tensor] = ()
    unknown: str = ""


class _UnknownError(Exception):
    """The graph of a loss does not show what divides it; the text says why."""


def divisor_of(losses: Losses) -> Divisor:
    """Return what the losses of one pass are divided by; it waits for no device."""
    found: dict[object, torch.Tensor] = {}
    factors = []
    try:
        if any(loss.numel() != 1 for loss in losses):
            raise _UnknownError("backward() was called on a tensor of several elements")
        terms = [term for loss in losses for term in _terms(loss) if not _is_penalty(term)]
        labelled = {_scored(term.node) for term in terms if term.name.startswith("NllLoss")}
        for term in terms:
            if _smoothed(term) not in labelled:  # else it is divided as its cross entropy is
                source, number, factor = _number_of(term)
                found[source] = number
                factors.append(factor)
        if len(found) > 1:
            raise _UnknownError("it is a sum of terms that are divided one by one")
    except _UnknownError as error:
        return Divisor(None, unknown=str(error))
    return Divisor(next(iter(found.values()), None), factors)


@dataclass(frozen=True)
class _Term:
    """The last operation of a term, its name, and the products and quotients that scale its result."""

    node: Any
    name: str
    scales: tuple[Any, ...]


def _terms(loss: torch.Tensor) -> Iterator[_Term]:
    """Yield the terms of a loss."""
    waiting: list[tuple[Any, tuple[Any, ...]]] = [(loss.grad_fn, ())]
    seen: set[tuple[Any, tuple[Any, ...]]] = set()
    while waiting:
        node, scales = one = waiting.pop()
        if node is None or one in seen:
            continue
        if len(seen) == _MOST_OPERATIONS:
            raise _UnknownError(f"it has more than {_MOST_OPERATIONS} operations")
        seen.add(one)
        name = node.name()
        if name.startswith(_OF_TERMS + _PLAIN):
            waiting += [(term, scales) for term, _ in node.next_functions]
        elif name.startswith(_SCALES):
            waiting.append((_scaled(node), (*scales, node)))
        else:
            yield _Term(node, name, (*scales, *_divided_before(node, name)))


def _divided_before(node: Any, name: str) -> tuple[Any, ...]:
    """Return the quotient whose elements are summed up, if one number divides all of them: it divides the sum, too."""
    before = _before(node) if name.startswith(_SUMS) else None
    if before is None or not before.name().startswith("DivBackward") or _is_learned(before):
        return ()
    other = None if _is_packed(before, "other") else before._saved_other
    return () if other is None or (isinstance(other, torch.Tensor) and other.dim()) else (before,)


def _number_of(term: _Term) -> tuple[object, torch.Tensor, torch.Tensor]:
    """Return where the number comes from that divides a term, the number, and the product of the term's factors."""
    node, name, scales = term.node, term.name, term.scales
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        own = name.removesuffix("Backward")
        raise _UnknownError(f"it is computed in {_HIDING.get(own, f'the autograd function {own}')}")
    reduction = getattr(node, "_saved_reduction", 0)
    if name.startswith("NllLoss") and reduction == _MEAN:
        return node, _number_of_labels(node), _product(scales)
    if name.startswith(_MEANS) or reduction == _MEAN:
        return node, _number_of_elements(node, name), _product(scales)
    if name.startswith(_SUMS) or reduction == _SUM:
        _check_elements(node)
        quotients = [one for one in scales if one.name().startswith("DivBackward")]
        if len(quotients) != 1:
            what = "no number divides" if not quotients else "several numbers divide, as its words and its samples"
            raise _UnknownError(f"a term is a sum that {what}")
        number = _value(quotients[0], "divided")
        others = [one for one in scales if one is not quotients[0]]
        weight = torch.nan_to_num(number.abs(), nan=1.0, posinf=1.0)
        other = quotients[0]._saved_other
        source = other.data_ptr() if isinstance(other, torch.Tensor) else quotients[0]
        return source, weight, _product(others)
    raise _UnknownError(f"a term is neither a sum nor a mean, but ends in {name}")


def _scored(node: Any) -> Any:
    """Return the operation whose results a negative log-likelihood takes."""
    before = _before(node)
    while before is not None and before.name().startswith(_PLAIN):
        before = _before(before)
    return before


def _smoothed(term: _Term) -> Any:
    """Return the operation whose results a cross entropy with smoothed labels adds up; else a number."""
    node, name = term.node, term.name
    for wanted in ("SumBackward", "MaskedFillBackward", "NegBackward", "SumBackward"):
        if not name.startswith(wanted):
            return 0
        node = _before(node)
        name = "" if node is None else node.name()
    return _before(node) if name.startswith("MulBackward") else node  # by weights of classes


def _number_of_labels(node: Any) -> torch.Tensor:
    """Return how many labels count, or the weights of their classes."""
    if _is_packed(node, "target"):
        raise _UnknownError(f"it is computed in {_PACKED}")
    total: torch.Tensor = node._saved_total_weight.detach()
    if node._saved_weight is None and total.element_size() < torch.float32.itemsize:  # it may be rounded
        total = (node._saved_target != node._saved_ignore_index).sum()
    return total.float().reshape(())


def _number_of_elements(node: Any, name: str) -> torch.Tensor:
    """Return how many elements a term is the mean of."""
    _check_elements(node)
    if name.startswith(_MEANS):
        return _on_cpu(math.prod(node._saved_self_sym_sizes))
    if _is_packed(node, "self"):
        raise _UnknownError(f"it is computed in {_PACKED}")
    return _on_cpu(math.prod(node._saved_self.shape))


def _check_elements(node: Any) -> None:
    """Raise if elements are no values of single samples, or of parts of them."""
    waiting, seen = [node], 0
    while waiting and seen < _MOST_ELEMENTWISE:
        seen += 1
        for one, _ in waiting.pop(0).next_functions:
            name = "" if one is None else one.name()
            reduces = name.startswith(_REDUCTIONS) or hasattr(one, "_saved_keepdim")
            if name.startswith(_JOINS) or (reduces and _is_over_samples(one)):
                raise _UnknownError(f"a term is a sum or a mean of values that are none of single samples ({name})")
            if name.startswith(_ELEMENTWISE):
                waiting.append(one)


def _is_over_samples(node: Any) -> bool:
    """Return whether a sum, a mean, a maximum or the like is over the first dimension, or over all."""
    dims = getattr(node, "_saved_dim", None)
    if not dims:
        return True
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is None and _is_packed(node, "self"):
        raise _UnknownError(f"it is computed in {_PACKED}")
    count = len(sizes if sizes is not None else node._saved_self.shape)
    return any(one in (0, 2**64 - count) for one in ([dims] if isinstance(dims, int) else dims))  # -1 is 2**64 - 1


def _product(scales: Any) -> torch.Tensor:
    """Return the product of the numbers that scale a term."""
    product = _on_cpu(1.0)
    for one in scales:
        value = _value(one, "multiplied" if one.name().startswith("Mul") else "divided")
        value = value if one.name().startswith("Mul") else 1 / value
        product = product.to(value.device) * value
    return product


def _value(node: Any, what: str) -> torch.Tensor:
    """Return the number of a product or a quotient."""
    names = ("other",) if what == "divided" else ("other", "self")
    if any(_is_packed(node, name) for name in names):
        raise _UnknownError(f"it is computed in {_PACKED}")
    values = [one for one in (getattr(node, f"_saved_{name}", None) for name in names) if one is not None]
    if len(values) != 1 or _is_learned(node):
        raise _UnknownError(f"a term is {what} by one that has a gradient")
    value = values[0]
    if not isinstance(value, torch.Tensor):
        return _on_cpu(float(value))
    if value.numel() != 1 or value.is_complex():
        raise _UnknownError(f"a term is {what} by several numbers")
    return value.detach().float().reshape(())


def _is_learned(node: Any) -> bool:
    """Return whether both sides of a product or a quotient have gradients."""
    return sum(one is not None for one, _ in node.next_functions) > 1


def _scaled(node: Any) -> Any:
    """Return the operation whose result a product or a quotient scales."""
    if _is_learned(node):
        kind = "product" if node.name().startswith("Mul") else "quotient"
        raise _UnknownError(f"it has a {kind} of two terms")
    return _before(node)


def _is_penalty(term: _Term) -> bool:
    """Return whether a term is made of a parameter alone."""
    node = _before(term.node) if term.name.startswith(_REDUCTIONS) else term.node
    while node is not None and node.name().startswith(_OF_ELEMENTS):
        before = {one for one, _ in node.next_functions if one is not None}
        node = before.pop() if len(before) == 1 else None
    return node is not None and node.name().endswith("AccumulateGrad")


def _before(node: Any) -> Any:
    """Return the operation whose result an operation has changed."""
    return next((one for one, _ in node.next_functions if one is not None), None)


def _is_packed(node: Any, name: str) -> bool:
    """Return whether a saved tensor is somewhere else: that of a checkpointed segment would be computed once more."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    some = saved if isinstance(saved, list | tuple) else [saved]
    return any(getattr(one, "unpack_hook", None) is not None for one in some)


def _on_cpu(number: float) -> torch.Tensor:
    return torch.tensor(float(number), dtype=torch.float32, device="cpu")
