"""`pgdefer web`: the page, if its extra is installed.

Tests: contrib/test_web_command.py.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from ._base import Exit, fail


class WebCommand(typer.core.TyperCommand):
    """The command `web`, whose arguments the command of the page itself parses."""

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the completions of the page's command; none without the extra."""
        try:
            page = importlib.import_module("pgdefer.contrib.web.__main__")
        except ModuleNotFoundError:
            return []
        command = typer.main.get_command(page.command_line)
        return command.shell_complete(command.context_class(command, parent=ctx), incomplete)


def web(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
    """Serve a page to see the queue and act on it. `pgdefer web --help` says more."""
    try:
        page = importlib.import_module("pgdefer.contrib.web.__main__")
    except ModuleNotFoundError as error:
        fail(Exit.USAGE, f"there is no {error.name}: pip install 'pgdefer[web]'")
    page.main(arguments or [])
