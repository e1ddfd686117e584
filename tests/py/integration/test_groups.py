"""Groups from Python and the command line."""

from __future__ import annotations

import pytest

from pgdefer import App, InvalidParameter
from pgdefer.cli import Exit

from .command_line import Run, run
from .conftest import running, until

__all__ = ["run"]

pytestmark = pytest.mark.client


async def test_a_group_ends(app: App, run: Run) -> None:
    ran: list[str] = []

    @app.task(name="t")
    async def member(n: int) -> None:
        if n == 0:
            # a callback that a handler prepares has no parent, which might be gone by then
            async with await app.open_group_async("inner", on_end=note.prepare("inner")):
                pass
        if n == 2:
            raise ValueError("on purpose")

    @app.task(name="note")
    async def note(text: str) -> None:
        ran.append(text)

    group = await app.open_group_async(
        "g", on_end=note.prepare("end"), on_success=note.prepare("success")
    )
    async with group:
        assert group.is_new
        for n in range(3):
            await member.configure(group="g").defer_async(n)
        again = await app.open_group_async("g", on_failure=note.prepare("other"))
        assert not again.is_new
    assert not await group.close_async()
    with pytest.raises(InvalidParameter, match="the group is closed"):
        await app.defer_async("t", {"n": 1}, group="g")
    with pytest.raises(InvalidParameter, match="the group is closed"):
        await app.open_group_async("g")
    async with running(app, drain=True) as worker:
        await until(lambda: worker.id is not None)
        await until(lambda: worker.id is None)
    assert sorted(ran) == ["end", "inner"]
    (info,) = await app.list_groups_async("g")
    assert (info.state, info.jobs, info.unfinished) == ("ended", 3, 0)
    assert (info.succeeded, info.failed, info.on_success_id) == (2, 1, None)
    shown = run("group", "show", "g", "--json").json
    assert [(row["name"], row["failed"]) for row in shown] == [("g", 1)]
    assert {row["name"] for row in run("group", "ls", "--json").json} == {"g", "inner"}


def test_a_block_that_raises_leaves_it_open(app: App, run: Run) -> None:
    def broken() -> None:
        with app.open_group("g"):
            app.defer("t", group="g")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    (info,) = app.list_groups()
    assert (info.name, info.state, info.closed_at) == ("g", "open", None)
    with app.open_group("g") as group:
        assert not group.is_new
    (info,) = app.list_groups("g")
    assert info.state == "closing"
    assert "was closed before" in run("group", "close", "g").out
    assert run("group", "close", "g", "--json").json == {"was_open": False}
    assert not group.close()
    assert run("group", "show", "none").code == Exit.NOT_FOUND
    with pytest.raises(InvalidParameter, match="no such group"):
        app.defer("t", group="none")
