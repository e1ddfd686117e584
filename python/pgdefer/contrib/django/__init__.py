"""The queue for Django: `app` has the project's tasks, and uses the database of its settings.

Add `pgdefer.contrib.django` to INSTALLED_APPS and run `manage.py migrate`: docs/django.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgdefer.contrib.django.application import DjangoApp

    #: The project's tasks. The App is created at its first use, when there are settings.
    app: DjangoApp

__all__ = ["app"]


def __getattr__(name: str) -> object:
    if name == "app":
        from pgdefer.contrib.django.application import project_app  # noqa: PLC0415 (reads settings)

        return project_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
