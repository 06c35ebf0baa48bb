"""The program of a process of :func:`paceline.hvd.run`: runs one function, and keeps its result.

``python -m paceline.hvd.task FOLDER``. The folder is private; the caller has put the function into it.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from paceline.collectives.environment import find_place
from paceline.hvd.functions import dumps


def main(folder: Path) -> None:
    """Run the function of a folder."""
    function, args, kwargs = pickle.loads((folder / "function").read_bytes())
    result = function(*args, **kwargs)
    part = folder / f"result-{find_place().rank}.part"
    part.write_bytes(dumps(result))
    part.replace(part.with_suffix(""))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
