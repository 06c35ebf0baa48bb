"""Code of ours that ``torch.compile`` leaves alone: its traces of our hooks and steps are slow at best, and may fail.

``torch.compiler.disable`` does both, and imports the compiler for it, which takes as long as torch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo

_Code = TypeVar("_Code", bound=Callable[..., Any])


def untraced(code: _Code) -> _Code:
    """Decorate a function, or a class with methods, that C++ calls while compiled code runs: hooks of a backward pass.

    What it calls is not traced, either.
    """
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for one in vars(code).values() if isinstance(code, type) else (code,):
        if isinstance(one, FunctionType):
            eval_frame.set_code_exec_strategy(one.__code__, skip)
    return code


def apart(function: _Code) -> _Code:
    """Decorate a function that compiled code may call: it runs between two compiled parts."""
    return _disable_dynamo(function)  # type: ignore[return-value]
