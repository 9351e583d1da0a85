"""What is counted, in the words of Prometheus: `GET /metrics`.

Labels are of known sets: never a path, a branch or a text that somebody sent.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from time import time

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric

from memgw.books import Books
from memgw.errors import BranchNotFound, MemgwError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

NUMBERS = {
    "memgw_workspaces": "Branches that have a workspace here.",
    "memgw_documents": "Documents in the indexes of all workspaces.",
    "memgw_index_bytes": "Size of the indexes of all workspaces.",
    "memgw_pending_vectors": "Texts of all workspaces that have no vectors yet.",
    "memgw_workspaces_uncounted": "Workspaces that the sums leave out: not indexed now, damaged, or no time was left.",
    "memgw_embedding_model_loadable": "1 when there is an embedding model to make vectors with.",
    "memgw_disk_free_bytes": "Space left where memgw keeps its data.",
    "memgw_disk_floor_bytes": "MEMGW_DISK_FLOOR_MB: with less, the gateway is not ready.",
}
"""Looked up when they are asked for, by whoever calls `render`."""

AGE = "memgw_last_asking_age_seconds"
_AGE_HELP = "Seconds since the remote last answered an asking; absent until it has."

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)

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
_hooks = Counter(
    "memgw_hooks_total",
    "Hooks of forges: accepted, ignored, or the code that they were refused with.",
    ["forge", "outcome"],
    registry=_registry,
)
_answered = Gauge(AGE, _AGE_HELP, multiprocess_mode="max", registry=_registry)  # a moment; its age when it is told


for _result in ("ok", "branch_not_found", "remote_unreachable", "remote_auth_failed"):
    _askings.labels(_result)  # there from the start: Prometheus sees a first failure only as a step up from 0

_books = Books(lambda: _shares.inc(0))
begin = _books.begin


def request(endpoint: str, status: int, seconds: float, spent_ms: Mapping[str, float]) -> None:
    """Counts a request that was answered, and the time of its steps."""
    with _books.opened() as usable:
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
    with _books.opened() as usable:
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


def hook(forge: str, outcome: str) -> None:
    """Counts a hook that was answered."""
    _count(_hooks, forge, outcome)


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
        for family in _books.summed() or _registry.collect():
            if family.name == AGE:
                family.samples = [
                    sample._replace(value=max(time() - sample.value, 0)) for sample in family.samples if sample.value
                ]
            yield family
        for name, value in self._numbers.items():
            family = Metric(name, NUMBERS[name], "gauge")
            family.add_sample(name, {}, value)
            yield family


def _count(counter: Counter, *labels: str) -> None:
    with _books.opened() as usable:
        if usable:
            _of(counter, *labels).inc()


def _asked(result: str, *, answered: bool) -> None:
    with _books.opened() as usable:
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
