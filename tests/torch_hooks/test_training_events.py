"""Events of loops that know nothing of paceline."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.torch_hooks.training_events import TrainingEvents


class Heard:
    def __init__(self) -> None:
        self.events: list[str] = []

    def loader_begins(self, iterator: Any) -> None:
        self.events.append(f"loader {len(iterator)}")

    def pass_begins(self, losses: Any) -> None:
        assert losses.numel() == 1
        self.events.append("pass")

    def stepped(self) -> None:
        self.events.append("step")


def train() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs in DataLoader(torch.ones(4, 2), batch_size=2):
        model(inputs).mean().backward()
        optimizer.step()


def test_loaders_passes_and_steps_are_told_until_the_end_and_nothing_stays_replaced() -> None:
    before = torch.autograd.backward, DataLoader.__iter__
    heard = Heard()
    events = TrainingEvents(heard)
    train()
    assert heard.events == ["loader 2", "pass", "step", "pass", "step"]
    events.close()
    assert (torch.autograd.backward, DataLoader.__iter__) == before
    train()
    assert len(heard.events) == 5


def test_replacements_under_those_of_others_do_nothing_after_the_end() -> None:
    before = torch.autograd.backward
    heard = Heard()
    inner, outer = TrainingEvents(heard), TrainingEvents(Heard())
    inner.close()
    train()
    assert heard.events == []
    outer.close()
    assert torch.autograd.backward is not before  # that of the inner one, which calls it
    torch.autograd.backward = before


def test_listener_may_stop_listening_in_a_step_that_others_watch_too() -> None:
    heard = Heard()
    events = TrainingEvents(heard)
    heard.stepped = events.close  # type: ignore[method-assign]
    after = TrainingEvents(Heard())
    train()
    assert heard.events == ["loader 2", "pass"]
    after.close()
