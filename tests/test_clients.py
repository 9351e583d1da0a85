"""Clients that are slow, stall, vanish or never close: /health within a second, /query served, and nothing is left."""

import json
import os
import resource
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path
from typing import Any

import gunicorn.config
import pytest
from gunicorn.http.message import Request

from memgw import connection
from memgw.connection import PIECE, Connection, NotYet
from memgw.worker import ARRIVING, UNTAKEN, Worker
from tests.actors import Server, Upstream, served, settings_in, until

HEAD = b"POST /query HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
ALPHA = b'{"query": "alpha"}'
WHOLE = b'{"query": "vast", "full": true, "limit": 1}'
VAST = 6_000_000
"""More than the kernel keeps of an answer for a client that does not read it."""


def post(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"

# what each client sends, and then nothing more, nor does it read or close
STALLED = {
    "says nothing": b"",
    "stops in the request line": b"POST /que",
    "stops in the headers": HEAD,
    "stops in the body": HEAD + b'Content-Length: 40\r\n\r\n{"query":',
    "stops in a chunk": HEAD + b'Transfer-Encoding: chunked\r\n\r\n8\r\n{"que',
    "stops between chunks": HEAD + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"que\r\n',
    "waits to be told to continue": HEAD + b"Content-Length: 40\r\nExpect: 100-continue\r\n\r\n",
    "never closes": b"GET /health HTTP/1.0\r\nHost: x\r\n\r\n",
    "is refused and never closes": HEAD + b"Content-Length: 1000000\r\n\r\n",
    "stays idle": GET,
}

ANSWERED = ("never closes", "is refused and never closes", "stays idle")


def connect(server: Server, sent: bytes = b"", room: int = 4096) -> socket.socket:
    """`room`: how much it is sent unread."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)  # heeded before it connects
    client.settimeout(60)
    try:
        client.connect(("127.0.0.1", server.port))
        client.sendall(sent)
    except OSError:
        client.close()
        raise
    return client


@contextmanager
def clients(server: Server, sent: bytes, number: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(connect(server, sent)) for _ in range(number)]


def rest(client: socket.socket) -> bytes:
    """What it is sent until the server closes."""
    pieces = []
    try:
        while piece := client.recv(65_536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def held(server: Server) -> int:
    """How many connections the workers have, as the kernel tells it: one without an inode is no process's."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    port = f":{server.port:04X}"
    return sum(row[1].endswith(port) and row[3] != "0A" and row[9] != "0" for row in rows)


def assert_serves(server: Server, meanwhile: Callable[[], object] = lambda: None) -> None:
    """/health on new connections takes less than a second and /query is answered, for as long as a stall is looked at.

    The median, since a busy machine may stop any process for a moment; a thread or a loop that waits for a client
    waits much longer than the bound for the worst one.
    """
    took = []
    for _ in range(8):
        begun = time.monotonic()
        assert server.request("GET", "/health", timeout=10)[0] == 200
        took.append(time.monotonic() - begun)
        assert server.query("alpha")["results"]
        meanwhile()
    assert statistics.median(took) < 1, took
    assert max(took) < 5, took


@pytest.fixture(scope="module", autouse=True)
def _many_files() -> Iterator[None]:
    """The tests hold more than a thousand connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def environ_in(folder: Path, **more: str) -> dict[str, str]:
    upstream = Upstream(folder / "upstream.git")
    vast = "# Vast\n\nvast\n" + "text\n" * (VAST // 5)
    upstream.commit("main", {"a.md": "# A\n\nalpha\n", "vast.md": vast})
    return {**settings_in(folder, upstream), "QMD_ENGINE": "auto", "MEMGW_THREADS": "8", **more}


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory, warm_host: Any) -> Iterator[Server]:
    """Two workers of eight threads that wait for clients as long as these tests last."""
    folder = tmp_path_factory.mktemp("patient")
    warm_host.serve(folder / "data")
    environ = environ_in(folder, MEMGW_CLIENT_TIMEOUT_SECONDS="3600", GUNICORN_CMD_ARGS="--keep-alive 3600")
    with served(environ, folder, measured=False) as server:
        server.query("alpha")
        yield server


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory, warm_host: Any) -> Iterator[Server]:
    """One worker of eight threads that waits three seconds."""
    folder = tmp_path_factory.mktemp("hasty")
    warm_host.serve(folder / "data")
    environ = environ_in(folder, MEMGW_CLIENT_TIMEOUT_SECONDS="3", GUNICORN_CMD_ARGS="--keep-alive 1")
    with served(environ, folder, workers=1, measured=True) as server:
        server.query("alpha")
        yield server


@pytest.mark.parametrize("number", [30, 200])
@pytest.mark.parametrize("kind", STALLED)
def test_stalled_clients_leave_health_and_queries_alone(patient: Server, kind: str, number: int) -> None:
    """More of them than all threads of all workers."""
    with clients(patient, STALLED[kind], number) as stalled:
        if kind in ANSWERED:  # so many at once would take all slots for a moment
            for client in stalled:
                client.recv(65_536)
        assert_serves(patient)
        assert held(patient) >= number
    assert until(lambda: not held(patient))
    assert_serves(patient)


@pytest.mark.parametrize("number", [300, 1000])
def test_idle_connections_leave_health_and_queries_alone(patient: Server, number: int) -> None:
    with clients(patient, GET, number) as idle:
        assert_serves(patient)
        assert held(patient) >= number
        for client in idle[:: number // 10]:
            client.sendall(post(ALPHA))
            client.recv(65_536)  # the answer to GET
    assert until(lambda: not held(patient))


def test_clients_that_do_not_take_their_answers_leave_health_and_queries_alone(patient: Server) -> None:
    with ExitStack() as stack:
        for _ in range(30):  # one after the other, or most would be told that the gateway is busy
            stack.enter_context(connect(patient, post(WHOLE))).recv(1)
        assert_serves(patient)
        assert held(patient) >= 30
    assert until(lambda: not held(patient))


def test_bodies_that_drip_leave_health_and_queries_alone(patient: Server) -> None:
    with clients(patient, HEAD + b"Content-Length: 4000\r\n\r\n", 200) as dripping:

        def drip() -> None:
            for client in dripping:
                client.sendall(b" ")

        assert_serves(patient, drip)


def test_each_stall_ends_and_nothing_is_left(hasty: Server) -> None:
    assert_serves(hasty)
    assert until(lambda: not held(hasty))
    said = hasty.err.read_text().count("did not arrive in time")
    with ExitStack() as stack:
        stalled = {kind: stack.enter_context(clients(hasty, sent, 3)) for kind, sent in STALLED.items()}
        untaken = [stack.enter_context(connect(hasty, post(WHOLE))) for _ in range(3)]
        dripping = stack.enter_context(clients(hasty, HEAD + b"Content-Length: 4000\r\n\r\n", 3))

        def drip() -> None:
            for client in dripping:
                try:
                    client.sendall(b" ")
                except OSError:
                    client.close()

        def ended() -> bool:
            drip()
            return not held(hasty)

        connected = 3 * (len(STALLED) + 2)
        assert until(lambda: hasty.err.read_text().count("did not arrive in time") > said or held(hasty) == connected)
        assert until(ended, 30)
        got = {kind: {rest(client) for client in group} for kind, group in stalled.items()}
        assert [len(rest(client)) < VAST for client in untaken] == [True] * 3
    assert_serves(hasty)
    assert got["says nothing"] == {b""}
    for kind in ("stays idle", "never closes"):
        assert {answer.split(b"\r\n")[0] for answer in got[kind]} <= {b"HTTP/1.1 200 OK", b"HTTP/1.0 200 OK"}
    assert {answer.split(b"\r\n")[0] for answer in got["is refused and never closes"]} == {
        b"HTTP/1.1 413 REQUEST ENTITY TOO LARGE"
    }
    late = 0
    for kind in STALLED:
        if kind.startswith("stops"):
            assert len(got[kind]) == 3, "each has a request id of its own"
            for answer in got[kind]:
                late += 1
                head, _, body = answer.partition(b"\r\n\r\n")
                assert b"content-type: application/problem+json" in head.lower()
                problem = json.loads(body)
                assert (problem["status"], problem["code"], problem["ok"]) == (408, "request_timeout", False)
                assert problem["request_id"] in hasty.err.read_text()
    for answer in got["waits to be told to continue"]:
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 408 ")
    assert hasty.err.read_text().count("did not arrive in time") == said + late + 3 + 3


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\r\n\r\n", 400, "bad_request"),  # TLS
        (b"GET /health\r\n\r\n", 400, "bad_request"),
        (b"GET /health HTTP/9.9\r\n\r\n", 400, "bad_request"),
        (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400, "bad_request"),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400, "bad_request"),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, "bad_request"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "bad_request"),
        (HEAD + b"Transfer-Encoding: br\r\n\r\n", 501, "transfer_coding_unsupported"),
        (HEAD + b"Expect: the unexpected\r\n\r\n", 417, "expectation_failed"),
        (b"GET /" + 5000 * b"a" + b" HTTP/1.1\r\n\r\n", 414, "uri_too_long"),
        (b"GET /health HTTP/1.1\r\n" + 65 * b"A: b\r\n" + b"\r\n", 431, "headers_too_large"),
        (b"GET /health HTTP/1.1\r\nA: " + 9000 * b"b" + b"\r\n\r\n", 431, "headers_too_large"),
    ],
)
def test_what_is_no_request_is_told_in_the_shape_of_all_failures(
    patient: Server, sent: bytes, status: int, code: str
) -> None:
    with connect(patient, sent) as client:
        head, _, body = rest(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"Content-Type: application/problem+json" in head
    problem = json.loads(body)
    assert (problem["ok"], problem["status"], problem["code"]) == (False, status, code)
    assert_serves(patient)


def test_of_answers_that_are_not_taken_a_worker_keeps_so_much_and_always_one() -> None:
    worker = Worker(1, os.getpid(), [], None, 1, gunicorn.config.Config(), None)
    worker.poller = selectors.DefaultSelector()
    vast = bytes(UNTAKEN // 2 + 1)
    with ExitStack() as stack:
        leaving = []
        for until_when in (3, 1, 2):
            ours, theirs = socket.socketpair()
            stack.enter_context(theirs)
            conn = Connection(stack.enter_context(ours), None, None, until_when)
            conn.sock.sendall(vast)
            leaving.append(conn)
            worker.wait(conn, selectors.EVENT_WRITE, worker.leave)
            worker.bound_untaken()
        assert list(worker.waiting) == leaving[:1]
        assert [conn.socket.fileno() >= 0 for conn in leaving] == [True, False, False]
        worker.poller.close()
        worker.tmp.close()


def test_of_large_bodies_that_arrive_a_worker_keeps_so_much() -> None:
    worker = Worker(1, os.getpid(), [], None, 1, gunicorn.config.Config(), None)
    worker.poller = selectors.DefaultSelector()
    arriving = []
    with ExitStack() as stack:
        for size in (ARRIVING // 2, ARRIVING // 2, 5 * PIECE, PIECE):
            ours, theirs = socket.socketpair()
            stack.enter_context(theirs)
            conn = Connection(stack.enter_context(ours), None, None, inf, bytearray(size - 1), due=ARRIVING)
            ours.setblocking(False)
            worker.connections.add(conn)
            theirs.sendall(b"x")
            worker.read(conn)
            arriving.append(conn)
        assert [conn.socket.fileno() >= 0 for conn in arriving] == [True, True, False, True]
        assert worker.connections == {arriving[0], arriving[1], arriving[3]}
        worker.poller.close()
        worker.tmp.close()


def test_a_body_in_pieces_is_parsed_when_all_of_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    monkeypatch.setattr(connection, "Request", lambda *args: parsed.append(args) or Request(*args))  # type: ignore[func-returns-value]
    body = b"a" * 50
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        conn = Connection(ours, None, None, inf)
        for piece in (post(body)[:-50], body[:49]):
            theirs.sendall(piece)
            assert conn.receive()
        with pytest.raises(NotYet):
            conn.parse(gunicorn.config.Config(), lambda path: 100 if path == "/query" else 1)
        assert (conn.due, len(parsed)) == (len(post(body)), 1)
        theirs.sendall(body[-1:] + b"POST")
        assert conn.receive()
        conn.parse(gunicorn.config.Config(), lambda path: 100)
    assert conn.parser
    assert next(conn.parser).body.read() == body
    assert (bytes(conn.data), conn.due) == (b"POST", 0)


def test_a_client_that_takes_its_answer_slowly_gets_all_of_it(hasty: Server) -> None:
    with connect(hasty, HEAD + b"Connection: close\r\n" + post(WHOLE)[len(HEAD) :], room=65_536) as client:
        pieces = []
        for _ in range(12):
            pieces.append(client.recv(65_536))
            time.sleep(0.4)  # longer, in all, than it may stall
        answer = b"".join(pieces) + rest(client)
    assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["results"][0]["body"]) > VAST - 10


def test_the_time_that_a_body_takes_is_not_the_requests(patient: Server) -> None:
    begun = time.monotonic()
    request = post(ALPHA).replace(b"Host", b"X-Request-ID: slow-1\r\nHost")
    with connect(patient, request[:-5]) as client:
        time.sleep(1)
        client.sendall(request[-5:])
        assert client.recv(65_536).startswith(b"HTTP/1.1 200 OK")
    took = (time.monotonic() - begun) * 1000
    lines = [json.loads(line) for line in patient.out.read_text().splitlines() if "slow-1" in line]
    assert [line["ms"] <= took - 1000 for line in lines] == [True]


def answers(client: socket.socket, number: int) -> list[tuple[int, Any]]:
    """Status and JSON of the next ones on a connection that is kept."""
    found: list[tuple[int, Any]] = []
    data = b""
    while len(found) < number:
        head, end, body = data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(fields.get(b"content-length", 0))
        if end and len(body) >= length:
            found.append((int(head.split()[1]), json.loads(body[:length] or b"null")))
            data = body[length:]
        else:
            piece = client.recv(65_536)
            assert piece, (found, data)
            data += piece
    assert not data
    return found


def test_a_request_in_single_bytes_and_several_in_one_piece_are_answered_in_order(patient: Server) -> None:
    with connect(patient) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in post(ALPHA):
            client.sendall(bytes([byte]))
        assert [status for status, _ in answers(client, 1)] == [200]
        chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n12\r\n%s\r\n0\r\n\r\n" % ALPHA
        client.sendall(post(ALPHA) + GET + chunked + post(b"{") + GET[:20])
        assert [status for status, _ in answers(client, 4)] == [200, 200, 200, 400]
        client.sendall(GET[20:])
        assert answers(client, 1) == [(200, {"ok": True})]


def test_a_client_is_told_once_to_continue_and_one_that_does_not_wait_is_not(patient: Server) -> None:
    expecting = post(ALPHA).replace(b"Host", b"Expect: 100-continue\r\nHost")
    head, body = expecting[: -len(ALPHA)], expecting[-len(ALPHA) :]
    with connect(patient, head) as client:
        assert client.recv(65_536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body[:5])
        client.sendall(body[5:])
        assert [status for status, _ in answers(client, 1)] == [200]
        client.sendall(expecting)
        assert [status for status, _ in answers(client, 1)] == [200]


def test_a_client_that_has_closed_its_side_is_answered(patient: Server) -> None:
    with connect(patient, post(ALPHA)) as client:
        client.shutdown(socket.SHUT_WR)
        assert rest(client).startswith(b"HTTP/1.1 200 OK")


def test_of_more_connections_than_a_worker_holds_the_longest_idle_is_closed(hasty: Server) -> None:
    """1,000 a worker (gunicorn_conf); as many as that may have come before."""
    hasty.environ["GUNICORN_CMD_ARGS"] = "--keep-alive 3600"
    hasty.stop()
    hasty.restart()
    with clients(hasty, GET, 1010) as idle:
        assert_serves(hasty)
        assert len(rest(idle[0])) > 0  # and then the end
        assert answers(idle[-1], 1) == [(200, {"ok": True})]


def test_a_worker_without_free_descriptors_closes_idle_connections_and_goes_on(hasty: Server) -> None:
    assert until(lambda: not held(hasty))
    (worker,) = hasty.workers()
    soft, hard = resource.prlimit(worker, resource.RLIMIT_NOFILE)
    try:
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (len(list(Path(f"/proc/{worker}/fd").iterdir())) + 12, hard))
        with clients(hasty, b"", 200):
            assert until(lambda: "can't accept a connection" in hasty.err.read_text())
            assert hasty.request("GET", "/health", timeout=5)[0] == 200
    finally:
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (soft, hard))
    assert hasty.workers() == [worker]
    assert_serves(hasty)


def test_many_clients_that_vanish_in_the_middle_leave_nothing(patient: Server) -> None:

    def vanish(number: int) -> None:
        for at in range(number, len(post(ALPHA)), 8):
            connect(patient, post(ALPHA)[:at]).close()

    threads = [threading.Thread(target=vanish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert until(lambda: not held(patient))
    assert_serves(patient)
    assert "a connection is given up" not in patient.err.read_text()
