"""`pgdefer web` as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import httpx
import pytest

from web_page import token

pytestmark = pytest.mark.client


def test_it_serves_the_database_of_pgdefer_dsn_and_says_where(dsn: str) -> None:
    command = [sys.executable, "-m", "pgdefer", "web", "--no-password", "--port", "0"]
    environment = {**os.environ, "PGDEFER_DSN": dsn}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while (found := re.search(r"running on (http://\S+)", said)) is None:
                line = process.stderr.readline()
                assert line, said
                said += line
            with httpx.Client(base_url=found[1], follow_redirects=True, timeout=60) as client:
                form = {"role": "postgres", "password": "any", "token": token(client.get("/login"))}
                answer = client.post("/login", data=form)
            assert answer.status_code == 200
            assert "Log out" in answer.text
        finally:
            process.send_signal(signal.SIGINT)
