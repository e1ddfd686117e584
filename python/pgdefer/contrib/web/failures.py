"""Pages that say what went wrong: never with internals of the page or of its server.

Tests: contrib/test_web_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from .database import Refused, Unreachable
from .pool import Full
from .visit import BadRequest, NotFound, frame_of, templates

__all__ = ["error_handler", "error_page", "page_for"]

# A statement, or a transaction, took longer than it may.
TOO_LONG = ("57014", "25P04")
STATUS = {"QJ001": 404, "42501": 403, "54001": 400} | dict.fromkeys(TOO_LONG, 504)

# Every operation admits all new jobs first, so that it finds each in its place.
BACKLOG = (
    "Nothing was changed. If many new jobs wait and no worker runs, start a worker, or call "
    "queue.tick() until it admits none. Then try again."
)


def page_for(request: Request, error: Exception) -> Response | None:
    """Return the page for an error that is not the page's own fault; None for any other."""
    match error:
        case NotFound():
            return error_page(request, 404, "This does not exist, or your role may not see it.")
        case BadRequest():
            return error_page(request, 400, "The address or the form can't be read.")
        case Refused():
            status = STATUS.get(error.sqlstate, 400 if error.sqlstate < "42" else 409)
            hint = error.hint
            if error.sqlstate in TOO_LONG and request.method == "POST":
                hint = BACKLOG
            return error_page(request, status, error.message, error.detail, hint)
        case Full():
            return error_page(
                request,
                503,
                "All connections to the database are in use.",
                "Nothing was done. Try again soon.",
                again=request.method == "GET",
            )
        case Unreachable() if request.method == "GET":
            return error_page(
                request, 503, "The database can't be reached.", "This page tries again.", again=True
            )
        case Unreachable():
            return error_page(
                request,
                503,
                "The connection to the database was lost.",
                "It is unknown whether the call was made. Check before you send it again.",
            )
    return None


def error_page(
    request: Request,
    status: int,
    message: str,
    detail: str = "",
    hint: str = "",
    *,
    again: bool = False,
) -> Response:
    """Return a page with a message; again: it asks for itself again soon."""
    body = templates.get_template("error.html").render(
        message=message, detail=detail, hint=hint, again=again, **frame_of(request)
    )
    return HTMLResponse(body, status)


def error_handler(status: int, message: str) -> Callable[[Request, Exception], Any]:
    """Return a handler of exceptions that shows a message."""

    async def answer(request: Request, _error: Exception) -> Response:
        return error_page(request, status, message)

    return answer
