"""What the page of a database and the index of many have in common.

Tests: contrib/test_web.py, contrib/test_web_many.py.
"""

from __future__ import annotations

import abc
import importlib.resources
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from .failures import error_handler
from .visit import BadRequest, TooLarge

__all__ = ["Site"]

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self';"
    " img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none';"
    " frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
STATIC = {"page.css": "text/css", "page.js": "text/javascript"}
HANDLERS: MutableMapping[Any, Any] = {
    404: error_handler(404, "There is no such page."),
    405: error_handler(405, "This page does not allow this method."),
    500: error_handler(500, "The page failed. Its log says why."),
    BadRequest: error_handler(400, "The form can't be read."),
    TooLarge: error_handler(413, "The form is too large."),
}


class Site(abc.ABC):
    """An application whose every answer has these headers, and that is closed at its shutdown."""

    def __init__(self, routes: Sequence[BaseRoute], *, name: str = "", path: str = "") -> None:
        """Serve these routes. Among many, it has a name, and a path below that of the index."""
        static = [Route(f"/static/{file}", _static(file)) for file in STATIC]
        self._application = Starlette(routes=[*static, *routes], exception_handlers=HANDLERS)
        self._application.state.name = name
        self._application.state.path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, with the headers of every answer."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            elif message["type"] == "lifespan.shutdown.complete":
                self.close()
            await send(message)

        await self._application(scope, receive, send_with_headers)

    @abc.abstractmethod
    def close(self) -> None:
        """End all sessions and close their connections."""


def _static(name: str) -> Callable[[Request], Any]:
    body = importlib.resources.files(__package__ or "").joinpath("static", name).read_bytes()
    headers = {"cache-control": "max-age=3600"}

    async def answer(_request: Request) -> Response:
        return Response(body, media_type=STATIC[name], headers=headers)

    return answer
