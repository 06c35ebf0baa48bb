"""The losses of backward passes: whether each is a mean over samples, or a sum, as far as its graph shows it.

| the last operation of the loss | the loss is |
|---|---|
| a loss of ``torch.nn.functional`` with ``reduction`` | as ``reduction`` says |
| likewise, with weights of classes, or with ignored labels | a mean over labels: batches have more or fewer of them |
| ``mean``; a sum over the samples | a mean; a sum |
| a sum over a parameter | unknown: it has nothing of the samples |
| a sum of terms | a sum if one of them is, else a mean over labels, else a mean if one of them is |
| a term times a number | as the term; unknown if that is a sum, and the number small |
| a term divided by a number | a mean if the term is, else unknown |
| one inside of ``torch.compile``, of a checkpointed segment or of a user's ``autograd.Function``; others | unknown |

A mean is a sum divided by a number. The graph of some losses has that number: the labels of a cross entropy, the
divisor of ``(losses * mask).sum() / mask.sum()``, the elements of ``losses[mask].mean()``. Batches that are joined have
the sum of their numbers, so a worker with such a loss weighs by its number.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from paceline.torch_hooks.untraced import untraced


class Reduced(Enum):
    """How a loss is made of the losses of its samples."""

    MEAN = "mean"
    SUM = "sum"
    OVER_LABELS = "mean over labels"
    UNKNOWN = "unknown"


#: Of losses that are no mean over samples, or not certainly: why.
NO_MEAN = {
    Reduced.OVER_LABELS: (
        ". It is one over labels, by weights of classes or without ignored ones, so samples weigh unlike; for equal "
        "weights take reduction='none', and the mean over the samples"
    ),
    Reduced.UNKNOWN: (
        ", which its graph does not show; a sum, or a mean over something else, as words, would weigh samples unlike"
    ),
}

#: Autograd's number of the backward pass that runs, where none does.
_NO_PASS = -1

#: Attribute of a ``torch.autograd.backward`` that tells the listeners.
_TELLS = "_paceline_tells"

#: The numbers by which losses of PyTorch save their ``reduction``.
_MEAN = 1
_SAVED = {_MEAN: Reduced.MEAN, 2: Reduced.SUM}

#: A factor that is no larger may be one divided by a number of samples.
_SMALL = 0.5

#: Operations of one loss that are looked at: a loss may be the sum of thousands of terms, or use each of them often.
_MOST_OPERATIONS = 200

#: Operations that are looked at between the elements of a sum or a mean and those of another shape.
_MOST_ELEMENTWISE = 20

#: PyTorch's own functions that hide a loss.
_HIDING = {"CompiledFunction": "torch.compile", "CheckpointFunction": "a checkpointed segment"}
_PACKED = "a checkpointed segment, or with other hooks of saved tensors, as save_on_cpu"

#: What the terms of a sum make of it.
_STRONGEST = (Reduced.SUM, Reduced.OVER_LABELS, Reduced.MEAN)

_OF_TERMS = ("AddBackward", "SubBackward")
_SCALES = ("MulBackward", "DivBackward")
_SUMS = ("SumBackward", "NansumBackward", "DotBackward", "VdotBackward")
_OF_ELEMENTS = ("PowBackward", "AbsBackward", "MulBackward")
_ELEMENTWISE = (
    *_OF_TERMS, *_SCALES, "Abs", "Clamp", "Clone", "Exp", "Gather", "Log", "MaskedFill", "Neg", "Nll", "Permute", "Pow",
    "Sigmoid", "Softmax", "Softplus", "Sqrt", "Squeeze", "ToCopy", "Transpose", "Unsqueeze", "View", "Where",
)  # fmt: skip
_PLAIN = ("ToCopyBackward", "CloneBackward", "SqueezeBackward", "NegBackward", "ViewBackward", "CppFunction")


def reduced(loss: torch.Tensor, samples: int | None = None) -> Reduced:
    """Return how a loss is made of those of its samples. Their number tells a sum by hand over them from others."""
    found: set[Reduced] = set()
    for node, name, scales in _terms(loss):
        kind = _of_term(node, name, samples)
        is_small = kind is Reduced.SUM and any(map(_makes_small, scales))
        found.add(Reduced.UNKNOWN if is_small else kind)
    return next((one for one in _STRONGEST if one in found), Reduced.UNKNOWN)


@dataclass(frozen=True)
class CountedMean:
    """A loss that is a sum divided by a number which its graph has, as that of a cross entropy over labels.

    Attributes:
        weight: the number: the labels that count, or the sum of their classes' weights; the divisor of a sum; the
            elements that a mask selects. Shape ``()``. Of several terms with labels: the largest one's, as all have as
            many labels, or terms of padding fewer.
        is_alone: the loss has no terms that are divided by something else.
    """

    weight: torch.Tensor
    is_alone: bool


class PassLosses:
    """The losses of one backward pass. They are read once, for all listeners."""

    def __init__(self, tensors: Any) -> None:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self.tensors = [one for one in given if isinstance(one, torch.Tensor)]

    @functools.cached_property
    def mean(self) -> CountedMean | None:
        """The mean that they are, if their graph has the number that it is divided by."""
        return counted_mean(self.tensors)

    @functools.cached_property
    def kinds(self) -> set[Reduced]:
        """How they are made."""
        return set(map(reduced, self.tensors))

    @functools.cached_property
    def hidden_in(self) -> str | None:
        """Name of the operation in which they are computed, if it hides what they are divided by."""
        if self.mean is not None:
            return None
        names = map(_hides, _of_samples([term for loss in self.tensors for term in _terms(loss)]))
        return next((name for name in names if name is not None), None)

    @functools.cached_property
    def are_divided_twice(self) -> bool:
        """Whether they are one sum that two numbers divide, as its words and the steps of an accumulation."""
        terms = _of_samples([term for loss in self.tensors for term in _terms(loss)])
        return len(terms) == 1 and _is_sum(*terms[0][:2]) and len(_quotients(terms[0])) > 1


def counted_mean(losses: list[torch.Tensor]) -> CountedMean | None:
    """Return the mean that the losses of one pass are, if their graph has its divisor; it waits for no device."""
    terms = [term for loss in losses for term in _terms(loss)]
    weights, is_alone = [], True
    for node, name, _ in terms:
        if name.startswith("NllLoss") and node._saved_reduction == _MEAN and not _is_packed(node, "target"):
            weights.append(_weight_of_labels(node))
        elif not _smooths_labels(node, name):
            is_alone = False
    if not weights:
        divisor = _divisor_of(terms) if all(one.numel() == 1 for one in losses) else None
        return None if divisor is None else CountedMean(divisor, is_alone=True)
    weight = weights[0]
    for other in weights[1:]:
        weight = torch.maximum(weight, other.to(weight.device))
    return CountedMean(weight, is_alone)


#: The last operation of a term, its name, and the products and quotients that scale its result.
_Term = tuple[Any, str, tuple[Any, ...]]


def _terms(loss: torch.Tensor) -> Iterator[_Term]:
    """Yield the terms of a loss."""
    waiting: list[tuple[Any, tuple[Any, ...]]] = [(loss.grad_fn, ())]
    seen: set[tuple[Any, tuple[Any, ...]]] = set()
    while waiting and len(seen) < _MOST_OPERATIONS:
        node, scales = one = waiting.pop()
        name = "" if node is None else node.name()
        if one in seen:
            continue
        seen.add(one)
        if name.startswith(_OF_TERMS + _PLAIN):
            waiting += [(term, scales) for term, _ in node.next_functions]
        elif name.startswith(_SCALES) and not _smooths_labels(node, name):
            waiting.append((_before(node), (*scales, node)))
        else:
            yield node, name, (*scales, *_divided_before(node, name))


def _divided_before(node: Any, name: str) -> tuple[Any, ...]:
    """Return the quotient whose elements are summed up, if one number divides all of them: it divides the sum, too."""
    before = _before(node) if name.startswith(_SUMS) else None
    if before is None or not before.name().startswith("DivBackward"):
        return ()
    divisor = _divisor(before)
    return (before,) if divisor is not None and divisor.dim() == 0 else ()


def _divisor_of(terms: list[_Term]) -> torch.Tensor | None:
    """Return the divisor of a loss of sums that one number divides, or of one mean over elements that a mask selects.

    A sum that is divided twice is one of no certain number: that of ``(sum / words) / steps`` would be its words, that
    of a list of images, each a sum over its own boxes, the images.
    """
    found: dict[int, torch.Tensor] = {}
    of_samples = _of_samples(terms)
    for term in of_samples:
        node, name, _ = term
        quotients, divisor = _quotients(term), None
        if not _is_sum(node, name):
            divisor = _number_of_selected(node, name) if len(of_samples) == 1 else None
        elif len(quotients) == 1:
            divisor = _divisor(quotients[0])
        if divisor is None:
            return None
        found[divisor.data_ptr()] = divisor
    if len(found) != 1:
        return None
    number = found.popitem()[1].detach().float().abs().reshape(())
    return torch.nan_to_num(number, nan=1.0, posinf=1.0)


def _of_samples(terms: list[_Term]) -> list[_Term]:
    """Leave out terms of parameters alone: they are the same on all workers."""
    return [term for term in terms if term[0] is not None and not _is_penalty(*term[:2])]


def _quotients(term: _Term) -> list[Any]:
    node, _, scales = term
    return [one for one in (*scales, node) if one.name().startswith("DivBackward")]


#: Methods that are called with the losses of every backward pass. They are held weakly, and leave when they end.
_listeners: list[weakref.WeakMethod[Callable[[PassLosses], None]]] = []


def tell_losses(listener: Callable[[PassLosses], None]) -> None:
    """Let a method be called with the losses of every outermost backward pass, before it: it frees what shows them."""
    if not hasattr(torch.autograd.backward, _TELLS):
        torch.autograd.backward = _telling(torch.autograd.backward)
        setattr(torch.autograd.backward, _TELLS, True)
    _listeners.append(weakref.WeakMethod(listener, _listeners.remove))


def _telling(original: Callable[..., None]) -> Callable[..., None]:
    @untraced
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if _listeners and torch._C._current_graph_task_id() == _NO_PASS:
            losses = PassLosses(tensors)
            for listener in list(_listeners):
                call = listener()
                if call is not None:
                    call(losses)
        original(tensors, *args, **kwargs)

    return backward


def _of_term(node: Any, name: str, samples: int | None) -> Reduced:
    saved = getattr(node, "_saved_reduction", 0)
    if name.startswith("NllLoss") and _is_packed(node, "target"):
        return Reduced.SUM if _SAVED.get(saved) is Reduced.SUM else Reduced.UNKNOWN
    if saved in _SAVED:
        return Reduced.OVER_LABELS if saved == _MEAN and _counts_labels(node) else _SAVED[saved]
    if name.startswith("MeanBackward"):
        return Reduced.MEAN
    return _of_sum(node, samples) if name.startswith("SumBackward") else Reduced.UNKNOWN


def _counts_labels(node: Any) -> bool:
    """Return whether a negative log-likelihood divides by the weights of its labels, or leaves some out."""
    if not node.name().startswith("NllLoss"):
        return False
    return node._saved_weight is not None or bool((node._saved_target == node._saved_ignore_index).any())


def _of_sum(node: Any, samples: int | None) -> Reduced:
    """Tell a sum over samples from one over the terms of a loss."""
    before = node.next_functions[0][0]
    is_of_terms = before is not None and before.name().startswith(("StackBackward", "CatBackward"))
    sizes = node._saved_self_sym_sizes
    is_over_samples = sizes and sizes[0] == samples and not is_of_terms and not _is_parameter(before)
    return Reduced.SUM if is_over_samples else Reduced.UNKNOWN


def _is_parameter(node: Any) -> bool:
    """Return whether a node is a leaf, or elements of one: a penalty on weights."""
    while node is not None and node.name().startswith(_OF_ELEMENTS):
        before = {one for one, _ in node.next_functions if one is not None}
        node = before.pop() if len(before) == 1 else None
    return node is not None and node.name().endswith("AccumulateGrad")


def _is_penalty(node: Any, name: str) -> bool:
    """Return whether a term is made of a parameter alone."""
    return _is_parameter(_before(node) if name.startswith(("Sum", "Mean", "Norm", "LinalgVectorNorm")) else node)


def _hides(term: _Term) -> str | None:
    """Return the name of the operation that computes a term, if it hides by which number that is divided."""
    node, name, _ = term
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        own = name.removesuffix("Backward")
        return _HIDING.get(own, f"the autograd function {own}")
    is_packed = name.startswith("NllLoss") and _is_packed(node, "target")
    return _PACKED if is_packed or any(_is_packed(one, "other") for one in _quotients(term)) else None


def _is_sum(node: Any, name: str) -> bool:
    """Return whether a term is a sum of elements that are no means, or one of smoothed labels."""
    if getattr(node, "_saved_reduction", 0) in _SAVED:
        return _SAVED[node._saved_reduction] is Reduced.SUM
    if name.startswith(_SUMS):
        return not any(one.startswith(("Mean", "Stack", "Cat", "Norm", "LinalgVectorNorm")) for one in _elements(node))
    return _smooths_labels(node, name)


def _divisor(node: Any) -> torch.Tensor | None:
    """Return the number that a quotient divides by; None: it is learned, or no number."""
    is_learned = any(one is not None for one, _ in node.next_functions[1:])
    if is_learned or _is_packed(node, "other"):
        return None
    other = node._saved_other
    if not isinstance(other, torch.Tensor):
        return _on_cpu(other)
    return other if other.numel() == 1 and not other.is_complex() else None


def _number_of_selected(node: Any, name: str) -> torch.Tensor | None:
    """Return how many elements a term is the mean of, if a mask has selected them."""
    if name.startswith("MeanBackward"):
        sizes = node._saved_self_sym_sizes
    elif getattr(node, "_saved_reduction", 0) == _MEAN and not _is_packed(node, "self"):
        sizes = node._saved_self.shape
    else:
        return None
    selects = any(one.startswith(("MaskedSelectBackward", "IndexBackward[mask]")) for one in _elements(node))
    return _on_cpu(math.prod(sizes)) if selects else None


def _on_cpu(number: float) -> torch.Tensor:
    return torch.tensor(float(number), dtype=torch.float32, device="cpu")


def _elements(node: Any) -> Iterator[str]:
    """Yield the names of the operations that made the elements of a sum or a mean, back to those that mix some."""
    waiting, seen = [node], 0
    while waiting and seen < _MOST_ELEMENTWISE:
        seen += 1
        for one, _ in waiting.pop(0).next_functions:
            name = "" if one is None else one.name()
            if name.startswith("IndexBackward") and _selects_by_mask(one):
                name = "IndexBackward[mask]"
            yield name
            if name.startswith(_ELEMENTWISE):
                waiting.append(one)


def _selects_by_mask(node: Any) -> bool:
    """Return whether a mask, not numbers, has chosen elements."""
    is_read = not _is_packed(node, "indices")
    return is_read and any(one is not None and one.dtype == torch.bool for one in node._saved_indices)


def _makes_small(node: Any) -> bool:
    """Return whether a product or a quotient may make a mean of a sum: a scale, as that of ``GradScaler``, does not."""
    number = None if node.name().startswith("Div") else _number_of(node)
    return number is None or abs(number) <= _SMALL


def _number_of(node: Any) -> float | None:
    """Return the number that a loss is multiplied with or divided by; None: it is no number, or learned."""
    names = [name for name in ("other", "self") if not _is_packed(node, name)]
    values = [getattr(node, f"_saved_{name}", None) for name in names]
    numbers = [one for one in values if one is not None]
    if len(numbers) != 1 or (isinstance(numbers[0], torch.Tensor) and numbers[0].numel() > 1):
        return None
    return float(numbers[0])


def _is_packed(node: Any, name: str) -> bool:
    """Return whether a saved tensor is somewhere else: that of a checkpointed segment would be computed once more."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    some = saved if isinstance(saved, list | tuple) else [saved]
    return any(getattr(one, "unpack_hook", None) is not None for one in some)


def _before(node: Any) -> Any:
    """Return the operation whose result a plain one, a product or a quotient has changed."""
    return next((one for one, _ in node.next_functions if one is not None), None)


def _smooths_labels(node: Any, name: str) -> bool:
    """Return whether a term is that of smoothed labels, which is divided by the same number as its cross entropy."""
    for wanted in ("DivBackward", "SumBackward", "MaskedFillBackward", "NegBackward"):
        if not name.startswith(wanted):
            return False
        node = _before(node)
        name = "" if node is None else node.name()
    return name.startswith("SumBackward")


def _weight_of_labels(node: Any) -> torch.Tensor:
    total: torch.Tensor = node._saved_total_weight.detach()
    if node._saved_weight is None and total.element_size() < torch.float32.itemsize:  # it may be rounded
        total = (node._saved_target != node._saved_ignore_index).sum()
    return total
