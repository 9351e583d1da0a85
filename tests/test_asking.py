"""Who shares an asking of the remote with whom: only those who arrived before it began, and nobody waits long."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from memgw.asking import PATIENCE_SECONDS, Asked, Askings
from memgw.branch import Branch
from memgw.config import ROOT
from memgw.deadline import Deadline
from memgw.errors import BranchNotFound, DeadlineExceeded, RemoteAuthFailed, RemoteUnreachable
from tests.actors import until

MAIN = Branch("main")
AT = "2026-11-30T14:23:05.799102Z"


def commit(number: int) -> str:
    return f"{number:040x}"


class Source:
    """A remote whose only branch is a number. `slowly` is what an asking does between its begin and its answer."""

    def __init__(self) -> None:
        self.number = self.asked = 0
        self.slowly: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def ask(self) -> Asked:
        with self._lock:
            self.asked += 1
        number = self.number
        self.slowly()
        return Asked(AT, commit(number))


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def known(data: Path) -> Path:
    """A data directory in which the branch has a workspace; returns where its askings are recorded."""
    for folder in ("state", "askings"):
        (data / folder).mkdir(parents=True)
    (data / "state" / "main.json").touch()
    return data / "askings" / "main.json"


def share(askings: Askings, source: Source, since: float | None = None, seconds: float = 30) -> int:
    asked = askings.share(MAIN, Deadline(seconds), monotonic() if since is None else since, source.ask)
    return int(asked.commit, 16)


def test_all_who_arrive_during_an_asking_are_served_by_the_next(data: Path, source: Source) -> None:
    askings = Askings(data, "url")
    go_on = threading.Event()
    source.slowly = lambda: go_on.wait(10)
    with ThreadPoolExecutor(41) as pool:
        first = pool.submit(share, askings, source)
        assert until(lambda: source.asked == 1)
        source.number = 1  # a push after the first asking had got its answer: nobody who arrives now may get that
        rest = [pool.submit(share, askings, source) for _ in range(40)]
        assert until(lambda: askings._queues["main"].present == 41)
        go_on.set()
        assert first.result() == 0
        assert {one.result() for one in rest} == {1}
    assert source.asked == 2
    assert not askings._queues


def test_an_asking_in_progress_serves_who_arrived_before_it_began(data: Path, source: Source) -> None:
    askings = Askings(data, "url")
    go_on = threading.Event()
    source.slowly = lambda: go_on.wait(10)
    early = monotonic()
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(share, askings, source)
        assert until(lambda: source.asked == 1)
        follower = pool.submit(share, askings, source, early)
        assert until(lambda: askings._queues["main"].present == 2)
        go_on.set()
        assert (leader.result(), follower.result(), source.asked) == (0, 0, 1)


@pytest.mark.parametrize("workspace", [False, True])
def test_under_a_storm_no_answer_is_older_than_its_question(
    data: Path, source: Source, request: pytest.FixtureRequest, workspace: bool
) -> None:
    if workspace:
        request.getfixturevalue("known")
    workers = [Askings(data, "url"), Askings(data, "url")]  # two objects meet as two processes do
    source.slowly = lambda: sleep(0.004)
    end = monotonic() + 2
    wrong: list[tuple[int, int]] = []
    served: list[int] = []

    def work(askings: Askings) -> None:
        while monotonic() < end:
            before, since = source.number, monotonic()
            got = share(askings, source, since)
            served.append(got)
            if not before <= got <= source.number:
                wrong.append((before, got))

    threads = [threading.Thread(target=work, args=(workers[number % 2],)) for number in range(16)]
    for thread in threads:
        thread.start()
    while monotonic() < end:
        source.number += 1
        sleep(0.0005)
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(set(served)) > 20
    assert source.asked < len(served) / 2


def test_a_stuck_asking_does_not_hold_the_others(data: Path, source: Source) -> None:
    askings = Askings(data, "url")
    stuck = threading.Event()
    source.slowly = lambda: stuck.wait(20) if source.asked == 1 else None
    with ThreadPoolExecutor(11) as pool:
        first = pool.submit(share, askings, source)
        assert until(lambda: source.asked == 1)
        source.number, begin = 1, monotonic()
        rest = [pool.submit(share, askings, source) for _ in range(10)]
        assert {one.result() for one in rest} == {1}
        assert monotonic() - begin < 4 * PATIENCE_SECONDS
        assert source.asked == 2  # one was enough for them all
        stuck.set()
        assert first.result() == 0


@pytest.mark.parametrize("kind", [BranchNotFound, RemoteUnreachable, RemoteAuthFailed])
def test_what_the_remote_says_is_shared_when_it_is_a_no_as_well(
    data: Path, source: Source, kind: type[BranchNotFound]
) -> None:
    askings = Askings(data, "url")
    go_on = threading.Event()

    def no() -> None:
        go_on.wait(10)
        raise kind("no")

    source.slowly = no
    with ThreadPoolExecutor(5) as pool:
        early = monotonic()
        all_of_them = [pool.submit(share, askings, source, early) for _ in range(5)]
        assert until(lambda: source.asked == 1 and askings._queues["main"].present == 5)
        go_on.set()
        errors = [one.exception() for one in all_of_them]
    assert [(type(error), str(error)) for error in errors] == [(kind, "no")] * 5
    assert len({id(error) for error in errors}) == 5
    assert source.asked == 1


def test_that_a_request_ran_out_of_time_is_its_own_affair(data: Path, source: Source) -> None:
    askings = Askings(data, "url")
    go_on = threading.Event()

    def late() -> None:
        go_on.wait(10)
        if source.asked == 1:
            raise DeadlineExceeded("late")

    source.slowly = late
    with ThreadPoolExecutor(2) as pool:
        early = monotonic()
        first = pool.submit(share, askings, source, early)
        assert until(lambda: source.asked == 1)
        second = pool.submit(share, askings, source, early)
        assert until(lambda: askings._queues["main"].present == 2)
        go_on.set()
        assert isinstance(first.exception(), DeadlineExceeded)
        assert (second.result(), source.asked) == (0, 2)


def test_who_waits_for_another_keeps_to_the_own_deadline(data: Path, source: Source) -> None:
    askings = Askings(data, "url")
    go_on = threading.Event()
    source.slowly = lambda: go_on.wait(10)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(share, askings, source)
        assert until(lambda: source.asked == 1)
        with pytest.raises(DeadlineExceeded):
            share(askings, source, seconds=0.1)
        go_on.set()
        first.result()


WORKER = """
import sys, threading, time
from pathlib import Path
from memgw.asking import Asked, Askings
from memgw.branch import Branch
from memgw.deadline import Deadline

data, number, log = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
askings, end = Askings(data, "url"), time.monotonic() + 2

def ask():
    with log.open("a") as file:
        file.write("x")
    value = number.read_text()
    time.sleep(0.03)
    return Asked("2026-11-30T14:23:05.799102Z", value)

def work():
    while time.monotonic() < end:
        before, since = int(number.read_text(), 16), time.monotonic()  # in this order
        got = int(askings.share(Branch("main"), Deadline(30), since, ask).commit, 16)
        sys.stdout.write("old\\n" if got < before else "good\\n")

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_workers_share_what_began_after_they_had_arrived(known: Path, data: Path, tmp_path: Path) -> None:
    number, log, aside = tmp_path / "number", tmp_path / "log", tmp_path / "aside"
    number.write_text(commit(0))
    command = [sys.executable, "-c", WORKER, str(data), str(number), str(log)]
    workers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    counter = 0
    while any(worker.poll() is None for worker in workers):
        counter += 1
        aside.write_text(commit(counter))
        aside.replace(number)
        sleep(0.005)
    answers = "".join(worker.communicate()[0] for worker in workers).split()
    assert set(answers) == {"good"}
    assert len(log.read_text()) < len(answers) / 5  # four threads share within a worker; the rest is across them
    assert json.loads(known.read_text())["branch"] == "main"


HOLDER = """
import sys, time
from pathlib import Path
from memgw.asking import Askings
from memgw.branch import Branch
from memgw.deadline import Deadline

def ask():
    print("asking", flush=True)
    time.sleep(60)

Askings(Path(sys.argv[1]), "url").share(Branch("main"), Deadline(60), time.monotonic(), ask)
"""


def test_a_worker_that_is_stopped_or_killed_in_its_asking_does_not_hold_the_others(
    known: Path, data: Path, source: Source
) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(data)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert holder.stdout
        holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        askings = Askings(data, "url")
        for least, most in ((PATIENCE_SECONDS, 3 * PATIENCE_SECONDS), (0.0, PATIENCE_SECONDS)):
            source.number, begin = source.number + 1, monotonic()
            assert share(askings, source) == source.number
            assert least <= monotonic() - begin < most
        assert not known.exists()  # those who went by themselves leave no record
    finally:
        holder.kill()
        holder.communicate()
    begin = monotonic()
    assert share(Askings(data, "url"), source) == 2
    assert monotonic() - begin < PATIENCE_SECONDS
    assert known.exists()


def changed(**fields: Any) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | fields)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text + "}",
        lambda text: "[" * 100_000,
        lambda text: "[]",
        lambda text: "{}",
        lambda text: "\N{SNOWMAN}",
        changed(began=1e15),
        changed(began=float("nan")),
        changed(began=float("inf")),
        changed(began="1"),
        changed(began=True),
        changed(era=None),
        changed(era="another boot"),
        changed(branch="other"),
        changed(commit="A" * 40),
        changed(commit=None),
        changed(at="yesterday"),
        changed(at=7),
    ],
    ids=range(19),
)
def test_a_record_that_is_damaged_or_of_another_world_is_none(
    known: Path, data: Path, source: Source, spoil: Callable[[str], str]
) -> None:
    early = monotonic()
    assert share(Askings(data, "url"), source) == 0
    source.number = 1
    assert share(Askings(data, "url"), source, early) == 0  # from the record, which began later than that
    assert source.asked == 1
    known.write_text(spoil(known.read_text()))
    assert share(Askings(data, "url"), source, early) == 1
    assert share(Askings(data, "another url"), source, early) == 1
    assert source.asked == 3


def test_a_record_that_can_not_be_written_fails_nothing(known: Path, data: Path, source: Source) -> None:
    known.mkdir()  # damage that is healed
    assert share(Askings(data, "url"), source) == 0
    assert known.is_file()
    known.unlink()
    known.parent.rmdir()
    known.parent.symlink_to("/proc")  # where nobody can make a file, nor a folder
    assert share(Askings(data, "url"), source) == 0
    (data / "locks").mkdir(exist_ok=True)
    os.rename(data / "locks", data / "away")
    os.symlink("/proc", data / "locks")
    assert share(Askings(data, "url"), source) == 0


def test_a_name_that_somebody_made_up_leaves_nothing_behind(data: Path, source: Source) -> None:
    data.mkdir()
    assert share(Askings(data, "url"), source) == 0
    assert list(data.iterdir()) == []
