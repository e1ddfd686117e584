"""The command line, as a separate process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgdefer import App, __version__
from pgdefer.cli import Exit
from pgdefer.database.install import Form, install
from proxy import Proxy

from .conftest import Jobs, wait_for

pytestmark = pytest.mark.client

MODULE = """
import time
from pgdefer import App

app = App({dsn!r})

@app.task(name="add")
async def add(a: int, b: int) -> int:
    return a + b

@app.task(name="stuck")
def stuck() -> None:
    print("started", flush=True)
    time.sleep(60)

@app.task(name="until cut")
def until_cut() -> None:
    print("started", flush=True)
    input()
    print("ended", flush=True)
"""

Connection = psycopg.Connection[Any]
Run = Callable[..., subprocess.CompletedProcess[str]]
NOWHERE = "postgresql://127.0.0.1:1/nowhere?connect_timeout=1"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    env |= {"PGDEFER_HOME": str(tmp_path / "home"), "COLUMNS": "100"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pgdefer", *arguments],
            check=False,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=env,
            timeout=300,
        )

    return run


def test_version(run: Run, dsn: str) -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"pgdefer {__version__}\n")
    done = run("version")
    assert (done.returncode, done.stdout) == (0, f"client {__version__}\n")
    done = run("version", "--dsn", dsn)
    assert (done.returncode, done.stdout) == (0, f"client {__version__}\ndatabase {__version__}\n")


@pytest.mark.parametrize("command", ["job ls", "job ls --json", "job get name 1 --raw"])
@pytest.mark.parametrize(
    ("to", "code", "said"),
    [
        ("> out", 0, ""),
        (">&-", 0, ""),
        (
            "> /dev/full",
            Exit.ERROR,
            "pgdefer: the output can't be written: No space left on device\n",
        ),
    ],
)
def test_wherever_the_output_goes(
    app: App, dsn: str, tmp_path: Path, *, command: str, to: str, code: int, said: str
) -> None:
    app.defer("\N{SNOWMAN}", {"name": "ready"})
    typed = f'"{sys.executable}" -m pgdefer {command} --dsn "{dsn}" {to}'
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        ["sh", "-c", typed], check=False, capture_output=True, text=True, cwd=tmp_path, env=env
    )
    assert (done.returncode, done.stderr) == (code, said)
    if to == "> out":
        assert "ready" in (tmp_path / "out").read_text()


@pytest.mark.long
@pytest.mark.unchecked("there is nothing to check")
@pytest.mark.parametrize("form", ["auto", "plain"])
def test_install(run: Run, blank_dsn: str, form: str) -> None:
    assert run("version", "--dsn", blank_dsn).returncode == Exit.NOT_INSTALLED
    done = run("install", "--dsn", blank_dsn, "--form", form)
    assert done.returncode == 0, done.stderr
    assert f"pgdefer {__version__} is installed" in done.stdout
    again = run("install", "--dsn", blank_dsn, "--form", form)
    assert (again.returncode, again.stdout) == (
        0,
        f"pgdefer {__version__} was installed already.\n",
    )
    with psycopg.connect(blank_dsn, autocommit=True) as connection:
        connection.execute("select queue.defer('t')")
        assert connection.execute("select * from queue.check()").fetchall() == []


@pytest.mark.unchecked("there is nothing to check")
def test_a_role_that_may_not_install(run: Run, blank_dsn: str) -> None:
    with psycopg.connect(blank_dsn, autocommit=True) as superuser:
        superuser.execute("create role no_installer login")
        try:
            done = run("install", "--dsn", make_conninfo(blank_dsn, user="no_installer"))
        finally:
            superuser.execute("drop role no_installer")
    assert done.returncode == Exit.FORBIDDEN
    assert done.stderr.splitlines()[1:] == [
        "Install as the owner of the queue, or as a role with CREATE on the database."
    ]


@pytest.mark.unchecked("there is nothing to check")
@pytest.mark.parametrize("form", ["auto", "plain"])
def test_installers_that_meet(blank_dsn: str, form: Form) -> None:
    """Like the workers of a supervisor on a new embedded server."""
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(install, [blank_dsn] * 4, [form] * 4))
    assert {(one.version, one.form) for one in done} == {(__version__, done[0].form)}


@pytest.mark.long
def test_what_is_there_keeps_its_form(run: Run, blank_dsn: str) -> None:
    """Even if the server has the extension's files, as from PostgreSQL 18 on."""
    assert run("install", "--dsn", blank_dsn, "--form", "plain").returncode == 0
    for command in ("install", "upgrade"):
        done = run(command, "--dsn", blank_dsn)
        assert (done.returncode, done.stderr) == (0, "")
    done = run("install", "--dsn", blank_dsn, "--form", "extension")
    assert done.returncode == Exit.ERROR
    assert "is installed by plain SQL here" in done.stderr


def test_a_worker(run: Run, dsn: str, jobs: Jobs, app: App, tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text(MODULE.format(dsn="postgresql://nowhere.invalid/x"))
    app.defer("add", {"a": 1, "b": 2}, queue="x1")
    app.defer("add", {"a": 3, "b": 4}, queue="y")
    app.defer("add", {"a": 5, "b": 6}, queue="z")
    done = run("worker", "-A", "mod:app", "--dsn", dsn, "--queues", "x*,y", "--drain")
    assert done.returncode == 0, done.stderr
    assert [(row["state"], row["result"]) for row in jobs()] == [
        ("succeeded", 3),
        ("succeeded", 7),
        ("ready", None),
    ]
    done = run("worker", "-A", "mod:app", "--dsn", "secret garbage")
    assert (done.returncode, done.stderr.count("\n")) == (Exit.USAGE, 1)
    assert "the DSN can't be read" in done.stderr
    assert "secret" not in done.stderr


def test_full_collections_leave_out_what_a_worker_has_imported(
    run: Run, dsn: str, jobs: Jobs, app: App, tmp_path: Path
) -> None:
    count = "@app.task(name='frozen')\ndef frozen():\n    return gc.get_freeze_count()\n"
    (tmp_path / "mod.py").write_text("import gc\n" + MODULE.format(dsn=dsn) + count)
    app.defer("frozen")
    assert run("worker", "-A", "mod:app", "--drain").returncode == 0
    (frozen,) = [row["result"] for row in jobs()]
    assert frozen > 10_000


def test_the_applications_own_log(run: Run, dsn: str, jobs: Jobs, app: App, tmp_path: Path) -> None:
    log = "import logging\nlogging.basicConfig(level=logging.INFO, format='own %(message)s')\n"
    (tmp_path / "mod.py").write_text(log + MODULE.format(dsn=dsn))
    for options in [], ["--log-format", "json"]:
        app.defer("add", {"a": 1, "b": 2})
        done = run("worker", "-A", "mod:app", "--drain", *options)
        (line,) = [line for line in done.stderr.splitlines() if "succeeded" in line]
        assert line.startswith("{" if options else "own "), line


def test_each_line_of_a_log_as_json(
    run: Run, dsn: str, jobs: Jobs, app: App, tmp_path: Path
) -> None:
    (tmp_path / "mod.py").write_text("""
import logging, warnings
import pgdefer

app = pgdefer.App()


@app.task(name="odd")
def odd() -> None:
    warnings.warn("of\\ntwo lines", stacklevel=1)
    logging.getLogger("mine").error("%d", "no number")
""")
    app.defer("odd")
    done = run("worker", "-A", "mod:app", "--dsn", dsn, "--drain", "--log-format", "json")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert "of\ntwo lines" in "".join(each["message"] for each in lines)
    assert "%d ('no number',)" in [each["message"] for each in lines]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "@app.task(name='send', retries=3)\ndef send() -> None: ...",
            "the task 'send' takes no option retries: did you mean retry?",
        ),
        (
            "@app.task(name='send', retry=dict(max_attempts='x'))\ndef send() -> None: ...",
            "the task 'send': ",
        ),
        (
            "@app.recurring('bad cron', name='nightly')\ndef send() -> None: ...",
            "the schedule of the task 'mod.send': 'bad cron' has 2 fields",
        ),
    ],
)
def test_a_worker_says_which_of_its_tasks_is_wrong(
    run: Run, dsn: str, tmp_path: Path, more: str, message: str
) -> None:
    (tmp_path / "mod.py").write_text(MODULE.format(dsn=dsn) + more)
    done = run("worker", "-A", "mod:app", "--drain")
    assert done.returncode == Exit.USAGE
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("pgdefer: ")]
    assert message in line
    assert "Traceback" not in done.stderr


def test_modules_to_import_that_are_not_there(run: Run, dsn: str, tmp_path: Path) -> None:
    more = "app.imports = ('no_such',)"
    (tmp_path / "mod.py").write_text(MODULE.format(dsn=dsn) + more)
    done = run("worker", "-A", "mod:app")
    assert done.returncode == Exit.NO_APP
    assert done.stderr == "pgdefer: mod:app, imports=['no_such']: No module named 'no_such'\n"


def test_a_worker_that_gave_jobs_back_says_so(
    dsn: str, jobs: Jobs, app: App, tmp_path: Path
) -> None:
    (tmp_path / "mod.py").write_text(MODULE.format(dsn=dsn))
    app.defer("stuck")
    process = subprocess.Popen(
        [sys.executable, "-m", "pgdefer", "worker", "-A", "mod"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGQUIT)
    assert process.wait(300) == Exit.GAVE_BACK
    process.stdout.close()
    assert list(jobs.states().values()) == ["ready"]


def test_a_worker_that_could_not_report_says_so(
    dsn: str, jobs: Jobs, app: App, tmp_path: Path
) -> None:
    """Its job will run again, when the database sees that the worker is gone."""
    named = conninfo_to_dict(dsn)
    folder = Path(str(named["host"]))
    proxy = Proxy(folder, 7005, int(named.get("port") or 5432))
    (tmp_path / "mod.py").write_text(MODULE.format(dsn=make_conninfo(dsn, port=7005)))
    app.defer("until cut")
    with subprocess.Popen(
        [sys.executable, "-m", "pgdefer", "worker", "-A", "mod"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "started\n"
            proxy.close()
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "ended\n"
            process.send_signal(signal.SIGQUIT)
            assert "outcomes that could not be reported: 1" in process.stderr.read()
            assert process.wait(300) == Exit.GAVE_BACK
        finally:
            process.kill()
            proxy.close()
            (folder / ".s.PGSQL.7005").unlink()
    assert list(jobs.states().values()) == ["running"]


def test_a_signal_while_a_worker_reports_its_end(
    dsn: str, conn: Connection, connect: Callable[..., Connection], tmp_path: Path
) -> None:
    """A second SIGTERM stops at once, but not before ended jobs are reported."""
    (tmp_path / "mod.py").write_text(MODULE.format(dsn=dsn))
    process = subprocess.Popen(
        [sys.executable, "-m", "pgdefer", "worker", "-A", "mod"],
        stderr=subprocess.DEVNULL,
        cwd=tmp_path,
    )
    try:
        wait_for(lambda: conn.execute("select 1 from queue.workers").fetchone())
        with connect() as holder, holder.transaction():
            holder.execute("select from queue.worker for update")
            process.send_signal(signal.SIGTERM)
            waiting = (
                "select 1 from pg_stat_activity"
                " where wait_event_type = 'Lock' and query like '%deregister_worker%'"
            )
            wait_for(lambda: conn.execute(waiting).fetchone())
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGQUIT)
        assert process.wait(300) == Exit.DONE
    finally:
        process.kill()
        process.wait()
    assert conn.execute("select from queue.workers where is_alive").fetchall() == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["worker"], Exit.USAGE, "Missing option"),
        (["why", "1"], Exit.USAGE, "there is no command 'why': did you mean 'job why'?"),
        (["pause"], Exit.USAGE, "did you mean 'queue pause'?"),
        (["jobs"], Exit.USAGE, "No such command 'jobs'. Did you mean 'job'?"),
        (["worker", "-A", "no_such_module:app"], Exit.NO_APP, "No module named"),
        (["worker", "-A", "json:dumps"], Exit.NO_APP, "json:dumps is a function, not an App"),
        (["worker", "-A", "json:dmps"], Exit.NO_APP, "json has no dmps"),
        (["worker", "-A", "json"], Exit.NO_APP, "json has no App"),
        (["worker", "-A", "json", "--shutdown-timeout", "-1"], Exit.USAGE, "'--shutdown-timeout'"),
        (["worker", "-A", "json", "--heartbeat-every", "-1"], Exit.USAGE, "'--heartbeat-every'"),
        (["worker", "-A", "json", "--heartbeat-every", "0"], Exit.USAGE, "must be above 0"),
        (["worker", "-A", "json", "--dead-after", "5"], Exit.USAGE, "below dead_after: 10 and 5"),
        (["worker", "-A", "json", "--dead-after", "inf"], Exit.USAGE, "dead_after must be"),
        (["worker", "-A", "json", "--poll-every", "0"], Exit.USAGE, "poll_every must be at least"),
        (["worker", "-A", "json", "--poll-every", "nan"], Exit.USAGE, "poll_every must be at most"),
        (["install", "--dsn", NOWHERE], Exit.UNREACHABLE, "onnection refused"),
        (["version", "--dsn", NOWHERE], Exit.UNREACHABLE, "onnection refused"),
        (["install", "--form", "other"], Exit.USAGE, "Invalid value"),
    ],
)
def test_what_went_wrong_is_in_the_exit_code(
    run: Run, arguments: list[str], code: Exit, message: str
) -> None:
    done = run(*arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_only_app_of_a_module_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text(MODULE.format(dsn=NOWHERE))
    done = run("worker", "-A", "mod:ap", "--drain")
    assert (done.returncode, done.stderr) == (
        Exit.NO_APP,
        "pgdefer: mod has no ap; its App is mod:app\n",
    )


def test_one_of_several_apps_is_to_be_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text("import pgdefer\na, b = pgdefer.App(), pgdefer.App()\nc = b\n")
    done = run("worker", "-A", "mod", "--drain")
    assert (done.returncode, done.stderr) == (
        Exit.NO_APP,
        "pgdefer: mod has several Apps: name one, as mod:a or mod:b\n",
    )


def test_an_import_that_fails_is_located(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text("import other\n")
    (tmp_path / "other.py").write_text("import os\nimport no_such\n")
    done = run("worker", "-A", "mod", "--drain")
    assert (done.returncode, done.stderr) == (
        Exit.NO_APP,
        f"pgdefer: mod: {tmp_path}/other.py:2: No module named 'no_such'\n",
    )
    done = run("worker", "-A", "mod.py", "--drain")
    assert (done.returncode, done.stderr) == (
        Exit.NO_APP,
        "pgdefer: mod.py is a file: pass its module, mod\n",
    )


@pytest.mark.parametrize("names", ["", "a,", ",a", "a, "])
def test_an_empty_name_does_not_stand_for_all_queues(run: Run, tmp_path: Path, names: str) -> None:
    (tmp_path / "mod.py").write_text(MODULE.format(dsn=NOWHERE))
    done = run("worker", "-A", "mod:app", "-q", names, "--drain")
    assert (done.returncode, done.stderr.count("\n")) == (Exit.USAGE, 1)
    assert "-q contains an empty name" in done.stderr


@pytest.mark.long
def test_a_worker_that_is_refused_at_first(
    run: Run, dsn: str, conn: Connection, tmp_path: Path
) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dbname": "nope"}, 'database "nope" does not exist'),
        ({"user": "nobody"}, 'role "nobody" does not exist'),
        ({"user": "locked_out"}, 'role "locked_out" is not permitted to log in'),
        ({"user": "barred"}, f'permission denied for database "{conn.info.dbname}"'),
    ]
    with roles(conn):
        for wrong, message in cases:
            (tmp_path / "mod.py").write_text(MODULE.format(dsn=make_conninfo(dsn, **wrong)))
            done = run("worker", "-A", "mod:app", "--drain")
            assert done.returncode == Exit.UNREACHABLE
            assert message in done.stderr.splitlines()[-1]
            assert "Traceback" not in done.stderr


@contextlib.contextmanager
def roles(conn: Connection) -> Iterator[None]:
    """A role that may not log in, and one that may not enter this database."""
    conn.execute("create role locked_out nologin; create role barred login")
    name = sql.Identifier(conn.info.dbname)
    conn.execute(sql.SQL("revoke connect on database {} from public").format(name))
    try:
        yield
    finally:
        conn.execute("drop role locked_out; drop role barred")


@pytest.mark.unchecked("there is nothing to check")
def test_a_worker_on_a_database_without_the_queue(run: Run, blank_dsn: str, tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text(MODULE.format(dsn=blank_dsn))
    done = run("worker", "-A", "mod:app")
    assert done.returncode == Exit.NOT_INSTALLED
    assert "pgdefer install" in done.stderr


def test_the_demo(run: Run, dsn: str) -> None:
    done = run("demo", "--dsn", dsn, "--limit", "30")
    assert done.returncode == 0, done.stderr
    assert "demo.digest" in done.stdout
    assert "60 jobs in" in done.stdout
    assert "files: 30," in done.stdout
    assert "failed" not in done.stdout


def test_the_demo_beside_other_programs(run: Run, dsn: str) -> None:
    over = threading.Event()

    def defer() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not over.wait(0.01):
                connection.execute("select queue.defer('elsewhere', queue => 'other')")

    with ThreadPoolExecutor() as pool:
        deferring = pool.submit(defer)
        try:
            done = run("demo", "--dsn", dsn, "--limit", "3")
        finally:
            over.set()
        deferring.result()
    assert done.returncode == 0, done.stderr
    assert "6 jobs in" in done.stdout
    assert "elsewhere" not in done.stdout
