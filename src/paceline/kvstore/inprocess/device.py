"""The ``device`` store: merges and updates on the devices that compute the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.keys import Key
from paceline.kvstore.inprocess.store import InProcessStore


class DeviceStore(InProcessStore):
    """Sums gradients on the devices, by NCCL among distinct GPUs, and updates the weights there (MXNet's ``device``).

    Every key is merged on one of the devices that push it. Keys are dealt out by size, the largest first, each to the
    device that has least so far, so that merging and updating is spread over the devices.
    """

    _TYPE = "device"

    def __init__(self, store_type: str = "") -> None:
        super().__init__(store_type)
        self._devices: dict[Key, torch.device] = {}
        self._load: dict[torch.device, int] = {}

    def devices(self) -> dict[Key, torch.device]:
        """Return on which device every key pushed so far is merged and updated."""
        return dict(self._devices)

    def close(self) -> None:
        """Forget all values, states, buffers and placements."""
        super().close()
        self._devices, self._load = {}, {}

    def _place(self, values: Mapping[Key, Sequence[torch.Tensor]]) -> None:
        new = [key for key in values if key not in self._devices]
        for key in sorted(new, key=lambda one: -_size(self._values[one])):
            self._choose_device(key, list(dict.fromkeys(one.device for one in values[key])))

    def _choose_device(self, key: Key, devices: Sequence[torch.device]) -> None:
        chosen = min(devices, key=lambda device: self._load.get(device, 0))
        self._values[key] = value = self._values[key].to(chosen)
        self._devices[key] = chosen
        self._load[chosen] = self._load.get(chosen, 0) + _size(value)


def _size(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()
