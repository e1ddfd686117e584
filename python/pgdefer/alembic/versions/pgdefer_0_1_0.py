"""pgdefer 0.1.0: install the queue.

`-x pgdefer=plain` or `-x pgdefer=extension` chooses the form; `-x pgdefer_force=yes` lets a
downgrade remove the queue with its jobs.
"""

from __future__ import annotations

from alembic import context, op

import pgdefer.alembic

revision = "pgdefer_0_1_0"
down_revision = None
branch_labels = ("pgdefer",)
depends_on = None


def upgrade() -> None:
    """Install the queue."""
    options = context.get_x_argument(as_dictionary=True)
    pgdefer.alembic.install(op, form=pgdefer.alembic.form_of(options.get("pgdefer", "auto")))


def downgrade() -> None:
    """Remove the queue if this is forced."""
    options = context.get_x_argument(as_dictionary=True)
    pgdefer.alembic.downgrade(op, force=options.get("pgdefer_force") == "yes")
