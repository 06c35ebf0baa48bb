"""Gradient codecs: from a bucket to bytes and back.

====================  ==========================================  ============  ==================
type                  parameters (defaults)                       bytes / elem  error feedback
====================  ==========================================  ============  ==================
``2bit``              ``threshold`` (0.5)                         0.25          yes
``1bit``              ``threshold`` (0)                           0.125         yes
``fp16``, ``bf16``                                                2             no
``int8``              ``chunk`` (1024)                            1.004         yes
``int4``              ``chunk`` (128)                             0.531         yes
``topk``              ``ratio`` (0.01) or ``k``                   8 x ratio     yes
``chunktopk``         ``k`` (64) of ``chunk`` (4096), ``decay``   0.021         yes
                      (0.95)
``randomk``           ``ratio`` (0.01)                            4 x ratio     yes
``powersgd``          ``rank`` (2)                                ~8 rank/√n    yes
====================  ==========================================  ============  ==================
"""

from paceline.compression import chunk_topk, halves, linear, packed, powersgd, sparse  # noqa: F401 (registers the codecs)
from paceline.compression.base import Codec, CodecState
from paceline.compression.codec_registry import Compression, Leg, by_leg, known_codecs, make

__all__ = ["Codec", "CodecState", "Compression", "Leg", "by_leg", "known_codecs", "make"]
