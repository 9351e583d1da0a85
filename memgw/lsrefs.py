"""Asks a Git server over HTTP for one ref on a connection that is kept open: protocol v2's `ls-refs`, one round trip.

Sources: gitprotocol-http(5), gitprotocol-v2(5). The server starts its upload-pack anew for every POST, and nobody
caches one: the answer is of now. Whatever is unusual is left to git, and None is the answer then.
"""

import logging
import re
import ssl
import weakref
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from queue import Empty, SimpleQueue
from select import POLLIN, poll
from socket import SHUT_RDWR
from threading import Thread
from time import monotonic
from urllib.parse import SplitResult, unquote, urlsplit

log = logging.getLogger(__name__)

Credentials = Callable[[], tuple[str, str] | None]
"""User and password of the operator's credential helpers."""

REST_SECONDS = 60.0
CHECKED_SECONDS = 3600.0
IDLE_SECONDS = 30.0
_MOST_IDLE = 16
_LARGEST = 1024 * 1024

# These change nothing in a small request that follows no redirect; any other setting of http.* asks for git.
_HARMLESS = {"followredirects", "lowspeedlimit", "lowspeedtime", "maxrequests", "minsessions", "postbuffer", "version"}
_ASKING_FOR_GIT = ("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "GIT_SSL_CAPATH")

_REF = re.compile(rb"((?!0{40})[0-9a-f]{40}) ([^ ]+)(?: .*)?")


class _Unusual(Exception):
    """`lasting`: it would be the same in a moment. Says no word of the server's."""

    def __init__(self, reason: str, *, lasting: bool = True) -> None:
        super().__init__(reason)
        self.lasting = lasting


def server(url: str, settings: Mapping[str, str], env: Mapping[str, str]) -> "Server | None":
    """What stands behind `url`. None when that is no HTTP, or the operator's settings ask for what only git does."""
    if not re.fullmatch(r"https?://[!-~]+", url) or {"?", "#"} & set(url):
        return None
    if settings.keys() - _HARMLESS - {"sslcainfo"} or any(env.get(name) for name in _ASKING_FOR_GIT):
        return None
    try:
        return Server(urlsplit(url), env.get("GIT_SSL_CAINFO") or settings.get("sslcainfo"))
    except ValueError:
        return None


class Server:
    """Connections to one repository. Safe to share between threads."""

    def __init__(self, parts: SplitResult, authorities: str | None) -> None:
        self._scheme, self._host, self._port = parts.scheme, parts.hostname, parts.port
        self._authorities = authorities
        self._folder = parts.path.removesuffix("/") + "/"
        user, password = parts.username, parts.password
        self._own = _basic(unquote(user), unquote(password)) if user and password is not None else None
        self._authorization = self._own
        self._tls: ssl.SSLContext | None = None
        self._formats: list[bytes] = []
        self._checked_at = self._rest_until = -CHECKED_SECONDS
        self._idle: list[tuple[HTTPConnection, float]] = []
        weakref.finalize(self, _close, self._idle)

    def tip(self, ref: str, seconds: float, credentials: Credentials) -> str | None:
        """The commit of `ref`, None when git is to be asked; in no more than `seconds`, whatever the server does."""
        if monotonic() < self._rest_until:
            return None
        answers: SimpleQueue[str | _Unusual | None] = SimpleQueue()
        asking = _Asking(monotonic() + seconds, credentials)
        # a thread, since neither the resolver nor a server that sends a byte a second can be timed out from here
        Thread(target=lambda: answers.put(self._try(ref, asking)), daemon=True).start()
        try:
            answer = answers.get(timeout=seconds)
        except Empty:
            asking.cut()
            answer = _Unusual("no answer in time")
        if isinstance(answer, _Unusual):
            self._checked_at = -CHECKED_SECONDS
            if answer.lasting:
                self._rest_until = monotonic() + REST_SECONDS
            log.info("git is asked instead", extra={"reason": str(answer)})
            return None
        return answer

    def _try(self, ref: str, asking: "_Asking") -> str | _Unusual | None:
        try:
            if self._checked_at < monotonic() - CHECKED_SECONDS:
                self._check(asking)
            return self._ls_refs(ref.encode(), asking)
        except _Unusual as exc:
            return exc
        except (OSError, HTTPException, ValueError) as exc:
            return _Unusual(type(exc).__name__, lasting=not isinstance(exc, ConnectionError))

    def _check(self, asking: "_Asking") -> None:
        """Whether the server speaks the protocol."""
        content = self._request("GET", "info/refs?service=git-upload-pack", "advertisement", b"", asking)
        first, *able = _lines(content.removeprefix(b"001e# service=git-upload-pack\n0000"))
        self._formats = [ability for ability in able if ability.startswith(b"object-format=")]
        if first != b"version 2" or not {b"ls-refs", b"ls-refs=unborn"} & set(able):
            raise _Unusual("no protocol v2")
        if self._formats not in ([], [b"object-format=sha1"]):
            raise _Unusual("no SHA-1")
        self._checked_at = monotonic()

    def _ls_refs(self, ref: bytes, asking: "_Asking") -> str | None:
        head = b"".join(map(_packet, [b"command=ls-refs\n", *self._formats]))
        body = head + b"0001" + _packet(b"ref-prefix " + ref + b"\n") + b"0000"
        found = [
            _REF.fullmatch(line) for line in _lines(self._request("POST", "git-upload-pack", "result", body, asking))
        ]
        if None in found:
            raise _Unusual("not a list of refs")
        commits = [match[1] for match in found if match and match[2] == ref]
        return commits[0].decode("ascii") if len(commits) == 1 else None

    def _request(self, method: str, target: str, kind: str, body: bytes, asking: "_Asking") -> bytes:
        """The content of a good answer. Credentials are asked for once, when the server wants some."""
        for filled in (False, True):
            sent = self._authorization
            response, content = self._send(method, target, kind, body, sent, asking)
            if response.status in (401, 403) and self._authorization == sent:
                self._authorization = self._own
            basic = "basic" in (response.getheader("WWW-Authenticate") or "").lower()
            if response.status != 401 or filled or self._own or not basic or not (known := asking.credentials()):
                break
            self._authorization = _basic(*known)
        if response.status != 200:
            raise _Unusual(f"status {response.status}")
        if response.getheader("Content-Type") != f"application/x-git-upload-pack-{kind}":
            raise _Unusual("no Git server")
        if response.getheader("Content-Encoding", "identity") != "identity" or len(content) > _LARGEST:
            raise _Unusual("an answer of another form")
        return content

    def _send(
        self, method: str, target: str, kind: str, body: bytes, authorization: str | None, asking: "_Asking"
    ) -> tuple[HTTPResponse, bytes]:
        headers = {
            "User-Agent": "git/memgw",
            "Accept": f"application/x-git-upload-pack-{kind}",
            "Git-Protocol": "version=2",
            "Cache-Control": "no-cache",
            "Pragma": "no-cache",
        }
        if body:
            headers["Content-Type"] = "application/x-git-upload-pack-request"
        if authorization:
            headers["Authorization"] = authorization
        while True:
            connection = self._take() or self._new()
            reused = connection.sock is not None
            try:
                asking.begins(connection)
                connection.request(method, self._folder + target, body or None, headers)
                response = connection.getresponse()
                content = response.read(_LARGEST + 1)
            except BaseException as exc:
                connection.close()
                if reused and isinstance(exc, ConnectionError | ssl.SSLError):
                    continue  # the server closed it while it was idle; it may have closed others, so that this ends
                raise
            if connection.sock and response.isclosed() and len(self._idle) < _MOST_IDLE:
                self._idle.append((connection, monotonic()))
            else:
                connection.close()
            return response, content

    def _take(self) -> HTTPConnection | None:
        """A connection that was used a moment ago and is still open: routers forget quiet ones without a word."""
        while self._idle:
            try:
                connection, used = self._idle.pop()
            except IndexError:  # another thread was quicker
                break
            state = poll()
            state.register(connection.sock, POLLIN)
            if used > monotonic() - IDLE_SECONDS and not state.poll(0):
                return connection
            connection.close()
        return None

    def _new(self) -> HTTPConnection:
        if self._host is None:
            raise _Unusual("no host")
        if self._scheme == "http":
            return HTTPConnection(self._host, self._port)
        if self._tls is None:
            tls = ssl.create_default_context(cafile=self._authorities)
            tls.set_alpn_protocols(["http/1.1"])
            self._tls = tls
        return HTTPSConnection(self._host, self._port, context=self._tls)


class _Asking:
    """One asking's end in monotonic time, and what it works on, to be cut off from outside."""

    def __init__(self, end: float, credentials: Credentials) -> None:
        self._end, self.credentials = end, credentials
        self._connection = HTTPConnection("")

    def begins(self, connection: HTTPConnection) -> None:
        self._connection = connection
        left = self._end - monotonic()
        if left <= 0:
            raise TimeoutError
        connection.timeout = left
        if connection.sock:
            connection.sock.settimeout(left)

    def cut(self) -> None:
        with suppress(OSError, AttributeError):  # not connected yet, or not any more
            self._connection.sock.shutdown(SHUT_RDWR)


def _basic(user: str, password: str) -> str:
    return "Basic " + b64encode(f"{user}:{password}".encode()).decode("ascii")


def _close(idle: list[tuple[HTTPConnection, float]]) -> None:
    for connection, _ in idle:
        connection.close()


def _packet(line: bytes) -> bytes:
    return b"%04x%s" % (len(line) + 4, line)


def _lines(content: bytes) -> list[bytes]:
    """The lines before the flush packet, which has to be the end. Raises ValueError."""
    lines, at = [], 0
    while (size := content[at : at + 4]) != b"0000":
        if not re.fullmatch(rb"[0-9a-f]{4}", size):
            raise ValueError("no packet")
        end = at + int(size, 16)
        if not at + 4 <= end <= len(content):
            raise ValueError("half a packet")
        lines.append(content[at + 4 : end].removesuffix(b"\n"))
        at = end
    if at + 4 != len(content):
        raise ValueError("more than was asked for")
    return lines
