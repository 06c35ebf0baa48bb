"""Sizes beyond which a message is refused unread."""

from __future__ import annotations

MAX_HEADER_BYTES = 16 * 1024 * 1024
"""Header of one message: 5,000 keys need about 0.5 MiB."""

MAX_KEPT_HEADS = 2 * MAX_HEADER_BYTES
"""Bytes of the headers of one member's requests that wait, and of answers that it has not confirmed: as objects they
take several times as much."""

MAX_FRAMES = 65_536
"""Payload frames of one message."""

MAX_FRAME_BYTES = 4 * 1024**3
"""One payload frame: a key that may not be split travels in one."""

MAX_GATHER_BYTES = 8 * 1024 * 1024
"""Bytes of all workers together in one gather: each worker gets all of them in one header."""

MAX_NAME = 1024
"""Characters of the name of a key, a store or the like."""

MAX_TEXT = 65_536
"""Any single string."""

MAX_KEYS = 2**18
"""Keys, buckets, or ranges of them or of samples, that one message lists."""

MAX_NAMES = 4096
"""Names that one request to a board lists."""

MAX_DIMENSIONS = 64
"""Dimensions of a shape: as torch."""

MAX_RANK = 1_000_000
"""Ranks, numbers of workers and servers."""

MAX_NUMEL = 2**48
"""Elements of a key, and positions inside an arena."""

MAX_AMOUNT = 10**15
"""Figures of a member: microseconds of 30 years."""

MAX_FIGURES, MAX_FIGURE_NAME = 64, 64
"""Names of figures that a script reports, and characters of such a name."""

FIGURE_NAME = r"^[A-Za-z_][A-Za-z0-9_./-]*\Z"
"""Form of these names."""

MAX_REPORTS = 64
"""Steps of which one heartbeat brings figures."""

MAX_TOLD_STEPS = 64
"""Steps of a worker of which one heartbeat tells."""

MAX_WINDOWS, MAX_PARTS, MAX_BINS = 1024, 64, 4096
"""Windows of one heartbeat's account, parts of a window, and entries of a histogram of staleness."""

MAX_MEMBERS = 65_536
"""Members that one message lists."""

MAX_TRACE_BYTES = 98_304
"""Events that one heartbeat brings: 2,048 records."""
