"""Hatchling's hook: builds the SQL files and adds them to the wheel as pgdefer/_sql."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))

import build as sql_build


class SqlBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs extension/build.py, so that installing directly from the sources works too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build into build/ and add one copy of each form; an editable install reads build/."""
        if version != "editable":
            sql_build.build()
            for name in ("extension", "pgdefer.sql"):
                build_data["force_include"][str(sql_build.BUILD / name)] = f"pgdefer/_sql/{name}"
            for name in sql_build.ON_DEMAND:
                build_data["force_include"][str(sql_build.HERE / name)] = f"pgdefer/_sql/{name}"
