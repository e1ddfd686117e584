"""How many jobs a worker claims ahead: it grows while that pays, and shrinks where jobs wait."""

from __future__ import annotations

import pytest

from pgdefer.worker.prefetch import AHEAD, FIT, SOON, WAIT, Prefetch


def grown(answers: int, most: int = 500, seconds: float = 0.0) -> Prefetch:
    """Return what allows jobs ahead after so many full answers, with jobs that took so long."""
    prefetch = Prefetch(20, most)
    prefetch.ended(seconds)
    for _ in range(answers):
        prefetch.answered(100, 100)
    return prefetch


def test_none_at_first() -> None:
    prefetch = Prefetch(20, 500)
    assert prefetch.allowed == 0
    prefetch.answered(20, 20)
    assert prefetch.allowed == 0  # how long jobs run is not known
    prefetch.ended(0.0)
    assert prefetch.allowed == 20


def test_each_full_answer_doubles_it_up_to_the_most() -> None:
    assert [grown(n).allowed for n in range(7)] == [0, 20, 40, 80, 160, 320, 500]
    assert grown(9).allowed == 500
    assert grown(9, most=0).allowed == 0


@pytest.mark.parametrize(
    ("seconds", "allowed"), [(0.002, 500), (0.01, 100), (AHEAD, 20), (AHEAD * 1.01, 0)]
)
def test_only_jobs_that_start_soon(seconds: float, allowed: int) -> None:
    prefetch = Prefetch(20, 500)
    prefetch.ended(seconds)
    for _ in range(9):
        prefetch.answered(100, 100)
    assert prefetch.allowed == allowed


def test_slots_of_long_jobs_do_not_count() -> None:
    prefetch = Prefetch(20, 500)
    prefetch.ended(0.01)
    prefetch.runs([1.0] * 18 + [2.0], now=1.0 + AHEAD * 1.01)
    sizes = []
    for _ in range(4):
        prefetch.answered(100, 100)
        sizes.append(prefetch.allowed)
    assert sizes == [2, 4, 8, 10]  # of two slots, in AHEAD / 0.01
    prefetch.runs([1.0] * 20, now=2.0)
    assert prefetch.allowed == 0
    prefetch.runs([], now=2.0)
    assert prefetch.allowed == 16


def test_it_halves_once_for_each_answer_whose_jobs_waited_long() -> None:
    prefetch = grown(5)
    for _ in range(50):
        prefetch.waited(AHEAD * 1.01)
    assert prefetch.allowed == 320
    prefetch.answered(100, 100)
    assert prefetch.allowed == 160
    prefetch.waited(AHEAD)
    prefetch.answered(100, 100)
    assert prefetch.allowed == 320


def test_it_halves_where_the_answer_may_be_as_long_as_it_can_be() -> None:
    prefetch = grown(5, seconds=AHEAD / 20)
    prefetch.answered(100, FIT)
    assert prefetch.allowed == 160


def test_it_then_keeps_what_came_if_that_many_start_soon() -> None:
    prefetch = grown(5)
    prefetch.answered(400, 0)
    prefetch.answered(400, 200)
    assert prefetch.allowed == 200
    prefetch.answered(400, FIT)
    assert prefetch.allowed == 100
    prefetch.answered(400, 300)
    assert prefetch.allowed == 100


def test_it_learns_how_many_come_at_a_time() -> None:
    """A burst of 110 once came in answers of 69 and 41, again and again."""
    prefetch = grown(2)
    prefetch.answered(60, 0)
    assert prefetch.allowed == 40
    prefetch.answered(60, 60)
    prefetch.answered(100, 50)
    assert prefetch.allowed == 80
    prefetch.answered(100, 100)
    prefetch.answered(180, FIT)
    assert prefetch.allowed == 130
    prefetch.answered(180, 130)
    assert prefetch.allowed == 130


@pytest.mark.parametrize("came", [0, 1, FIT - 1])
def test_it_begins_anew_where_others_may_have_nothing_to_do(came: int) -> None:
    prefetch = grown(5, seconds=AHEAD)
    prefetch.answered(40, came)
    prefetch.ended(0.0)
    assert prefetch.allowed == 2  # 20 slots, SOON / AHEAD


@pytest.mark.parametrize("came", [0, 1, FIT - 1])
def test_it_keeps_those_that_start_soon(came: int) -> None:
    prefetch = grown(5)
    prefetch.answered(100, came)
    assert prefetch.allowed == 320
    prefetch.ended(SOON)
    prefetch.answered(100, came)
    assert prefetch.allowed == 160  # a mean of SOON / 8: 20 slots start 8 each


@pytest.mark.parametrize("came", [0, 1, FIT - 1])
def test_it_keeps_none_where_jobs_waited_long(came: int) -> None:
    prefetch = grown(5)
    prefetch.waited(AHEAD * 1.01)
    prefetch.answered(100, came)
    assert prefetch.allowed == 0
    prefetch.answered(20, 20)
    assert prefetch.allowed == 20


def test_it_begins_anew_where_jobs_were_given_back() -> None:
    prefetch = grown(5)
    prefetch.waited_too_long()
    assert prefetch.allowed == 0


def test_those_are_kept_that_start_soon_at_the_pace_of_the_others() -> None:
    prefetch = grown(5)
    assert prefetch.take_pace(WAIT) == 0
    for _ in range(30):
        prefetch.waited(0.0)
    assert prefetch.take_pace(WAIT / 2) == 60
    assert prefetch.take_pace(WAIT) == 0


def test_it_grows_slowly_from_half_of_what_was_given_back() -> None:
    prefetch = grown(5)  # 320
    prefetch.waited_too_long()
    prefetch.waited_too_long()
    sizes = []
    for _ in range(7):
        prefetch.answered(100, 100)
        sizes.append(prefetch.allowed)
    assert sizes == [20, 40, 80, 160, 180, 200, 220]


def test_jobs_are_quick_again_some_time_after_a_slow_one() -> None:
    prefetch = Prefetch(20, 500)
    assert prefetch.is_quick  # none was slow
    prefetch.ended(2.0)
    for _ in range(30):
        assert not prefetch.is_quick
        prefetch.ended(0.0)
    for _ in range(20):
        prefetch.ended(0.0)
    assert prefetch.is_quick
