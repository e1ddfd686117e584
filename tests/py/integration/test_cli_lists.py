"""Repeatable options, many ids, locks and limits, and the samples of deploy/."""

from __future__ import annotations

import datetime as dt
import re
import shutil
import subprocess

import psycopg
import pytest

from pgdefer import App
from pgdefer.cli import Exit
from support import ROOT

from .command_line import Run, run
from .conftest import Jobs, running

__all__ = ["run"]

pytestmark = pytest.mark.client


def test_states_repeat(app: App, run: Run) -> None:
    ids = [app.defer("t").id, app.defer("t", held=True).id, app.defer("t").id]
    app.job(ids[0]).cancel()
    listed = run("job", "ls", "-s", "held", "-s", "cancelled", "--json").json
    assert [(row["id"], row["task"], row["queue"], row["state"]) for row in listed] == [
        (ids[1], "t", "default", "held"),
        (ids[0], "t", "default", "cancelled"),
    ]
    shown = run("job", "show", ids[1], "--json").json
    assert listed[0] == {key: shown[key] for key in listed[0]}
    cut = run("job", "ls", "-s", "held", "-s", "cancelled", "-n", 1)
    assert f"--before {ids[1]}" in cut.err
    (rest,) = run("job", "ls", "-s", "held", "-s", "cancelled", "--before", ids[1], "--json").json
    assert rest["id"] == ids[0]
    (found,) = run("job", "search", "{", "-s", "ready", "-s", "held", "-n", 1, "--json").json
    assert found["id"] == ids[2]
    assert found.keys() == listed[0].keys() | {"bytes", "excerpt"}


def test_options_of_defer(run: Run, jobs: Jobs) -> None:
    given = (
        "--delay",
        "5 minutes",
        "--retry",
        3,
        "--timeout",
        "30 s",
        "--options",
        '{"held": true}',
    )
    run("defer", "t", *given)
    run("defer", "t", "--in", "1 hour")
    shown = run("job", "show", 1, "--json").json
    assert shown["state"] == "held"
    assert [row["state"] for row in jobs()] == ["held", "scheduled"]
    row = jobs._cursor.execute("select j.options from queue.job j where j.id = 1").fetchone()
    assert row is not None
    assert row["options"]["retry"] == {"max_attempts": 3}


def test_a_job_is_deferred_once(run: Run, jobs: Jobs) -> None:
    given = ("defer", "t", '{"n": 1}', "--idempotency-key", "k{n}", "--unique-for", "1 hour")
    assert run(*given).out == run(*given).out
    (row,) = jobs()
    assert row["idempotency_key"] == "k1"
    assert run("job", "show", row["id"], "--json").json["idempotency_key"] == "k1"


def test_many_are_cancelled(app: App, run: Run, jobs: Jobs) -> None:
    ids = [app.defer("t").id for _ in range(3)]
    done = run("job", "cancel", ids[0], 7777, ids[0], "--dry-run", "--json")
    assert (done.code, done.json) == (
        Exit.PARTLY,
        [
            {"id": ids[0], "outcome": "cancelled", "error": None},
            {"id": 7777, "outcome": None, "error": "QJ001"},
        ],
    )
    done = run("job", "cancel", ids[0], 7777, ids[1], "--dry-run")
    assert done.out == f"{ids[0]}: cancelled\n{ids[1]}: cancelled\n"
    assert "not found" in done.err
    assert done.code == Exit.PARTLY
    done = run("job", "cancel", *ids[:2], "--yes")
    assert (done.code, done.out) == (Exit.DONE, f"{ids[0]}: cancelled\n{ids[1]}: cancelled\n")
    done = run("job", "cancel", ids[0], ids[2], "--yes")
    assert done.code == Exit.PARTLY
    assert f"id: {ids[0]}" in done.err
    assert set(jobs.states().values()) == {"cancelled"}


def test_the_exit_code_says_why_none_is_cancelled(app: App, run: Run) -> None:
    ids = [app.defer("t").id for _ in range(2)]
    assert run("job", "cancel", *ids, "--yes").code == Exit.DONE
    for form in ((), ("--json",)):
        assert run("job", "cancel", *ids, "--yes", *form).code == Exit.WRONG_STATE
        assert run("job", "cancel", 7777, 7777, 7778, "--yes", *form).code == Exit.NOT_FOUND
        assert run("job", "cancel", ids[0], 7777, "--yes", *form).code == Exit.PARTLY


def test_locks_and_limits(app: App, run: Run) -> None:
    for _ in range(2):
        app.defer("t", lock="customer:1")
    app.defer("t", concurrency_key="api", concurrency_limit=2, share="a")
    for of in ("lock", "limit", "share"):
        assert "New jobs count once a worker has seen them." in run(of, "ls").err
    run("db", "tick")
    (lock,) = run("lock", "ls", "--json").json
    assert (lock["lock"], lock["job_id"], lock["waiting"]) == ("customer:1", 1, 2)
    (limit,) = run("limit", "ls", "--json").json
    assert (limit["key"], limit["limit"], limit["used"]) == ("api", 2, 0)


async def test_a_traceback_is_shown(app: App, run: Run, jobs: Jobs) -> None:
    @app.task(name="t")
    async def task() -> None:
        raise ValueError("no")

    async with running(app):
        await task.defer_async()
        await jobs.end()
    shown = run("job", "show", 1).out
    assert "Traceback (most recent call last)" in shown
    assert "ValueError: no" in shown


SAMPLES = sorted((ROOT / "deploy").iterdir())


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_samples_name_options_that_there_are(sample, run: Run) -> None:
    text = re.sub(r'", "', " ", sample.read_text("utf-8"))
    known = set(re.findall(r"--[a-z-]+", run("worker", "--help").out))
    commands = re.findall(r"pgdefer(?:\"?,?) worker.*", text)
    assert commands or "image: shop-worker" in text  # the image's own command
    for command in commands:
        named = set(re.findall(r"--[a-z-]+", command))
        assert named <= known


def test_the_query_of_keda(conn: psycopg.Connection) -> None:
    text = (ROOT / "deploy" / "kubernetes.yaml").read_text("utf-8")
    (query,) = re.findall(r'query: "(.*)"', text)
    conn.execute("select queue.defer('t')")
    conn.execute("select queue.tick()")
    (grant,) = re.findall(r"select queue\.grant_access\('keda', .*\)", text)
    conn.execute("create role keda")
    try:
        conn.execute(grant)
        conn.execute("set role keda")
        assert conn.execute(query).fetchone() == (1,)
    finally:
        conn.execute("reset role; drop owned by keda; drop role keda")


def test_the_parts_of_the_kubernetes_sample_fit() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "deploy" / "kubernetes.yaml").read_text("utf-8")
    install, deployment, login, scaled = (part for part in yaml.safe_load_all(text) if part)
    assert (install["apiVersion"], install["kind"]) == ("batch/v1", "Job")
    assert install["spec"]["template"]["spec"]["containers"][0]["command"] == ["pgdefer", "install"]
    assert login["kind"] == "TriggerAuthentication"
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["authenticationRef"] == {"name": login["metadata"]["name"]}
    (secret,) = login["spec"]["secretTargetRef"]
    assert secret["parameter"] == "connection"
    used = {
        install["spec"]["template"]["spec"]["containers"][0]["envFrom"][0]["secretRef"]["name"],
        deployment["spec"]["template"]["spec"]["containers"][0]["envFrom"][0]["secretRef"]["name"],
        secret["name"],
    }
    assert used == set(re.findall(r"^# (shop-\w+) ", text, re.MULTILINE))
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    pod = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert pod["spec"].keys() == {"terminationGracePeriodSeconds", "containers"}
    (container,) = pod["spec"]["containers"]
    probes = {"livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert container.keys() == {"name", "image", "envFrom", "ports", *probes}
    for probe, path in probes.items():
        known = {"httpGet", "periodSeconds", "timeoutSeconds"}
        assert container[probe].keys() <= known
        assert container[probe]["httpGet"] == {"path": path, "port": container["ports"][0]["name"]}
    # As the image says.
    image = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
    port = container["ports"][0]["containerPort"]
    assert f'"--http", "0.0.0.0:{port}"' in image
    (limit,) = re.findall(r'"--shutdown-timeout", "(\d+)"', image)
    assert int(limit) < pod["spec"]["terminationGracePeriodSeconds"]
    assert scaled["kind"] == "ScaledObject"
    assert scaled["spec"]["scaleTargetRef"] == {"name": deployment["metadata"]["name"]}
    assert [trigger["type"] for trigger in scaled["spec"]["triggers"]] == ["postgresql"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_the_unit_of_systemd(tmp_path) -> None:
    text = (ROOT / "deploy" / "pgdefer-worker.service").read_text("utf-8")
    unit = tmp_path / "pgdefer-worker@shop.service"
    unit.write_text(text.replace("/srv/%i/.venv/bin/pgdefer", "/bin/true").replace("User=%i\n", ""))
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not [line for line in done.stderr.splitlines() if unit.name in line], done.stderr


def test_rates_and_shares(app: App, run: Run) -> None:
    rated = {"key": "api", "rate": {"limit": 5, "per": "1 minute"}}
    app.defer("t", concurrency=[rated], share="a")
    app.defer("t", share="b")
    run("db", "tick")
    (limit,) = run("limit", "ls", "--json").json
    assert (limit["key"], limit["limit"], limit["rate"]) == ("api", None, "5 per 00:01:00")
    (found,) = app.list_limits()
    assert (found.rate_limit, found.rate_per) == (5, dt.timedelta(minutes=1))
    rows = run("share", "ls", "--json").json
    assert [(row["share"], row["weight"], row["waiting"]) for row in rows] == [
        ("a", 1.0, 1),
        ("b", 1.0, 1),
    ]
    assert [(share.share, share.started) for share in app.list_shares()] == [("a", 0), ("b", 0)]
    assert "started last minute" in run("share", "ls").out


def test_tasks(run: Run, conn: psycopg.Connection) -> None:
    assert run("task", "ls").err == "No task is registered.\n"
    conn.execute("select queue.register_task('plain')")
    conn.execute("""select queue.register_task('mail', '{"queue": "post", "lock": "{to}"}')""")
    defaults = {"queue": "post", "lock": "{to}"}
    assert run("task", "ls", "--json").json == [
        {"name": "mail", "defaults": defaults, "paused_in": []},
        {"name": "plain", "defaults": {}, "paused_in": []},
    ]
    _, _, mail, plain = map(str.strip, run("task", "ls").out.splitlines())
    assert mail.split(None, 1) == ["mail", '{"lock": "{to}", "queue": "post"}']
    assert plain.split() == ["plain", "{}"]


def test_bare_numbers_are_seconds(run: Run, jobs: Jobs) -> None:
    run("defer", "t", "--delay", 90)
    id = run("defer", "t").out.strip()
    assert run("job", "cancel", id, "--yes").code == 0
    assert run("job", "retry", id, "--delay", 90).code == 0
    assert run("queue", "configure", "default", "--retain", 90).code == 0
    run("db", "tick")
    waits = [row["scheduled_at"] - row["created_at"] for row in jobs()]
    assert all(dt.timedelta(seconds=90) <= wait < dt.timedelta(minutes=90) for wait in waits)
    assert run("queue", "ls", "--json").json[0]["retain"] == "00:01:30"
