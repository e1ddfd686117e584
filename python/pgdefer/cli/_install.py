"""`pgdefer install`, `upgrade` and `version`, and the options before a command.

Tests: integration/test_cli.py.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Annotated

import typer

from pgdefer import __version__
from pgdefer.database.install import install, installed_version
from pgdefer.database.source import Source
from pgdefer.errors import NotInstalled

from . import _show
from ._base import DSN, AsJson, Exit, out, reported

_FORBIDDEN = "Install as the owner of the queue, or as a role with CREATE on the database."


class FormChoice(enum.StrEnum):
    """The values of `install --form`."""

    auto = "auto"
    extension = "extension"
    plain = "plain"


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"pgdefer {__version__}", highlight=False)
        raise typer.Exit


def program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the client's version."
        ),
    ] = False,
) -> None:
    """Handle the options before a command."""


def install_command(
    dsn: DSN = None,
    form: Annotated[
        FormChoice,
        typer.Option(help="plain installs the same by ordinary SQL, without an extension."),
    ] = FormChoice.auto,
    as_json: AsJson = False,
) -> None:
    """Install the queue into a database, or upgrade it. A second call changes nothing."""
    with reported(_FORBIDDEN):
        source = Source(dsn)
        done = install(source.conninfo(), form.value)
    if as_json:
        _show.write(json.dumps(dataclasses.asdict(done)))
    elif done.before == done.version:
        out.print(f"pgdefer {done.version} was installed already.")
    elif done.before is None:
        out.print(f"pgdefer {done.version} is installed ({done.form}).")
    else:
        out.print(f"pgdefer was upgraded from {done.before} to {done.version} ({done.form}).")


def upgrade(dsn: DSN = None, as_json: AsJson = False) -> None:
    """Upgrade the queue of a database to this version."""
    with reported(_FORBIDDEN):
        source = Source(dsn)
        with source.connect() as connection:
            if installed_version(connection) is None:
                raise NotInstalled("the queue is not installed here", hint=NotInstalled.remedy)
        done = install(source.conninfo())
    was = "already" if done.before == done.version else f"from {done.before}"
    if as_json:
        _show.write(json.dumps(dataclasses.asdict(done)))
        return
    out.print(f"pgdefer is at {done.version}, {was} ({done.form}).")


def version(dsn: DSN = None, as_json: AsJson = False) -> None:
    """Show the client's version, and the database's if one is named."""
    tables = None
    with reported():
        source = Source(dsn)
    if not as_json:
        out.print(f"client {__version__}")
    if source.is_chosen:
        with reported(), source.connect() as connection:
            tables = installed_version(connection)
    if as_json:
        _show.write(json.dumps({"client": __version__, "database": tables}))
    elif source.is_chosen:
        out.print(f"database {tables or 'none: run `pgdefer install`'}")
    if source.is_chosen and tables is None:
        raise typer.Exit(Exit.NOT_INSTALLED)
