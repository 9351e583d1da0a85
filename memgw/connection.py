"""A client's connection as gunicorn's parts see it from within a thread: in memory, with nothing to wait for."""

import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fcntl import ioctl
from io import BytesIO
from struct import unpack
from termios import TIOCOUTQ
from typing import Any

from gunicorn.http.body import LengthReader
from gunicorn.http.errors import ParseException
from gunicorn.http.message import Request
from gunicorn.http.unreader import Unreader

PIECE = 65_536


class NotYet(Exception):
    """More of the request has to arrive."""


class Here(Unreader):  # type: ignore[misc]  # gunicorn has no types
    """What has arrived, for gunicorn's parser."""

    def chunk(self, size_hint: int | None = None) -> bytes:
        raise NotYet


class Outlet:
    """The socket that a thread sees: it takes everything at once, and the main loop does the rest."""

    def __init__(self) -> None:
        self.parts: deque[memoryview] = deque()

    def sendall(self, data: bytes) -> None:
        if data:
            self.parts.append(memoryview(data))

    def size(self) -> int:
        return sum(map(len, self.parts))

    def setblocking(self, flag: bool) -> None: ...

    def gettimeout(self) -> float:
        return 0.0

    def shutdown(self, how: int) -> None: ...

    def settimeout(self, seconds: float) -> None: ...

    def recv(self, size: int) -> bytes:
        return b""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Parsed:
    """The parser that a thread sees: it has parsed. `outcome`: a request."""

    outcome: Any

    def __next__(self) -> Any:
        return self.outcome

    def finish_body(self, deadline: float) -> bool:
        return True


@dataclass(eq=False)
class Connection:
    """In the hands of the main loop, or of a thread; never of both. `due`: bytes before which it is no use to parse.
    `fault`: why what has arrived is no request."""

    socket: socket.socket
    client: Any
    server: Any
    until: float
    data: bytearray = field(default_factory=bytearray)
    due: int = 0
    sock: Outlet = field(default_factory=Outlet)
    parser: Parsed | None = None
    fault: ParseException | None = None
    requests: int = 0
    encouraged: bool = False
    keep: bool = True
    broken: bool = False
    untaken: int = 0
    initialized: bool = True
    is_http2: bool = False

    def init(self) -> None:
        """gunicorn asks for it; there is nothing left to do."""

    def receive(self) -> bool:
        """Whether anything came. If not, `broken` tells whether anything still may."""
        try:
            piece = self.socket.recv(PIECE)
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        self.data += piece
        self.broken = not piece
        return not self.broken

    def send(self) -> bool:
        """Whether any of the answer could be sent without waiting."""
        parts, sent = self.sock.parts, 0
        try:
            while parts:
                taken = self.socket.send(parts[0])
                sent += taken
                parts[0] = parts[0][taken:]
                if not parts[0]:
                    parts.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.broken = True
        return bool(sent)

    def progresses(self) -> bool:
        """Whether the client's side has taken any of the answer since the last time; the kernel keeps megabytes."""
        before, self.untaken = self.untaken, unpack("i", ioctl(self.socket, TIOCOUTQ, bytes(4)))[0]
        return self.untaken != before

    def parse(self, cfg: Any, limit: Callable[[str], int]) -> None:
        """Makes `parser` or `fault` of a request that has arrived, or as much as anybody will look at. Raises NotYet.

        `limit`: of a path's bodies, in bytes. A larger one is refused by its Content-Length or, without one, by its
        first limit + 1 bytes.
        """
        here = Here()
        here.unread(self.data)
        request = None
        try:
            request = Request(cfg, here, self.client, self.requests + 1)
            reader, most, body = request.body.reader, limit(request.path), b""
            too_large = False
            if isinstance(reader, LengthReader):
                too_large = reader.length > most
                self.due = 0 if too_large else len(self.data) - len(here.buf.getvalue()) + reader.length
                if len(self.data) < self.due:
                    raise NotYet
            if not too_large:
                body = request.body.read(most + 1)
            if too_large or len(body) > most:
                request.force_close()  # where the next request begins will not be known
            request.body = BytesIO(body)
            self.parser = Parsed(request)
        except ParseException as exc:
            self.fault = exc
        except NotYet:
            if request and request._expected_100_continue and not self.encouraged:
                self.encouraged = True
                self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            raise
        if request:
            request._expected_100_continue = False  # said already, or the client did not wait for it
        self.encouraged = False
        self.data, self.due = bytearray(here.take_buffered()), 0
        self.requests += 1
