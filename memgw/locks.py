"""File locks across threads and processes. Two kinds, one order: a workspace's, then the mirror's. That of an asking
(asking.py) is of no account for what is right: it is waited for a moment, inside the others or outside."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from memgw import files
from memgw.deadline import Deadline
from memgw.errors import WorkspaceBusy

RETRY_AFTER_SECONDS = 5


@contextmanager
def hold(path: Path, deadline: Deadline, at_most: float, *, poll: float = 0.01) -> Iterator[int]:
    """Holds the lock file at `path` and yields its descriptor.

    A child process that inherits the descriptor keeps the lock after our death until it is gone
    itself (flock belongs to the open file, not to the process). memgw never deletes the file.
    `poll`: seconds between two looks at a lock that is taken.
    Raises WorkspaceBusy when the lock is not to be had within `at_most` seconds or the deadline.
    """
    files.make_folder(path.parent)
    if path.is_dir() or (path.exists() and not os.access(path, os.R_OK | os.W_OK)):
        files.remove(path)  # damage: nobody can hold it
    while True:
        descriptors: list[int] = []
        # a new object each time: filelock's are reentrant, so that a shared one would let two threads in
        lock = FileLock(
            path, poll_interval=poll, thread_local=False, fallback_to_soft=False, on_acquired=descriptors.append
        )
        try:
            with deadline.step("wait"):
                lock.acquire(timeout=deadline.left(at_most))
        except Timeout as exc:
            raise WorkspaceBusy("another request is still at work on what this one needs", RETRY_AFTER_SECONDS) from exc
        if is_held(path, descriptors[0]):
            break
        lock.release()  # somebody deleted the file while we waited: others will lock the new one
    try:
        yield descriptors[0]
    finally:
        lock.release()


def is_held(path: Path, descriptor: int) -> bool:
    """Whether the lock is worth anything: not when its file was deleted, since then another can hold the new one."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False
