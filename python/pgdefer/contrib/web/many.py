"""The pages of many databases, below an index of them.

Tests: contrib/test_web_many.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route

from .app import Page
from .site import Site
from .visit import frame_of, templates

__all__ = ["Pages", "asgi_of_many"]

_UNSAFE = re.compile(r"^\.|[^\w.-]", re.ASCII)


def asgi_of_many(
    dsns: Mapping[str, str],
    *,
    role_header: str | None = None,
    needs_password: bool = True,
) -> Pages:
    """Return the pages of many databases, with their names and DSNs, as one ASGI application.

    The index at / lists the names to everybody. Each database has a page below /db, with logins
    and sessions of its own. The options are those of `asgi`, for all pages.
    """
    return Pages(dsns, role_header, needs_password=needs_password)


class Pages(Site):
    """The index, and the page of each database."""

    def __init__(
        self, dsns: Mapping[str, str], role_header: str | None, *, needs_password: bool
    ) -> None:
        self._paths = [(name, place_of(name)) for name in sorted(dsns)]
        self._pages = {
            path: Page(dsns[name], role_header, needs_password=needs_password, name=name, path=path)
            for name, path in self._paths
        }
        mounts = [Mount(path, page) for path, page in self._pages.items()]
        super().__init__([Route("/", self._index), *mounts])

    def close(self) -> None:
        """End the sessions of all pages and close their connections."""
        for page in self._pages.values():
            page.close()

    async def _index(self, request: Request) -> Response:
        index = templates.get_template("index.html")
        return HTMLResponse(index.render(paths=self._paths, **frame_of(request)))


def place_of(name: str) -> str:
    """Return a path that no other name has, and that URLs and cookies contain as it is."""
    if not name:
        raise ValueError("each database needs a name")
    return "/db/" + _UNSAFE.sub(_escaped, name)


def _escaped(found: re.Match[str]) -> str:
    return "".join(f"~{byte:02X}" for byte in found[0].encode())
