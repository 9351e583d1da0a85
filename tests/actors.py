"""Who acts in the tests: a remote that is pushed to, a gunicorn that is asked, a qmd that misbehaves on purpose."""

import getpass
import gzip
import http.client
import http.server
import json
import os
import shlex
import shutil
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from memgw.config import ROOT, Config

type_of_files = Mapping[str, "str | bytes | None"]
type_of_tree = Mapping[str, tuple[str, bytes]]

MINILM = ROOT / ".cache" / "minilm-l6-v2-q8_0.gguf"
"""Where bin/minilm.py puts the embedding model of the tests."""


def until(condition: Callable[[], Any], seconds: float = 10) -> bool:
    """Whether the condition came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process does nothing for as long as this lasts."""
    os.kill(pid, signal.SIGSTOP)
    try:
        assert until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def settings_in(folder: Path, upstream: "Upstream") -> dict[str, str]:
    """The environment of a gateway that several tests share."""
    own = {"GIT_REMOTE_URL": upstream.url, "MEMGW_DATA_DIR": str(folder / "data"), "HOME": str(folder)}
    return {**os.environ, **own}


class Upstream:
    """A bare repository that stands for the remote. A commit here is what a push leaves behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = path.as_uri()  # file://, so that clones share no object with it
        subprocess.run(["git", "init", "--quiet", "--bare", "--initial-branch=main", str(path)], check=True)

    def commit(
        self, branch: str, files: type_of_files, *, parent: str | None = "", clear: bool = False, mode: str = "100644"
    ) -> str:
        """Adds a commit with changed files (None deletes one) and returns it.

        `parent`: another than the branch's tip; None for a commit without history. `clear` drops all other files.
        """
        if parent == "":
            parent = self.tip(branch)
        changes = []
        for name, content in files.items():
            if content is None:
                changes.append(b"D " + _quoted(name))
            else:
                data = content if isinstance(content, bytes) else content.encode()
                changes.append(_modification(mode, name, data))
        return self._import(branch, changes, parent=parent, clear=clear)

    def push_tree(self, branch: str, tree: type_of_tree, *, parent: str | None = "") -> str:
        """Adds a commit that has exactly these files (path → mode and bytes; of a submodule the commit's name)."""
        if parent == "":
            parent = self.tip(branch)
        changes = [_modification(mode, name, data) for name, (mode, data) in tree.items()]
        return self._import(branch, changes, parent=parent, clear=True)

    def _import(self, branch: str, changes: list[bytes], *, parent: str | None, clear: bool) -> str:
        lines = [b"commit refs/heads/%s" % branch.encode(), b"committer t <t@example.com> now", b"data 1\nm"]
        if parent:
            lines.append(b"from %s" % parent.encode())
        if clear or not parent:
            lines.append(b"deleteall")
        stream = b"\n".join([*lines, *changes]) + b"\n\ndone\n"
        if parent is None:
            self.delete(branch)
        self._git(
            "-c",
            "core.ignorecase=false",
            "fast-import",
            "--quiet",
            "--force",
            "--done",
            "--date-format=now",
            stdin=stream,
        )
        tip = self.tip(branch)
        assert tip
        return tip

    def tip(self, branch: str) -> str | None:
        out = self._git("for-each-ref", "--format=%(objectname)", f"refs/heads/{branch}").split()
        return out[0] if out else None

    def move(self, branch: str, commit: str) -> None:
        """A force-push."""
        self._git("update-ref", f"refs/heads/{branch}", commit)

    def delete(self, branch: str) -> None:
        self._git("update-ref", "-d", f"refs/heads/{branch}")

    def blob(self, commit: str, path: str) -> str:
        return self._git("cat-file", "blob", f"{commit}:{path}")

    def _git(self, *arguments: str, stdin: bytes = b"") -> str:
        command = ["git", f"--git-dir={self.path}", *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True)
        assert not done.returncode, done.stderr
        return done.stdout.decode("utf-8", "replace")


def _modification(mode: str, name: str, data: bytes) -> bytes:
    if mode == "160000":
        return b"M 160000 %s %s" % (data, _quoted(name))
    return b"M %s inline %s\ndata %d\n%s" % (mode.encode(), _quoted(name), len(data), data)


def _quoted(name: str) -> bytes:
    return b'"' + b"".join(_octal(byte) for byte in os.fsencode(name)) + b'"'


def _octal(byte: int) -> bytes:
    return bytes([byte]) if 32 <= byte < 127 and byte not in b'"\\' else b"\\%03o" % byte


class Server:
    """memgw under a real gunicorn."""

    def __init__(self, environ: Mapping[str, str], folder: Path, *, workers: int = 2, measured: bool = True) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.out, self.err = folder / "stdout.log", folder / "stderr.log"
        self.environ = {**environ, "MEMGW_BIND": f"127.0.0.1:{self.port}", "MEMGW_WORKERS": str(workers)}
        if not measured:  # coverage makes a start five times as slow
            self.environ.pop("COVERAGE_PROCESS_CONFIG", None)
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self.out.open("ab") as out, self.err.open("ab") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "gunicorn", "-c", "python:memgw.gunicorn_conf", "memgw.wsgi:app"],
                cwd=ROOT,
                env=self.environ,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        assert until(lambda: self._healthy() or process.poll() is not None, 30), self.err.read_text()
        assert process.poll() is None, self.err.read_text()
        return process

    def _healthy(self) -> bool:
        try:
            return self.request("GET", "/health", timeout=2)[0] == 200
        except OSError:
            return False

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (names in lower case), body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any, timeout: float = 60) -> tuple[int, dict[str, Any]]:
        """Status and JSON of an answer."""
        status, _, answer = self.request(
            "POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"}, timeout
        )
        return status, json.loads(answer)

    def query(self, text: str, **more: Any) -> dict[str, Any]:
        """The answer to a query that has to succeed."""
        status, answer = self.post("/query", {"query": text, **more})
        assert status == 200, answer
        return answer

    def workers(self) -> list[int]:
        """The process ids of gunicorn's workers."""
        return children(self.process.pid)

    def kill_all(self) -> None:
        """SIGKILL to master and workers; what they started is left to itself."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def restart(self) -> None:
        self.process = self._start()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)


def children(pid: int) -> list[int]:
    """Living children of a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def processes_with(sign: str) -> list[int]:
    """Living processes whose environment or command line has `sign`, but for this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            text = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if sign.encode() in text and state != "Z" and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


class GitHttp(http.server.ThreadingHTTPServer):
    """Serves a repository over smart HTTP through git's own backend, on connections that stay open.

    `spoil` may change each answer on its way; `door` gives status and headers for one that is not let in. `seen`: the
    method and the user agent of each request; `connections`: how many there were. `before` is called with the agent
    before an answer is made; `closes` hangs up after each answer without saying so.
    """

    daemon_threads = True

    def __init__(self, upstream: Upstream, certificate: Path | None = None, key: Path | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _GitHandler)
        self.root = upstream.path.parent
        if certificate:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate, key)
            self.socket = tls.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"http{'s' if certificate else ''}://127.0.0.1:{self.server_address[1]}/{upstream.path.name}"
        self.spoil: Callable[[bytes, bytes], bytes] = lambda request, answer: answer
        self.door: Callable[[Message], tuple[int, dict[str, str]] | None] = lambda headers: None
        self.before: Callable[[str], object] = lambda agent: None
        self.closes = False
        self.speaks_v2 = True
        self.seen: list[tuple[str, str]] = []
        self.connections = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Somebody hung up, as those who do not trust us should."""

    def counts(self) -> tuple[int, int]:
        """How many requests were memgw's own, and how many git's."""
        ours = sum(agent == "git/memgw" for _, agent in self.seen)
        return ours, len(self.seen) - ours


def answer_by_git(
    handler: http.server.BaseHTTPRequestHandler,
    root: Path,
    body: bytes,
    protocol: str,
    spoil: Callable[[bytes, bytes], bytes] = lambda request, answer: answer,
) -> None:
    """Has git's own backend answer a request for a repository below `root`, one process a request."""
    path, _, query = handler.path.partition("?")
    if handler.headers.get("Content-Encoding") == "gzip":
        body = gzip.decompress(body)
    environ = {
        **os.environ,
        "GIT_PROJECT_ROOT": str(root),
        "GIT_HTTP_EXPORT_ALL": "1",
        "REQUEST_METHOD": handler.command,
        "PATH_INFO": path,
        "QUERY_STRING": query,
        "CONTENT_TYPE": handler.headers.get("Content-Type", ""),
        "GIT_PROTOCOL": protocol,
    }
    done = subprocess.run(["git", "http-backend"], env=environ, input=body, capture_output=True)
    head, _, content = done.stdout.partition(b"\r\n\r\n")
    fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
    content = spoil(body, content)
    handler.send_response(int(fields.pop("Status", "200").split()[0]))
    for name, value in fields.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


class _GitHandler(http.server.BaseHTTPRequestHandler):
    server: GitHttp
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet an answer, or Nagle and delayed acknowledgements cost 40 ms

    def setup(self) -> None:
        self.server.connections += 1
        super().setup()

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, self.headers.get("User-Agent", "")))
        self.server.before(self.headers.get("User-Agent", ""))
        self.close_connection = self.close_connection or self.server.closes
        if kept_out := self.server.door(self.headers):
            self.send_response(kept_out[0])
            for name, value in (kept_out[1] | {"Content-Length": "0"}).items():
                self.send_header(name, value)
            self.end_headers()
            return
        protocol = self.headers.get("Git-Protocol", "") if self.server.speaks_v2 else ""
        answer_by_git(self, self.server.root, body, protocol, self.server.spoil)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def git_http(upstream: Upstream, certificate: Path | None = None, key: Path | None = None) -> Iterator[GitHttp]:
    """`upstream` over HTTP (HTTPS with a certificate) for as long as this lasts."""
    with GitHttp(upstream, certificate, key) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def connect(path: Path, timeout: float = 30) -> socket.socket:
    """A connection to the Unix socket at `path`, however long that is."""
    folder = os.open(path.parent, os.O_PATH)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout)
        connection.connect(f"/proc/self/fd/{folder}/{path.name}")
    except BaseException:
        connection.close()
        raise
    finally:
        os.close(folder)
    return connection


class WarmHost:
    """A running warm host. It can serve any index, so that one does for many data directories."""

    def __init__(self, environ: Mapping[str, str], folder: Path) -> None:
        self.socket = folder / "run" / "qmd-host.sock"
        self._environ, self._folder = environ, folder
        self._log = folder / "host.log"
        self.start()

    def start(self) -> None:
        """Once more, after it has ended or was killed."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "memgw.hostd"],
                cwd=ROOT,
                env={**self._environ, "GIT_REMOTE_URL": "/nowhere", "MEMGW_DATA_DIR": str(self._folder)},
                stdout=log,
                stderr=log,
            )
        assert until(lambda: self.answers() or self.process.poll() is not None, 30), self.log()
        assert self.process.poll() is None, self.log()

    def answers(self) -> bool:
        try:
            connect(self.socket).close()
        except OSError:
            return False
        return True

    def ask(self, request: Any) -> dict[str, Any]:
        """The answer to one request, over a connection of its own."""
        with connect(self.socket) as connection:
            connection.sendall(json.dumps(request).encode() + b"\n")
            return read_answer(connection)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return self._log.read_text()

    def serve(self, data: Path) -> None:
        """Lets the gateways of a data directory find it."""
        lead_to(self.socket, data)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        return self.process.wait(30)


def lead_to(socket: Path, data: Path) -> None:
    """Puts a socket where the gateways of a data directory look for the host's."""
    place = data / "run" / "qmd-host.sock"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(socket)


def read_answer(connection: socket.socket) -> dict[str, Any]:
    """One line of JSON; ConnectionResetError when the connection ends before it does."""
    said = bytearray()
    while not said.endswith(b"\n"):
        chunk = connection.recv(65536)
        if not chunk:
            raise ConnectionResetError(f"ended after {len(said)} bytes")
        said += chunk
    answer = json.loads(said)
    assert isinstance(answer, dict)
    return answer


class HostProxy(socketserver.ThreadingUnixStreamServer):
    """Stands between gateways and a warm host, and notes what is asked. `answer` may say something else to a request:
    bytes, as they are; b"" ends the connection; None has the host answer."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, path: Path, host: WarmHost) -> None:
        super().__init__(str(path), _ProxyHandler)
        self.path, self.host = path, host
        self.asked: list[dict[str, Any]] = []
        self.answer: Callable[[dict[str, Any]], bytes | None] = lambda request: None

    def serve(self, data: Path) -> None:
        """Lets the gateways of a data directory find it."""
        lead_to(self.path, data)

    def of(self, operation: str) -> list[dict[str, Any]]:
        """The requests for one operation."""
        return [request for request in self.asked if request["op"] == operation]

    def sent(self) -> dict[str, str | None]:
        """Path → text of all documents that the host was told of; None for one to take out."""
        found: dict[str, str | None] = {}
        for request in self.of("apply"):
            found |= dict.fromkeys(request["gone"]) | dict(request["put"])
        return found

    def handle_error(self, *_: Any) -> None:
        """A connection that was lost is nobody's fault here."""


class _ProxyHandler(socketserver.StreamRequestHandler):
    server: HostProxy

    def handle(self) -> None:
        for line in self.rfile:
            request = json.loads(line)
            self.server.asked.append(request)
            said = self.server.answer(request)
            if said is None:
                with connect(self.server.host.socket) as behind:
                    behind.sendall(line)
                    said = json.dumps(read_answer(behind)).encode() + b"\n"
            if not said:
                return
            self.wfile.write(said)


@contextmanager
def host_proxy(host: WarmHost) -> Iterator[HostProxy]:
    """A proxy in front of `host` for as long as this lasts."""
    with TemporaryDirectory(prefix="memgw") as folder, HostProxy(Path(folder) / "proxy.sock", host) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield proxy
        proxy.shutdown()
        thread.join()


@contextmanager
def warm_host_of_its_own(environ: Mapping[str, str]) -> Iterator[WarmHost]:
    """A host that may be ended or killed; what is left of it ends with this."""
    with TemporaryDirectory(prefix="memgw") as folder:
        host = WarmHost(environ, Path(folder))
        try:
            yield host
        finally:
            host.kill()


@contextmanager
def sshd(folder: Path) -> Iterator[tuple[str, str]]:
    """A real sshd that lets us in. Yields where it listens, as a URL without a path, and a PATH whose ssh knows it."""
    folder.mkdir()
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/key.pub\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n"
    )
    (folder / "ssh_config").write_text(
        f"IdentityFile {folder}/key\nIdentitiesOnly yes\nUserKnownHostsFile {folder}/known\n"
        "StrictHostKeyChecking accept-new\nLogLevel ERROR\n"
    )
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    ssh.chmod(0o755)
    command = [str(shutil.which("sshd")), "-D", "-e", "-f", str(folder / "sshd_config")]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            assert until(lambda: b"listening" in (folder / "log").read_bytes()), (folder / "log").read_text()
            yield f"ssh://{getpass.getuser()}@127.0.0.1:{port}", f"{ssh.parent}:{os.environ['PATH']}"
        finally:
            server.terminate()


FAKE_QMD = """\
#!/bin/sh
# The real qmd, unless a file beside this script tells it to misbehave: <command> holds what to do instead.
here={here}
command=
for word; do
  case $word in search|update|embed|query|vsearch) command=$word; break;; esac
done
echo "$command" >> "$here/calls"
if [ -f "$here/$command" ]; then . "$here/$command"; fi
exec {real} "$@"
"""


class FakeQmd:
    """Runs the real qmd until it is told to misbehave; counts the calls."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.path = folder / "qmd"
        real = Config.load({"GIT_REMOTE_URL": "/nowhere"}).launcher
        self.path.write_text(FAKE_QMD.format(here=shlex.quote(str(folder)), real=shlex.join(real)))
        self.path.chmod(0o755)
        (folder / "package.json").write_text(json.dumps({"version": "2.8.3"}))

    def does(self, command: str, script: str) -> None:
        """From now on `command` runs a piece of shell instead; if that does not exit, the real qmd follows."""
        (self._folder / command).write_text(script + "\n")

    def behaves(self) -> None:
        for command in ("search", "update"):
            (self._folder / command).unlink(missing_ok=True)

    def calls(self, command: str) -> int:
        try:
            return (self._folder / "calls").read_text().split().count(command)
        except FileNotFoundError:
            return 0


@contextmanager
def served(environ: Mapping[str, str], folder: Path, *, workers: int = 2, measured: bool = True) -> Iterator[Server]:
    """A server for as long as this lasts; nothing that it started is left afterwards."""
    server = Server(environ, folder, workers=workers, measured=measured)
    try:
        yield server
    finally:
        server.stop()
        assert until(lambda: not processes_with(environ["MEMGW_DATA_DIR"])), "processes are left"
