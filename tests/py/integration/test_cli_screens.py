"""The command line's output in a terminal, played by tmux."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pgdefer.database.source import PsycopgConnection

TMUX = shutil.which("tmux")
pytestmark = [
    pytest.mark.client,
    pytest.mark.skipif(TMUX is None, reason="there is no tmux"),
]

FILL = """
select queue.defer('shop.send_receipt', jsonb_build_object('order', n), queue => 'mail',
  options => jsonb_build_object('description', 'the receipt of order ' || n || repeat(' etc.', 20)))
from generate_series(1, 9) n;
select queue.defer('shop.reports.monthly', queue => 'reports', lock => 'month')
from generate_series(1, 3) n;
select queue.defer('later', scheduled_at => '2999-01-01');
select queue.pause('reports');
select queue.defer('last', needs => '{1,2}', queue => repeat('long name ', 50));
select queue.register_worker('web-1.example.com:4711', '{mail,reports*}');
"""
# Words that must be completely visible on each screen, whatever its width.
SCREENS = {
    "job ls": ["id", "state", "scheduled", "14", "shop."],
    "job ls -n 5": ["There may be more: --before 10"],
    "job search order": ["order", "found", "9", "ready"],
    "job show 14": ["task: last", "state: waiting", "needs: 1, 2"],
    "job why 14": ["it needs job 1 (ready), job 2 (ready)"],
    "graph 14": ["●  2 shop.send_receipt ready", "●  14 last waiting  ◀"],
    "queue ls": ["mail", "reports", "paused", "resumed"],
    "worker ls": ["web-1.example.com:4711", "alive"],
    "schedule ls": ["Nothing is scheduled."],
    "db stats": ["queue", "oldest", "scheduled", "mail"],
    "db health": ["notifications", "what to do", "ok", "warn", "select queue.resume"],
    "top --once": [
        "10 ready, 0 running, 0 done/s, workers: 1",
        "mail",
        "reports",
        "paused",
        "web-1.example.com:4711",
    ],
}


class Terminal:
    """A terminal with a shell in it."""

    def __init__(self, socket: Path, width: int, height: int, variables: dict[str, str]) -> None:
        assert TMUX
        self._count = 0
        self._tmux = [TMUX, "-S", str(socket), "-f", os.devnull]
        self._run("new-session", "-d", "-x", str(width), "-y", str(height), "bash --norc -i")
        given = "; ".join(f"export {key}={shlex.quote(each)}" for key, each in variables.items())
        self.type(f"{given}; PS1='ready> '; unset PROMPT_COMMAND; clear", "Enter")
        self.until(lambda screen: screen.strip() == "ready>")

    def _run(self, *words: str) -> str:
        return subprocess.run(
            [*self._tmux, *words], check=True, capture_output=True, text=True
        ).stdout

    def type(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        self._run("resize-window", "-x", str(width), "-y", str(height))

    @property
    def screen(self) -> str:
        return self._run("capture-pane", "-p")

    def until(self, condition: Callable[[str], object], seconds: float = 300.0) -> str:
        """Wait until the screen satisfies the condition, and return it."""
        end = time.monotonic() + seconds
        while not condition(screen := self.screen):
            assert time.monotonic() < end, screen
            time.sleep(0.05)
        return screen

    def run(self, command: str) -> str:
        """Return the screen after a command."""
        self._count += 1
        self.type(f"clear; {command}; echo END{self._count}:$?", "Enter")
        end = re.compile(rf"^END{self._count}:\d+$", re.MULTILINE)
        return end.split(self.until(end.search))[0]

    def close(self) -> None:
        self._run("kill-server")


@pytest.fixture
def terminal(dsn: str, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def open_one(width: int = 80, height: int = 24) -> Terminal:
        variables = {"PGDEFER_DSN": dsn, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        variables |= {"HOME": str(tmp_path), "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}
        made.append(Terminal(tmp_path / f"tmux{len(made)}", width, height, variables))
        return made[-1]

    program = tmp_path / "pgdefer"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pgdefer "$@"\n')
    program.chmod(0o755)
    yield open_one
    for each in made:
        each.close()


@pytest.mark.long
@pytest.mark.parametrize("width", [80, 120])
def test_screens(terminal: Callable[..., Terminal], conn: PsycopgConnection, width: int) -> None:
    conn.execute(FILL)
    conn.execute("select queue.tick()")
    on = terminal(width, 50)
    for command, words in SCREENS.items():
        conn.execute("select queue.heartbeat(1)")
        screen = on.run(f"pgdefer {command}")
        flat = " ".join(screen.split())
        for word in words:
            assert " ".join(word.split()) in flat, f"{command}: {word}\n{screen}"
        lines = screen.rstrip().splitlines()
        # a table is no wider than the terminal, so the terminal wraps no line
        if any(re.fullmatch("─+", line) for line in lines):
            assert max(len(line) for line in lines if re.fullmatch("─+", line)) <= width, screen
            assert not any(re.match("  +─", line) for line in lines), screen


def test_top(terminal: Callable[..., Terminal], conn: PsycopgConnection) -> None:
    conn.execute("select queue.defer('t', queue => 'invoices')")
    on = terminal(80, 24)
    on.type("clear; pgdefer top --interval 0.2; echo END:$?", "Enter")
    screen = on.until(lambda screen: "invoices" in screen)
    assert screen.startswith("pgdefer ")
    assert "1 ready, 0 running" in screen
    conn.execute("select queue.register_worker('the worker')")
    conn.execute("select queue.defer('t', queue => 'letters ' || n) from generate_series(1, 40) n")
    conn.execute("select from queue.fetch(1, '{invoices}')")
    # The queues leave room for the workers.
    shown = ("letters", "1 running", "the worker")
    screen = on.until(lambda screen: all(text in screen for text in shown))
    assert len(screen.rstrip().splitlines()) <= 24
    assert re.search(r"^… and \d+ more$", screen, re.MULTILINE)
    on.resize(40, 12)
    screen = on.until(lambda screen: max(map(len, screen.splitlines())) <= 40)
    assert "letters" in on.until(lambda screen: "letters" in screen)
    on.resize(80, 24)
    on.type("q")
    assert "END:0" in on.until(lambda screen: "END:" in screen)
    assert on.run("stty -a | grep -o '.icanon'").split() == ["icanon"], "the terminal is as before"


def test_top_is_interrupted(terminal: Callable[..., Terminal], conn: PsycopgConnection) -> None:
    conn.execute("select queue.defer('t', queue => 'invoices')")
    on = terminal()
    on.type("clear; pgdefer top; echo END:$?", "Enter")
    on.until(lambda screen: "invoices" in screen)
    on.type("C-c")
    assert "END:0" in on.until(lambda screen: "END:" in screen)
    assert on.run("stty -a | grep -o '.icanon'").split() == ["icanon"]


def test_top_says_that_the_server_went(
    terminal: Callable[..., Terminal], conn: PsycopgConnection
) -> None:
    conn.execute("select queue.defer('t', queue => 'invoices')")
    on = terminal()
    on.type("clear; pgdefer top --interval 0.2; echo END:$?", "Enter")
    on.until(lambda screen: "invoices" in screen)
    conn.execute("""
        select pg_terminate_backend(pid) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid()
          and application_name = 'pgdefer'
    """)
    screen = on.until(lambda screen: "END:" in screen)
    assert re.search(r"^END:3$", screen, re.MULTILINE), screen
    assert re.search(r"^pgdefer: .*connection", screen, re.MULTILINE), screen


def test_no_terminal(dsn: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pgdefer", "top", "--dsn", dsn],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--once" in done.stderr
