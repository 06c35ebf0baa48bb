"""The backends that can run a plan."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from paceline.launch.plan import Plan
from paceline.naming import suggestion

#: Backend by name: the module and class that implement it, imported when asked for.
BACKENDS: dict[str, str] = {"local": "paceline.launch.local:LocalBackend"}


class Backend(Protocol):
    """Starts the processes of a plan somewhere, supervises them and ends them."""

    def check(self, plan: Plan) -> None:
        """Check that this backend can run the plan. Starts nothing.

        Raises:
            paceline.errors.LaunchError: it cannot; the message says why.
        """

    def run(self, plan: Plan) -> int:
        """Run the plan to its end and return the job's exit code.

        Raises:
            paceline.errors.LaunchError: the job could not be started.
        """


def backend(name: str) -> Backend:
    """Return the backend of a name.

    Raises:
        ValueError: unknown name; the message suggests one.
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown launcher {name!r}{suggestion(name, BACKENDS)}")
    module, _, attribute = BACKENDS[name].partition(":")
    return cast(Backend, getattr(importlib.import_module(module), attribute)())
