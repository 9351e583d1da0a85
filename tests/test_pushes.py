"""Pushes are synced behind the answers: one at a time, those of a branch together, bounded, and no fault is lost."""

import json
import logging
import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest

from memgw import logs, pushes
from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.errors import RemoteUnreachable, WorkspaceBusy
from memgw.gateway import Gateway, Report
from memgw.pushes import Pushes
from tests.actors import until


class Stub(Gateway):
    """A gateway whose syncs wait until they are let through, and end as told."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, float]] = []
        self.at_once = self.most_at_once = 0
        self.through = threading.Semaphore(0)
        self.ends: dict[str, Exception] = {}

    def sync(self, branch: Branch, deadline: Deadline) -> Report:
        self.begun.append((branch.name, deadline.started))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            assert self.through.acquire(timeout=30)
            raise self.ends.get(branch.name, RemoteUnreachable(f"no {branch.name}"))
        finally:
            self.at_once -= 1

    def names(self) -> list[str]:
        return [name for name, _ in self.begun]


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    yield stub
    stub.through.release(1000)


class Lines(logging.Handler):
    """Keeps what is logged, as it would be written."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[dict[str, Any]] = []
        self._written = logs.JsonLines()

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(json.loads(self._written.format(record)))


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    logger, lines = logging.getLogger("memgw.pushes"), Lines()
    logger.addHandler(lines)
    logger.setLevel("INFO")
    yield lines.kept
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(lines)


def test_pushes_of_a_branch_while_one_is_at_work_make_one_more_and_the_newest_counts(stub: Stub) -> None:
    taker = Pushes(stub, 60)
    arrivals = [monotonic() + number / 1000 for number in range(11)]
    taker.take(Branch("main"), arrivals[0])
    assert until(lambda: stub.names() == ["main"])
    for arrived in arrivals[1:]:
        taker.take(Branch("main"), arrived)
    assert not taker.idle
    stub.through.release(2)
    assert until(lambda: taker.idle)
    assert stub.begun == [("main", arrivals[0]), ("main", arrivals[-1])]


def test_branches_take_their_turns_one_at_a_time(stub: Stub) -> None:
    taker = Pushes(stub, 60)
    for name in ("main", "task/1", "task/2", "main", "task/1"):
        taker.take(Branch(name), monotonic())
        assert until(lambda: stub.begun)
    stub.through.release(10)
    assert until(lambda: taker.idle)
    assert stub.names() == ["main", "task/1", "task/2", "main"]
    assert stub.most_at_once == 1


def test_those_that_wait_are_bounded_and_what_waits_already_is_still_taken(stub: Stub) -> None:
    taker = Pushes(stub, 60)
    taker.take(Branch("main"), monotonic())
    assert until(lambda: stub.begun)
    for number in range(pushes.MOST_WAITING):
        taker.take(Branch(f"task/{number}"), monotonic())
    with pytest.raises(WorkspaceBusy) as caught:
        taker.take(Branch("task/more"), monotonic())
    assert caught.value.retry_after > 0
    taker.take(Branch("task/0"), monotonic())
    stub.through.release(1000)
    assert until(lambda: taker.idle)
    assert len(stub.begun) == 1 + pushes.MOST_WAITING
    taker.take(Branch("task/more"), monotonic())
    assert until(lambda: taker.idle)


def test_an_error_is_one_line_with_its_branch_and_the_id_of_the_request(
    stub: Stub, lines: list[dict[str, Any]]
) -> None:
    taker = Pushes(stub, 60)
    stub.ends = {"task/2": OSError("disk")}
    stub.through.release(2)
    for name, request in (("task/1", "id-1"), ("task/2", "id-2")):
        token = logs.request_id.set(request)
        taker.take(Branch(name), monotonic())
        logs.request_id.reset(token)
    assert until(lambda: len(lines) == 2)
    assert [(line["event"], line["branch"], line["request_id"]) for line in lines] == [
        ("push_not_synced", "task/1", "id-1"),
        ("push_not_synced", "task/2", "id-2"),
    ]
    assert "no task/1" in lines[0]["trace"]


def test_a_fault_of_ours_is_logged_too_and_the_next_one_goes_on(stub: Stub, lines: list[dict[str, Any]]) -> None:
    taker = Pushes(stub, 60)
    stub.ends = {"main": KeyError("oops")}
    token = logs.request_id.set("id-1")
    taker.take(Branch("main"), monotonic())
    logs.request_id.reset(token)
    taker.take(Branch("task/1"), monotonic())
    stub.through.release(2)
    assert until(lambda: taker.idle and len(lines) == 2)
    assert sorted(line["level"] for line in lines) == ["ERROR", "WARNING"]
    [ours] = [line for line in lines if line["level"] == "ERROR"]
    assert "KeyError: 'oops'" in ours["trace"]
    assert ours["request_id"] == "id-1"
    assert stub.names() == ["main", "task/1"]
    taker.take(Branch("main"), monotonic())
    stub.through.release()
    assert until(lambda: taker.idle)


def test_one_that_waited_for_longer_than_a_request_lasts_is_left_to_those_who_ask(
    stub: Stub, lines: list[dict[str, Any]]
) -> None:
    taker = Pushes(stub, 60)
    taker.take(Branch("main"), monotonic() - 61)
    assert until(lambda: taker.idle and len(lines) == 1)
    assert (lines[0]["event"], lines[0]["branch"]) == ("push_not_synced", "main")
    assert stub.begun == []


def test_what_waits_when_the_process_ends_is_dropped_with_a_line(stub: Stub, lines: list[dict[str, Any]]) -> None:
    taker = Pushes(stub, 60)
    for name in ("main", "task/1", "task/2"):
        taker.take(Branch(name), monotonic())
    assert until(lambda: stub.begun)
    taker._threads.shutdown(wait=False)  # as the interpreter does first of all when it ends
    stub.through.release()
    assert until(lambda: taker.idle)
    assert [line["branches"] for line in lines if line["event"] == "pushes_dropped"] == [["task/1", "task/2"]]
    assert stub.names() == ["main"]
