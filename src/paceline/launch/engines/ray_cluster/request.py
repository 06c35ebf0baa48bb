"""What the launcher asks the driver for."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class PlacementRequest:
    """A placement group, and where to serve the remote shells."""

    job: str
    address: str
    """Of the cluster; empty: the one of this machine."""
    socket: str
    """Path of the unix socket."""
    strategy: str
    wait_s: float
    """How long the cluster may take to find room."""
    resources: list[dict[str, float]]
    labels: list[dict[str, str]]

    @property
    def text(self) -> str:
        """The request as a line."""
        return json.dumps(asdict(self))
