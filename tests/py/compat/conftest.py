"""Code common to the tests of upgrades, dumps and roles."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgdefer.database.embedded import EmbeddedServer
from releases import Releases


@pytest.fixture(scope="session")
def shared_folder() -> Iterator[Path]:
    """A folder that the server's user can read; for root pytest's own is not."""
    made = Path(tempfile.mkdtemp(prefix="pgdefer-compat-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="session")
def releases(shared_folder: Path) -> Releases:
    return Releases(shared_folder / "releases")


@pytest.fixture(params=["extension", "plain"])
def form(request: pytest.FixtureRequest, server: EmbeddedServer) -> str:
    if request.param == "extension" and server.major < 18:
        pytest.skip("the extension needs extension_control_path, which PostgreSQL 18 brought")
    return str(request.param)
