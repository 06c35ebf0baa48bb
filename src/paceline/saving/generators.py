"""The states of this process's random generators: read, checked and set.

A state has the place of the next number in a table. NumPy takes any place, and then reads outside of the table.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from paceline.torch_hooks.generator_state import stays_in_its_table

#: Words of the table of NumPy's generator (Mersenne Twister).
_WORDS = 624


def state_of_generators() -> dict[str, Any]:
    """Return the state of this process's generators, as plain data and tensors; CUDA's only if CUDA is in use."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {
        "python": (version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss),
        "numpy": (name, torch.from_numpy(np.array(keys)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def check_state(state: Any) -> None:
    """Check a state of :func:`state_of_generators` that comes from a file. No generator is changed.

    Raises:
        ValueError: the state of a generator cannot be set; the text names the generator.
    """
    for name, check in _CHECKS.items():
        try:
            check(state[name])
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError, RuntimeError) as error:
            raise ValueError(f"the state of the random generator {name!r} cannot be set: {error}") from error


def set_state(state: dict[str, Any]) -> None:
    """Set a state that :func:`check_state` accepts; states of CUDA devices that do not exist here are ignored."""
    random.setstate(_python(state["python"]))
    np.random.set_state(_numpy(state["numpy"]))
    torch.set_rng_state(state["torch"])
    for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(one, device)


def _python(state: Any) -> tuple[Any, ...]:
    version, words, gauss = state
    return version, tuple(words.tolist()), gauss


def _numpy(state: Any) -> tuple[Any, ...]:
    name, keys, position, has_gauss, cached = state
    return name, keys.numpy(), position, has_gauss, cached


def _check_python(state: Any) -> None:
    random.Random().setstate(_python(state))


def _check_numpy(state: Any) -> None:
    _, keys, position, has_gauss, cached = _numpy(state)
    if keys.shape != (_WORDS,) or keys.dtype != np.uint32:
        raise ValueError(f"it needs {_WORDS} words of 32 bits, and has {keys.dtype} of shape {keys.shape}")
    if type(position) is not int or not 0 <= position <= _WORDS:
        raise ValueError(f"the next word is number {position!r} of {_WORDS}")
    if has_gauss not in (0, 1) or not np.isfinite(cached):
        raise ValueError(f"its normal number is {cached!r}, and whether it counts {has_gauss!r}")
    np.random.RandomState().set_state(_numpy(state))


def _check_torch(state: Any) -> None:
    torch.Generator().set_state(state)
    if not stays_in_its_table(state):
        raise ValueError("the next numbers are outside of its table")


def _check_cuda(states: Any) -> None:
    for device, one in enumerate(states[: torch.cuda.device_count()]):
        torch.Generator(torch.device("cuda", device)).set_state(one)


_CHECKS = {"python": _check_python, "numpy": _check_numpy, "torch": _check_torch, "cuda": _check_cuda}
