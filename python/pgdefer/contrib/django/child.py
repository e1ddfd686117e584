"""What a worker's child process imports: the whole project, so that it has every task.

Tests: contrib/test_django_handlers.py.
"""

from __future__ import annotations

from pgdefer.contrib.django import app

app.import_tasks()
