"""The file that lists databases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pgdefer.worker.databases import DsnFile, read_dsns


def test_a_file_that_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rights may change where the file does not."""
    path = tmp_path / "dsns"
    path.write_text("dbname=a\n")
    file = DsnFile(path)
    assert len(file.read()) == 1
    path.write_text("dbname=a\ndbname=b\n")

    def denied(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", denied)
        assert [file.changed() for _ in range(6)] == [None] * 6
    assert len(caplog.records) == 1
    found = [file.changed() for _ in range(3)]
    assert [len(databases) for databases in found if databases] == [2]


def test_no_two_databases_have_one_name() -> None:
    where = "host=a dbname=x user=u hostaddr=127.0.0"
    found = read_dsns([f"{where}.{n}" for n in range(1, 5)])
    names = [database.name for database in found.values()]
    assert names[:2] == ["a/x", "a/x as u"]
    assert len({*names}) == 4
