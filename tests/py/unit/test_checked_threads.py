"""Threads that work beside a test (tests/workers.py)."""

from __future__ import annotations

import time

import pytest

from workers import CheckedThread, beside


class Failing(CheckedThread):
    def work(self) -> None:
        raise ZeroDivisionError


class Slow(CheckedThread):
    def work(self) -> None:
        self.is_over.wait(300)
        time.sleep(0.5)


def test_all_have_ended_though_one_has_failed() -> None:
    slow = Slow()
    with pytest.raises(ZeroDivisionError), beside(Failing(), slow):
        pass
    assert not slow.is_alive()
