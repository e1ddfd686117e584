"""The examples of docs/unique.md are typed in, and print the documented output."""

from __future__ import annotations

from .test_docs import Block, Reader, blocks, reader, squeezed

__all__ = ["reader"]


def test_the_page_on_unique_jobs(reader: Reader) -> None:
    reader.type_in(Block(0, "sh", "createdb shop && pgdefer install"))
    output = ""
    for block in blocks("docs/unique.md"):
        if block.language == "text":
            assert squeezed(output) == squeezed(block.text), block.line
        else:
            output = reader.type_in(block)
