"""Requests that wait for the same branch share one asking of the remote, if it began after each of them arrived."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from os import readlink
from pathlib import Path
from threading import Condition, Lock
from time import monotonic
from typing import cast

from memgw import files, locks, metrics
from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.errors import (
    BranchNotFound,
    MemgwError,
    RemoteAuthFailed,
    RemoteUnreachable,
    WorkspaceBusy,
)

PATIENCE_SECONDS = 0.5
"""Nobody waits longer than this for an asking of another: it may be stuck, or its process stopped."""

ALONE_SECONDS = 10.0
_LOOK_SECONDS = 0.004
_POLL_SECONDS = 0.002
_LONGEST = 4096


@dataclass(frozen=True)
class Asked:
    """`commit`: what the remote had for the branch at `at` or later. `at`: when the asking began."""

    at: str
    commit: str


@dataclass(frozen=True)
class _Outcome:
    """`began`: in monotonic time, which is one for all processes of a boot."""

    began: float
    result: Asked | MemgwError


@dataclass
class _Queue:
    """Those who ask for one branch. `running`: when each asking in progress began, the newest last."""

    changed: Condition
    present: int = 0
    running: list[float] = field(default_factory=list)
    last: _Outcome | None = None


class Askings:
    """Of one remote. Within a worker one asking is in progress at a time, and who arrives meanwhile waits for the next,
    which serves them all; across workers a lock and a record do the same for branches that have a workspace."""

    def __init__(self, data: Path, url: str) -> None:
        self._data, self._era = data, _era(url)
        self._lock = Lock()
        self._queues: dict[str, _Queue] = {}
        self._alone_until = 0.0

    def share(self, branch: Branch, deadline: Deadline, since: float, ask: Callable[[], Asked]) -> Asked:
        """The result of an asking that began at `since` or later: one of another request, or `ask`'s own.

        Raises what `ask` does; what it says of the remote is shared, too, that its request ran out of time is not.
        """
        with self._queue(branch) as queue:
            outcome = self._wait(queue, deadline, since)
            if isinstance(outcome, float):
                return self._lead(queue, outcome, branch, since, ask)
            metrics.shared()
            if isinstance(outcome.result, MemgwError):
                raise type(outcome.result)(outcome.result.detail)
            return outcome.result

    @contextmanager
    def _queue(self, branch: Branch) -> Iterator[_Queue]:
        with self._lock:
            queue = self._queues.setdefault(branch.name, _Queue(Condition(self._lock)))
            queue.present += 1
        try:
            yield queue
        finally:
            with self._lock:
                queue.present -= 1
                if not queue.present:  # anybody can make up names of branches
                    del self._queues[branch.name]

    def _wait(self, queue: _Queue, deadline: Deadline, since: float) -> _Outcome | float:
        """An outcome that will do; or the moment at which one's own asking begins, noted as in progress. When patience
        is lost with one, the next begins and the rest wait for that: a slow remote is not asked by all at once."""
        with self._lock:
            while True:
                if queue.last and queue.last.began >= since:
                    return queue.last
                now = monotonic()
                patience = queue.running[-1] + PATIENCE_SECONDS - now if queue.running else 0.0
                if patience <= 0:
                    queue.running.append(now)
                    return now
                queue.changed.wait(min(patience, deadline.left()))

    def _lead(
        self,
        queue: _Queue,
        began: float,
        branch: Branch,
        since: float,
        ask: Callable[[], Asked],
    ) -> Asked:
        outcome: _Outcome | None = None
        try:
            outcome = self._across_workers(branch, since, ask)
            return cast(Asked, outcome.result)
        except (BranchNotFound, RemoteUnreachable, RemoteAuthFailed) as exc:
            outcome = _Outcome(began, type(exc)(exc.detail))
            raise
        finally:
            with self._lock:
                queue.running.remove(began)
                if outcome and not (queue.last and queue.last.began > outcome.began):
                    queue.last = outcome
                queue.changed.notify_all()

    def _across_workers(self, branch: Branch, since: float, ask: Callable[[], Asked]) -> _Outcome:
        record = self._data / "askings" / f"{branch.workspace}.json"
        known = (self._data / "state" / f"{branch.workspace}.json").exists()  # a made-up name leaves no file behind
        with ExitStack() as stack:
            locked, end = False, monotonic() + PATIENCE_SECONDS
            while known and not locked and monotonic() >= self._alone_until:
                locked = self._locked(branch, stack)
                outcome = self._read(record, branch)
                if outcome and outcome.began >= since:
                    metrics.shared()
                    return outcome
                if not locked and monotonic() > end:  # its owner is slow or stopped
                    self._alone_until = monotonic() + ALONE_SECONDS
            began = monotonic()
            with metrics.asking():
                asked = ask()
            if locked:
                self._write(record, branch, began, asked)
            return _Outcome(began, asked)

    def _locked(self, branch: Branch, stack: ExitStack) -> bool:
        """Whether no other worker asks for the branch from here on. Waits a moment; then the record is due."""
        lock = self._data / "locks" / "askings" / f"{branch.workspace}.lock"
        own_books = Deadline(PATIENCE_SECONDS)  # this is part of the asking
        try:
            stack.enter_context(locks.hold(lock, own_books, _LOOK_SECONDS, poll=_POLL_SECONDS))
        except WorkspaceBusy:
            return False
        except OSError:  # a full disk must not fail what needs no disk
            self._alone_until = monotonic() + ALONE_SECONDS
            return False
        return True

    def _read(self, record: Path, branch: Branch) -> _Outcome | None:
        """What is no whole record of this boot, remote and branch is none."""
        try:
            with record.open(encoding="utf-8") as file:
                data = json.loads(file.read(_LONGEST))
            known = (data["era"], data["branch"]) == (self._era, branch.name)
            asked, began = Asked(data["at"], data["commit"]), data["began"]
            whole = re.fullmatch(r"[0-9a-f]{40}", asked.commit) and re.fullmatch(r"[0-9T:.-]{19,26}Z", asked.at)
            sane = isinstance(began, float) and 0 < began <= monotonic()
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return _Outcome(began, asked) if self._era and known and whole and sane else None

    def _write(self, record: Path, branch: Branch, began: float, asked: Asked) -> None:
        data = {"era": self._era, "branch": branch.name, "began": began, "at": asked.at, "commit": asked.commit}
        with suppress(OSError):  # a full disk must not fail what needs no disk
            if not record.exists():
                files.remove_leftovers(record)
            files.replace(record, json.dumps(data))


def _era(url: str) -> str | None:
    """Equal for processes that have one clock and ask one remote; None when that can't be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii") + readlink("/proc/self/ns/time")
    except OSError:
        return None
    return sha256(f"{boot}\n{url}".encode()).hexdigest()
