"""Install the queue, and tell Django of the models of its views."""

from django.db import migrations, models

import pgdefer.contrib.django.models
from pgdefer.contrib.django.operations import InstallQueue


class Migration(migrations.Migration):
    """The first one."""

    initial = True

    dependencies = []

    operations = [
        InstallQueue(),
        migrations.CreateModel(
            name="Attempt",
            fields=[
                ("claim", models.BigIntegerField(primary_key=True, serialize=False)),
                ("attempt", models.IntegerField()),
                ("started_at", pgdefer.contrib.django.models.Moment()),
                ("finished_at", pgdefer.contrib.django.models.Moment()),
                ("outcome", models.TextField()),
                ("error", models.TextField(null=True)),
                ("details", pgdefer.contrib.django.models.Json(null=True)),
            ],
            options={
                "db_table": '"queue"."attempts"',
                "abstract": False,
                "managed": False,
                "base_manager_name": "objects",
            },
        ),
        migrations.CreateModel(
            name="Job",
            fields=[
                ("id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("task", models.TextField()),
                ("queue", models.TextField()),
                (
                    "state",
                    models.TextField(
                        choices=[
                            ("scheduled", "scheduled"),
                            ("waiting", "waiting"),
                            ("upstream_failed", "upstream_failed"),
                            ("blocked", "blocked"),
                            ("ready", "ready"),
                            ("running", "running"),
                            ("held", "held"),
                            ("succeeded", "succeeded"),
                            ("failed", "failed"),
                            ("cancelled", "cancelled"),
                        ]
                    ),
                ),
                ("reason", models.TextField(null=True)),
                ("args", pgdefer.contrib.django.models.Json()),
                ("priority", models.IntegerField()),
                ("lock", models.TextField(null=True)),
                ("queueing_lock", models.TextField(null=True)),
                ("concurrency_key", models.TextField(null=True)),
                (
                    "needs",
                    pgdefer.contrib.django.models.List(
                        base_field=models.BigIntegerField(), null=True, size=None
                    ),
                ),
                ("deadline", pgdefer.contrib.django.models.Moment(null=True)),
                ("scheduled_at", pgdefer.contrib.django.models.Moment(null=True)),
                ("expires_at", pgdefer.contrib.django.models.Moment(null=True)),
                ("created_at", pgdefer.contrib.django.models.Moment()),
                ("started_at", pgdefer.contrib.django.models.Moment(null=True)),
                ("finished_at", pgdefer.contrib.django.models.Moment(null=True)),
                ("attempts", models.IntegerField()),
                ("failures", models.IntegerField()),
                ("crashes", models.IntegerField()),
                ("claims", models.IntegerField()),
                ("claim", models.BigIntegerField(null=True)),
                ("error", models.TextField(null=True)),
                ("result", pgdefer.contrib.django.models.Json(null=True)),
                ("description", models.TextField(null=True)),
                ("headers", pgdefer.contrib.django.models.Json(null=True)),
                ("progress", models.IntegerField()),
                ("options", pgdefer.contrib.django.models.Json(null=True)),
            ],
            options={
                "db_table": '"queue"."jobs"',
                "permissions": (("view_sensitive_args", "Can view sensitive args"),),
                "abstract": False,
                "managed": False,
                "base_manager_name": "objects",
            },
        ),
        migrations.CreateModel(
            name="Lock",
            fields=[
                ("lock", models.TextField(primary_key=True, serialize=False)),
                ("running", models.IntegerField()),
                ("waiting", models.IntegerField()),
                ("has_mutex", models.BooleanField()),
            ],
            options={
                "db_table": '"queue"."locks"',
                "abstract": False,
                "managed": False,
                "base_manager_name": "objects",
            },
        ),
        migrations.CreateModel(
            name="Queue",
            fields=[
                ("name", models.TextField(primary_key=True, serialize=False)),
                ("created_at", pgdefer.contrib.django.models.Moment(null=True)),
                ("max_running", models.IntegerField(null=True)),
                ("rate_limit", models.IntegerField(null=True)),
                ("rate_per", models.DurationField(null=True)),
                ("retain", models.DurationField(null=True)),
                ("ready", models.BigIntegerField()),
                ("running", models.BigIntegerField()),
                ("paused_until", pgdefer.contrib.django.models.Moment(null=True)),
            ],
            options={
                "db_table": '"queue"."queues"',
                "abstract": False,
                "managed": False,
                "base_manager_name": "objects",
            },
        ),
        migrations.CreateModel(
            name="Schedule",
            fields=[
                ("name", models.TextField(primary_key=True, serialize=False)),
                ("cron", models.TextField()),
                ("timezone", models.TextField()),
                ("task", models.TextField()),
                ("args", pgdefer.contrib.django.models.Json()),
                ("options", pgdefer.contrib.django.models.Json()),
                ("enabled", models.BooleanField()),
                ("next_run_at", pgdefer.contrib.django.models.Moment(null=True)),
                ("last_run_at", pgdefer.contrib.django.models.Moment(null=True)),
                ("reason", models.TextField(null=True)),
                ("catch_up", models.TextField()),
                ("max_delay", models.DurationField(null=True)),
                ("overlap", models.TextField()),
                ("source", models.TextField(null=True)),
                ("created_at", pgdefer.contrib.django.models.Moment()),
                ("changed_at", pgdefer.contrib.django.models.Moment()),
            ],
            options={
                "db_table": '"queue"."schedules"',
                "abstract": False,
                "managed": False,
                "base_manager_name": "objects",
            },
        ),
        migrations.CreateModel(
            name="ScheduleRun",
            fields=[
                ("run_at", pgdefer.contrib.django.models.Moment(primary_key=True, serialize=False)),
                ("skipped", models.TextField(null=True)),
                ("detail", models.TextField(null=True)),
                ("manual", models.BooleanField()),
                ("decided_at", pgdefer.contrib.django.models.Moment()),
            ],
            options={
                "db_table": '"queue"."schedule_runs"',
                "abstract": False,
                "managed": False,
                "base_manager_name": "objects",
            },
        ),
        migrations.CreateModel(
            name="Semaphore",
            fields=[
                ("key", models.TextField(primary_key=True, serialize=False)),
                ("kind", models.TextField()),
                ("limit", models.IntegerField()),
                ("used", models.IntegerField()),
                ("ready", models.IntegerField()),
                ("waiting", models.IntegerField()),
            ],
            options={
                "db_table": '"queue"."semaphores"',
                "abstract": False,
                "managed": False,
                "base_manager_name": "objects",
            },
        ),
        migrations.CreateModel(
            name="Task",
            fields=[
                ("name", models.TextField(primary_key=True, serialize=False)),
                ("defaults", pgdefer.contrib.django.models.Json()),
                (
                    "paused_in",
                    pgdefer.contrib.django.models.List(base_field=models.TextField(), size=None),
                ),
            ],
            options={
                "db_table": '"queue"."tasks"',
                "abstract": False,
                "managed": False,
                "base_manager_name": "objects",
            },
        ),
        migrations.CreateModel(
            name="Worker",
            fields=[
                ("id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("name", models.TextField()),
                (
                    "queues",
                    pgdefer.contrib.django.models.List(
                        base_field=models.TextField(), null=True, size=None
                    ),
                ),
                ("info", pgdefer.contrib.django.models.Json()),
                ("registered_at", pgdefer.contrib.django.models.Moment()),
                ("last_seen_at", pgdefer.contrib.django.models.Moment()),
                ("dead_after", models.DurationField()),
                ("is_alive", models.BooleanField()),
                ("running", models.IntegerField()),
                ("memory", models.BigIntegerField(null=True)),
                ("has_left", models.BooleanField()),
            ],
            options={
                "db_table": '"queue"."workers"',
                "abstract": False,
                "managed": False,
                "base_manager_name": "objects",
            },
        ),
    ]
