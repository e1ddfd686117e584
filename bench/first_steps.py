#!/usr/bin/env python3
"""How long the first commands of README.md take in an empty Debian, by a user who has nothing else.

    .venv/bin/python bench/first_steps.py [--tests] [--sudo] [FOLDER]

As root, with debootstrap. FOLDER keeps the empty Debian (Python and make, nothing more) for the next time.
The commands download what they need, so the network is part of the times. --tests runs `make test` instead, and
shows what it says; with --sudo, the user may install packages, so fewer tests are skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASE = "bookworm"
PACKAGES = "ca-certificates,make,procps,python3,python3-venv"
HOME = "/home/ann"
# What the commands of README.md need, in their order; the last two are one shell's.
COMMANDS = [
    ("make demo", "make demo"),
    ("make demo, again", "make demo"),
    ("pip install '.[all]'", "python3 -m venv ~/venv && ~/venv/bin/pip install --quiet '.[all]'"),
    ("pgdefer install", "~/venv/bin/pgdefer install"),
]


def make_debian(folder: Path, *, sudo: bool) -> None:
    """Make an empty Debian with an ordinary user, unless the folder has one."""
    if (folder / HOME[1:]).is_dir():
        return
    packages = PACKAGES + (",sudo" if sudo else "")
    command = ["debootstrap", "--variant=minbase", f"--include={packages}", RELEASE, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"debootstrap failed:\n{done.stdout[-2000:]}{done.stderr}")
    subprocess.run(["chroot", folder, "useradd", "--create-home", "ann"], check=True)
    if sudo:
        (folder / "etc/sudoers.d/ann").write_text("ann ALL=(ALL) NOPASSWD: ALL\n", "utf-8")


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[list[str]]:
    """Give the command that runs others there, as the user, in a copy of this checkout."""
    for name in ("resolv.conf", "hosts", "ssl/certs/ca-certificates.crt"):
        if (Path("/etc") / name).exists():
            shutil.copyfile(f"/etc/{name}", folder / "etc" / name)
    home = folder / HOME[1:]
    for old in home.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    checkout = home / "pgdefer"
    checkout.mkdir()
    files = subprocess.Popen(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", checkout], stdin=files.stdout, check=True)
    subprocess.run(["chroot", folder, "chown", "-R", "ann:ann", HOME], check=True)
    kept = [f"{name}={value}" for name, value in os.environ.items() if is_route(name)]
    environment = [f"HOME={HOME}", "PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8", *kept]
    shell = ["env", "-i", f"--chdir={HOME}/pgdefer", *environment, "bash", "-c"]
    mounts = {
        "proc": ["-t", "proc", "proc"],
        "dev": ["--bind", "/dev"],
        "dev/pts": ["--bind", "/dev/pts"],
    }
    made = []
    try:
        for name, source in mounts.items():
            subprocess.run(["mount", *source, folder / name], check=True)
            made.append(folder / name)
        yield ["chroot", "--userspec=ann:ann", str(folder), *shell]
    finally:
        for place in reversed(made):
            subprocess.run(["umount", place], check=True)


def is_route(name: str) -> bool:
    """Whether a variable says how to reach the package index."""
    return name.lower().endswith("_proxy") or name in {
        "PIP_INDEX_URL",
        "PIP_CERT",
        "PIP_DEFAULT_TIMEOUT",
    }


def measure(before: list[str], commands: list[tuple[str, str]], *, shown: bool) -> int:
    """Run the commands and print the time of each, until one fails."""
    for name, command in commands:
        began = time.monotonic()
        done = subprocess.run([*before, command], capture_output=not shown, text=True, check=False)
        print(f"{name:32} {time.monotonic() - began:6.1f} s")
        if done.returncode:
            said = "" if shown else f":\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
            print(f"{name} failed{said}", file=sys.stderr)
            return 1
    return 0


def main() -> int:
    """Measure each command."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--tests", action="store_true")
    parser.add_argument("--sudo", action="store_true")
    parser.add_argument("folder", nargs="?", metavar="FOLDER")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-steps-") as temporary:
        folder = Path(asked.folder or temporary).absolute()
        began = time.monotonic()
        make_debian(folder, sudo=asked.sudo)
        print(f"{'an empty Debian, by debootstrap':32} {time.monotonic() - began:6.1f} s")
        commands = [("make test", "make test")] if asked.tests else COMMANDS
        with inside(folder) as before:
            failed = measure(before, commands, shown=asked.tests)
            # The server stops when nobody has used it for ten seconds: let go of the folder.
            left = "while pgrep -x -u ann postgres > /dev/null; do sleep 0.2; done"
            subprocess.run([*before, left], check=True, timeout=60)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
