"""Copies into memory that another core reads next, past the caches: with non-temporal stores.

A plain store first gets the line of memory into the core's own cache. Where another core has read the line before, as
in an area that ranks use again and again, that takes longer than the copy itself: an area of 2 MiB was written with
2.6 GB/s by plain stores, and with 14 GB/s by these, on two cores of an AMD EPYC. The other core reads it as fast.

No function of torch or numpy has such stores, so LLVM, which comes with numba, makes one: 30 ms at the first use.
Where it cannot, copies are plain ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

logger = logging.getLogger(__name__)

#: Bytes that are stored at once: a line of the cache.
LINE_BYTES = 64

#: Copies below this size stay in the cache: they take a few microseconds either way.
LEAST_BYTES = 64 * 1024

#: Takes the addresses of target and source, and a number of lines, at least 1. It holds no lock of the interpreter.
_CopyLines: TypeAlias = Callable[[int, int, int], None]


def stream_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor; other threads and processes see it at the return.

    Args:
        target: flat and contiguous, in host memory.
        source: another one of the same size and dtype.
    """
    lines = source.nbytes // LINE_BYTES if source.nbytes >= LEAST_BYTES and source.is_contiguous() else 0
    copy_lines = _copy_lines() if lines and target.data_ptr() % LINE_BYTES == 0 else None
    done = 0
    if copy_lines is not None:
        copy_lines(target.data_ptr(), source.data_ptr(), lines)
        done = lines * LINE_BYTES // source.itemsize
    if done < source.numel():
        target[done:].copy_(source[done:])


@functools.cache
def _copy_lines() -> _CopyLines | None:
    """Compile the copy of lines; None where that is not possible."""
    try:
        from llvmlite import binding

        with contextlib.suppress(RuntimeError):  # newer versions do this themselves, and say so
            binding.initialize()
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        features = binding.get_host_cpu_features().flatten()
        machine = binding.Target.from_default_triple().create_target_machine(
            cpu=binding.get_host_cpu_name(), features=features, opt=2
        )
        engine = binding.create_mcjit_compiler(binding.parse_assembly(_code(binding.get_default_triple())), machine)
        engine.finalize_object()
        found = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(
            engine.get_function_address(_NAME)
        )
    except (ImportError, OSError, RuntimeError) as error:
        logger.info("copies to other processes of this host are slower, because LLVM makes no code here: %s", error)
        return None
    _engines.append(engine)
    return found


_NAME = "copy_lines"

_engines: list[Any] = []
"""Code lives as long as its engine."""


def _code(triple: str) -> str:
    """Return the copy of lines in LLVM's language."""
    from llvmlite import ir

    line, number = ir.VectorType(ir.IntType(64), LINE_BYTES // 8), ir.IntType(64)
    module = ir.Module()
    module.triple = triple
    kind = ir.FunctionType(ir.VoidType(), [line.as_pointer(), line.as_pointer(), number])
    function = ir.Function(module, kind, _NAME)
    target, source, count = function.args
    entry, body, end = (function.append_basic_block() for _ in range(3))
    builder = ir.IRBuilder(entry)
    builder.branch(body)
    builder.position_at_end(body)
    place = builder.phi(number)
    place.add_incoming(number(0), entry)
    value = builder.load(builder.gep(source, [place]), align=1)
    store = builder.store(value, builder.gep(target, [place]), align=LINE_BYTES)
    store.set_metadata("nontemporal", module.add_metadata([ir.IntType(32)(1)]))
    following = builder.add(place, number(1))
    place.add_incoming(following, body)
    builder.cbranch(builder.icmp_signed("<", following, count), body, end)
    builder.position_at_end(end)
    builder.fence("seq_cst")  # such stores are not in order with later ones
    builder.ret_void()
    return str(module)
