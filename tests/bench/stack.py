"""memgw as operators start it, asked over HTTP and otherwise a black box."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from memgw.config import ROOT, Config
from tests.actors import children, processes_with, until

START_SECONDS = 60
IDLE_SECONDS = 2
"""gunicorn closes a connection after 5 idle ones."""


@dataclass(frozen=True)
class Answer:
    """How long it took until the last byte, and the bytes. Reading them as JSON is not measured."""

    seconds: float
    status: int
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(self.body)
        return read

    @property
    def hits(self) -> list[tuple[str, float]]:
        """Paths and scores, the best first."""
        return [(hit["path"], hit["score"]) for hit in self.json.get("results", [])]


class Client:
    """One connection that is kept. `post` to any server of JSON."""

    def __init__(self, port: int, path: str = "/query", headers: Mapping[str, str] | None = None) -> None:
        self.path, self.headers = path, {"Content-Type": "application/json", **(headers or {})}
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
        self._connection.connect()
        self._used = time.monotonic()

    def ask(self, text: str, **more: Any) -> Answer:
        return self.post(json.dumps({"query": text, **more}).encode())

    def post(self, body: bytes, headers: Mapping[str, str] | None = None, path: str = "") -> Answer:
        if time.monotonic() - self._used > IDLE_SECONDS:  # a lost connection is no part of an answer
            self._connection.close()
            self._connection.connect()
        start = time.perf_counter()
        self._connection.request("POST", path or self.path, body, {**self.headers, **(headers or {})})
        got = self._connection.getresponse()
        self.head, content = got.headers, got.read()
        end = time.perf_counter()
        self._used = time.monotonic()
        return Answer(end - start, got.status, content)

    def close(self) -> None:
        self._connection.close()


class Stack:
    """`bin/stack.py serve` over a remote, with settings as they come out of the box but for those that are given."""

    def __init__(self, folder: Path, remote: str, **settings: str) -> None:
        self.data, self.port = folder, free_port()
        unset = {item.metadata["name"]: "" for item in fields(Config)}  # what a .env here says is no part of this
        self._process = subprocess.Popen(
            [sys.executable, "bin/stack.py", "serve"],
            cwd=ROOT,
            env={
                **os.environ,
                **unset,
                "RUNTIME": "local",
                "GIT_REMOTE_URL": remote,
                "MEMGW_DATA_DIR": str(folder),
                "MEMGW_BIND": f"127.0.0.1:{self.port}",
                "MEMGW_MCP_PORT": str(free_port()),
                "QMD_TIMEOUT_SECONDS": "1800",  # for the first index of the largest corpus
                **settings,
            },
            stdout=subprocess.DEVNULL,
        )
        if not until(lambda: health(self.port) or self._process.poll() is not None, START_SECONDS):
            self.stop()
        if self._process.poll() is not None:
            raise RuntimeError(f"memgw did not start: see {folder / 'logs'}")

    def worker_megabytes(self) -> list[float]:
        """Resident memory of each of gunicorn's workers."""
        return [megabytes(pid) for pid in children(int((self.data / "run" / "gateway.pid").read_text()))]

    def host_megabytes(self) -> float | None:
        """Resident memory of the Node host with all that wraps it; None where there is none."""
        found, todo = [], [self._process.pid]
        while todo:
            todo += children(pid := todo.pop())
            if "qmd/host.js" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(megabytes(pid))
        return sum(found) if found else None

    def stop(self) -> None:
        """TERM, as an operator does, and nothing may be left."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(120)
        if not until(lambda: not processes_with(str(self.data))):
            raise RuntimeError(f"memgw left processes: {processes_with(str(self.data))}")


@contextmanager
def running(folder: Path, remote: str, **settings: str) -> Iterator[Stack]:
    """A stack for as long as this lasts."""
    stack = Stack(folder, remote, **settings)
    try:
        yield stack
    finally:
        stack.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def health(port: int, path: str = "/health") -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def megabytes(pid: int) -> float:
    """VmRSS."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024
