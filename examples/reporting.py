"""Accuracy of a network, and the report of an example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import paceline


@torch.no_grad()
def accuracy(net: nn.Module, test: paceline.data.ArrayDataset, device: torch.device) -> float:
    """Return the share of test samples that a network on ``device`` recognises."""
    loader = paceline.data.batches(test, batch_size=500)
    return sum(int((net(images.to(device)).argmax(1).cpu() == labels).sum()) for images, labels in loader) / len(test)


def report(console: Console, result: dict[str, Any], file: Path | None) -> None:
    """Print a table of figures and counters, and write them to a JSON file."""
    table = Table(title=f"Trained {result['network']}", show_header=False)
    for name, value in {**result, **result["stats"], "accuracy": result["accuracy"][-1]}.items():
        if name != "stats":
            table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    if file:
        file.write_text(json.dumps(result, indent=2))
