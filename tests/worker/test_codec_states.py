"""What a worker keeps for the codec of its pushes, when these are cut in ever new ways."""

from __future__ import annotations

from itertools import product

import torch

from paceline import compression
from paceline.compression import Codec
from paceline.wire import messages as m
from paceline.worker.block import WorkerBlock

NUMEL = 1000
#: More than 1,000 different ranges.
CUTS = [(start, length) for start, length in product(range(0, 500, 10), range(400, 500, 4)) if start + length <= NUMEL]
MOST = 64


def new_block(keys: int = 1) -> WorkerBlock:
    specs = [m.KeySpec(f"x{index}", [NUMEL // keys], 0) for index in range(keys)]
    spec = m.BlockSpec(0, "float32", specs, [0], [], 8 * NUMEL, "balanced", False)
    return WorkerBlock(spec, 1, shared=False, still=False, via=lambda owner: owner)


def made(**settings: object) -> Codec:
    codec = compression.make(settings)
    assert codec is not None
    return codec


def push(block: WorkerBlock, codec: Codec, start: int, length: int, round: int) -> torch.Tensor:
    """Return what the servers get of a push of a range, flat [elements of the bucket]."""
    grads = block.grads[block.arena_slice(m.Span(0, 0, start, length))]
    received = torch.zeros(NUMEL)
    payload = codec.encode(grads, block.codec_state(codec, m.Span(0, 0, start, length)), round=round)
    codec.decode(payload, received[start : start + length])
    return received


def states(block: WorkerBlock) -> int:
    return len(block.buckets[0].codec_states)


def test_a_thousand_cuts_keep_few_states_and_exact_residuals() -> None:
    # Steps of a power of two, so that sums of float32 are exact in any order.
    codec, block = made(type="2bit", threshold=0.5), new_block()
    block.grads.copy_(torch.randint(-4, 5, (NUMEL,), generator=torch.Generator().manual_seed(0)) / 8)
    pushed, received = torch.zeros(NUMEL), torch.zeros(NUMEL)
    assert len(set(CUTS)) > 1000
    for round, (start, length) in enumerate(CUTS, 1):
        pushed[start : start + length] += block.grads[start : start + length]
        received += push(block, codec, start, length, round)
        assert states(block) <= MOST
    assert torch.equal(received + block.residual_arena()[:NUMEL], pushed)


def test_a_codec_that_keeps_more_than_residuals_loses_no_gradient_when_that_is_forgotten() -> None:
    codec, block = made(type="powersgd", rank=1), new_block()
    block.grads.copy_(torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)))
    pushed, received = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for round, (start, length) in enumerate(CUTS, 1):
        pushed[start : start + length] += block.grads[start : start + length]
        received += push(block, codec, start, length, round)
        assert states(block) <= MOST
    torch.testing.assert_close(received + block.residual_arena()[:NUMEL], pushed, rtol=1e-4, atol=1e-2)


def test_a_range_that_is_pushed_all_the_time_keeps_its_state_between_others() -> None:
    codec, block = made(type="powersgd", rank=1), new_block()
    whole = block.codec_state(codec, m.Span(0, 0, 0, NUMEL))
    for start, length in CUTS:
        block.codec_state(codec, m.Span(0, 0, start, length))
        assert block.codec_state(codec, m.Span(0, 0, 0, NUMEL)) is whole


def test_every_key_of_a_bucket_of_many_keeps_its_state() -> None:
    codec, block = made(type="powersgd", rank=1), new_block(keys=200)
    [bucket] = block.layout.buckets
    ranges = [(part.start, part.length) for part in bucket.parts]
    first = [block.codec_state(codec, m.Span(0, 0, *one)) for one in ranges]
    assert len(first) == 200
    assert all(block.codec_state(codec, m.Span(0, 0, *one)) is state for one, state in zip(ranges, first, strict=True))
