"""The codecs of a store on its server, one per leg."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from paceline.compression import Codec, make


class Codecs(dict[str, Codec]):
    """The codec of each leg that is compressed: ``push``, ``pull``.

    Args:
        store: name, for messages.
    """

    def __init__(self, store: str) -> None:
        super().__init__()
        self._store = store

    def put(self, params: dict[str, Any], leg: str, dtypes: Iterable[torch.dtype]) -> None:
        """Set the codec of a leg; saying the same again changes nothing.

        Args:
            params: of the codec.
            leg: ``push`` or ``pull``.
            dtypes: of the values that there are.

        Raises:
            ValueError: unknown leg, codec or parameters, or another codec is in use.
            TypeError: a codec for pulls, and values that are not float32.
        """
        if leg not in ("push", "pull"):
            raise ValueError(f"the legs that can be compressed are 'push' and 'pull', not {leg!r}")
        codec, known = make(params), self.get(leg)
        if known is not None and (codec is None or codec.params() != known.params()):
            raise ValueError(f"store {self._store!r} compresses its {leg} leg with {known.params()} already")
        if codec is None or known is not None:
            return
        if leg == "pull":
            self._check(dtypes)
        self[leg] = codec

    def check(self, dtypes: Iterable[torch.dtype]) -> None:
        """Refuse values that the codecs cannot take.

        Raises:
            TypeError: pulls are compressed, and a value is not float32.
        """
        if "pull" in self:
            self._check(dtypes)

    def _check(self, dtypes: Iterable[torch.dtype]) -> None:
        for dtype in dtypes:
            if dtype != torch.float32:
                raise TypeError(f"store {self._store!r} compresses pulls, which takes float32 values, not {dtype}")
