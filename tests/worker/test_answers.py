"""What a worker makes of answers of servers that compress pulls: news once, repeats never, nonsense not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline import compression
from paceline.compression import Codec
from paceline.errors import ConfigError, PacelineError, ProtocolError
from paceline.wire import messages as m
from paceline.worker.answers import store_known
from paceline.worker.block import WorkerBlock

NUMEL = 10
ALL = m.Entry(0, 0, 0, NUMEL, 1)


def new_block() -> WorkerBlock:
    key = m.KeySpec("x", [NUMEL], 0)
    spec = m.BlockSpec(0, "float32", [key], [0], [], 1000, "balanced", False)
    return WorkerBlock(spec, 1, shared=False, still=False, via=lambda owner: owner)


def fp16() -> Codec:
    codec = compression.make("fp16")
    assert codec is not None
    return codec


def coded(value: float, length: int = NUMEL) -> bytes:
    codec = fp16()
    return bytes(codec.encode(torch.full((length,), value), codec.new_state(length)))


def plain(value: float, length: int = NUMEL) -> bytearray:
    return bytearray(torch.full((length,), value).numpy().tobytes())


def told(version: int, is_coded: bool, start: int = 0, length: int = NUMEL) -> m.KnownRange:
    return m.KnownRange(0, 0, start, length, version, is_coded)


def tell(block: WorkerBlock, words: Sequence[m.KnownRange], frames: Sequence[Any], codec: Codec | None = None) -> None:
    store_known({0: block}, [ALL], False, codec or fp16(), words, frames)


def test_differences_add_up_and_values_replace() -> None:
    block = new_block()
    tell(block, [told(1, True)], [coded(0.5)])
    tell(block, [told(2, True)], [coded(0.25)])
    assert block.values.tolist() == [0.75] * NUMEL
    tell(block, [told(7, False)], [plain(3.0)])
    tell(block, [told(8, True)], [coded(1.0)])
    assert block.values.tolist() == [4.0] * NUMEL


def test_what_is_known_is_not_added_again() -> None:
    block = new_block()
    for _ in range(2):
        tell(block, [told(1, True)], [coded(0.5)])
    tell(block, [told(3, False)], [plain(2.0)])
    tell(block, [told(2, True)], [coded(1.0)])
    tell(block, [told(2, False)], [plain(9.0)])
    assert block.values.tolist() == [2.0] * NUMEL


def test_ranges_move_by_themselves() -> None:
    block = new_block()
    tell(block, [told(1, True, 0, 4), told(2, False, 4, 6)], [coded(0.5, 4), plain(1.0, 6)])
    tell(block, [told(2, True, 0, 4), told(3, True, 4, 6)], [coded(0.5, 4), coded(0.5, 6)])
    assert block.values.tolist() == [1.0] * 4 + [1.5] * 6


def test_an_empty_range_has_no_version_to_miss() -> None:
    block = new_block()
    tell(block, [told(3, True, 0, 0)], [coded(1.0, 0)])
    assert block.values.tolist() == [0.0] * NUMEL


def test_what_a_server_wrote_in_place_counts_as_known() -> None:
    block = new_block()
    block.values.fill_(5.0)
    store_known({0: block}, [ALL], True, None, [told(4, False)], ())
    tell(block, [told(5, True)], [coded(1.0)])
    assert block.values.tolist() == [6.0] * NUMEL


@pytest.mark.parametrize(
    ("words", "frames", "error", "text"),
    [
        ([told(3, True)], [coded(1.0)], ProtocolError, "version 3, but this worker holds .0.; pull their keys"),
        ([told(1, True)], [coded(1.0)[:-1]], ProtocolError, "19 bytes where 20 are expected"),
        ([told(1, False)], [plain(1.0)[:-4]], ProtocolError, "36 bytes"),
        ([told(1, True)], [], ProtocolError, "1 ranges has 0 frames"),
        ([told(1, True, 5, 6)], [coded(1.0, 6)], ProtocolError, "not requested"),
        ([m.KnownRange(0, 1, 0, 4, 1, True)], [coded(1.0, 4)], ProtocolError, "not requested"),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(
    words: list[m.KnownRange], frames: list[Any], error: type[PacelineError], text: str
) -> None:
    block = new_block()
    with pytest.raises(error, match=text):
        tell(block, words, frames)
    assert block.values.tolist() == [0.0] * NUMEL
    tell(block, [told(1, True)], [coded(1.0)])
    assert block.values.tolist() == [1.0] * NUMEL


def test_a_worker_without_the_codec_is_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match="every worker calls set_gradient_compression"):
        store_known({0: new_block()}, [ALL], False, None, [told(1, True)], [coded(1.0)])
