"""Branches that hooks told of, brought to their newest commits behind the answers: one after the other in each worker.

Nothing here is needed for what is right: a question asks the remote itself, and does what was not done.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from time import monotonic

from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.errors import MemgwError, WorkspaceBusy
from memgw.gateway import Gateway
from memgw.logs import request_id

log = logging.getLogger(__name__)

MOST_WAITING = 256
RETRY_AFTER_SECONDS = 30


@dataclass(frozen=True)
class _Push:
    """`arrived`: in monotonic time; what is done is done within the time of that request, and logged under its id."""

    branch: Branch
    arrived: float
    request_id: str


class Pushes:
    """Of one worker. Pushes to a branch that waits are one; those to the one at work make one more. What waits when the
    worker ends is dropped; what is at work ends within its time, which is shorter than the worker's grace."""

    def __init__(self, gateway: Gateway, seconds: float) -> None:
        self._gateway, self._seconds = gateway, seconds
        self._lock = Lock()
        self._waiting: dict[str, _Push] = {}
        self._at_work = False
        self._threads = ThreadPoolExecutor(1, "pushes")  # starts one when it is needed: after gunicorn's fork

    @property
    def idle(self) -> bool:
        """Whether all is done."""
        with self._lock:
            return not self._at_work and not self._waiting

    def take(self, branch: Branch, arrived: float) -> None:
        """Has the branch synced, from an asking after `arrived`. Raises WorkspaceBusy when too many wait."""
        with self._lock:
            if branch.name not in self._waiting and len(self._waiting) >= MOST_WAITING:
                raise WorkspaceBusy("too many branches wait to be synced", RETRY_AFTER_SECONDS)
            self._waiting[branch.name] = _Push(branch, arrived, request_id.get())
            if not self._at_work:
                self._begin()

    def _begin(self) -> None:
        """The next one, if any. With the lock held."""
        self._at_work = bool(self._waiting)
        if not self._waiting:
            return
        push = self._waiting.pop(next(iter(self._waiting)))
        try:
            future = self._threads.submit(self._run, push)
        except RuntimeError:  # this process is ending
            log.info("pushes_dropped", extra={"branches": [push.branch.name, *self._waiting]})
            self._waiting.clear()
            self._at_work = False
        else:
            future.add_done_callback(_report)

    def _run(self, push: _Push) -> None:
        request_id.set(push.request_id)
        try:
            self._sync(push)
        finally:
            with self._lock:
                self._begin()

    def _sync(self, push: _Push) -> None:
        facts: dict[str, object] = {"branch": push.branch.name}
        deadline = Deadline(self._seconds, started=push.arrived)
        if deadline.is_over:  # no fault of the branch, so that nothing is noted of it
            log.warning("push_not_synced", extra=facts | {"reason": "it waited for too long"})
            return
        try:
            report = self._gateway.sync(push.branch, deadline)
        except (MemgwError, OSError) as exc:
            log.warning("push_not_synced", extra=facts, exc_info=exc)
            return
        facts |= {"commit": report.fresh.stamp.commit, "changed": report.previous != report.fresh.stamp.commit}
        log.info("push_synced", extra=facts | {"ms": round((monotonic() - push.arrived) * 1000, 1)})


def _report(future: "Future[None]") -> None:
    """A fault of ours would otherwise stay in there."""
    if exc := future.exception():
        log.error("push_not_synced", exc_info=exc)
