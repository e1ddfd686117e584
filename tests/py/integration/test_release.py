"""The release: what `make dist` builds installs alone, and all its versions agree."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgdefer.database.embedded import EmbeddedServer
from support import ROOT, open_folder

pytestmark = pytest.mark.client

PIP = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def locked(name: str = "requirements.lock") -> str:
    """Return the versions of a lock without their hashes, as pip's constraints."""
    text = (ROOT / name).read_text("utf-8")
    return "\n".join(re.findall(r"^([a-z][^\\\n]*?) *\\?$", text, re.MULTILINE)) + "\n"


def test_the_sources_know_their_version() -> None:
    """Package metadata has the version; the sources alone, without it, have a copy."""
    code = (ROOT / "python" / "pgdefer" / "_version.py").read_text("utf-8")
    assert re.findall(r'__version__ = "(.*)"', code) == [VERSION]
    assert f"pgdefer--{VERSION}.sql" in (ROOT / "docs" / "installing.md").read_text("utf-8")


def test_locks_pin_every_tool_with_hashes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = {re.split(r"[\[<>=]", entry)[0].lower() for group in groups for entry in group}
    pinned = set(re.findall(r"^([a-z0-9-]+)==", locked(), re.MULTILINE))
    assert wanted - {"pgdefer"} <= pinned
    assert {"twine", "cyclonedx-bom"} <= set(
        re.findall(r"^([a-z0-9-]+)==", locked("release.lock"), re.MULTILINE)
    )
    for name in ("requirements.lock", "release.lock"):
        entries = re.split(r"^(?=[a-z])", (ROOT / name).read_text("utf-8"), flags=re.MULTILINE)[1:]
        assert all("--hash=sha256:" in entry for entry in entries)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with open_folder("release") as made:
        yield made


@pytest.fixture(scope="module")
def dist(folder: Path) -> Path:
    """Return the folder that `make dist` fills."""
    probe = [sys.executable, *PIP, "download", "--no-deps", "--retries", "1", "-d", folder, "twine"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("no package index can be reached, so nothing can be installed")
    run("make", "dist", f"DIST={folder}/dist", cwd=ROOT)
    return folder / "dist"


@pytest.mark.long
def test_the_wheel_installs_alone_and_runs_the_demo(folder: Path, dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    (folder / "constraints").write_text(locked(), "utf-8")
    run(sys.executable, "-m", "venv", folder / "alone")
    python = folder / "alone" / "bin" / "python"
    # From another folder, so that nothing of the checkout is found.
    run(python, *PIP, "install", "-c", "constraints", f"{wheel}[embedded]", cwd=folder)
    run(python, *PIP, "check", cwd=folder)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PG", "PGDEFER", "PYTHON"))
    }
    environment["PGDEFER_HOME"] = str(folder / "home")
    program = folder / "alone" / "bin" / "pgdefer"
    said = run(program, "--version", cwd=folder, env=environment).stdout
    assert VERSION in said
    try:
        said = run(program, "demo", "--limit", "50", cwd=folder, env=environment, timeout=300)
        assert "50" in said.stdout
    finally:
        EmbeddedServer(folder / "home").stop("immediate")


@pytest.mark.long
def test_the_sdist_builds_the_same_wheel(folder: Path, dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "sources", filter="data")
    sources = folder / "sources" / f"pgdefer-{VERSION}"
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=sources)
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(folder / wheel.name) as second:
        assert second.namelist() == first.namelist()
        assert all(second.read(name) == first.read(name) for name in first.namelist())


@pytest.mark.long
def test_the_sbom_lists_what_is_locked(dist: Path) -> None:
    (path,) = dist.glob("*.cdx.json")
    sbom = json.loads(path.read_text("utf-8"))
    assert sbom["bomFormat"] == "CycloneDX"
    component = sbom["metadata"]["component"]
    assert (component["name"], component["version"]) == ("pgdefer", VERSION)
    listed = {(entry["name"], entry["version"]) for entry in sbom["components"]}
    assert listed == set(re.findall(r"^([a-z0-9-]+)==([^ \n;]+)", locked(), re.MULTILINE))


@pytest.mark.long
def test_make_install_asks_pg_config(folder: Path) -> None:
    """The real pg_config of a server names the place."""
    command = [ROOT / "tests" / "system-postgres"]
    bin_dir = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    config = Path(bin_dir or "/none") / "pg_config"
    if not config.exists():
        pytest.skip("the system's PostgreSQL has no pg_config")
    place = run(config, "--sharedir").stdout.strip()
    run("make", "install", f"PG_CONFIG={config}", f"DESTDIR={folder}/root", cwd=ROOT)
    installed = {path.name for path in Path(f"{folder}/root{place}/extension").iterdir()}
    assert {"pgdefer.control", f"pgdefer--{VERSION}.sql"} <= installed
