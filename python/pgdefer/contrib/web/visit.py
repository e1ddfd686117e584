"""One request: the visitor, the form, and the answer.

Tests: contrib/test_web.py, contrib/test_web_faults.py.
"""

from __future__ import annotations

import dataclasses
import functools
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from starlette.requests import Request, cookie_parser
from starlette.responses import HTMLResponse, RedirectResponse, Response

from pgdefer._text import count_of, first_line

from . import queries, text
from .database import Reader
from .figures import Figures
from .sessions import Session

__all__ = [
    "BadRequest",
    "Form",
    "NotFound",
    "TooLarge",
    "Visit",
    "cookie_of",
    "form_of",
    "frame_of",
    "path_of",
    "read_form",
    "root_of",
    "templates",
]

LARGEST_FORM = 4_000_000  # bytes
LARGEST_ID = 2**63 - 1

templates = jinja2.Environment(
    loader=jinja2.PackageLoader("pgdefer.contrib.web"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
templates.filters |= {
    "plain": text.plain,
    "cut": text.cut,
    "first_line": first_line,
    "moment": text.moment,
}
templates.filters |= {"jobs_in": text.jobs_in, "count_of": count_of}


class BadRequest(Exception):  # noqa: N818 (what it says)
    """The URL or the form contains something that no page sends."""


class NotFound(Exception):  # noqa: N818
    """There is no such thing, or this role may not see it."""


class TooLarge(Exception):  # noqa: N818
    """The form is too large."""


def root_of(request: Request) -> str:
    """Return the path under which the page is mounted, empty if it is the whole site."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def frame_of(request: Request) -> dict[str, str]:
    """Return what the frame of every page shows: its paths, and its name if it is one of many."""
    root, place = root_of(request), request.app.state
    return {"root": root, "name": place.name, "index": root.removesuffix(place.path)}


def path_of(request: Request) -> str:
    """Return the path below the one under which the page is mounted."""
    root = str(request.scope.get("root_path", ""))
    return request.url.path.removeprefix(root) or "/"


def cookie_of(request: Request, name: str) -> str:
    """Return a cookie, empty if it is missing. If there are two, browsers send the page's first."""
    sent = ";".join(request.headers.getlist("cookie")).split(";")
    return cookie_parser(";".join(reversed(sent))).get(name, "")


class Form:
    """The fields of a form or a URL."""

    def __init__(self, fields: Mapping[str, Sequence[str]]) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        """Return a field, empty if it is missing."""
        return next(iter(self._fields.get(name, ())), "")

    def maybe(self, name: str) -> str | None:
        """Return a field, None if it is missing or empty."""
        return self.text(name) or None

    def number(self, name: str) -> int | None:
        """Return a field that is a number, None if it is missing or empty."""
        value = self.maybe(name)
        return None if value is None else whole(value)

    def numbers(self, name: str) -> list[int]:
        """Return all fields of a name as numbers, each once."""
        return sorted({whole(value) for value in self._fields.get(name, ())})

    def flag(self, name: str) -> bool:
        """Return whether a box is checked."""
        return self.text(name) != ""


def whole(value: str) -> int:
    """Return a number that fits into a bigint."""
    if not (value.isascii() and value.isdigit() and len(value) <= 19 and int(value) <= LARGEST_ID):
        raise BadRequest
    return int(value)


async def read_form(request: Request, largest: int = LARGEST_FORM) -> Form:
    """Return the fields of a form, unless it has more bytes."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > largest:
            raise TooLarge
    return form_of(body, 2_000)


def form_of(encoded: bytes | bytearray, most: int) -> Form:
    """Return the fields of a form or a URL: at most so many."""
    try:
        text = encoded.decode("ascii")
        fields = urllib.parse.parse_qs(
            text, keep_blank_values=True, max_num_fields=most, errors="replace"
        )
    except ValueError:
        raise BadRequest from None
    return Form(fields)


@dataclasses.dataclass
class Visit:
    """A request of a visitor who is logged in."""

    request: Request
    session: Session
    form: Form
    query: Form
    can_log_out: bool
    figures: Figures
    reader: Reader | None = None

    @property
    def root(self) -> str:
        """Return the path under which the page is mounted."""
        return root_of(self.request)

    def read(self, statement: str, **values: Any) -> list[dict[str, Any]]:
        """Return the rows of a statement of this visit."""
        assert self.reader is not None
        return self.reader.rows(statement, **values)

    def figure(self, statement: str) -> list[dict[str, Any]] | None:
        """Return figures that may be cached; None if they take too long."""
        assert self.reader is not None
        self.reader.statements.append((statement.strip(), {}))
        return self.figures.read(self.session, str(self.rights), statement)

    @functools.cached_property
    def rights(self) -> list[dict[str, Any]]:
        """Return what changes with the rights of the visitor's role."""
        return self.read(queries.RIGHTS)

    def page(self, name: str, status: int = 200, **values: Any) -> Response:
        """Return a page."""
        statements = [] if self.reader is None else self.reader.statements
        body = templates.get_template(name).render(
            session=self.session,
            can_log_out=self.can_log_out,
            path=path_of(self.request),
            statements=statements,
            **frame_of(self.request),
            **values,
        )
        return HTMLResponse(body, status)

    def go(self, path: str, **query: str) -> Response:
        """Redirect the visitor to another page."""
        tail = f"?{urllib.parse.urlencode(query)}" if query else ""
        return RedirectResponse(f"{self.root}{path}{tail}", 303)
