"""Sums the pushes of several devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.cuda import comm

from paceline.layout.arguments import COMPRESSIBLE
from paceline.layout.keys import Key
from paceline.layout.tensors import sum_into
from paceline.updaters.rows import sum_rows

if TYPE_CHECKING:
    from paceline.compression import Codec, CodecState, Compression

#: Name of the number of pushes among the tensors of a codec's state.
_ROUND = "round"


@dataclass
class _Sender:
    """One device's pushes of a key, compressed."""

    state: CodecState
    round: int = 0


class DeviceSums:
    """Sums device values into one buffer per key, compressing them first when a codec is set.

    The buffers are reused by later pushes: one per key, as large as the key.
    """

    def __init__(self) -> None:
        self._buffers: dict[Key, torch.Tensor] = {}
        self._codec: Codec | None = None
        self._senders: dict[tuple[Key, int], _Sender] = {}

    def set_codec(self, params: Compression) -> None:
        """Compress every device's dense values of 16 or 32 bits from now on.

        Raises:
            ValueError: unknown settings, or a codec for the pull leg.
        """
        from paceline import compression  # the import compiles kernels, so only do it if needed

        codecs = compression.by_leg(params)
        if "pull" in codecs:
            raise ValueError(
                "the values of this store are copied within one process and never sent, so there is nothing to "
                "compress on the pull leg; use leg='push', or a distributed store"
            )
        self._codec = codecs.get("push")

    @property
    def keeps_residuals(self) -> bool:
        """Whether the codec keeps residuals: it adds the rest that it did not send to the next push."""
        return self._codec is not None and self._codec.uses_residual

    def codec_states(self) -> dict[Key, dict[str, torch.Tensor]]:
        """Return copies of the codec's state by key: ``<name> <device>`` and ``round <device>``."""
        states: dict[Key, dict[str, torch.Tensor]] = {}
        for (key, index), sender in self._senders.items():
            tensors = {f"{name} {index}": tensor.clone() for name, tensor in sender.state.state_tensors().items()}
            states.setdefault(key, {}).update(tensors | {f"{_ROUND} {index}": torch.tensor(sender.round, device="cpu")})
        return states

    def set_codec_states(self, states: Mapping[Key, Mapping[str, torch.Tensor]]) -> None:
        """Set states that :meth:`codec_states` returned. All other state is reset.

        Raises:
            ValueError: the states are of another codec. Then no state is changed.
        """
        grouped: dict[tuple[Key, int], dict[str, torch.Tensor]] = {}
        for key, tensors in states.items():
            for name, tensor in tensors.items():
                what, _, index = name.rpartition(" ")
                grouped.setdefault((key, int(index)), {})[what] = tensor
        self._senders = {where: self._loaded(tensors) for where, tensors in grouped.items()}

    def _loaded(self, tensors: Mapping[str, torch.Tensor]) -> _Sender:
        if self._codec is None or not self.keeps_residuals:
            raise ValueError("codec states were given, but there is no codec that keeps states")
        if not {"residual", _ROUND} <= tensors.keys():
            raise ValueError(f"these are not codec states: {', '.join(tensors)} instead of a residual and a round")
        state = self._codec.new_state(tensors["residual"].numel())
        state.load({name: tensor for name, tensor in tensors.items() if name != _ROUND})
        return _Sender(state, int(tensors[_ROUND]))

    def merge(self, key: Key, values: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the sum of ``values`` on ``device``. It is memory of this object, never a caller's tensor.

        Sparse values give a sparse sum; sparse and dense values give a dense one.
        """
        if all(one.is_sparse for one in values):
            return sum_rows(values, device)
        dense = [one.detach().to_dense() if one.is_sparse else one.detach() for one in values]
        if self._codec is not None and dense[0].dtype in COMPRESSIBLE:
            dense = [self._compressed(key, index, one) for index, one in enumerate(dense)]
        return self._sum(key, dense, device)

    def exchange(self, key: Key, value: torch.Tensor) -> torch.Tensor:
        """Return the buffer of ``key`` and keep ``value`` instead. So a merged value is stored without a copy."""
        merged = self._buffers[key]
        self._buffers[key] = value
        return merged

    def _sum(self, key: Key, values: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        if _distinct_gpus(values) and device in [one.device for one in values]:
            self._buffers[key] = comm.reduce_add(list(values), destination=device.index)  # type: ignore[no-untyped-call]
            return self._buffers[key]
        buffer = self._buffer(key, values[0], device)
        sum_into(buffer, values)
        return buffer

    def _buffer(self, key: Key, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        known = self._buffers.get(key)
        if known is None or known.device != device or known.dtype != like.dtype:
            known = self._buffers[key] = torch.empty(like.shape, dtype=like.dtype, device=device)
        return known

    def _compressed(self, key: Key, index: int, value: torch.Tensor) -> torch.Tensor:
        """Return the encoded and decoded value; the residual is kept for this key and device."""
        assert self._codec is not None
        flat = value.reshape(-1).cpu()
        sender = self._senders.get((key, index))
        if sender is None:
            sender = self._senders[key, index] = _Sender(self._codec.new_state(flat.numel()))
        payload = self._codec.encode(flat, sender.state, round=sender.round)
        sender.round += 1
        out = torch.empty(flat.numel(), dtype=torch.float32, device="cpu")
        self._codec.decode(payload, out)
        return out.view(value.shape).to(value.dtype)


def sum_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of device values as a new tensor on the first device: rows if all of them are, else dense."""
    first = values[0].detach()
    if all(one.is_sparse for one in values):
        return sum_rows(values, first.device)
    total = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    sum_into(total, [one.detach().to_dense() if one.is_sparse else one.detach() for one in values])
    return total


def _distinct_gpus(values: Sequence[torch.Tensor]) -> bool:
    devices = {one.device for one in values}
    return len(values) > 1 and len(devices) == len(values) and all(one.type == "cuda" for one in devices)
