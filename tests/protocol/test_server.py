"""The server goes down and comes back, under workers of all languages at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pgdefer.database.embedded import EmbeddedServer, temporary_server
from support import make_base

from .conftest import BASE, COMMANDS, Lab, make_lab, wait_for, what_is_missing

MODES = ("fast", "immediate")


class Outages:
    """Labs with a worker each, by kind, and their jobs from before the outage."""

    def __init__(self) -> None:
        self.labs: dict[str, Lab] = {}
        self.missing: dict[str, str] = {}
        self.ran: dict[tuple[str, str], int] = {}
        self.waited: dict[tuple[str, str], int] = {}

    def run(self, server: EmbeddedServer, mode: str) -> None:
        """A job runs, another one waits; the server stops; the job ends; the server starts."""
        paths = []
        for kind, lab in self.labs.items():
            self.ran[kind, mode], path = lab.hold()
            lab.reach(self.ran[kind, mode], "running")
            self.waited[kind, mode] = lab.defer("echo")
            wait_for(path.with_name(f"{path.name}.began").exists)
            paths.append((path, len(lab.worker.events)))
            lab.conn.close()
        server._stop(mode)
        for lab, (path, seen) in zip(self.labs.values(), paths, strict=True):
            path.touch()
            lab.worker.wait("lost", after=seen)
        server.ensure_running()
        for kind, lab in self.labs.items():
            lab.connect()
            lab.end(self.waited[kind, mode])


@pytest.fixture(scope="module")
def outages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outages]:
    outages = Outages()
    with temporary_server(durable=True) as server:
        make_base(server, BASE)
        for kind in COMMANDS:
            if why := what_is_missing(kind, server):
                outages.missing[kind] = why
            else:
                lab = make_lab(server, kind, tmp_path_factory.mktemp(kind))
                lab.worker = lab.start(CONCURRENCY=1)
                outages.labs[kind] = lab
        for mode in MODES:
            outages.run(server, mode)
        yield outages
        for lab in outages.labs.values():
            lab.close()


@pytest.fixture(params=COMMANDS)
def back(outages: Outages, request: pytest.FixtureRequest) -> Any:
    """The lab of an implementation, after the server came back."""
    if request.param in outages.missing:
        pytest.skip(outages.missing[request.param])
    return outages.labs[request.param]


@pytest.mark.parametrize("mode", MODES)
def test_what_ran_has_succeeded(outages: Outages, back: Lab, mode: str) -> None:
    """It ended while the server was down; its outcome was reported later."""
    (job,) = back.end(outages.ran[back.kind, mode])
    assert (job["state"], job["claims"], job["crashes"]) == ("succeeded", 1, 0)


@pytest.mark.parametrize("mode", MODES)
def test_what_waited_runs(outages: Outages, back: Lab, mode: str) -> None:
    (job,) = back.end(outages.waited[back.kind, mode])
    assert (job["state"], job["attempts"]) == ("succeeded", 1)


def test_the_worker_lives_on(back: Lab) -> None:
    """The same process, and the same registration."""
    job = back.end(back.defer("echo"))[0]
    assert job["state"] == "succeeded"
    assert [e["event"] for e in back.worker.events].count("ready") == 1
    assert job["worker_id"] == back.worker.events[0]["id"]
