"""Speed, size and error of the gradient codecs on one thread, against a pass of ``x.add_(1)`` in the same run.

    python benchmarks/codecs.py --numel 25500000 --codec 2bit --codec int8

``x add_`` is the time of an operation divided by that of one read-modify-write pass over the gradient. The last line of
the output is the table as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table

from paceline.compression import Codec, known_codecs, make

#: Thresholds in units of the gradient's standard deviation, which is 1 here.
SETTINGS = {"2bit": {"type": "2bit", "threshold": 2.0}}


@dataclass(frozen=True)
class Result:
    codec: str
    ratio: float
    encode_gb_s: float
    decode_gb_s: float
    decode_add_gb_s: float
    encode_passes: float
    decode_passes: float
    decode_add_passes: float
    error: float
    """Norm of what one payload leaves out, relative to the gradient, without error feedback."""


@dataclass(frozen=True)
class Timing:
    median_s: float
    passes: float
    """Relative to the median of the passes that ran between the operations: other programs may use the machine too."""


def timed_s(operation: Callable[[], object]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


def timing(operation: Callable[[], object], x: torch.Tensor, repeat: int) -> Timing:
    operation()
    pairs = [(timed_s(operation), timed_s(lambda: x.add_(1))) for _ in range(repeat)]
    own, passes = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Timing(own, own / passes)


def relative_error(codec: Codec, grad: torch.Tensor) -> float:
    decoded = torch.empty_like(grad)
    codec.decode(codec.encode(grad, codec.new_state(grad.numel())), decoded)
    return float((decoded - grad).norm() / grad.norm())


def measure(codec: Codec, grad: torch.Tensor, repeat: int) -> Result:
    state, out, x = codec.new_state(grad.numel()), torch.zeros_like(grad), torch.zeros_like(grad)
    payload = codec.encode(grad, state)
    encode = timing(lambda: codec.encode(grad, state), x, repeat)
    decode = timing(lambda: codec.decode(payload, out), x, repeat)
    decode_add = timing(lambda: codec.decode_add(payload, out, 0.5), x, repeat)
    return Result(
        codec=codec.name,
        ratio=grad.nbytes / len(payload),
        encode_gb_s=grad.nbytes / encode.median_s / 1e9,
        decode_gb_s=grad.nbytes / decode.median_s / 1e9,
        decode_add_gb_s=grad.nbytes / decode_add.median_s / 1e9,
        encode_passes=encode.passes,
        decode_passes=decode.passes,
        decode_add_passes=decode_add.passes,
        error=relative_error(codec, grad),
    )


def table_of(results: list[Result], title: str) -> Table:
    table = Table(title=title)
    for heading in ("codec", "ratio", "encode GB/s", "x add_", "decode GB/s", "x add_", "decode_add GB/s", "x add_"):
        table.add_column(heading, justify="right")
    table.add_column("error", justify="right")
    for one in results:
        table.add_row(
            one.codec, f"{one.ratio:.1f}",
            f"{one.encode_gb_s:.1f}", f"{one.encode_passes:.2f}",
            f"{one.decode_gb_s:.1f}", f"{one.decode_passes:.2f}",
            f"{one.decode_add_gb_s:.1f}", f"{one.decode_add_passes:.2f}",
            f"{one.error:.4f}",
        )  # fmt: skip
    return table


def arguments() -> argparse.Namespace:
    names = [name for name in known_codecs() if name != "none"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=25_500_000, help="elements of the gradient (default: ResNet-50)")
    parser.add_argument("--codec", action="append", choices=names, help="may be repeated (default: all)")
    parser.add_argument("--repeat", type=int, default=9, help="runs of which the median counts")
    options = parser.parse_args()
    options.codec = options.codec or names
    return options


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    grad = torch.randn(options.numel, generator=torch.Generator().manual_seed(0))
    x = torch.zeros_like(grad)
    pass_s = timing(lambda: x.add_(1), x, options.repeat).median_s
    results = []
    for name in options.codec:
        codec = make(SETTINGS.get(name, name))
        assert codec is not None
        results.append(measure(codec, grad, options.repeat))
    size_mb = grad.nbytes / 1e6
    Console(width=110).print(table_of(results, f"{size_mb:.0f} MB, 1 thread, add_ pass {pass_s * 1e3:.1f} ms"))
    facts = {"numel": options.numel, "pass_ms": pass_s * 1e3, "machine": platform.machine(), "torch": torch.__version__}
    print(json.dumps(facts | {"results": [asdict(one) for one in results]}))


if __name__ == "__main__":
    main()
