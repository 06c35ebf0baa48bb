"""The state of a sender for each bucket."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.compression.buffers import Floats, float32_parts

#: Name of a part of a key's saved state: the values minus those a worker knows, where pulls are compressed.
UNSENT = "unsent"


class CodecState:
    """The state of a sender for one bucket, from round to round. One thread uses it at a time.

    Attributes:
        numel: elements of the bucket.
        residual: flat float32, the part that was not sent yet (error feedback, Seide et al. 2014), or None.
        extra: further tensors of the codec, by name.
        dropped: how many non-finite elements were left out so far.
    """

    def __init__(self, numel: int, residual: torch.Tensor | None = None, **extra: torch.Tensor) -> None:
        self.numel = numel
        self.residual = residual
        self.extra = extra
        self.dropped = 0

    def residual_array(self) -> Floats:
        """Return the residual, which must exist, as an array that shares its memory."""
        assert self.residual is not None
        residual: Floats = self.residual.numpy()
        return residual

    def accumulate(self, grad: torch.Tensor) -> int:
        """Add a gradient to the residual; non-finite sums become 0. Returns how many did."""
        from paceline.compression.kernels import accumulate

        residual = self.residual_array()
        parts = float32_parts(grad)
        return sum(accumulate.accumulate(part, residual[start : start + len(part)]) for start, part in parts)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors to save with the optimizer's state (not copies)."""
        residual = {} if self.residual is None else {"residual": self.residual}
        return residual | self.extra

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy saved tensors back.

        Raises:
            ValueError: names, shapes or dtypes differ from :meth:`state_tensors`; the state is unchanged then.
        """
        own = self.state_tensors()
        if own.keys() != tensors.keys():
            raise ValueError(f"this codec's state has tensors {sorted(own)}, not {sorted(tensors)}")
        for name, tensor in own.items():
            saved = tensors[name]
            if saved.shape != tensor.shape or saved.dtype != tensor.dtype:
                raise ValueError(
                    f"saved state {name!r} is {saved.dtype} {tuple(saved.shape)}, "
                    f"but this bucket needs {tensor.dtype} {tuple(tensor.shape)}"
                )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
