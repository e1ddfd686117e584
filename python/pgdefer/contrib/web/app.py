"""The application: sessions and routes.

Tests: contrib/test_web.py.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import urllib.parse
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from .actions import ACTIONS
from .database import ABOUT, Database, LoginRefused, Refused, Unreachable, login_with
from .failures import error_page, page_for
from .figures import Figures
from .pool import Full, Pool
from .sessions import Session, Sessions
from .site import Site
from .views import VIEWS
from .visit import (
    Form,
    Visit,
    cookie_of,
    form_of,
    frame_of,
    path_of,
    read_form,
    root_of,
    templates,
)

__all__ = ["Page", "asgi"]

COOKIE = "pgdefer_session"
LOGIN_COOKIE = "pgdefer_login"
OTHER_SITE = "The form comes from another site."
OUT_OF_DATE = "This form is out of date. Open the page again."
LONGEST_ROLE = 63  # bytes
# Bytes of a form that needs no login: to parse it takes the event loop's time.
LARGEST_LOGIN = 16_384
THREADS = 40  # of a page's visits, so that those to another database that is down delay none
Handler = Callable[[Visit], Response]


class _Id(Convertor[int]):
    """A job's id in a URL."""

    regex = "[0-9]{1,18}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


register_url_convertor("id", _Id())


def asgi(
    dsn: str = "",
    *,
    role_header: str | None = None,
    needs_password: bool = True,
) -> Page:
    """Return the page as an ASGI application, to be served or mounted under a path.

    Visitors log in as roles of the database of `dsn`, by password. With `role_header`, a trusted
    proxy passes the visitor's role in this header: the page connects as `dsn` says and switches to
    that role by SET ROLE. Then only the proxy may be able to reach the page.

    PostgreSQL must require a password. `needs_password=False` permits servers that require none;
    use it only on your own machine.
    """
    return Page(dsn, role_header, needs_password=needs_password)


class Page(Site):
    """The application, and its sessions."""

    def __init__(
        self,
        dsn: str,
        role_header: str | None,
        *,
        needs_password: bool,
        name: str = "",
        path: str = "",
    ) -> None:
        self._dsn = dsn
        self._role_header = role_header
        self._needs_password = needs_password
        self._pool = Pool()
        self._databases: dict[str, Database] = {}  # of the roles that the proxy has named
        self._sessions = Sessions()
        self._limiters: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, CapacityLimiter] = (
            weakref.WeakKeyDictionary()
        )
        self._figures = Figures()
        super().__init__(self._routes(), name=name, path=path)

    @property
    def _in_thread(self) -> Callable[..., Awaitable[Response]]:
        loop = asyncio.get_running_loop()
        limiter = self._limiters.get(loop)  # it belongs to the loop
        if limiter is None:
            limiter = self._limiters[loop] = CapacityLimiter(THREADS)
        return functools.partial(to_thread.run_sync, limiter=limiter)

    def close(self) -> None:
        """End all sessions and close their connections."""
        self._sessions.close()
        self._pool.close_all()

    def _routes(self) -> list[Route]:
        routes = [Route("/login", self._login, methods=["GET", "POST"])]
        routes += [Route("/logout", self._logout, methods=["POST"])]
        for path, (view, *_) in VIEWS.items():
            routes.append(Route(path, self._reads(view), methods=["GET"]))
        for path, act in ACTIONS.items():
            routes.append(Route(path, self._writes(act), methods=["POST"]))
        return routes

    def _reads(self, view: Handler) -> Callable[[Request], Any]:
        def read(visit: Visit) -> Response:
            with visit.session.database.visit() as visit.reader:
                return view(visit)

        async def answer(request: Request) -> Response:
            return await self._in_thread(self._answer, request, Form({}), read)

        return answer

    def _writes(self, act: Handler) -> Callable[[Request], Any]:
        def write(visit: Visit) -> Response:
            if not visit.session.has_sent(visit.form.text("token")):
                return error_page(visit.request, 403, OUT_OF_DATE)
            return act(visit)

        async def answer(request: Request) -> Response:
            if not _is_own(request):
                return error_page(request, 403, OTHER_SITE)
            form = await read_form(request)
            return await self._in_thread(self._answer, request, form, write)

        return answer

    def _answer(self, request: Request, form: Form, handler: Handler) -> Response:
        try:
            session = self._session(request)
            if session is None:
                return self._to_login(request)
            query = form_of(request.scope["query_string"], 100)
            can_log_out = self._role_header is None
            visit = Visit(request, session, form, query, can_log_out, self._figures)
            response = handler(visit)
        except LoginRefused:
            return self._to_login(request)
        except Exception as error:
            answer = page_for(request, error)
            if answer is None:
                raise
            return answer
        if self._role_header is not None:
            _set_cookie(request, response, COOKIE, session.name)
        return response

    def _to_login(self, request: Request) -> Response:
        if self._role_header is not None:
            return error_page(request, 403, "The proxy has named no role that may see this page.")
        query = {"next": _below(request)} if request.method != "POST" else {}
        if cookie_of(request, COOKIE):
            query["ended"] = "1"
        tail = f"?{urllib.parse.urlencode(query)}" if query else ""
        return RedirectResponse(f"{root_of(request)}/login{tail}", 303)

    def _session(self, request: Request) -> Session | None:
        session = self._sessions.get(cookie_of(request, COOKIE))
        if self._role_header is None:
            return session
        role = _named_role(request.headers.get(self._role_header, ""))
        if role is None:
            return None
        if session is None or session.role != role:
            database = self._databases.get(role) or Database(self._dsn, self._pool, role=role)
            session = self._begin(database)
            self._databases[role] = database
        return session

    def _begin(self, database: Database) -> Session:
        """Return a session for a visitor that PostgreSQL has accepted."""
        with database.visit() as reader:
            about = reader.one(ABOUT)
        assert about is not None
        if not about["views"]:
            database.close()
            raise Refused("42501", "This role has no rights on the queue.")
        session = Session(
            secrets.token_urlsafe(32),
            database,
            about["role"],
            frozenset(about["functions"]),
            frozenset(about["views"]),
        )
        self._sessions.add(session)
        return session

    async def _login(self, request: Request) -> Response:
        if self._role_header is not None:
            return RedirectResponse(f"{root_of(request)}/", 303)
        if request.method != "POST":
            is_ended = "ended" in request.query_params
            return _login_page(request, "Your session has ended. Log in again." if is_ended else "")
        form = await read_form(request, LARGEST_LOGIN)
        token = cookie_of(request, LOGIN_COOKIE)
        if (
            not _is_own(request)
            or not token
            or not secrets.compare_digest(token.encode(), form.text("token").encode())
        ):
            return _login_page(request, "This form was out of date. Try again.", 403, form)
        return await self._in_thread(self._log_in, request, form)

    def _log_in(self, request: Request, form: Form) -> Response:
        role, password = form.text("role"), form.text("password")

        def again(told: str, status: int) -> Response:
            return _login_page(request, told, status, form)

        if not self._sessions.may_try():
            return again("Too many logins were refused. Wait a minute.", 429)
        # with an empty password, libpq would use one of this process
        if not role or not password or "\0" in role + password:
            return again("Enter a database role and its password.", 403)
        try:
            database = login_with(
                self._dsn, self._pool, role, password, needs_password=self._needs_password
            )
            session = self._begin(database)
        except LoginRefused:
            self._sessions.note_refused()
            return again("The server does not accept this role and password.", 403)
        except Full:
            return again("All connections to the database are in use. Try again soon.", 503)
        except Unreachable:
            return again("The database can't be reached just now.", 503)
        except Refused as refused:
            return again(refused.message, 403)
        before = self._sessions.get(cookie_of(request, COOKIE))
        if before is not None:
            self._sessions.drop(before)
        target = form.text("next")
        path = target if target.startswith("/") and not target.startswith(("//", "/\\")) else "/"
        response = RedirectResponse(f"{root_of(request)}{path}", 303)
        _set_cookie(request, response, COOKIE, session.name)
        response.delete_cookie(LOGIN_COOKIE, path=root_of(request) or "/")
        return response

    async def _logout(self, request: Request) -> Response:
        if not _is_own(request):
            return error_page(request, 403, OTHER_SITE)
        form = await read_form(request, LARGEST_LOGIN)
        session = self._sessions.get(cookie_of(request, COOKIE))
        if session is None:
            return self._to_login(request)
        if not session.has_sent(form.text("token")):
            return error_page(request, 403, OUT_OF_DATE)
        self._sessions.drop(session)
        response = RedirectResponse(f"{root_of(request)}/login", 303)
        response.delete_cookie(COOKIE, path=root_of(request) or "/")
        return response


def _below(request: Request) -> str:
    path = path_of(request)
    return f"{path}?{request.url.query}" if request.url.query else path


def _is_own(request: Request) -> bool:
    """Whether the form comes from a page of this site, as far as the browser says."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("origin")
    return origin is None or origin.partition("://")[2] == request.url.netloc


def _named_role(header: str) -> str | None:
    """Return the role that a header names in UTF-8, None if it names none."""
    sent = header.encode("latin-1")  # starlette has decoded its bytes as latin-1
    try:
        role = sent.decode()
    except UnicodeDecodeError:
        return None
    # "none" would mean the role that connects; a longer name would be cut to another one
    is_name = role not in ("", "none") and "\0" not in role and len(sent) <= LONGEST_ROLE
    return role if is_name else None


def _set_cookie(request: Request, response: Response, name: str, value: str) -> None:
    response.set_cookie(
        name,
        value,
        path=root_of(request) or "/",
        httponly=True,
        samesite="lax" if name == COOKIE else "strict",
        secure=request.url.scheme == "https",
    )


def _login_page(
    request: Request, told: str = "", status: int = 200, sent: Form | None = None
) -> Response:
    """Return the form. After a refusal it still leads to the page that was asked for."""
    token = secrets.token_urlsafe()
    target = sent.text("next") if sent else request.query_params.get("next", "/")
    role = sent.text("role") if sent else ""
    body = templates.get_template("login.html").render(
        told=told, token=token, next=target, role=role, **frame_of(request)
    )
    response = HTMLResponse(body, status)
    _set_cookie(request, response, LOGIN_COOKIE, token)
    return response
