"""The files that workers count into, and their sum.

Under gunicorn each worker counts into files of its own in one folder (PROMETHEUS_MULTIPROC_DIR, which has to be named
before this module is imported, as gunicorn_conf does), and whichever is asked tells the sum of all. Without a folder
the process counts for itself. Like all below `data/` it may be deleted or damaged at any time: that costs the counts
so far, never a request.
"""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from sys import byteorder
from threading import Lock
from time import monotonic

from prometheus_client import values
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from memgw import files

KINDS = ("counter", "gauge_max", "histogram")
"""Of the metrics that there are: each has a file."""

ROOM = 128 * 1024
"""Of each file, taken from the disk at once: on a full one, growing a mapped file ends the process."""

LOOK_AGAIN_SECONDS = 5.0

_DAMAGE = (OSError, RuntimeError, ValueError, LookupError, TypeError, struct.error)

_name = str(os.getpid())
_shared = values.ValueClass is not values.MutexValue
if _shared:
    # its own name for a process, the process id, would leave files behind with every worker that ends
    values.ValueClass = values.MultiProcessValue(lambda: _name)  # type: ignore[no-untyped-call]


class Books:
    """What this process counts into, while others read it. `touch`: changes any count by nothing."""

    def __init__(self, touch: Callable[[], object]) -> None:
        self._touch = touch
        self._lock = Lock()
        self._folder: Path | None = None
        self._base, self._generation = _name, 0
        self._own: list[str] = []
        self._seen: list[int] = []
        self._closed_until = 0.0

    def begin(self, folder: Path, name: str) -> None:
        """For a worker, before its first request: it goes on with the counts of the one that had the name before."""
        if _shared:
            with self._lock:
                self._folder, self._base, self._generation = folder, name, 0
                self._open(name)

    @contextmanager
    def opened(self) -> Iterator[bool]:
        """Whether there is something to count into now. Files that were deleted or replaced are made again."""
        with self._lock:
            yield not self._folder or self._whole() or self._open_others()

    def summed(self) -> list[Metric] | None:
        """What all workers count, and have counted; of damaged files, nothing. None when this process is alone."""
        if not self._folder:
            return None
        try:
            return _sum(self._all())
        except _DAMAGE:
            whole = []
            for path in self._all():
                if _readable(path):
                    whole.append(path)
                else:
                    files.remove(path)  # its owner makes another
            return _sum(whole)

    def _whole(self) -> bool:
        return not self._closed_until and self._inodes() == self._seen

    def _open_others(self) -> bool:
        if monotonic() < self._closed_until:
            return False
        self._generation += 1
        return self._open(f"{self._base}.{self._generation}")

    def _open(self, name: str) -> bool:
        global _name
        try:
            self._own = [f"{self._folder}/{kind}_{name}.db" for kind in KINDS]
            for path in self._own:
                _make_room(Path(path))
            _name = name
            self._seen = self._inodes()
            self._touch()  # with another name, the client opens files anew: all, when any count is touched
        except _DAMAGE:
            self._closed_until = monotonic() + LOOK_AGAIN_SECONDS
            return False
        self._closed_until = 0.0
        return True

    def _inodes(self) -> list[int]:
        try:
            return [os.stat(path).st_ino for path in self._own]
        except OSError:
            return []

    def _all(self) -> list[Path]:
        return sorted(path for kind in KINDS for path in self._folder.glob(f"{kind}_*.db")) if self._folder else []


def _sum(paths: list[Path]) -> list[Metric]:
    return list(MultiProcessCollector.merge([str(path) for path in paths]))  # type: ignore[no-untyped-call]


def _readable(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            used = int.from_bytes(file.read(4), byteorder, signed=True)
        _sum([path])
    except _DAMAGE:
        return False
    return used == 0 or used >= 8  # the client believes any number


def _make_room(path: Path) -> None:
    """Makes `path` a file that can be counted into, going on with what it has if that is whole."""
    files.make_folder(path.parent)
    if path.exists() and not _readable(path):
        files.remove(path)
    with path.open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, ROOM)
