"""Workers that end while clients ask: no request that was accepted is lost, and nothing is left behind."""

import fcntl
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import pytest

from tests.actors import Server, Upstream, processes_with, served, stopped, until
from tests.test_clients import GET, HEAD, connect, held, post, rest
from tests.test_metrics import requests, scrape

ALPHA = b'{"query": "alpha"}'
JSON = {"Content-Type": "application/json"}


class Client(threading.Thread):
    """Asks again and again, on a connection that it keeps, or on a new one each time.

    `outcomes`: "answered", or what went wrong. `crossed`: the server closed a kept connection before any byte of the
    answer, as HTTP allows it at any time; there the client asks again.
    """

    def __init__(self, server: Server, *, keeps: bool, pauses: float) -> None:
        super().__init__()
        self.outcomes: Counter[str] = Counter()
        self.commits: set[str] = set()
        self._server, self._keeps, self._pauses = server, keeps, pauses
        self._over = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        while not self._over.wait(self._pauses):
            used = connection.sock is not None
            try:
                if not used:
                    connection.connect()
            except OSError:
                self.outcomes["not connected"] += 1
                self._over.wait(0.05)
                continue
            outcome, stays = self._ask(connection)
            self.outcomes["crossed" if used and outcome == "closed" else outcome] += 1
            if not (self._keeps and stays):
                connection.close()
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection) -> tuple[str, bool]:
        try:
            connection.request("POST", "/query", ALPHA, JSON)
            answer = connection.getresponse()
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            return "closed", False
        except (OSError, http.client.HTTPException) as exc:
            return repr(exc), False
        try:
            body = json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as exc:
            return f"cut: {exc!r}", False
        if answer.status != 200 or not body["results"]:
            return str(body), False
        self.commits.add(body["commit_hash"])
        return "answered", not answer.will_close

    def stop(self) -> None:
        self._over.set()
        self.join()


@contextmanager
def clients(server: Server, number: int) -> Iterator[list[Client]]:
    asking = [Client(server, keeps=turn % 2 == 0, pauses=0.05 if turn % 4 > 1 else 0) for turn in range(number)]
    try:
        for client in asking:
            client.start()
        yield asking
    finally:
        for client in asking:
            client.stop()


def outcomes(asking: list[Client]) -> "Counter[str]":
    return sum((client.outcomes for client in asking), Counter())


def replaced(server: Server, workers: list[int], number: int = 2) -> bool:
    now = server.workers()
    return len(now) == number and not set(now) & set(workers)


def assert_all_locks_are_free(data: Path) -> None:
    locks = [path for path in (data / "locks").rglob("*") if path.is_file()]
    assert locks
    for path in locks:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_rolling_term_under_load_loses_no_request_and_leaves_no_process_and_no_lock(
    server: Server, upstream: Upstream, data: Path
) -> None:
    pushed = [upstream.commit("main", {"a.md": "# A\n\nalpha\n"})]
    server.query("alpha")
    assert until(lambda: len(server.workers()) == 2)
    random = Random(7)
    with clients(server, 16) as asking:
        for turn in range(12):
            worker = server.workers()[turn % 2]
            os.kill(worker, signal.SIGTERM)
            pushed.append(upstream.commit("main", {"a.md": f"# A\n\nalpha {turn}\n"}))
            assert until(lambda worker=worker: replaced(server, [worker]), 60)  # type: ignore[misc]
            threading.Event().wait(random.uniform(0, 0.1))  # where the next one hits is the point
        for _ in range(2):
            workers = server.workers()
            os.kill(server.process.pid, signal.SIGHUP)
            assert until(lambda workers=workers: replaced(server, workers), 60)  # type: ignore[misc]
        answered = outcomes(asking)["answered"]
        assert until(lambda: outcomes(asking)["answered"] >= answered + 50, 60)
        assert set(outcomes(asking)) <= {"answered", "crossed"}

        server.process.terminate()
        assert server.process.wait(60) == 0
        assert until(lambda: outcomes(asking)["not connected"] > 16)
    ended = outcomes(asking)
    # The kernel may have accepted one in the instant between a worker's last look and its closing of the door.
    assert ended.pop("closed", 0) <= 2
    assert set(ended) <= {"answered", "crossed", "not connected"}
    assert set().union(*(client.commits for client in asking)) <= set(pushed)
    assert not processes_with(str(data))
    assert_all_locks_are_free(data)


def test_what_the_kernel_had_accepted_before_the_end_is_answered(environ: dict[str, str], tmp_path: Path) -> None:
    with served(environ, tmp_path, workers=1, measured=False) as server, ExitStack() as stack:
        (worker,) = server.workers()
        with stopped(worker):
            waiting = [stack.enter_context(connect(server, GET)) for _ in range(20)]
            server.process.terminate()
            assert until(lambda: terminated(worker), 30)
        assert [rest(client).split(b"\r\n")[0] for client in waiting] == [b"HTTP/1.1 200 OK"] * 20
        with pytest.raises(ConnectionRefusedError):
            connect(server)
        assert server.process.wait(30) == 0


def terminated(pid: int) -> bool:
    """Whether TERM waits for a process that is stopped."""
    fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool((int(fields["ShdPnd"], 16) | int(fields["SigPnd"], 16)) >> (signal.SIGTERM - 1) & 1)


def test_a_worker_that_is_told_to_end_while_it_begins_ends(server: Server) -> None:
    """gunicorn's own loses the signal then, and with it a stop of the gateway would take its whole grace."""
    assert until(lambda: len(server.workers()) == 2)
    known = set(server.workers())
    os.kill(min(known), signal.SIGTERM)
    for _ in range(8):
        worker = next_worker(server, known)
        os.kill(worker, signal.SIGTERM)
        assert until(lambda worker=worker: worker not in server.workers(), 20)  # type: ignore[misc]
        known.add(worker)


def next_worker(server: Server, known: set[int]) -> int:
    """The next one that is not known, within a fraction of a millisecond after its fork."""
    master = server.process.pid
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if found := set(map(int, Path(f"/proc/{master}/task/{master}/children").read_text().split())) - known:
            return found.pop()
    raise AssertionError("no worker begins")


def test_a_stop_does_not_wait_for_clients_that_stall_and_tells_them(server: Server) -> None:
    with connect(server, post(ALPHA)[:-3]) as stalled, connect(server, HEAD) as other, connect(server) as silent:
        with connect(server, GET) as idle:
            assert until(lambda: held(server) == 4)
            server.process.terminate()
            assert server.process.wait(30) == 0
            assert rest(idle).startswith(b"HTTP/1.1 200 OK")
        assert rest(silent) == b""
        for client in (stalled, other):
            assert rest(client).startswith(b"HTTP/1.1 408 ")


def test_workers_that_end_together_let_others_in_while_clients_stall(server: Server) -> None:
    assert until(lambda: len(server.workers()) == 2)
    workers = server.workers()
    with ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(connect(server, post(ALPHA)[:-3]))
        assert until(lambda: held(server) == 30)
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
        by_old, took = 0, [0.0]
        while not replaced(server, workers):
            begun = time.monotonic()
            status, headers, _ = server.request("GET", "/health", timeout=10)
            took.append(time.monotonic() - begun)
            assert status == 200
            by_old += headers.get("connection") == "close"
    assert by_old > 10  # of those who came after the TERM
    assert max(took) < 5


def test_a_body_that_is_on_its_way_when_a_worker_is_told_to_end_may_arrive(server: Server, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    server.query("alpha")
    with connect(server, post(ALPHA)[:-3]) as client:
        assert until(lambda: held(server) == 1)
        for worker in server.workers():
            os.kill(worker, signal.SIGTERM)
        client.sendall(post(ALPHA)[-3:])
        answer = rest(client)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"Connection: close" in answer


def test_workers_that_are_replaced_for_their_age_lose_no_request_and_no_count(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    environ["MEMGW_MAX_REQUESTS"] = "40"
    with served(environ, tmp_path, measured=False) as server:
        server.query("alpha")
        assert until(lambda: len(server.workers()) == 2)
        workers = server.workers()
        before = requests(scrape(server))["/query", 200]
        with clients(server, 8) as asking:
            assert until(lambda: outcomes(asking)["answered"] >= 300, 60)
        assert set(outcomes(asking)) <= {"answered", "crossed"}
        assert not set(server.workers()) & set(workers)
        assert until(lambda: len(server.workers()) == 2)
        assert requests(scrape(server))["/query", 200] - before == outcomes(asking)["answered"]


def test_one_who_connects_and_is_told_nothing_is_not_kept_beyond_the_stop(server: Server) -> None:
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        assert until(lambda: held(server) == 50)
        server.process.terminate()
        assert server.process.wait(30) == 0
