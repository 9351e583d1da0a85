"""One deadline a request. Time is made to have passed by starting earlier, so nothing here waits for it."""

from time import monotonic

import pytest

from memgw.deadline import Deadline
from memgw.errors import DeadlineExceeded


def started_ago(seconds: float, *, limit: float) -> Deadline:
    return Deadline(limit, started=monotonic() - seconds)


def fail_after(seconds: float) -> None:
    begin = monotonic()
    while monotonic() - begin < seconds:
        pass
    raise KeyError("anything")


def test_what_is_left_shrinks_with_time() -> None:
    deadline = started_ago(3, limit=10)
    first = deadline.left()
    assert 6 < first <= 7
    assert deadline.left() < first


def test_a_step_gets_no_more_than_its_own_limit() -> None:
    assert started_ago(3, limit=10).left(2) == 2
    assert 6 < started_ago(3, limit=10).left(60) <= 7


@pytest.mark.parametrize("spent", [1.5, 100])
@pytest.mark.parametrize("cap", [None, 60])
def test_nothing_left_is_an_error_that_names_the_limit(spent: float, cap: float | None) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        started_ago(spent, limit=1.5).left(cap)
    assert caught.value.detail == "the request was not done within 1.5 seconds"


def test_time_is_counted_from_the_arrival_that_was_given() -> None:
    assert Deadline(5, started=monotonic() + 5).left() > 9


def test_a_step_is_booked_in_milliseconds_even_when_it_fails() -> None:
    deadline = Deadline(60)
    begin = monotonic()
    with pytest.raises(KeyError), deadline.step("fetch"):
        fail_after(0.02)
    assert deadline.timings_ms.keys() == {"fetch"}
    assert 20 <= deadline.timings_ms["fetch"] <= (monotonic() - begin) * 1000 + 0.1


def test_a_step_taken_twice_is_booked_as_the_sum_and_apart_from_others() -> None:
    deadline = Deadline(60, timings_ms={"search": 1000.0})
    with deadline.step("search"), deadline.step("wait"):
        pass
    assert 1000 <= deadline.timings_ms["search"] < 1500
    assert 0 <= deadline.timings_ms["wait"] < 500


def test_two_requests_keep_separate_books() -> None:
    one, other = Deadline(1), Deadline(1)
    with one.step("ask"):
        pass
    assert other.timings_ms == {}
