"""``torch.compile`` traces nothing of what it shall leave alone."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from paceline.torch_hooks.untraced import apart, untraced

#: What the compiler traced, as numbers of operations.
Traces = list[list[str]]


def compiled(function: Any) -> tuple[Any, Traces]:
    traces: Traces = []

    def note(module: torch.fx.GraphModule, inputs: object) -> Any:
        traces.append([node.name for node in module.graph.nodes if node.op.startswith("call")])
        return module

    torch.compiler.reset()
    return torch.compile(function, backend=note), traces


class Seen:
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def note(self, param: torch.Tensor) -> None:
        self.seen.append((param * 2).sin())


class Traced(Seen):
    def hook(self, param: torch.Tensor) -> None:
        self.note(param)


@untraced
class Untraced(Seen):
    def hook(self, param: torch.Tensor) -> None:
        self.note(param)


@pytest.mark.parametrize("kind", [Untraced, Traced])
def test_hooks_of_a_backward_pass_are_not_traced(
    kind: type[Traced | Untraced], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ours may have taken its place, which is not traced, with all that it calls.
    monkeypatch.setattr(torch.autograd, "backward", inspect.unwrap(torch.autograd.backward))

    def step(inputs: torch.Tensor) -> None:
        (weight * inputs).sum().backward()

    hooks = kind()
    weight = torch.nn.Parameter(torch.ones(3))
    weight.register_post_accumulate_grad_hook(hooks.hook)  # type: ignore[no-untyped-call]
    run, traces = compiled(step)
    run(torch.ones(3))
    assert torch.equal(hooks.seen[0], torch.full((3,), 2.0).sin())
    assert any("sin" in trace for trace in traces) is (kind is Traced)


@pytest.mark.parametrize("hides", [False, True])
def test_functions_that_run_apart_are_not_traced(hides: bool) -> None:
    def plain(tensor: torch.Tensor) -> torch.Tensor:
        """Its name stays."""
        return tensor.sin()

    call = apart(plain) if hides else plain
    run, traces = compiled(lambda tensor: call(tensor + 1) + 1)
    assert torch.equal(run(torch.ones(3)), torch.full((3,), 2.0).sin() + 1)
    assert any("sin" in trace for trace in traces) is not hides
    assert call.__doc__ == "Its name stays."
