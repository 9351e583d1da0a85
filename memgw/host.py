"""Calls of the warm host (`qmd/host.js`): the same engine as the command line, without a Node start a call.

One line of JSON asks, one answers, over a Unix socket that only our user can open.
"""

import json
import logging
import os
import socket
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from memgw.deadline import Deadline
from memgw.errors import EngineBadOutput, EngineFailed, HostAway, StorageFull

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0
"""A search takes milliseconds: a host that says nothing for so long hangs, and is left alone for as long again."""

_MAX_ANSWER = 64 * 1024 * 1024
_ADDRESS_BYTES = 100


class Host:
    """Connections to the host, kept for the next call. Safe to share between threads; opens nothing until asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._idle: deque[socket.socket] = deque()
        self._hangs_until = 0.0
        weakref.finalize(self, _close, self._idle)

    def call(self, request: dict[str, Any], deadline: Deadline, at_most: float | None = None) -> dict[str, Any]:
        """The host's answer. Raises HostAway (it is not there, or says nothing), EngineFailed (it can't do that),
        StorageFull, EngineBadOutput, DeadlineExceeded."""
        line = json.dumps(request, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        answer = self._exchange(line, deadline, at_most)
        if answer.get("ok") is not True:
            if answer.get("kind") == "full":
                raise StorageFull("no space is left where memgw keeps its data")
            log.warning("host_failed", extra={"op": request["op"], "reason": str(answer.get("error"))[:500]})
            raise EngineFailed("the search engine failed")
        return answer

    def _exchange(self, line: bytes, deadline: Deadline, at_most: float | None) -> dict[str, Any]:
        if monotonic() < self._hangs_until:
            raise HostAway("the warm host hangs")
        seconds = deadline.left(at_most)
        try:
            connection = self._kept() or self._connect(seconds)
            said = self._say(connection, line, seconds)
        except TimeoutError as exc:
            if deadline.is_over:
                raise deadline.exceeded() from exc
            self._hangs_until = monotonic() + PATIENCE_SECONDS
            raise HostAway("the warm host does not answer in time") from exc
        except OSError as exc:
            raise HostAway("the warm host is not there") from exc
        try:
            answer = json.loads(said)
        except (ValueError, RecursionError) as exc:
            raise EngineBadOutput("the warm host's answer could not be read") from exc
        if not isinstance(answer, dict):
            raise EngineBadOutput("the warm host's answer could not be read")
        return answer

    def _kept(self) -> socket.socket | None:
        """A connection kept from before, if there is one that the host has not closed."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            connection.setblocking(False)
            try:
                connection.recv(1)
            except BlockingIOError:
                return connection
            except OSError:
                pass  # as when it was closed
            connection.close()

    def _say(self, connection: socket.socket, line: bytes, seconds: float) -> bytes:
        end = monotonic() + seconds
        try:
            connection.settimeout(seconds)
            connection.sendall(line)
            said = bytearray()
            while not said.endswith(b"\n"):
                connection.settimeout(max(end - monotonic(), 0.001))
                chunk = connection.recv(65536)
                said += chunk
                if not chunk or len(said) > _MAX_ANSWER:
                    raise ConnectionResetError("the host went away")
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return bytes(said)

    def _connect(self, seconds: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(min(seconds, PATIENCE_SECONDS))
            with _short(self._path) as address:
                connection.connect(address)
        except BaseException:
            connection.close()
            raise
        return connection


def _close(connections: deque[socket.socket]) -> None:
    for connection in connections:
        connection.close()


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """`path` in so few bytes that it fits into a socket's address."""
    if len(os.fsencode(path)) <= _ADDRESS_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
