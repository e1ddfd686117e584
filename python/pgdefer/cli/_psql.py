"""`pgdefer psql` and `pgdefer psqlrc`: psql with shortcuts.

Tests: integration/test_cli_psql.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from pgdefer.database.source import Source

from . import _show
from ._base import DSN, Exit, fail, out, reported
from ._pg import find_program, without_password

SHORTCUTS = Path(__file__).with_name("psqlrc")
# To each error of PL/pgSQL, the server adds the functions and lines that it passed through. Only
# the client can leave them out. The user's own file may show them again, and so does \errverbose.
QUIET_ERRORS = "\\set SHOW_CONTEXT never\n"


def psql(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENT...]", help="Arguments for psql.", show_default=False),
    ] = None,
    dsn: DSN = None,
) -> None:
    """Open psql on the database, with shortcuts: type :help there."""
    with reported():
        conninfo = Source(dsn).conninfo()
    program = find_program("psql")
    if program is None:
        fail(Exit.ERROR, "psql is not installed: apt install postgresql-client, or the like")
    # psql reads only one such file: this one includes the user's, then the shortcuts.
    start = _folder("XDG_CACHE_HOME", ".cache") / "psqlrc"
    files = [file for file in (_user_file(), SHORTCUTS) if file.exists()]
    start.write_text("".join([QUIET_ERRORS, *map(_include, files)]), "utf-8")
    shown, environment = without_password(conninfo)
    environment["PSQLRC"] = str(start)
    os.execve(program, [program, "-d", shown, *(arguments or [])], environment)  # noqa: S606


def psqlrc(
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the shortcuts, and change nothing.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the shortcuts.")] = False,
) -> None:
    """Add shortcuts to every psql session: :jobs, :queues, :stats, :why and more."""
    if print_only and remove:
        fail(Exit.USAGE, "--print and --remove exclude each other")
    if print_only:
        _show.write(SHORTCUTS.read_text("utf-8").rstrip())
        return
    ours = _folder("XDG_CONFIG_HOME", ".config") / "psqlrc"
    user = _user_file()
    before = user.read_text("utf-8") if user.exists() else ""
    kept = [line for line in before.splitlines(keepends=True) if line != _include(ours)]
    if remove:
        ours.unlink(missing_ok=True)
    else:
        ours.write_text(SHORTCUTS.read_text("utf-8"), "utf-8")
        if kept and not kept[-1].endswith("\n"):
            kept[-1] += "\n"
        kept.append(_include(ours))
    if "".join(kept) != before:
        user.write_text("".join(kept), "utf-8")
    verb = "no longer reads" if remove else "reads"
    out.print(Text(f"{user} {verb} {ours}"), soft_wrap=True)


def _user_file() -> Path:
    return Path(os.environ.get("PSQLRC") or Path.home() / ".psqlrc")


def _folder(variable: str, default: str) -> Path:
    folder = Path(os.environ.get(variable) or Path.home() / default) / "pgdefer"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(Exit.ERROR, f"{folder} can't be created: {error.strerror}. Set {variable}.")
    return folder


def _include(file: Path) -> str:
    quoted = str(file).replace("\\", "\\\\").replace("'", "\\'")
    return f"\\i '{quoted}'\n"
