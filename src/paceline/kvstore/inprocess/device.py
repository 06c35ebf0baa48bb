"""The ``device`` store: merges and updates on the devices that compute the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.keys import Key
from paceline.kvstore.inprocess.store import InProcessStore


class DeviceStore(InProcessStore):
    """Sums gradients on the devices, by NCCL among distinct GPUs, and updates the weights there (MXNet's ``device``).

    Every key is merged on one of the devices that push it. Keys are assigned by size, the largest first, each to the
    device with the smallest load. This spreads merging and updating over the devices.
    """

    _TYPE = "device"

    def __init__(self, store_type: str = "") -> None:
        super().__init__(store_type)
        self._key_devices: dict[Key, torch.device] = {}
        self._load: dict[torch.device, int] = {}

    def key_devices(self) -> dict[Key, torch.device]:
        """Return the device that merges and updates each key that was pushed so far."""
        return dict(self._key_devices)

    def close(self) -> None:
        """Release all values, states, buffers and placements."""
        super().close()
        self._key_devices, self._load = {}, {}

    def _place(self, values: Mapping[Key, Sequence[torch.Tensor]]) -> None:
        new = [key for key in values if key not in self._key_devices]
        for key in sorted(new, key=lambda one: -_size(self._values[one])):
            self._place_key(key, list(dict.fromkeys(one.device for one in values[key])))

    def _place_key(self, key: Key, devices: Sequence[torch.device]) -> None:
        device = min(devices, key=lambda device: self._load.get(device, 0))
        self._values[key] = value = self._values[key].to(device)
        self._key_devices[key] = device
        self._load[device] = self._load.get(device, 0) + _size(value)


def _size(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()
