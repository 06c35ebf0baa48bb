"""Gradient compression: Horovod's compressors, and paceline's codecs.

With a codec every rank gathers all payloads, and adds up the gradients in them. Each rank receives n - 1 payloads, so
this pays while a payload is less than 2 / n of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.collectives.operations import Average, Sum, allgather, synchronize
from paceline.collectives.process_sets import ProcessSet, members_of
from paceline.compression import make


class Compressor:
    """Interface of compressors: two static methods."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the compressed tensor, and the context that decompressing needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor, decompressed."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating point tensors as float16."""

    _dtype = torch.float16

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor in half precision, if it is of a floating point type."""
        return (tensor.to(cls._dtype) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its own type."""
        return tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Sends floating point tensors as bfloat16, which has the range of float32."""

    _dtype = torch.bfloat16


class Compression:
    """The compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


class CodecCompression:
    """Names a codec of :mod:`paceline.compression`, with its parameters: ``{"type": "2bit", "threshold": 0.5}``.

    Args:
        params: as for :func:`paceline.compression.make`.

    Raises:
        ValueError: no such codec, or wrong parameters.
    """

    def __init__(self, params: Any) -> None:
        codec = make(params)
        if codec is None:
            raise ValueError("Compression.codec needs a codec; use Compression.none for none")
        self.codec = codec

    def compress(self, tensor: torch.Tensor) -> Any:
        """Refuse.

        Raises:
            ValueError: always: codecs remember the rest of each gradient that they have not sent.
        """
        raise ValueError(f"the codec {self.codec.name!r} works in DistributedOptimizer only")

    decompress = compress


class CodecReduction:
    """Reduces one gradient, step by step."""

    def __init__(self, compression: CodecCompression, numel: int) -> None:
        self._codec = compression.codec
        self._state = self._codec.new_state(numel)
        self._round = 0

    def start(self, gradient: torch.Tensor, name: str, op: int, process_set: ProcessSet) -> Callable[[], None]:
        """Send a gradient; returns a function that waits and overwrites it with the result.

        Raises:
            ValueError: an operation that codecs cannot do.
        """
        if op not in (Average, Sum):
            raise ValueError("a codec can average or sum")
        flat = gradient.detach().reshape(-1).cpu()
        payload = self._codec.encode(flat, self._state, round=self._round)
        self._round += 1
        handle = allgather([torch.from_numpy(payload)], f"{name}.codec", process_set)
        size = len(members_of(process_set)[1])  # of it, ranks that have joined send nothing

        def wait() -> None:
            total = torch.zeros(flat.numel(), dtype=torch.float32, device="cpu")
            for part in synchronize(handle).view(-1, len(payload)).unbind():
                self._codec.decode_add(part.numpy(), total, alpha=1.0 / size if op == Average else 1.0)
            with torch.no_grad():
                gradient.copy_(total.view(gradient.shape))

        return wait
