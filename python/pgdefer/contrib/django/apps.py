"""The Django app.

Tests: contrib/test_django.py.
"""

from __future__ import annotations

from django.apps import AppConfig
from django.core import checks

__all__ = ["PgDeferConfig"]


class PgDeferConfig(AppConfig):
    """The queue as an app of the project."""

    name = "pgdefer.contrib.django"
    label = "pgdefer"
    verbose_name = "Job queue"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks."""
        from pgdefer.contrib.django.checks import check_database, check_settings  # noqa: PLC0415

        checks.register(check_settings, "pgdefer")
        checks.register(check_database, checks.Tags.database)
