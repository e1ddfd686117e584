"""A web page that shows the queue and lets you act on it: an ASGI application.

PostgreSQL decides what a visitor may see and do: each visitor logs in as a database role, and every
page reads public views or calls public functions as that role.

    from pgdefer.contrib import web

    app.mount("/queue", web.asgi("postgresql://db.example/shop"))
"""

from __future__ import annotations

from .app import Page, asgi
from .many import Pages, asgi_of_many

__all__ = ["Page", "Pages", "asgi", "asgi_of_many"]
