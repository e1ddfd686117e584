"""Patroni on etcd, as processes on this machine: failover, switch-over and partition under load.

Needs etcd and Patroni: `tests/install-tools patroni`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from failover import Connection, Load, OldWorker, Producer, folder_of_servers
from pgdefer.database.embedded import EmbeddedServer, sql_folder
from proxy import Proxy
from support import ROOT
from workers import wait_for

pytestmark = [pytest.mark.client, pytest.mark.long]

PATRONI = ROOT / ".tools" / "patroni" / "bin" / "patroni"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _at(port: int, far_port: int) -> dict[str, Any]:
    return {"listen": f"127.0.0.1:{port}", "connect_address": f"127.0.0.1:{far_port}"}


def dsn_of(*ports: int) -> str:
    """Return a DSN of several servers, of which clients use the one that can be written to."""
    return (
        f"host={','.join(['127.0.0.1'] * len(ports))} port={','.join(map(str, ports))}"
        " user=postgres dbname=postgres target_session_attrs=read-write connect_timeout=3"
    )


class Member:
    """A server that Patroni runs. Clients, the other member and etcd are beyond a network."""

    def __init__(self, name: str, folder: Path, server: EmbeddedServer, etcd: int) -> None:
        self.name, self.port, self._folder = name, free_port(), folder
        self._api = free_port()
        targets = self.port, self._api, etcd
        #: The port for others.
        self.far_port, far_api, far_etcd = far = tuple(free_port() for _ in targets)
        self._network = [Proxy(None, *ports) for ports in zip(far, targets, strict=True)]
        self._options = server._as_user() | {"cwd": folder}
        self._process: subprocess.Popen[bytes] | None = None
        trust = ["local all all trust", "host all all 127.0.0.1/32 trust",
                 "host replication all 127.0.0.1/32 trust"]  # fmt: skip
        settings = {
            "scope": "shop",
            "name": name,
            "restapi": _at(self._api, far_api),
            # Otherwise it goes to the address that etcd tells.
            "etcd3": {"hosts": [f"127.0.0.1:{far_etcd}"], "use_proxies": True},
            "bootstrap": {
                "dcs": {
                    "ttl": 20,
                    "loop_wait": 1,
                    "retry_timeout": 3,
                    "synchronous_mode": True,
                    "postgresql": {"use_pg_rewind": True, "parameters": {"wal_keep_size": "1GB"}},
                },
                "initdb": [{"encoding": "UTF8"}, {"locale": "C.UTF-8"}, "data-checksums"],
            },
            "postgresql": _at(self.port, self.far_port)
            | {
                "data_dir": str(folder / name),
                "bin_dir": str(server.bin_dir),
                "pgpass": str(folder / f"{name}.pgpass"),
                "pg_hba": trust,
                "parameters": {"unix_socket_directories": str(folder)},
                "authentication": {
                    "superuser": {"username": "postgres"},
                    "replication": {"username": "replicator"},
                },
            },
        }
        # JSON is YAML.
        self._settings = folder / f"{name}.yml"
        self._settings.write_text(json.dumps(settings))

    def start(self) -> None:
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [PATRONI, self._settings], stdout=log, stderr=log, **self._options
            )

    def is_(self, role: str) -> bool:
        """Whether Patroni's API says that it is primary, or synchronous."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self._api}/{role}").status_code == 200
        return False

    def switch_over_to(self, other: Member) -> None:
        asked = {"leader": self.name, "candidate": other.name}
        answer = httpx.post(f"http://127.0.0.1:{self._api}/switchover", json=asked, timeout=120)
        assert answer.status_code == 200, answer.text

    def kill(self) -> None:
        """Kill Patroni and its server, as if their machine had died."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None
        postmaster = int((self._folder / self.name / "postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGKILL)

    def isolate(self) -> None:
        """Cut it off from all that is beyond the network."""
        for proxy in self._network:
            proxy.hold()

    def hang_up(self) -> None:
        """End its connections beyond the network, as time limits do."""
        for proxy in self._network:
            proxy.cut()

    def rejoin(self) -> None:
        """End the isolation; nothing comes through that was sent meanwhile."""
        self.hang_up()
        for proxy in self._network:
            proxy.heal()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to Patroni alone."""
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGCONT)
            self._process.terminate()
            self._process.wait(60)
        for proxy in self._network:
            proxy.close()

    def connect(self) -> Connection:
        return psycopg.connect(
            f"host=127.0.0.1 port={self.port} user=postgres dbname=postgres", autocommit=True
        )


@pytest.fixture
def members(server: EmbeddedServer) -> Iterator[tuple[Member, Member]]:
    etcd = shutil.which("etcd")
    if etcd is None or not PATRONI.exists():
        pytest.skip("there is no etcd, or no Patroni: tests/install-tools patroni")
    with folder_of_servers(server) as folder:
        client, peer = free_port(), free_port()
        urls = [f"http://127.0.0.1:{port}" for port in (client, peer)]
        command = [etcd, "--data-dir", folder / "etcd", "--log-level", "error"]
        command += ["--listen-client-urls", urls[0], "--advertise-client-urls", urls[0]]
        command += ["--listen-peer-urls", urls[1], "--initial-advertise-peer-urls", urls[1]]
        command += ["--initial-cluster", f"default={urls[1]}"]
        with (folder / "etcd.log").open("wb") as log:
            running = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        one, two = made = (
            Member("one", folder, server, client),
            Member("two", folder, server, client),
        )
        try:
            one.start()
            wait_for(lambda: one.is_("primary"))
            two.start()
            wait_for(lambda: two.is_("sync"))
            yield made
        except BaseException:
            for path in sorted(folder.glob("*.log")):
                print(path.name, path.read_text("utf-8", "replace")[-3000:])
            raise
        finally:
            for member in reversed(made):
                member.stop()
            running.terminate()
            running.wait(60)


def test_under_load(members: tuple[Member, Member], tmp_path: Path) -> None:
    one, two = members
    with one.connect() as connection:
        connection.execute((sql_folder() / "pgdefer.sql").read_bytes())
    with Load(dsn_of(one.far_port, two.far_port), tmp_path) as load:
        load.go_on()
        with one.connect() as connection:
            old = OldWorker(connection)
        one.kill()
        wait_for(lambda: two.is_("primary"))
        load.go_on()
        with two.connect() as connection:
            old.is_refused(connection)
        one.start()  # Patroni rewinds it
        wait_for(lambda: one.is_("sync"))
        load.go_on()
        with two.connect() as connection:
            old = OldWorker(connection)
        two.switch_over_to(one)
        wait_for(lambda: one.is_("primary"))
        load.go_on()
        with one.connect() as connection:
            old.is_refused(connection)
        load.end(one)


@pytest.mark.soak
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_partition(members: tuple[Member, Member], tmp_path: Path, is_frozen: bool) -> None:
    """The primary is cut off with some clients. If its Patroni is frozen, too, it stays a primary."""
    one, two = members
    with one.connect() as connection:
        connection.execute((sql_folder() / "pgdefer.sql").read_bytes())
    beside = Producer(dsn_of(one.port, two.far_port), "neighbour")
    with Load(dsn_of(one.far_port, two.far_port), tmp_path) as load:
        beside.start()
        load.go_on()
        wait_for(lambda: len(beside.acknowledged) > 20)
        with one.connect() as connection:
            old = OldWorker(connection)
            if is_frozen:
                one.signal(signal.SIGSTOP)
            one.isolate()
            wait_for(lambda: two.is_("primary"))
            one.hang_up()
            if is_frozen:
                in_recovery = "select pg_is_in_recovery()"
                assert connection.execute(in_recovery).fetchall() == [(False,)]
                # It takes a job, and confirms it to nobody.
                hanging = "select from pg_stat_activity where wait_event = 'SyncRep'"
                wait_for(lambda: connection.execute(hanging).rowcount)
                count = len(beside.acknowledged)
                load.go_on()
                assert len(beside.acknowledged) == count, "acknowledged without the standby"
        load.go_on()
        with two.connect() as connection:
            old.is_refused(connection)
        one.signal(signal.SIGCONT)
        one.rejoin()
        wait_for(lambda: one.is_("sync"))
        load.go_on()
        count = len(beside.acknowledged)
        wait_for(lambda: len(beside.acknowledged) > count + 20)
        print(load.end(two, beside))
