"""The base of gradient codecs, the state of their senders, and the checks that all codecs share."""

from __future__ import annotations

import abc
import inspect
import logging
import math
from collections.abc import Mapping
from typing import ClassVar, TypeAlias

import numpy as np
import torch

from paceline.compression.buffers import GRADIENT_DTYPES, Bytes, Floats, Payload, check_flat, float32_parts
from paceline.errors import ProtocolError

logger = logging.getLogger(__name__)

Params: TypeAlias = dict[str, int | float | str | bool]
#: Name of a part of a key's saved state: the values minus those a worker knows, where pulls are compressed.
UNSENT = "unsent"


class CodecState:
    """The state of a sender for one bucket, from round to round. One thread uses it at a time.

    Attributes:
        numel: elements of the bucket.
        residual: flat float32, the rest that was not sent yet (error feedback, Seide et al. 2014), or None.
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
            ValueError: names, shapes or dtypes differ from :meth:`state_tensors`; no state is changed then.
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


class Codec(abc.ABC):
    """Turns a bucket, a flat contiguous CPU tensor, into bytes for the wire and back.

    A codec holds nothing but its parameters, so that one instance serves any number of buckets and threads; the
    sender's memory is the :class:`CodecState` of each bucket. Little-endian machines only.

    A codec of your own sets ``name``, takes its parameters as arguments of ``__init__``, keeps them as attributes of
    the same names, and defines ``encoded_nbytes`` and the methods whose names begin with one underscore, which need
    not check their arguments again. Make it known with ``@paceline.register("codec")``.
    """

    name: ClassVar[str]
    #: Whether the part that is not sent in one round is added to the next (error feedback at the sender).
    uses_residual: ClassVar[bool] = True

    def params(self) -> Params:
        """Return the settings with which :func:`paceline.compression.make` builds this codec again."""
        values = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return {"type": self.name} | {name: value for name, value in values.items() if value is not None}

    @abc.abstractmethod
    def encoded_nbytes(self, numel: int) -> int:
        """Return the exact size in bytes of the payload of a bucket of ``numel`` elements."""

    def new_state(self, numel: int) -> CodecState:
        """Return the state of a sender for a bucket of ``numel`` elements; the residual starts at 0."""
        return CodecState(numel, torch.zeros(numel, dtype=torch.float32, device="cpu") if self.uses_residual else None)

    def encode(self, grad: torch.Tensor, state: CodecState, *, round: int = 0, seed: int = 0) -> Bytes:
        """Encode one round's gradient of one bucket.

        Non-finite elements of gradient plus residual count as 0 where there is a residual, which they would spoil
        for ever; ``state.dropped`` counts them.

        Args:
            grad: flat contiguous CPU tensor, float32, float16 or bfloat16. Never changed.
            state: from :meth:`new_state`, for this bucket. Updated in place.
            round: number of this push of the bucket.
            seed: the same on every worker; with ``round`` it determines all random choices.

        Returns:
            A new uint8 array of :meth:`encoded_nbytes` bytes.

        Raises:
            TypeError: ``grad`` is of another dtype.
            ValueError: ``grad`` is not flat, contiguous and on the CPU, ``state`` belongs to another bucket or
                codec, or ``round`` or ``seed`` is not in 0 to 2**63 - 1.
        """
        self._check_gradient(grad, state)
        if not (0 <= round < 2**63 and 0 <= seed < 2**63):
            raise ValueError(f"round {round} and seed {seed} must be in 0 to 2**63 - 1")
        payload: Bytes = np.empty(self.encoded_nbytes(grad.numel()), np.uint8)
        if grad.numel():
            self._note_dropped(state, self._encode(grad.detach(), state, payload, round, seed), round)
        return payload

    def decode(self, payload: Payload, out: torch.Tensor) -> None:
        """Overwrite ``out`` with the values of ``payload``.

        Args:
            payload: a result of :meth:`encode` for as many elements as ``out`` has.
            out: flat contiguous float32 CPU tensor.

        Raises:
            ProtocolError: the payload has a wrong size or impossible content; ``out`` is unchanged.
            TypeError: ``out`` is not float32.
            ValueError: ``out`` is not flat, contiguous and on the CPU.
        """
        raw = self._accepted(payload, out)
        if len(raw):
            self._decode(raw, out.detach())

    def decode_add(self, payload: Payload, out: torch.Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the values of ``payload`` to ``out``, in one pass.

        Args:
            payload: as for :meth:`decode`.
            out: as for :meth:`decode`.
            alpha: finite factor, used as float32.

        Raises:
            ProtocolError: as for :meth:`decode`.
            TypeError: as for :meth:`decode`.
            ValueError: as for :meth:`decode`, or ``alpha`` is not finite.
        """
        if not math.isfinite(alpha):
            raise ValueError(f"alpha is {alpha}; it must be finite")
        raw = self._accepted(payload, out)
        if len(raw):
            self._decode_add(raw, out.detach(), float(alpha))

    def check(self, payload: Payload, numel: int) -> Bytes:
        """Return a payload as an array, unless no sender makes it of a bucket of ``numel`` elements.

        Raises:
            ProtocolError: a wrong size or impossible content.
        """
        raw = np.frombuffer(payload, np.uint8)
        expected = self.encoded_nbytes(numel)
        if len(raw) != expected:
            raise self._refuse(f"it has {len(raw)} bytes where {expected} are expected", numel)
        if len(raw):
            self._check_content(raw, numel)
        return raw

    @abc.abstractmethod
    def _encode(self, grad: torch.Tensor, state: CodecState, payload: Bytes, round: int, seed: int) -> int:
        """Fill ``payload`` from a gradient of at least one element; return how many elements were dropped."""

    def _decode(self, payload: Bytes, out: torch.Tensor) -> None:
        """Overwrite ``out`` from a checked payload."""
        out.zero_()
        self._decode_add(payload, out, 1.0)

    @abc.abstractmethod
    def _decode_add(self, payload: Bytes, out: torch.Tensor, alpha: float) -> None:
        """Add ``alpha`` times a checked payload to ``out``."""

    def _check_content(self, payload: Bytes, numel: int) -> None:  # noqa: B027 (most payloads cannot be wrong)
        """Raise ProtocolError (see :meth:`_refuse`) when a payload of the right size cannot come from a sender."""

    def _refuse(self, what: str, numel: int) -> ProtocolError:
        return ProtocolError(
            f"{self.name} payload refused: {what}; it is for {numel} elements with {self.params()}. "
            "Check that sender and receiver use the same compression settings and the same placement of keys"
        )

    def _accepted(self, payload: Payload, out: torch.Tensor) -> Bytes:
        check_flat(out, "out")
        if out.dtype != torch.float32:
            raise TypeError(f"out is {out.dtype}; codecs decode to torch.float32")
        return self.check(payload, out.numel())

    def _check_gradient(self, grad: torch.Tensor, state: CodecState) -> None:
        check_flat(grad, "grad")
        if grad.dtype not in GRADIENT_DTYPES:
            raise TypeError(f"grad is {grad.dtype}; codecs take float32, float16 and bfloat16, so convert it first")
        if state.numel != grad.numel():
            raise ValueError(f"grad has {grad.numel()} elements but its state is for {state.numel}")
        if self.uses_residual and state.residual is None:
            raise ValueError(f"the state has no residual, which {self.name} needs: take it from this codec's new_state")

    def _note_dropped(self, state: CodecState, dropped: int, round: int) -> None:
        if dropped and not state.dropped:
            logger.warning(
                "%s left %d non-finite elements out of a bucket of %d in round %d and sends 0 for them; "
                "a loss scale or a learning rate is too high (further cases are only counted)",
                self.name, dropped, state.numel, round,
            )  # fmt: skip
        state.dropped += dropped


def check_number(
    codec: str, field: str, value: object, low: float, high: float, kind: type[int] | type[float] = float
) -> None:
    """Raise ValueError unless a codec's parameter is of a kind (not bool) and in ``low`` to ``high``, both included."""
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not low <= value <= high:
        wanted = f"an integer in {low} to {high}" if kind is int else f"a number in {low:g} to {high:g}"
        raise ValueError(f"{field} of codec {codec!r} is {value!r}; it must be {wanted}")
