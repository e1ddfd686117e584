"""Code common to all commands: exit codes, connections, calls and questions.

Tests: integration/test_cli.py, integration/test_cli_wrong_input.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import math
import os
import re
import sys
import time
import zoneinfo
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import psycopg
import typer
from psycopg.abc import Buffer
from psycopg.rows import dict_row
from psycopg.types.datetime import IntervalLoader, TimestamptzLoader
from psycopg.types.json import JsonbLoader
from rich.console import Console
from rich.text import Text

from pgdefer._text import escaped
from pgdefer.codec import is_deep
from pgdefer.database import sql
from pgdefer.database.source import Source
from pgdefer.database.sql import Statement
from pgdefer.errors import (
    SQLSTATES,
    AlreadyQueued,
    ClaimLost,
    IncompatibleClient,
    InvalidParameter,
    InvalidState,
    JobNotFound,
    NotInstalled,
    PgDeferError,
    QueueNotEmpty,
    StepChanged,
    translate,
)


class Program(typer.core.TyperGroup):
    """The program. For an unknown command that some groups have, it names these groups."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command of the first argument."""
        named = args[0]
        groups = [name for name, each in self.commands.items() if named in _commands(each)]
        if groups and named not in self.commands and not ctx.resilient_parsing:
            meant = " or ".join(f"'{group} {named}'" for group in groups)
            fail(Exit.USAGE, f"there is no command {named!r}: did you mean {meant}?")
        return super().resolve_command(ctx, args)


def _commands(command: object) -> Mapping[str, object]:
    """Return the commands of a group."""
    return getattr(command, "commands", {})


cli = typer.Typer(
    name="pgdefer",
    cls=Program,
    help="A job queue whose every rule lives in PostgreSQL.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# A file or a pipe has no width limit.
NO_TERMINAL = 100_000
_is_wide = sys.stdout is None or not sys.stdout.isatty()
out = Console(width=NO_TERMINAL if _is_wide and not os.environ.get("COLUMNS") else None)
err = Console(stderr=True)


class Exit(enum.IntEnum):
    """The exit codes."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_INSTALLED = 4
    INCOMPATIBLE = 5
    NO_APP = 6
    FORBIDDEN = 7
    GAVE_BACK = 8
    NOT_FOUND = 9
    WRONG_STATE = 10
    NOT_EMPTY = 11
    ALREADY_QUEUED = 12
    PARTLY = 13
    NOTHING = 14
    UNHEALTHY = 15


_ENDS: dict[type[PgDeferError], Exit] = {
    NotInstalled: Exit.NOT_INSTALLED,
    IncompatibleClient: Exit.INCOMPATIBLE,
    JobNotFound: Exit.NOT_FOUND,
    InvalidState: Exit.WRONG_STATE,
    ClaimLost: Exit.WRONG_STATE,
    StepChanged: Exit.NOT_FOUND,  # from fork: no such step
    QueueNotEmpty: Exit.NOT_EMPTY,
    AlreadyQueued: Exit.ALREADY_QUEUED,
    InvalidParameter: Exit.USAGE,
}
# The options whose values the database parses, and their format.
_MOMENT = "a time, such as 2030-01-31 09:00"
_INTERVAL = "an interval, such as 30 minutes"
_READ_THERE = {
    "at": ("--at", _MOMENT),
    "scheduled_at": ("--at", _MOMENT),
    "deadline": ("--deadline", _MOMENT),
    "until": ("--until", _MOMENT),
    "older_than": ("--older-than", _INTERVAL),
    "lease": ("--lease", _INTERVAL),
    "retain": ("--retain", _INTERVAL),
}
# The views that hints name, and the commands for them.
_COMMANDS = {
    "queue.queues lists": "`pgdefer queue ls` lists",
    "queue.schedules lists": "`pgdefer schedule ls` lists",
    "queue.groups lists": "`pgdefer group ls` lists",
}
_NO_JOB = "The id is wrong, its transaction has not committed, or the job was pruned or deleted."
# The SQLSTATEs that functions on many jobs report in their rows, in words.
REFUSALS = {
    "QJ001": "there is no such job",
    "QJ003": "its state does not allow this",
    "QJ004": "another job has its queueing lock",
    "QJ009": "it has finished no such step, see `pgdefer job steps`",
}

DSN = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        envvar="PGDEFER_DSN",
        help="The database. Else libpq's PG* variables; else the embedded server.",
        show_default=False,
    ),
]


def dsn_file(text: str) -> Any:
    """Return the option --dsns, with this help."""
    return typer.Option(
        "--dsns", metavar="FILE", exists=True, dir_okay=False, help=text, show_default=False
    )


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
# JSON with more levels is shown as text: showing it recurses once for each level.
LEVELS = 100
# The longest time between queries, in seconds: a day.
LONGEST = 86_400


def is_whole(text: str) -> bool:
    """Whether a text is a whole number that Python and the database can read."""
    return text.isascii() and text.isdigit() and len(text) < 20


def no_nan(seconds: float) -> float:
    """Return a number of seconds; its option's limits do not refuse nan."""
    if math.isnan(seconds):
        raise typer.BadParameter("nan is no number of seconds.")
    return seconds


Interval = Annotated[
    float,
    typer.Option(min=0.05, max=LONGEST, callback=no_nan, help="The seconds between queries."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would happen, and change nothing.")
]


class _Moment(TimestamptzLoader):
    """Loads moments. Moments without a Python value, such as infinity, stay text."""

    def load(self, data: Buffer) -> Any:
        return _or_text(super().load, data)


class _Span(IntervalLoader):
    """Loads intervals in the same way."""

    def load(self, data: Buffer) -> Any:
        return _or_text(super().load, data)


class Number(str):
    """A number of JSON that is not an integer, as the database has it."""

    __slots__ = ()


class _Json(JsonbLoader):
    """Loads JSON in the same way: it may be too deep to be shown, or have too long numbers."""

    def load(self, data: Buffer) -> Any:
        value = _or_text(lambda data: json.loads(bytes(data), parse_float=Number), data)
        return bytes(data).decode() if is_deep(value, LEVELS) else value


def _or_text(load: Callable[[Buffer], Any], data: Buffer) -> Any:
    try:
        return load(data)
    except (psycopg.DataError, NotImplementedError, RecursionError, ValueError):
        return bytes(data).decode()


def _row_of(text: str) -> dict[str, Any]:
    """Read a row that the database wrote as JSON; an empty one if Python can't read it."""
    try:
        row: dict[str, Any] = json.loads(text)
    except (RecursionError, ValueError):
        return {}
    return row


@dataclasses.dataclass
class Rows:
    """The rows of a statement: as values, or as JSON written by the database."""

    values: list[dict[str, Any]]
    texts: list[str] | None = None

    def __add__(self, more: Rows) -> Rows:
        """Return these rows and more, of the same kind."""
        texts = None if more.texts is None else [*(self.texts or []), *more.texts]
        return Rows([*self.values, *more.values], texts)

    def pick(self, wanted: Sequence[int]) -> Rows:
        """Return the rows at these places, in this order."""
        texts = None if self.texts is None else [self.texts[at] for at in wanted]
        return Rows([self.values[at] for at in wanted], texts)


class Session:
    """One connection, for the statements of one command."""

    def __init__(self, connection: psycopg.Connection[Any], *, as_json: bool = False) -> None:
        self.as_json = as_json
        self._connection = connection
        connection.adapters.register_loader("timestamptz", _Moment)
        connection.adapters.register_loader("interval", _Span)
        connection.adapters.register_loader("jsonb", _Json)

    def call(self, statement: Statement, parameters: Mapping[str, Any] | None = None) -> Rows:
        """Run a statement."""
        values = dict(parameters or {})
        with _misread(values), self._connection.cursor(row_factory=dict_row) as cursor:
            if not self.as_json:
                return Rows(cursor.execute(statement.psycopg, values).fetchall())
            texts = [row["row"] for row in cursor.execute(statement.json.psycopg, values)]
            return Rows([_row_of(text) for text in texts], texts)

    def transaction(self) -> contextlib.AbstractContextManager[object]:
        """Run the statements in the block in one transaction."""
        return self._connection.transaction()

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Run the statements in the block, and roll them back."""
        with self._connection.transaction(force_rollback=True):
            yield

    def execute(self, statement: Statement) -> None:
        """Run a statement that returns no rows."""
        self._connection.execute(statement.psycopg)

    def one(self, statement: Statement, parameters: Mapping[str, Any] | None = None) -> Any:
        """Run a statement that returns one value."""
        (row,) = self.call(statement, parameters).values
        (value,) = row.values()
        return value


@contextlib.contextmanager
def _misread(values: Mapping[str, Any]) -> Iterator[None]:
    """Make errors name the option that the database can't read, or the text that can't be sent."""
    try:
        yield
    except UnicodeEncodeError as error:
        wrong = error.object[error.start : error.end]
        raise InvalidParameter(f"{wrong!a} in an argument is no {error.encoding} text") from error
    except psycopg.DataError as error:
        said = error.diag.message_primary or ""
        for name, (option, form) in _READ_THERE.items():
            if values.get(name) is not None and f'"{values[name]}"' in said:
                raise InvalidParameter(f"{option}: {said}", hint=f"Give {form}.") from error
        if isinstance(error, psycopg.errors.NumericValueOutOfRange):
            most = 2 ** (63 if said.startswith("bigint") else 31)
            for given in values.values():
                for each in given if isinstance(given, list) else [given]:
                    if isinstance(each, int) and not -most <= each < most:
                        raise InvalidParameter(f"{each} is too large: {said}") from error
        raise


@contextlib.contextmanager
def typed(names: Mapping[str, str]) -> Iterator[None]:
    """Make the database's refusals in the block name what the user has typed.

    The names of options replace those of arguments in messages and hints, except in a hint that
    lists the keys of JSON.
    """
    try:
        yield
    except (psycopg.Error, PgDeferError) as error:
        better = translate(error) if isinstance(error, psycopg.Error) else error
        if better is None:
            raise
        better.message = _renamed(better.message, names)
        if better.hint and not better.hint.startswith("Known keys: "):
            better.hint = _renamed(better.hint, names)
        raise better from error


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """Return a text with these names replaced, except within quotes."""
    if not names:
        return text
    either = "|".join(map(re.escape, names))
    form = rf"(?<![\w\"-])(?:{either})(?!\w)|'[^']*'|\"[^\"]*\""
    return re.sub(form, lambda found: names.get(found[0], found[0]), text)


@contextlib.contextmanager
def session(dsn: str | None, *, as_json: bool = False, dry_run: bool = False) -> Iterator[Session]:
    """Provide a connection; errors become one line and an exit code.

    A dry run is one transaction, which is rolled back.
    """
    with reported(), contextlib.ExitStack() as stack:
        connection = stack.enter_context(connect(dsn))
        if dry_run:
            stack.enter_context(connection.transaction(force_rollback=True))
        yield Session(connection, as_json=as_json)
    if dry_run:
        err.print("Dry run, nothing is changed:", highlight=False)


def connect(dsn: str | None) -> psycopg.Connection[Any]:
    """Return a connection whose times and intervals are read and shown as this module does."""
    connection = Source(dsn).connect()
    try:
        _set_styles(connection)
        _set_zone(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _set_styles(connection: psycopg.Connection[Any]) -> None:
    """Let the server write times and intervals as this module's loaders read them.

    What is set so already is not set again: pgbouncer below 1.20 would pass it on to the next
    client.
    """
    of = connection.info.parameter_status
    if of("IntervalStyle") != "postgres" or not (of("DateStyle") or "").startswith("ISO"):
        connection.execute(sql.STYLES.psycopg)


def _set_zone(connection: psycopg.Connection[Any]) -> None:
    """Let the server read and write times in this machine's time zone.

    If the server does not know that zone, the session's own remains.
    """
    zone = _zone()
    if zone is not None and zone != connection.info.parameter_status("TimeZone"):
        with contextlib.suppress(psycopg.DataError):
            connection.execute(sql.SET_ZONE.psycopg, {"zone": zone})


def _zone() -> str | None:
    """Return the name of the zone of PGTZ, TZ or the system; None if there is none."""
    name = os.environ.get("PGTZ") or os.environ.get("TZ")
    if name is None:
        name = os.path.realpath("/etc/localtime").partition("/zoneinfo/")[2]
    name = name.removeprefix(":")
    if not name and not time.daylight and time.timezone == 0:
        return "UTC"
    try:
        zoneinfo.ZoneInfo(name)
    except (LookupError, OSError, ValueError):  # psycopg would not know it, either
        return None
    return name


_ASK_THE_OWNER = (
    "The owner grants access: select queue.grant_access('ROLE', 'operator'); "
    "the other kinds are producer, worker and reader."
)


@contextlib.contextmanager
def reported(forbidden: str = _ASK_THE_OWNER) -> Iterator[None]:
    """Turn errors into one line and an exit code; `forbidden` is the hint if a right is missing."""
    from pgdefer.database.embedded import ServerError  # noqa: PLC0415 (not on every system)

    try:
        yield
    except (psycopg.Error, PgDeferError, ServerError) as error:
        fail(*explained(error, forbidden))


def explained(error: Exception, forbidden: str = _ASK_THE_OWNER) -> tuple[Exit, str]:
    """Return the exit code and the message for an error of the database or its connection."""
    if isinstance(error, PgDeferError):
        return _explained(error)
    if not isinstance(error, psycopg.Error):
        return Exit.UNREACHABLE, str(error)
    better = translate(error)
    if better is not None:
        return _explained(better)
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        said = error.diag.message_primary or one_line(error)
        hint = error.diag.message_hint or forbidden
        return Exit.FORBIDDEN, f"{said}\n{hint}"
    if isinstance(error, psycopg.DataError):
        return Exit.USAGE, one_line(error)
    # without a code, or with one for connections and for servers that shut down
    is_lost = isinstance(error, psycopg.OperationalError) and (
        error.sqlstate is None or error.sqlstate.startswith(("08", "57P"))
    )
    return Exit.UNREACHABLE if is_lost else Exit.ERROR, one_line(error)


def _explained(error: PgDeferError) -> tuple[Exit, str]:
    # These share the SQLSTATE of bad arguments.
    is_missing = error.message in {"no such schedule", "no such group", "no such queue"}
    error.hint = error.hint and _renamed(error.hint, _COMMANDS)
    return Exit.NOT_FOUND if is_missing else _ENDS.get(type(error), Exit.ERROR), escaped(str(error))


def one_line(error: Exception) -> str:
    """Return an error's text without its line breaks, and without the code that raised it."""
    text, _, _ = str(error).partition("\nCONTEXT:")
    return " ".join(text.split())


def fail(code: Exit, message: str) -> NoReturn:
    """Print a message and exit."""
    say(message)
    raise typer.Exit(code)


def check_one_place(dsn: str | list[str] | None, file: Path | None) -> None:
    """Refuse --dsn together with --dsns. A database named by the environment is no --dsn."""
    if file is not None and dsn and dsn != os.environ.get("PGDEFER_DSN"):
        fail(Exit.USAGE, "give --dsn or --dsns, not both.")


def say(message: str) -> None:
    """Print a message about a failure to stderr, with control characters escaped."""
    text = "\n".join(map(escaped, f"pgdefer: {message}".split("\n")))
    err.print(Text(text, style="red"), soft_wrap=True)


def fail_for_missing(kind: str, name: str | int) -> NoReturn:
    """Say that there is no such thing, in the database's words, and exit."""
    if kind == "job":
        fail(*explained(JobNotFound("job not found", detail=f"id: {name}", hint=_NO_JOB)))
    hint = f"queue.{kind}s lists them."
    fail(*explained(InvalidParameter(f"no such {kind}", detail=f"name: {name}", hint=hint)))


def is_asked() -> bool:
    """Whether a person can answer: stdin may be closed, or no terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def confirm(question: str, *, yes: bool, dry_run: bool = False) -> None:
    """Ask for confirmation, unless told not to. Without an answer, exit."""
    if yes or dry_run:
        return
    if not is_asked():
        fail(
            Exit.USAGE,
            f"{question} Standard input is no terminal, so nobody can answer: pass --yes.",
        )
    typer.confirm(question, abort=True, err=True)


def end_of(rows: Sequence[Mapping[str, Any]]) -> Exit:
    """Return the exit code of a call on many jobs: all done, one reason for none, or partly."""
    errors = {row["error"] for row in rows}
    if errors <= {None}:
        return Exit.DONE
    if len(errors) > 1:
        return Exit.PARTLY
    (error,) = errors
    return _ENDS.get(SQLSTATES.get(error, PgDeferError), Exit.ERROR)
