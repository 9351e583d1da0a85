"""File locks: who waits for whom, and for how long."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep

import pytest

from memgw import locks
from memgw.config import ROOT
from memgw.deadline import Deadline
from memgw.errors import DeadlineExceeded, WorkspaceBusy
from tests.actors import until

COUNT = """
import sys
from pathlib import Path
from memgw import locks
from memgw.deadline import Deadline

lock, counter = map(Path, sys.argv[1:])
for _ in range(40):
    with locks.hold(lock, Deadline(60), 60):
        counter.write_text(str(int(counter.read_text()) + 1))
"""

HOLD = """
import subprocess, sys
from pathlib import Path
from memgw import locks
from memgw.deadline import Deadline

with locks.hold(Path(sys.argv[1]), Deadline(60), 60) as descriptor:
    inherited = (descriptor,) if sys.argv[2] == "inherited" else ()
    child = subprocess.Popen(["sleep", "60"], pass_fds=inherited, stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    child.wait()
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "locks" / "workspaces" / "main~01.lock"


def is_free(lock: Path) -> bool:
    try:
        with locks.hold(lock, Deadline(60), 0.05):
            return True
    except WorkspaceBusy:
        return False


def python(code: str, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def test_the_descriptor_is_that_of_the_lock_file(lock: Path) -> None:
    with locks.hold(lock, Deadline(60), 60) as descriptor:
        assert os.path.samestat(os.fstat(descriptor), lock.stat())
        assert not os.get_inheritable(descriptor)


def test_threads_exclude_each_other(lock: Path) -> None:
    inside, most = 0, 0

    def work(_: int) -> None:
        nonlocal inside, most
        with locks.hold(lock, Deadline(60), 60):
            inside += 1
            most = max(most, inside)
            sleep(0.001)  # lets the others run, so that they could get in
            inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(40)))
    assert most == 1


def test_processes_exclude_each_other(lock: Path, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    workers = [python(COUNT, lock, counter) for _ in range(3)]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    for worker in workers:
        worker.communicate()
    assert counter.read_text() == "120"


def test_a_lock_that_is_not_to_be_had_in_time_is_busy(lock: Path) -> None:
    with locks.hold(lock, Deadline(60), 60):
        deadline = Deadline(60)
        begin = monotonic()
        with pytest.raises(WorkspaceBusy) as caught, locks.hold(lock, deadline, 0.2):
            pytest.fail("two at once")
    assert 0.2 <= monotonic() - begin < 5
    assert caught.value.retry_after == locks.RETRY_AFTER_SECONDS == 5
    assert 200 <= deadline.timings_ms["wait"] < 5000


def test_a_request_does_not_wait_longer_than_its_deadline(lock: Path) -> None:
    with locks.hold(lock, Deadline(60), 60):
        begin = monotonic()
        with pytest.raises(WorkspaceBusy), locks.hold(lock, Deadline(0.2), 60):
            pytest.fail("two at once")
    assert 0.2 <= monotonic() - begin < 5


def test_a_request_that_is_late_takes_no_lock(lock: Path) -> None:
    with pytest.raises(DeadlineExceeded), locks.hold(lock, Deadline(1, started=monotonic() - 2), 60):
        pytest.fail("too late")
    assert is_free(lock)


def test_a_lock_is_free_after_an_error(lock: Path) -> None:
    with pytest.raises(KeyError), locks.hold(lock, Deadline(60), 60):
        raise KeyError("anything")
    assert is_free(lock)


def test_who_waits_gets_the_lock_when_it_is_free(lock: Path) -> None:
    got, leave = Event(), Event()
    deadline = Deadline(60)

    def wait() -> None:
        with locks.hold(lock, deadline, 60):
            got.set()
            leave.wait(10)

    with locks.hold(lock, Deadline(60), 60):
        waiting = Thread(target=wait)
        waiting.start()
        assert not got.wait(0.2)
    assert got.wait(5)
    assert not is_free(lock)
    leave.set()
    waiting.join()
    assert is_free(lock)
    assert deadline.timings_ms["wait"] >= 150


def test_locks_of_different_workspaces_do_not_meet(lock: Path) -> None:
    with locks.hold(lock, Deadline(60), 60), locks.hold(lock.with_name("main~02.lock"), Deadline(60), 0.05):
        assert not is_free(lock)


def test_the_lock_file_is_never_deleted(lock: Path) -> None:
    inodes = set()
    for _ in range(3):
        with locks.hold(lock, Deadline(60), 60):
            inodes.add(lock.stat().st_ino)
        inodes.add(lock.stat().st_ino)
    assert len(inodes) == 1


def test_a_lock_is_free_when_its_holder_was_killed(lock: Path) -> None:
    holder = python(HOLD, lock, "not inherited")
    child = int(first_line(holder))
    try:
        assert not is_free(lock)
        holder.kill()
        holder.communicate()
        assert until(lambda: is_free(lock), 5)
        os.kill(child, 0)
    finally:
        os.kill(child, 9)


def test_a_child_with_the_descriptor_keeps_the_lock_when_its_parent_was_killed(lock: Path) -> None:
    holder = python(HOLD, lock, "inherited")
    child = int(first_line(holder))
    try:
        holder.kill()
        holder.wait()
        assert not is_free(lock)
        assert lock.exists()
    finally:
        os.kill(child, 9)
        holder.communicate()
    assert until(lambda: is_free(lock), 5)
