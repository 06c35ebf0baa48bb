"""Puts the list of components that ``nox -s dist`` has made into the wheel (PEP 770). Other builds have none."""

from __future__ import annotations

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SbomHook(BuildHookInterface):
    """Adds the file that ``PACELINE_SBOM`` names to ``.dist-info/sboms/``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file, if there is one."""
        path = os.environ.get("PACELINE_SBOM")
        if path and version == "standard":
            build_data["sbom_files"].append(path)
