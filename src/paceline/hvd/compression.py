"""Gradient compression under Horovod's interface."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Interface of compressors: two static methods."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the compressed tensor, and what is needed to decompress it."""
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

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor as float16, if it is of a floating point type."""
        return (tensor.half() if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its own type."""
        return tensor.to(ctx)


class BF16Compressor(FP16Compressor):
    """Sends floating point tensors as bfloat16, which has the range of float32."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor as bfloat16, if it is of a floating point type."""
        return (tensor.bfloat16() if tensor.dtype.is_floating_point else tensor), tensor.dtype


class Compression:
    """The compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
