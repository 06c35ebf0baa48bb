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
| a cross entropy in a checkpointed segment with ``use_reentrant=False``; anything else | unknown |
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


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

#: What the terms of a sum make of it.
_STRONGEST = (Reduced.SUM, Reduced.OVER_LABELS, Reduced.MEAN)

_OF_TERMS = ("AddBackward", "SubBackward")
_SCALES = ("MulBackward", "DivBackward")
_OF_ELEMENTS = ("PowBackward", "AbsBackward", "MulBackward")
_PLAIN = ("ToCopyBackward", "CloneBackward", "SqueezeBackward", "NegBackward", "ViewBackward", "CppFunction")


def reduced(loss: torch.Tensor, samples: int | None = None) -> Reduced:
    """Return how a loss is made of those of its samples. Their number tells a sum by hand over them from others."""
    found: set[Reduced] = set()
    for node, name, is_small in _terms(loss, _makes_small):
        kind = _of_term(node, name, samples)
        found.add(Reduced.UNKNOWN if kind is Reduced.SUM and is_small else kind)
    return next((one for one in _STRONGEST if one in found), Reduced.UNKNOWN)


@dataclass(frozen=True)
class LabelMean:
    """A loss with a mean over labels, as that of a cross entropy.

    Attributes:
        weight: the mean is a sum divided by it: the labels that count, or the sum of their classes' weights. Shape
            ``()``, on the device of the loss. Of several terms: the largest one's, as all have as many labels, or
            terms of padding fewer.
        is_alone: the loss has no terms that are no means over labels.
    """

    weight: torch.Tensor
    is_alone: bool


class PassLosses:
    """The losses of one backward pass. They are read once, for all listeners."""

    def __init__(self, tensors: Any) -> None:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self.tensors = [one for one in given if isinstance(one, torch.Tensor)]

    @functools.cached_property
    def labels(self) -> LabelMean | None:
        """Their mean over labels."""
        return label_mean(self.tensors)

    @functools.cached_property
    def kinds(self) -> set[Reduced]:
        """How they are made."""
        return set(map(reduced, self.tensors))


def label_mean(losses: list[torch.Tensor]) -> LabelMean | None:
    """Return the mean over labels in the losses of one pass; None: they have none. It does not wait for a device."""
    weights, is_alone = [], True
    for loss in losses:
        for node, name, _ in _terms(loss, lambda _: False):
            if name.startswith("NllLoss") and node._saved_reduction == _MEAN and not _is_packed(node, "target"):
                weights.append(_weight_of_labels(node))
            elif not _smooths_labels(node, name):
                is_alone = False
    if not weights:
        return None
    weight = weights[0]
    for other in weights[1:]:
        weight = torch.maximum(weight, other.to(weight.device))
    return LabelMean(weight, is_alone)


def _terms(loss: torch.Tensor, makes_small: Callable[[Any], bool]) -> Iterator[tuple[Any, str, bool]]:
    """Yield the last operations of a loss's terms, with their names, and whether one of their factors is small."""
    waiting: list[tuple[Any, bool]] = [(loss.grad_fn, False)]
    seen: set[tuple[Any, bool]] = set()
    while waiting and len(seen) < _MOST_OPERATIONS:
        node, is_small = one = waiting.pop()
        name = "" if node is None else node.name()
        if one in seen:
            continue
        seen.add(one)
        if name.startswith(_OF_TERMS + _PLAIN):
            waiting += [(term, is_small) for term, _ in node.next_functions]
        elif name.startswith(_SCALES) and not _smooths_labels(node, name):
            waiting.append((_before(node), is_small or makes_small(node)))
        else:
            yield node, name, is_small


#: Methods that are called with the losses of every backward pass. They are held weakly, and leave when they end.
_listeners: list[weakref.WeakMethod[Callable[[PassLosses], None]]] = []


def tell_losses(listener: Callable[[PassLosses], None]) -> None:
    """Let a method be called with the losses of every outermost backward pass, before it: it frees what shows them."""
    if not hasattr(torch.autograd.backward, _TELLS):
        torch.autograd.backward = _telling(torch.autograd.backward)
        setattr(torch.autograd.backward, _TELLS, True)
    _listeners.append(weakref.WeakMethod(listener, _listeners.remove))


def _telling(original: Callable[..., None]) -> Callable[..., None]:
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
    return getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None) is not None


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
