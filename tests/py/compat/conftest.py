"""Code common to the tests of upgrades, dumps and roles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from releases import Releases
from support import open_folder


@pytest.fixture(scope="session")
def shared_folder() -> Iterator[Path]:
    with open_folder("compat") as made:
        yield made


@pytest.fixture(scope="session")
def releases(shared_folder: Path) -> Releases:
    return Releases(shared_folder / "releases")
