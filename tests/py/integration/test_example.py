"""The example application, over HTTP, with a worker."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from support import ROOT, url_of

from .conftest import Jobs, wait_for

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]


@pytest.fixture(params=["psycopg", pytest.param("asyncpg", marks=pytest.mark.long)])
def environment(dsn: str, request: pytest.FixtureRequest) -> dict[str, str]:
    if request.param == "asyncpg":
        # libpq reads its URLs too, so one is enough for the engine and the queue.
        url = url_of(dsn, "asyncpg").render_as_string(hide_password=False)
    else:
        url = url_of(dsn).render_as_string(hide_password=False)
    path = os.pathsep.join([str(ROOT / "python"), str(ROOT / "examples")])
    return os.environ | {"DATABASE_URL": url, "PYTHONPATH": path}


@pytest.fixture
def client(environment: dict[str, str], tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of the application, served on a separate port."""
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as listening, log.open("w") as errors:
        fd = listening.fileno()
        command = [sys.executable, "-m", "uvicorn", "fastapi_shop:web", "--fd", str(fd)]
        served = subprocess.Popen(
            [*command, "--log-level", "warning"], env=environment, pass_fds=[fd], stderr=errors
        )
        port = listening.getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            wait_for(lambda: is_up(client))
            yield client
    finally:
        served.terminate()
        served.wait(300)
    assert log.read_text() == ""


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/openapi.json").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def worker(client: httpx.Client, environment: dict[str, str]) -> Iterator[None]:
    command = [sys.executable, "-m", "pgdefer", "worker", "-A", "fastapi_shop:queue"]
    process = subprocess.Popen(command, env=environment)
    yield
    process.terminate()
    assert process.wait(300) == 0


def order(client: httpx.Client, quantity: int, customer: str = "ann") -> httpx.Response:
    sent = {"customer": customer, "product": "tea", "quantity": quantity}
    return client.post("/orders", json=sent)


def test_an_order_and_its_job(client: httpx.Client, worker: None, jobs: Jobs) -> None:
    answer = order(client, 2)
    assert (answer.status_code, answer.json()["receipt"]) == (201, None)
    id = answer.json()["id"]

    def receipt() -> str | None:
        found: str | None = client.get(f"/orders/{id}").json()["receipt"]
        return found

    assert wait_for(receipt) == "2 x tea for ann"
    assert client.get(f"/orders/{id}").json() == {
        "id": id,
        "receipt": "2 x tea for ann",
        "job": "succeeded",
    }
    (job,) = jobs()
    assert (job["task"], job["lock"], job["args"]) == (
        "write_receipt",
        "customer:ann",
        {"order_id": id, "customer": "ann"},
    )


def test_a_request_that_rolls_back_leaves_no_job(
    client: httpx.Client, jobs: Jobs, conn: Connection
) -> None:
    assert order(client, 6).status_code == 409  # five exist
    assert order(client, 0).status_code == 422
    assert jobs() == []
    assert conn.execute('select * from "order"').fetchall() == []
    # It had got as far as deferring: its ids are not used again.
    assert order(client, 5).status_code == 201
    (job,) = jobs()
    assert (job["id"], job["state"]) == (2, "ready")
    assert conn.execute("select stock from product").fetchall() == [(0,)]
    assert client.get("/orders/99").status_code == 404


@pytest.mark.long
def test_many_at_once(client: httpx.Client, worker: None, jobs: Jobs, conn: Connection) -> None:
    conn.execute("update product set stock = 20")
    answers = [order(client, 1, f"customer {n % 3}").status_code for n in range(25)]
    assert sorted(answers) == [201] * 20 + [409] * 5

    def all_written() -> bool:
        found = conn.execute('select count(*), count(receipt) from "order"').fetchone()
        return found == (20, 20)

    wait_for(all_written)
    end = time.monotonic() + 20
    while set(jobs.states().values()) != {"succeeded"} and time.monotonic() < end:
        time.sleep(0.01)
    assert set(jobs.states().values()) == {"succeeded"}
    assert len(jobs.states()) == 20
