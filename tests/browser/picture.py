"""Writes the picture of the page that the documents show: ``nox -s pictures``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.browser.chromium import PROGRAM, Chromium
from tests.browser.simulated import SimulatedJob


def main() -> None:
    """Draw a job of eight workers, one of which has a slow data loader, after three minutes."""
    if PROGRAM is None:
        sys.exit("nox -s pictures needs chromium: apt-get install chromium")
    job = SimulatedJob(8, 2, slow=5, dashboard="0")
    assert job.exports.page is not None
    for _ in range(180):
        job.turn()
    with tempfile.TemporaryDirectory() as folder, Chromium(Path(folder), 1200, 900) as browser:
        browser.open(job.exports.page.url)
        browser.settle("data !== null")
        browser.picture(Path(sys.argv[1]))
    job.close()


if __name__ == "__main__":
    main()
