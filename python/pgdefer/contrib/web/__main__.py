"""`python -m pgdefer.contrib.web`, and `pgdefer web`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pgdefer._text import escaped
from pgdefer.cli._base import check_one_place, dsn_file
from pgdefer.database.source import Source
from pgdefer.errors import InvalidParameter
from pgdefer.worker.databases import DsnFile

from . import Page, Pages, asgi, asgi_of_many

LOCAL = ("127.0.0.1", "::1", "localhost")
_LOCAL_HOST = re.compile(r"(127\.0\.0\.1|\[::1\]|localhost)(:\d+)?", re.IGNORECASE)


def local_only(page: ASGIApp) -> ASGIApp:
    """Refuse requests that name another host.

    Else a site whose name resolves to this machine could log in from its visitors' browsers.
    Starlette's TrustedHostMiddleware refuses [::1] before 1.7, and LOCALHOST still in 1.7.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _LOCAL_HOST.fullmatch(
            Headers(scope=scope).get("host", "")
        ):
            await PlainTextResponse("Invalid host header", 400)(scope, receive, send)
        else:
            await page(scope, receive, send)

    return guarded


def source_of(dsn: str, *, needs_password: bool) -> str:
    """Return the DSN of the one database."""
    try:
        source = Source(dsn or None)
    except InvalidParameter as error:
        raise typer.BadParameter(escaped(str(error))) from error
    if source.kind == "embedded" and needs_password:
        raise typer.BadParameter("the embedded server requires no password: add --no-password")
    return source.conninfo()


def sources_of(file: Path) -> dict[str, str]:
    """Return the names and DSNs of the databases of a file."""
    found = DsnFile(file).read().values()
    if not found:
        raise typer.BadParameter(f"{file} names no database")
    return {database.name: Source(database.dsn).conninfo() for database in found}


def web(  # noqa: PLR0917 (typer passes them by name)
    dsn: Annotated[
        str,
        typer.Option(
            envvar="PGDEFER_DSN",
            help="The database. Else libpq's PG* variables; else the embedded server.",
        ),
    ] = "",
    dsns: Annotated[
        Path | None,
        dsn_file("Serve many databases, below an index: one DSN per line, # begins a comment."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="The port.")] = 8080,
    root_path: Annotated[str, typer.Option(help="The path at which a proxy serves it.")] = "",
    role_header: Annotated[
        str | None, typer.Option(help="The header in which a trusted proxy names the role.")
    ] = None,
    no_password: Annotated[
        bool,
        typer.Option(
            "--no-password", help="Permit servers that require no password. Only at 127.0.0.1."
        ),
    ] = False,
) -> None:
    """Serve a web page that shows the queue and lets you act on it, as a database role."""
    if no_password and host not in LOCAL:
        raise typer.BadParameter("--no-password is for 127.0.0.1 only")
    if root_path and not root_path.startswith("/"):
        raise typer.BadParameter("--root-path begins with /, as in /queue")
    check_one_place(dsn, dsns)
    needs_password = not no_password
    page: Page | Pages
    if dsns is None:
        where = source_of(dsn, needs_password=needs_password)
        page = asgi(where, role_header=role_header, needs_password=needs_password)
    else:
        places = sources_of(dsns)
        page = asgi_of_many(places, role_header=role_header, needs_password=needs_password)
    uvicorn.run(
        local_only(page) if no_password else page,
        host=host,
        port=port,
        root_path=root_path,
        access_log=False,
        server_header=False,
    )


def main(arguments: list[str] | None = None) -> None:
    """Run it, with these arguments or those of the process."""
    typer.main.get_command(command_line).main(arguments, prog_name="pgdefer web")


command_line = typer.Typer(rich_markup_mode=None, add_completion=False)
command_line.command(context_settings={"help_option_names": ["-h", "--help"]})(web)

if __name__ == "__main__":
    main()
