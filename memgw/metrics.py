"""What is counted, in the words of Prometheus; no other module knows its client.

Under gunicorn each worker counts into files of its own in one folder, and whichever is asked tells the sum of all. The
folder (PROMETHEUS_MULTIPROC_DIR) has to be named before this module is imported, as gunicorn_conf does; without one,
this process counts for itself. Like all below `data/` it may be deleted or damaged at any time: that costs the counts
so far, never a request. Labels are of known sets: never a path, a branch or a text that somebody sent.
"""

import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from sys import byteorder
from threading import Lock
from time import monotonic, time

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
    values,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from memgw import files
from memgw.errors import BranchNotFound, MemgwError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ROOM = 128 * 1024
"""Of each file, taken from the disk at once: on a full one, growing a mapped file ends the process."""

LOOK_AGAIN_SECONDS = 5.0

NUMBERS = {
    "memgw_workspaces": "Branches that have a workspace here.",
    "memgw_documents": "Documents in the indexes of all workspaces.",
    "memgw_index_bytes": "Size of the indexes of all workspaces.",
    "memgw_pending_vectors": "Texts of all workspaces that have no vectors yet.",
    "memgw_workspaces_uncounted": "Workspaces that the four sums leave out, for want of time or as they are damaged.",
    "memgw_embedding_model_loadable": "1 when there is an embedding model to make vectors with.",
    "memgw_disk_free_bytes": "Space left where memgw keeps its data.",
    "memgw_disk_floor_bytes": "MEMGW_DISK_FLOOR_MB: with less, the gateway is not ready.",
}
"""Looked up when they are asked for, by whoever calls `render`."""

AGE = "memgw_last_asking_age_seconds"
_AGE_HELP = "Seconds since the remote last answered an asking; absent until it has."

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)
_KINDS = ("counter", "gauge_max", "histogram")

_lock = Lock()
_name = str(os.getpid())
_shared = values.ValueClass is not values.MutexValue
if _shared:
    # its own name for a process, the process id, would leave files behind with every worker that ends
    values.ValueClass = values.MultiProcessValue(lambda: _name)  # type: ignore[no-untyped-call]
disable_created_metrics()  # type: ignore[no-untyped-call]

_registry = CollectorRegistry()
_requests = Counter("memgw_requests_total", "Requests that were answered.", ["endpoint", "status"], registry=_registry)
_request_seconds = Histogram(
    "memgw_request_seconds", "From a request to its answer.", ["endpoint"], buckets=_BUCKETS, registry=_registry
)
_step_seconds = Histogram(
    "memgw_step_seconds", "What each step of a request took.", ["step"], buckets=_BUCKETS, registry=_registry
)
_lock_wait = Histogram(
    "memgw_lock_wait_seconds", "What requests that needed a lock waited for it.", buckets=_BUCKETS, registry=_registry
)
_askings = Counter("memgw_askings_total", "Askings of the remote, by their result.", ["result"], registry=_registry)
_shares = Counter(
    "memgw_askings_shared_total", "Requests that took the result of another request's asking.", registry=_registry
)
_syncs = Counter(
    "memgw_syncs_total", "Times that a workspace was brought to a commit, or not.", ["outcome"], registry=_registry
)
_fallbacks = Counter(
    "memgw_engine_fallbacks_total",
    "Times that the command line stood in for the warm host.",
    ["operation"],
    registry=_registry,
)
_answered = Gauge(AGE, _AGE_HELP, multiprocess_mode="max", registry=_registry)  # a moment; its age when it is told


class _Own:
    """The files that this process counts into, while others read them."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._usable_again = 0.0
        self._base, self._generation = _name, 0
        self._seen: list[int] = []

    def begin(self, folder: Path, name: str) -> None:
        self.folder, self._base, self._generation = folder, name, 0
        self._open(name)

    def usable(self) -> bool:
        """Whether there is something to count into; files that were deleted or replaced are made again."""
        if not self.folder:
            return True
        if self._usable_again:
            if monotonic() < self._usable_again:
                return False
        elif self._inodes() == self._seen:
            return True
        self._generation += 1
        return self._open(f"{self._base}.{self._generation}")

    def _paths(self, name: str) -> list[Path]:
        return [self.folder / f"{kind}_{name}.db" for kind in _KINDS] if self.folder else []

    def _inodes(self) -> list[int]:
        try:
            return [os.stat(path).st_ino for path in self._paths(_name)]
        except OSError:
            return []

    def _open(self, name: str) -> bool:
        global _name
        try:
            for path in self._paths(name):
                _make_room(path)
            _name = name
            self._seen = self._inodes()
            _shares.inc(0)  # with another name, the client opens files anew: all, at its first touch
        except (OSError, *_DAMAGE):
            self._usable_again = monotonic() + LOOK_AGAIN_SECONDS
            return False
        self._usable_again = 0.0
        return True


_own = _Own()
_DAMAGE = (RuntimeError, ValueError, LookupError, TypeError, struct.error)


def begin(folder: Path, name: str) -> None:
    """For a worker, before its first request: it goes on with the counts of the one that had the name before it."""
    if _shared:
        with _lock:
            _own.begin(folder, name)


def request(endpoint: str, status: int, seconds: float, spent_ms: Mapping[str, float]) -> None:
    """Counts a request that was answered, and the time of its steps."""
    with _counting() as usable:
        if usable:
            _of(_requests, endpoint, str(status)).inc()
            _timed(_request_seconds, endpoint).observe(seconds)
            for step, spent in spent_ms.items():
                times = _lock_wait if step == "wait" else _timed(_step_seconds, step)
                times.observe(spent / 1000)


@contextmanager
def asking() -> Iterator[None]:
    """Counts one asking of the remote, and how it ends."""
    try:
        yield
    except MemgwError as exc:
        _asked(_code(exc), answered=isinstance(exc, BranchNotFound))
        raise
    _asked("ok", answered=True)


def shared() -> None:
    """A request took the result of another's asking."""
    with _counting() as usable:
        if usable:
            _shares.inc()


@contextmanager
def syncing() -> Iterator[list[str]]:
    """Counts one bringing of a workspace to a commit. What is put into the list last, says how it was done."""
    ways = ["none"]
    try:
        yield ways
    except MemgwError as exc:
        _count(_syncs, _code(exc))
        raise
    _count(_syncs, ways[-1])


def fell_back(operation: str) -> None:
    """The command line does what the warm host could not."""
    _count(_fallbacks, operation)


def render(numbers: Mapping[str, float]) -> bytes:
    """All that was counted, and `numbers` (of NUMBERS), in Prometheus' text format (CONTENT_TYPE)."""
    registry = CollectorRegistry()
    registry.register(_Told(numbers))
    return generate_latest(registry)


class _Told:
    """A collector, for one telling."""

    def __init__(self, numbers: Mapping[str, float]) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Metric]:
        for family in _counted(_own.folder) if _own.folder else _registry.collect():
            if family.name == AGE:
                family.samples = [
                    sample._replace(value=max(time() - sample.value, 0)) for sample in family.samples if sample.value
                ]
            yield family
        for name, value in self._numbers.items():
            family = Metric(name, NUMBERS[name], "gauge")
            family.add_sample(name, {}, value)
            yield family


def _counted(folder: Path) -> Iterable[Metric]:
    """The sum of what all processes count, and have counted; of damaged files, nothing."""
    try:
        return _sum(_all(folder))
    except (OSError, *_DAMAGE):
        whole = []
        for path in _all(folder):
            if _readable(path):
                whole.append(path)
            else:
                files.remove(path)  # its owner makes another
        return _sum(whole)


def _sum(paths: list[Path]) -> list[Metric]:
    return list(MultiProcessCollector.merge([str(path) for path in paths]))  # type: ignore[no-untyped-call]


def _all(folder: Path) -> list[Path]:
    return sorted(path for kind in _KINDS for path in folder.glob(f"{kind}_*.db"))


def _readable(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            used = int.from_bytes(file.read(4), byteorder, signed=True)
        _sum([path])
    except (OSError, *_DAMAGE):
        return False
    return used == 0 or used >= 8  # the client believes any number


def _make_room(path: Path) -> None:
    """Makes `path` a file that can be counted into, going on with what it has if that is whole."""
    files.make_folder(path.parent)
    if path.exists() and not _readable(path):
        files.remove(path)
    with path.open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, ROOM)


@contextmanager
def _counting() -> Iterator[bool]:
    with _lock:
        yield _own.usable()


def _count(counter: Counter, *labels: str) -> None:
    with _counting() as usable:
        if usable:
            _of(counter, *labels).inc()


def _asked(result: str, *, answered: bool) -> None:
    with _counting() as usable:
        if usable:
            _of(_askings, result).inc()
            if answered:
                _answered.set(time())


@cache
def _of(counter: Counter, *labels: str) -> Counter:
    return counter.labels(*labels)


@cache
def _timed(times: Histogram, *labels: str) -> Histogram:
    return times.labels(*labels)


def _code(exc: MemgwError) -> str:
    """RemoteUnreachable → remote_unreachable"""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(exc).__name__).lower()
