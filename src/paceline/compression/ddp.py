"""The codecs in PyTorch's DistributedDataParallel.

state = DDPState({"type": "2bit", "threshold": 0.1})
ddp_model.register_comm_hook(state, ddp_hook)
"""

# No ``from __future__ import annotations``: DDP compares the hook's annotations with classes, not with strings.

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from paceline.compression.base import Codec, CodecState
from paceline.compression.codec_registry import make

#: (identity, elements) of every parameter of a bucket, in its order.
_Layout: TypeAlias = tuple[tuple[int, int], ...]


@dataclass
class _Bucket:
    layout: _Layout
    state: CodecState
    round: int = 0


class DDPState:
    """The state of :func:`ddp_hook` between steps: the codec and, for every bucket of DDP, the sender's state.

    Args:
        params: compression settings as for :func:`paceline.compression.make`, the same on every rank; None averages
            without compression.
        process_group: a group that takes CPU tensors (gloo), or None for the default group.
        seed: determines the random choices of codecs that make any, the same on every rank.

    Attributes:
        codec: the codec, or None.
        sent_bytes: bytes that this rank has sent so far, payloads only.

    Raises:
        ValueError: unusable compression settings.
    """

    def __init__(
        self, params: Mapping[str, Any] | str | None, process_group: dist.ProcessGroup | None = None, *, seed: int = 0
    ) -> None:
        self.codec: Codec | None = make(params)
        self.process_group = process_group
        self.seed = seed
        self.sent_bytes = 0
        self._buckets: dict[int, _Bucket] = {}
        self._carried: dict[int, torch.Tensor] = {}
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """How many non-finite elements were left out so far; a loss scaler cannot see them any more."""
        return self._dropped + sum(bucket.state.dropped for bucket in self._buckets.values())

    def bucket(self, index: int, layout: _Layout, codec: Codec) -> _Bucket:
        """Return the state of a bucket of DDP.

        DDP arranges its buckets anew after the first step: the residuals of the parameters go with them.
        """
        known = self._buckets.get(index)
        if known is None or known.layout != layout:
            if known is not None:
                self._dissolve()
            state = codec.new_state(sum(numel for _, numel in layout))
            self._fill(state, layout)
            known = self._buckets[index] = _Bucket(layout, state)
        return known

    def _dissolve(self) -> None:
        for bucket in self._buckets.values():
            self._dropped += bucket.state.dropped
            if bucket.state.residual is not None:
                parts = torch.split(bucket.state.residual, [numel for _, numel in bucket.layout])
                self._carried |= {key: part for (key, _), part in zip(bucket.layout, parts, strict=True)}
        self._buckets.clear()

    def _fill(self, state: CodecState, layout: _Layout) -> None:
        if state.residual is not None:
            parts = torch.split(state.residual, [numel for _, numel in layout])
            for (key, _), part in zip(layout, parts, strict=True):
                if key in self._carried:
                    part.copy_(self._carried.pop(key))


def ddp_hook(
    state: DDPState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch does not re-export it for type checkers
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks with compressed gradients (a DDP communication hook).

    Every rank encodes its own gradient with error feedback, all ranks gather all payloads, and each decodes and
    averages them: n - 1 payloads arrive per step, so this pays while a payload is less than 2 / n of the gradient.
    A bucket on an accelerator goes over the CPU without overlap.

    Returns:
        A future of the averaged flat gradient, with the dtype and on the device of the bucket.
    """
    buffer: torch.Tensor = bucket.buffer()
    group = state.process_group if state.process_group is not None else dist.group.WORLD
    if state.codec is None:
        return _averaged(buffer, group)
    layout = tuple((id(parameter), parameter.numel()) for parameter in bucket.parameters())
    known = state.bucket(bucket.index(), layout, state.codec)
    encoded = state.codec.encode(buffer.detach().cpu(), known.state, round=known.round, seed=state.seed)
    known.round += 1
    state.sent_bytes += len(encoded)
    return _gathered(state.codec, torch.from_numpy(encoded), buffer, group)


def _gathered(
    codec: Codec, payload: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.futures.Future[torch.Tensor]:
    payloads = [torch.empty_like(payload) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(payloads, payload, group=group, async_op=True)
    assert work is not None, "this rank is not in the state's process group"

    def decoded() -> torch.Tensor:
        mean = torch.zeros(buffer.numel(), dtype=torch.float32, device="cpu")
        for one in payloads:
            codec.decode_add(one.numpy(), mean, alpha=1.0 / len(payloads))
        return buffer.copy_(mean)

    if buffer.device.type == "cpu":
        return _then(work.get_future(), decoded)
    # Work on an accelerator's stream belongs to the thread that runs backward, not to the one that ends a gather.
    work.wait()
    result = torch.futures.Future[torch.Tensor](devices=[buffer.device])
    result.set_result(decoded())
    return result


def _averaged(buffer: torch.Tensor, group: dist.ProcessGroup | None) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(buffer.div_(dist.get_world_size(group)), group=group, async_op=True)
    assert work is not None, "this rank is not in the state's process group"
    return _then(work.get_future(), lambda: buffer)


def _then(future: Any, result: Callable[[], torch.Tensor]) -> torch.futures.Future[torch.Tensor]:
    """Return a future of ``result()``, or of the exception with which ``future`` ends."""

    def value(done: Any) -> torch.Tensor:
        done.wait()
        return result()

    following: torch.futures.Future[torch.Tensor] = future.then(value)
    return following
