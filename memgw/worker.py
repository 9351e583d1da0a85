"""gunicorn's gthread worker, except that no thread of it ever waits for a client.

There a thread is held by a connection that says nothing (5 s), by one whose request stops in the middle or whose client
does not take the answer (for ever), and the main loop by one that its client does not close (2 s each): a few dozen
agents that were killed or cut off stop a worker, /health and all.

Here the main loop, which waits for nobody, collects a request until all of it is there, and sends what a client is slow
to take; a thread sees memory only. Every wait for a client is bounded:

    accepted ─▶ idle ─▶ arriving ─▶ (a thread answers) ─▶ leaving ─▶ idle, if kept alive
              closed │   408 │                         closed │ └──▶ parting ─▶ closed
"""

import json
import selectors
import signal
import socket
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import Any
from uuid import uuid4

from gunicorn.http.errors import (
    ExpectationFailed,
    LimitRequestHeaders,
    LimitRequestLine,
    ParseException,
    UnsupportedTransferCoding,
)
from gunicorn.workers.gthread import ThreadWorker

from memgw.connection import PIECE, Connection, NotYet
from memgw.problems import shape

STOPPING = {signal.SIGTERM, signal.SIGQUIT, signal.SIGINT}
"""Blocked while a worker is forked: until it has handlers of its own it has the master's, and those would lose them."""
PART = 5.0
"""Seconds for a client to close after its answer; closing on what it still sends would take the answer from it."""
STOP = 2.0
"""Seconds that a worker which stops leaves to requests that are arriving, or may be. Meanwhile it lets others in:
gunicorn replaces it only when it is gone, and its neighbour may be stopping, too."""
LAST = 0.5
"""Seconds for requests that are arriving when the door is closed."""
UNTAKEN = 256 * 1024 * 1024
"""Bytes of answers that a worker keeps for clients that are slow to take them."""
ARRIVING = 64 * 1024 * 1024
"""Bytes of requests that a worker keeps until all of each is there."""
TICK = 0.25


NOT_TAKEN: dict[type[Exception], tuple[int, str, str]] = {
    LimitRequestLine: (414, "uri_too_long", "the first line of the request is too long"),
    LimitRequestHeaders: (431, "headers_too_large", "the request has too many headers, or too long ones"),
    ExpectationFailed: (417, "expectation_failed", "of expectations 100-continue alone is known"),
    UnsupportedTransferCoding: (501, "transfer_coding_unsupported", "of transfer codings chunked alone is known"),
    ParseException: (400, "bad_request", "the request is not the HTTP that is spoken here"),
}
"""What no thread is asked about: gunicorn would answer in HTML. The first kind that fits counts."""


def problem(status: int, code: str, detail: str, request_id: str) -> bytes:
    """The whole answer to a request that the application is not asked about."""
    body = shape(status, code, detail, request_id)
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} {body['title']}\r\nConnection: close\r\nContent-Type: application/problem+json\r\n"
    return b"%sContent-Length: %d\r\n\r\n%s" % (head.encode(), len(text), text)


class Worker(ThreadWorker):  # type: ignore[misc]  # gunicorn has no types
    """Of ThreadWorker remain the threads, the way back from them, and what one does with a request."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connections: set[Connection] = set()
        self.waiting: dict[Connection, Callable[[Connection], None]] = {}
        self.swept = monotonic()
        self.alive: bool
        self.open = True

    def init_signals(self) -> None:
        super().init_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

    def run(self) -> None:
        self.patience: float = self.wsgi.extensions["memgw.config"].client_timeout_seconds
        self.limits: Callable[[str], int] = self.wsgi.extensions["memgw.body_limits"]
        self.poller.register(self.method_queue.fileno(), selectors.EVENT_READ, self.method_queue.run_callbacks)
        self.set_accept_enabled(True)
        while self.alive and self.is_parent_alive():
            self.turn()
        self.alive = False
        end = monotonic() + STOP
        while monotonic() < end and any(not conn.sock.parts for conn in self.waiting):
            self.turn()
        self.retire()
        end = monotonic() + self.cfg.graceful_timeout
        while self.connections and monotonic() < end:
            self.turn()
        self.tpool.shutdown(wait=False)

    def turn(self) -> None:
        self.notify()
        for key, _ in self.poller.select(TICK):
            key.data(key.fileobj)
        if monotonic() >= self.swept + TICK:
            self.sweep()

    def accept(self, listener: Any) -> bool:
        """Whether there may be another connection to accept."""
        if len(self.connections) >= self.worker_connections:
            self.make_room()
        try:
            opened, client = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError as exc:  # no descriptors or no memory
            self.log.warning("can't accept a connection: %s", exc)
            if self.make_room():
                return True
            self.set_accept_enabled(False)  # until the next sweep
            return False
        opened.setblocking(False)
        conn = Connection(opened, client, listener.getsockname(), until=monotonic() + self.cfg.keepalive)
        self.connections.add(conn)
        self.read(conn)
        return True

    def read(self, conn: Connection) -> None:
        """Of a connection that is idle or arriving."""
        begins = not conn.data
        if conn.receive():
            if begins:
                conn.until = monotonic() + self.patience
            if not self.bound_arriving(conn):
                self.close(conn)
            elif len(conn.data) >= conn.due:
                self.hand_over(conn)
            elif conn.until <= monotonic():  # one that drips is seldom found waiting by a sweep
                self.refuse(conn)
            else:
                self.wait(conn, selectors.EVENT_READ, self.read)
        elif conn.broken:
            self.close(conn)
        else:
            self.wait(conn, selectors.EVENT_READ, self.read)

    def hand_over(self, conn: Connection) -> None:
        self.forget(conn)
        self.enqueue_req(conn)

    def handle(self, conn: Connection) -> bool | None:
        """In a thread. Whether the connection is kept; None where the request has not arrived yet."""
        try:
            conn.parse(self.cfg, self.limits)
        except NotYet:
            conn.send()
            return None
        fault = conn.fault
        if fault:
            self.log.warning("no request that is taken, from %s: %s", conn.client[0], fault)
            kind = next(kind for kind in NOT_TAKEN if isinstance(fault, kind))
            conn.sock.sendall(problem(*NOT_TAKEN[kind], uuid4().hex))
        keep: bool = not fault and super().handle(conn)
        conn.send()
        return keep

    def finish_request(self, conn: Connection, done: "Future[bool | None]") -> None:
        """In the main loop, after `handle`."""
        if failed := done.exception():
            self.log.error("a connection is given up", exc_info=failed)
            self.close(conn)
        elif (keep := done.result()) is None:
            if conn.until <= monotonic():  # likewise
                self.refuse(conn)
            else:
                self.wait(conn, selectors.EVENT_READ, self.read)
        else:
            conn.keep = keep
            conn.until = monotonic() + self.patience
            self.leave(conn)

    def leave(self, conn: Connection) -> None:
        """Sends what is left of an answer, and goes on to what comes after it."""
        if conn.send():
            conn.until = monotonic() + self.patience
        if conn.broken:
            self.close(conn)
        elif conn.sock.parts:
            self.wait(conn, selectors.EVENT_WRITE, self.leave)
            self.bound_untaken()
        elif not conn.keep:
            self.part(conn)
        elif conn.data:  # the client did not wait for the answer
            conn.until = monotonic() + self.patience
            self.hand_over(conn)
        else:
            conn.until = monotonic() + self.cfg.keepalive
            self.read(conn)

    def bound_untaken(self) -> None:
        """Closes who has taken nothing for the longest time, when together they leave too much, but never the last."""
        leaving = sorted((conn for conn in self.waiting if conn.sock.parts), key=lambda conn: conn.until)
        if len(leaving) > 1 and sum(conn.sock.size() for conn in leaving) > UNTAKEN:
            self.close(leaving[0])

    def bound_arriving(self, conn: Connection) -> bool:
        """Whether there is room for what arrives on a connection. Only bodies of hooks are large."""
        return len(conn.data) <= 2 * PIECE or sum(len(other.data) for other in self.connections) <= ARRIVING

    def part(self, conn: Connection) -> None:
        conn.until = monotonic() + (PART if self.alive else TICK)
        try:
            conn.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.close(conn)
        else:
            self.drain(conn)

    def drain(self, conn: Connection) -> None:
        conn.receive()
        conn.data.clear()
        if conn.broken:
            self.close(conn)
        else:
            self.wait(conn, selectors.EVENT_READ, self.drain)

    def wait(self, conn: Connection, events: int, go_on: Callable[[Connection], None]) -> None:
        """Has `go_on` called when the client has done its part."""
        if not (self.open or conn.sock.parts):
            conn.until = min(conn.until, monotonic() + LAST)
        if self.waiting.get(conn) == go_on:
            return
        self.forget(conn)
        self.waiting[conn] = go_on
        self.poller.register(conn.socket, events, partial(self.ready, conn, go_on))

    def ready(self, conn: Connection, go_on: Callable[[Connection], None], _: object) -> None:
        if self.waiting.get(conn) == go_on:  # else something before it in the same turn has ended the wait
            go_on(conn)

    def forget(self, conn: Connection) -> None:
        if self.waiting.pop(conn, None):
            self.poller.unregister(conn.socket)

    def close(self, conn: Connection) -> None:
        self.forget(conn)
        self.connections.discard(conn)
        conn.socket.close()

    def sweep(self) -> None:
        """Ends the waits that have been too long."""
        self.swept = monotonic()
        for conn in [conn for conn in self.waiting if conn.until <= self.swept]:
            if conn.sock.parts and conn.progresses():
                conn.until = self.swept + self.patience
            elif self.waiting[conn] != self.read:
                self.close(conn)
            elif conn.data:
                self.refuse(conn)
            else:
                conn.until = self.swept + self.patience
                if conn.receive():  # at the last moment
                    self.hand_over(conn)
                else:
                    self.close(conn)
        self.set_accept_enabled(self.open)

    def refuse(self, conn: Connection) -> None:
        request_id = uuid4().hex
        self.log.info("a request did not arrive in time: %d bytes (%s)", len(conn.data), request_id)
        conn.sock.sendall(problem(408, "request_timeout", "the request did not arrive in time", request_id))
        conn.keep = False
        self.leave(conn)

    def make_room(self) -> bool:
        """Closes the connection that will be missed least, if there is one that no thread has."""
        if not self.waiting:
            return False
        self.close(min(self.waiting, key=lambda conn: (bool(conn.sock.parts), bool(conn.data), conn.until)))
        return True

    def retire(self) -> None:
        """What the kernel has accepted is ours, too; whoever comes later finds another worker, or a closed door."""
        self.open = False
        self.set_accept_enabled(False)
        for listener in self.sockets:
            while self.accept(listener):
                pass
            listener.close()
        for conn in self.waiting:
            if not conn.sock.parts:
                conn.until = min(conn.until, monotonic() + LAST)
