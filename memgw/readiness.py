"""Whether questions can be answered now: what `/ready` tells. It takes no workspace lock, and never much more than two
seconds, whatever hangs."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass
from tempfile import TemporaryFile
from threading import Lock
from time import monotonic

from memgw.branch import Branch
from memgw.config import Config
from memgw.deadline import Deadline
from memgw.errors import BranchNotFound, DeadlineExceeded, MemgwError
from memgw.gateway import Gateway

log = logging.getLogger(__name__)

SECONDS = 2.0
MORE_SECONDS = 0.2
"""For a check to say itself that its time is over."""

SHARED_SECONDS = 1.0
"""So long what was found is told to others, too: asking for it often asks the remote no more often."""


@dataclass(frozen=True)
class Check:
    """`detail`: why not; safe to show to a client."""

    ok: bool
    detail: str = ""

    def told(self) -> dict[str, object]:
        return {"ok": self.ok} | ({"detail": self.detail} if self.detail else {})


class Readiness:
    """Looks at all that a question needs, at once. Safe to share between threads."""

    def __init__(self, config: Config, gateway: Gateway) -> None:
        self._config, self._gateway = config, gateway
        self._ways: dict[str, Callable[[], Check]] = {
            "remote": self._remote,
            "engine": self._engine,
            "data": self._data,
            "disk": self._disk,
        }
        self._threads = ThreadPoolExecutor(len(self._ways), "ready")  # starts one when it is needed
        self._lock = Lock()
        self._running: dict[str, Future[Check]] = {}
        self._found: tuple[float, dict[str, Check]] = (float("-inf"), {})

    def checks(self) -> dict[str, Check]:
        """What is found now, or was found a moment ago."""
        with self._lock:  # one looks, those behind it use what it saw
            if self._found[0] < monotonic() - SHARED_SECONDS:
                found = self._look()
                self._found = monotonic(), found
            return self._found[1]

    def _look(self) -> dict[str, Check]:
        for name, way in self._ways.items():
            if name not in self._running:  # one that hangs is not begun again
                self._running[name] = self._threads.submit(copy_context().run, self._tried, name, way)
        wait(self._running.values(), SECONDS + MORE_SECONDS)
        found = {}
        for name in self._ways:
            if self._running[name].done():
                found[name] = self._running.pop(name).result()
            else:
                found[name] = Check(False, f"no answer within {SECONDS:g} s")
        return found

    def _tried(self, name: str, way: Callable[[], Check]) -> Check:
        try:
            return way()
        except MemgwError as exc:
            log.warning("not_ready", extra={"check": name}, exc_info=exc)
            late = isinstance(exc, DeadlineExceeded)
            return Check(False, f"no answer within {SECONDS:g} s" if late else exc.detail)

    def _remote(self) -> Check:
        try:
            self._gateway.remote.ask(Branch(self._config.default_branch), Deadline(SECONDS))
        except BranchNotFound:  # it has said so
            pass
        except OSError:
            return Check(False, "there is no place to ask from")
        return Check(True)

    def _engine(self) -> Check:
        try:
            self._gateway.engine.check(Deadline(SECONDS))
        except OSError:
            return Check(False, "there is no place to start it in")
        return Check(True)

    def _data(self) -> Check:
        try:
            self._config.data_dir.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self._config.data_dir) as file:
                file.write(b"memgw")
        except OSError as exc:
            return Check(False, f"can't be written to: {os.strerror(exc.errno or 0)}")
        return Check(True)

    def _disk(self) -> Check:
        floor = self._config.disk_floor_mb
        try:
            space = os.statvfs(self._config.data_dir)
        except OSError as exc:
            return Check(False, f"can't be looked at: {os.strerror(exc.errno or 0)}")
        free = space.f_bavail * space.f_frsize // 1_000_000
        return Check(free >= floor, "" if free >= floor else f"{free} MB are free, of the {floor} that are wanted")
