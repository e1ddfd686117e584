"""The examples of docs/unique.md are typed in, and print the documented output."""

from __future__ import annotations

from .test_docs import Reader, follow, reader

__all__ = ["reader"]


def test_the_page_on_unique_jobs(reader: Reader) -> None:
    reader.install()
    follow(reader.type_in, "docs/unique.md")
