"""Hatchling's hook: builds the SQL files and adds them to the wheel as pgdefer/_sql."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))

import build as sql_build


class SqlBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs extension/build.py, so that installing directly from the sources works too.

    The two forms differ in a few lines of a megabyte, so the wheel has their code once: in the
    extension's script, and plain.sql has what else is in pgdefer.sql.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build into build/ and add what a wheel needs; an editable install reads build/."""
        if version != "editable":
            sql_build.build()
            folder = sql_build.BUILD
            script = folder / f"pgdefer--{sql_build.version()}.sql"
            texts = [path.read_text("utf-8") for path in (script, folder / "pgdefer.sql")]
            (folder / "plain.sql").write_text(sql_build.without_code(*texts), "utf-8")
            for name in ("extension", "plain.sql"):
                build_data["force_include"][str(folder / name)] = f"pgdefer/_sql/{name}"
            for name in sql_build.ON_DEMAND:
                build_data["force_include"][str(sql_build.HERE / name)] = f"pgdefer/_sql/{name}"
