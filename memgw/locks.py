"""File locks across threads and processes. Two kinds, one order: a workspace's, then the mirror's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from memgw.deadline import Deadline
from memgw.errors import WorkspaceBusy

RETRY_AFTER_SECONDS = 5


@contextmanager
def hold(path: Path, deadline: Deadline, at_most: float) -> Iterator[int]:
    """Holds the lock file at `path` and yields its descriptor.

    A child process that inherits the descriptor keeps the lock after our death until it is gone
    itself (flock belongs to the open file, not to the process). The file is never deleted.
    Raises WorkspaceBusy when the lock is not to be had within `at_most` seconds or the deadline.
    """
    descriptors: list[int] = []
    # a new object each time: filelock's are reentrant, so that a shared one would let two threads in
    lock = FileLock(
        path, poll_interval=0.01, thread_local=False, fallback_to_soft=False, on_acquired=descriptors.append
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with deadline.step("wait"):
            lock.acquire(timeout=deadline.left(at_most))
    except Timeout as exc:
        raise WorkspaceBusy("another request is still working on this branch", RETRY_AFTER_SECONDS) from exc
    try:
        yield descriptors[0]
    finally:
        lock.release()
