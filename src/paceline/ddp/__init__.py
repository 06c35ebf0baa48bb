"""The backend ``paceline`` of torch.distributed, and ``paceline launch --ddp``.

``import torch`` calls :func:`on_torch_import` in every process that has paceline installed (entry point
``torch.backends``), so this file imports nothing that takes time.
"""

from __future__ import annotations

import os

#: Set for the workers of ``paceline launch --ddp``: 1, or ``measured`` with ``--shares measured``.
VARIABLE = "PACELINE_DDP"


def on_torch_import() -> None:
    """Register the backend in a worker of a job; with ``--ddp`` make ``init_process_group`` open it.

    An exception would break ``import torch``, so the error of a broken installation is only printed.
    """
    if not os.environ.get("PACELINE_SCHEDULER") or os.environ.get("PACELINE_ROLE", "worker") != "worker":
        return
    try:
        from paceline.ddp import backend
        from paceline.worker import alone

        if hasattr(alone, "begin"):  # else it imports torch itself, and begins when it is loaded
            alone.begin()
        backend.register()
        if os.environ.get(VARIABLE):
            backend.replace_init()
    except Exception as error:  # noqa: BLE001 - border to torch, see above
        import sys

        print(f"paceline: torch.distributed stays as it is: {type(error).__name__}: {error}", file=sys.stderr)
