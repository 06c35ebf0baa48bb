"""The codecs that every test of a property common to all runs with."""

from __future__ import annotations

import pytest

from paceline.compression import Codec, make

SETTINGS: list[dict[str, object]] = [
    {"type": "2bit", "threshold": 0.5},
    {"type": "1bit"},
    {"type": "1bit", "threshold": -0.25},
    {"type": "fp16"},
    {"type": "bf16"},
    {"type": "int8"},
    {"type": "int8", "chunk": 37},
    {"type": "int4"},
    {"type": "int4", "chunk": 38},
    {"type": "topk"},
    {"type": "topk", "k": 5},
    {"type": "chunktopk"},
    {"type": "chunktopk", "k": 3, "chunk": 19, "decay": 1.0},
    {"type": "randomk", "ratio": 0.25},
    {"type": "powersgd", "rank": 4},
]


def _built(settings: list[dict[str, object]]) -> list[Codec]:
    codecs = [make(one) for one in settings]
    return [codec for codec in codecs if codec is not None]


def _name(codec: Codec) -> str:
    return "-".join(str(value) for value in codec.params().values())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with argument ``codec`` for all codecs, with ``residual_codec`` for those that keep what is left."""
    codecs = _built(SETTINGS)
    if "codec" in metafunc.fixturenames:
        metafunc.parametrize("codec", codecs, ids=_name)
    if "residual_codec" in metafunc.fixturenames:
        kept = [one for one in codecs if one.uses_residual and one.params().get("decay", 1.0) == 1.0]
        metafunc.parametrize("residual_codec", kept, ids=_name)
