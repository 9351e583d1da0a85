"""The contract of DESIGN.md §3 over real HTTP: strict requests, one shape of failure, no secret in it."""

import http.server
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from memgw import files
from tests.actors import FakeQmd, Server, Upstream, children, served, settings_in, until

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests that need no other; its remote has one branch."""
    folder = tmp_path_factory.mktemp("http")
    upstream = Upstream(folder / "upstream.git")
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    with served(settings_in(folder, upstream), folder, workers=1) as server:
        assert server.query("alpha")["ok"]
        yield server


@dataclass
class Faulty:
    """A server whose qmd can be told to misbehave."""

    server: Server
    upstream: Upstream
    fake_qmd: FakeQmd

    def started(self) -> list[int]:
        """What the workers have started and is still there."""
        return [pid for worker in self.server.workers() for pid in children(worker)]


@pytest.fixture(scope="module")
def shared_faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty")
    upstream, fake_qmd = Upstream(folder / "upstream.git"), FakeQmd(folder / "fake")
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    environ = {
        **os.environ,
        "GIT_REMOTE_URL": upstream.url,
        "MEMGW_DATA_DIR": str(folder / "data"),
        "MEMGW_QMD": str(fake_qmd.path),
        "HOME": str(folder),
        "NODE_COMPILE_CACHE": str(folder / "node"),
        "QMD_TIMEOUT_SECONDS": "5",
    }
    with served(environ, folder, workers=1) as server:
        yield Faulty(server, upstream, fake_qmd)


@pytest.fixture
def faulty(shared_faulty: Faulty) -> Iterator[Faulty]:
    yield shared_faulty
    shared_faulty.fake_qmd.behaves()


def canonical(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, str]:
    """Status and code of a failure, which has exactly the shape that all failures have."""
    status, headers, raw = answer
    assert headers["content-type"] == "application/problem+json", (status, headers, raw)
    body = json.loads(raw)
    assert set(body) - {"errors"} == {"ok", "status", "code", "title", "detail", "request_id"}
    assert body["ok"] is False
    assert body["status"] == status
    assert body["request_id"] == headers["x-request-id"]
    assert body["detail"]
    for secret in ("Traceback", "/tmp", "python", "argv", "--index", "site-packages"):
        assert secret not in raw.decode(), raw
    if status == 422:
        assert body["errors"]
        assert all(isinstance(text, str) for texts in body["errors"].values() for text in texts)
    return status, body["code"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nul", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b'{"query":"a"} x', b'{"query":"a","query":"b"}',
     b'{"limit":NaN}',
     b"[" * 30_000, b'{"limit":' + b"9" * 5000 + b"}", b"{'query':'a'}"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/query", "/sync"])
def test_what_is_not_json_is_400(shared: Server, path: str, body: bytes) -> None:
    assert canonical(shared.request("POST", path, body, JSON)) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ([], "body"),
        ("query", "body"),
        ({}, "query"),
        ({"query": "a", "unknown": 1}, "unknown"),
        ({"query": "a", "Query": "b"}, "Query"),
        ({"query": ""}, "query"),
        ({"query": " \t\n\u3000"}, "query"),
        ({"query": "a\0b"}, "query"),
        ({"query": "a\ud800"}, "query"),
        ({"query": "a" * 1025}, "query"),
        ({"query": None}, "query"),
        ({"query": 5}, "query"),
        ({"query": ["a"]}, "query"),
        ({"query": "a", "limit": "5"}, "limit"),
        ({"query": "a", "limit": 0}, "limit"),
        ({"query": "a", "limit": 51}, "limit"),
        ({"query": "a", "limit": 5.0}, "limit"),
        ({"query": "a", "limit": True}, "limit"),
        ({"query": "a", "limit": 10**400}, "limit"),
        ({"query": "a", "min_score": "0.5"}, "min_score"),
        ({"query": "a", "min_score": -0.1}, "min_score"),
        ({"query": "a", "min_score": 1.1}, "min_score"),
        ({"query": "a", "min_score": 10**400}, "min_score"),
        ({"query": "a", "min_score": False}, "min_score"),
        ({"query": "a", "require_latest": "yes"}, "require_latest"),
        ({"query": "a", "require_latest": 1}, "require_latest"),
        ({"query": "a", "full": "true"}, "full"),
        ({"query": "a", "debug": None}, "debug"),
        ({"query": "a", "query_type": "bm25"}, "query_type"),
        ({"query": "a", "query_type": 1}, "query_type"),
        ({"query": "a", "branch": 1}, "branch"),
        ({"query": "a", "branch": None}, "branch"),
        ({"query": "a", "memory_profile": {}}, "memory_profile"),
    ],
)
def test_what_is_not_exactly_right_is_422_and_names_the_field(shared: Server, body: Any, field: str) -> None:
    answer = shared.request("POST", "/query", json.dumps(body).encode(), JSON)
    assert canonical(answer) == (422, "validation_failed")
    assert list(json.loads(answer[2])["errors"]) == [field]


def test_sync_takes_a_selection_and_no_question(shared: Server) -> None:
    assert canonical(shared.request("POST", "/sync", b'{"query":"a"}', JSON)) == (422, "validation_failed")
    assert shared.post("/sync", {})[0] == 200


def test_several_mistakes_are_told_at_once(shared: Server) -> None:
    status, answer = shared.post("/query", {"limit": "5", "full": 1, "min_score": 2, "more": 1})
    assert (status, sorted(answer["errors"])) == (422, ["full", "limit", "min_score", "more", "query"])


@pytest.mark.parametrize(
    "branch",
    ["-x", "--upload-pack=touch y", "a..b", "x.lock", "@{-1}", "b" * 300, "", "a b", "a~1", "a^", "a:b", "/a", "a/",
     "a//b",
     ".a", "a/.b", "a.", "a\\b", "a\0", "a\x7f", "a\n", "*", "\ud800"],
)  # fmt: skip
def test_a_name_that_can_not_be_a_branch_is_422_and_starts_nothing(
    environ: dict[str, str], tmp_path: Path, shared: Server, branch: str
) -> None:
    answer = shared.request("POST", "/query", json.dumps({"query": "a", "branch": branch}).encode(), JSON)
    assert canonical(answer) == (422, "invalid_branch")
    assert list(json.loads(answer[2])["errors"]) == ["branch"]
    lines = [json.loads(line) for line in shared.out.read_text().splitlines()]
    mine = [line for line in lines if line["request_id"] == answer[1]["x-request-id"]]
    assert len(mine) == 1
    assert "asked_ms" not in mine[0]


@pytest.mark.parametrize(
    "profile", ["", "Stable", "monthly", "monthly-2026-13", "monthly-2026-3", "task-", "task-a..b", "x"]
)
def test_an_unknown_profile_is_422(shared: Server, profile: str) -> None:
    for body in (
        {"query": "a", "memory_profile": profile},
        {"query": "a", "memory_profile": profile, "branch": "main"},
    ):
        answer = shared.request("POST", "/query", json.dumps(body).encode(), JSON)
        assert canonical(answer) == (422, "invalid_profile")


def test_an_absent_branch_is_404(shared: Server) -> None:
    for branch in ("gone", "+main", "$(id)", "%2e", "记忆", "main/x"):
        answer = shared.request("POST", "/query", json.dumps({"query": "a", "branch": branch}).encode(), JSON)
        assert canonical(answer) == (404, "branch_not_found"), branch


@pytest.mark.parametrize("path", ["/", "/nope", "/query/", "/static/x", "/query/../etc", "/%00"])
def test_an_unknown_path_is_404(shared: Server, path: str) -> None:
    assert canonical(shared.request("GET", path)) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/query", "POST"), ("GET", "/sync", "POST"), ("PUT", "/query", "POST"), ("DELETE", "/status", "GET"),
     ("POST", "/health", "GET"), ("PATCH", "/openapi.json", "GET")],
)  # fmt: skip
def test_a_wrong_method_is_405_and_names_the_right_one(shared: Server, method: str, path: str, allowed: str) -> None:
    answer = shared.request(method, path)
    assert canonical(answer) == (405, "method_not_allowed")
    assert allowed in answer[1]["allow"]


@pytest.mark.parametrize("size", [70_000, 1_000_000, 3_000_000])
def test_a_body_too_large_is_413(shared: Server, size: int) -> None:
    body = b'{"query":"' + b"a" * size + b'"}'
    assert canonical(shared.request("POST", "/query", body, JSON)) == (413, "body_too_large")


def test_a_chunked_body_too_large_is_413_and_a_small_one_is_read(shared: Server) -> None:
    def send(body: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", shared.port), timeout=30) as connection:
            head = "POST /query HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
            connection.sendall(head.encode() + b"Connection: close\r\n\r\n")
            for at in range(0, len(body), 50_000):
                piece = body[at : at + 50_000]
                connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            connection.sendall(b"0\r\n\r\n")
            return b"".join(iter(lambda: connection.recv(65_536), b""))

    assert b"200 OK" in send(b'{"query": "alpha"}').splitlines()[0]
    large = send(b'{"query": "' + b"a" * 200_000 + b'"}')
    assert b"413" in large.splitlines()[0]
    assert b"body_too_large" in large


@pytest.mark.parametrize(
    "headers",
    [{}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"},
     {"Content-Type": "application/json; charset=latin-1"}, {"Content-Type": "application/json",
     "Content-Encoding": "gzip"}],
)  # fmt: skip
def test_another_media_type_is_415(shared: Server, headers: dict[str, str]) -> None:
    answer = shared.request("POST", "/query", b'{"query":"alpha"}', headers)
    assert canonical(answer) == (415, "unsupported_media_type")


def test_json_with_a_charset_is_json(shared: Server) -> None:
    headers = {"Content-Type": 'Application/JSON; charset="UTF-8"'}
    assert shared.request("POST", "/query", b'{"query":"alpha"}', headers)[0] == 200


def test_the_request_id_comes_back_and_stands_in_the_log_line(shared: Server) -> None:
    _, headers, _ = shared.request("POST", "/query", b'{"query":"alpha"}', {**JSON, "X-Request-ID": "agent-7.x:1"})
    assert headers["x-request-id"] == "agent-7.x:1"
    lines = [json.loads(line) for line in shared.out.read_text().splitlines()]
    line = next(line for line in lines if line["request_id"] == "agent-7.x:1")
    assert (line["method"], line["path"], line["status"], line["branch"]) == ("POST", "/query", 200, "main")
    assert len(line["commit"]) == 40
    assert line["ms"] >= line["asked_ms"] + line["searched_ms"] > 0


@pytest.mark.parametrize("given", ["a b", "x" * 200, "ü", '"', ""])
def test_a_strange_request_id_is_replaced(shared: Server, given: str) -> None:
    _, headers, _ = shared.request("GET", "/health", None, {"X-Request-ID": given.encode().decode("latin-1")})
    assert len(headers["x-request-id"]) == 32
    int(headers["x-request-id"], 16)


def test_stdout_has_one_json_line_for_each_request(shared: Server) -> None:
    before = len(shared.out.read_text().splitlines())
    for path in ("/health", "/nope", "/status", "/openapi.json"):
        shared.request("GET", path)
    lines = shared.out.read_text().splitlines()[before:]
    assert [json.loads(line)["path"] for line in lines] == ["/health", "/nope", "/status", "/openapi.json"]


def test_openapi_names_every_endpoint(shared: Server) -> None:
    status, _, body = shared.request("GET", "/openapi.json")
    document = json.loads(body)
    assert status == 200
    assert sorted(document["paths"]) == [
        "/health",
        "/hooks/push",
        "/metrics",
        "/openapi.json",
        "/query",
        "/ready",
        "/status",
        "/sync",
    ]


def test_health_touches_no_git_and_no_qmd(environ: dict[str, str], tmp_path: Path, fake_qmd: FakeQmd) -> None:
    environ["GIT_REMOTE_URL"] = "/nowhere"
    with served(environ, tmp_path, workers=1) as server:
        assert server.request("GET", "/health")[2] == b'{"ok":true}\n'
        assert [path.name for path in (tmp_path / "data").glob("*")] == ["run"]  # the test's own, for the warm host


# the rows of the error table that need a fault: each with the next request right again


def test_a_remote_that_is_down_is_502_and_nothing_is_lost(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream
) -> None:
    commit = upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    with served(environ, tmp_path, workers=1) as server:
        assert server.query("alpha")["commit_hash"] == commit
        away = upstream.path.rename(upstream.path.with_name("away.git"))
        assert canonical(server.request("POST", "/query", b'{"query":"alpha"}', JSON)) == (502, "remote_unreachable")
        status = json.loads(server.request("GET", "/status")[2])
        assert status["workspaces"][0]["last_error"]["code"] == "remote_unreachable"
        assert status["workspaces"][0]["indexed_commit"] == commit
        away.rename(upstream.path)
        assert server.query("alpha")["commit_hash"] == commit
        assert json.loads(server.request("GET", "/status")[2])["workspaces"][0]["last_error"] is None


def test_a_remote_that_hangs_is_502_within_its_limit(environ: dict[str, str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environ |= {
            "GIT_REMOTE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/x.git",
            "MEMGW_REMOTE_TIMEOUT_SECONDS": "1",
        }
        with served(environ, tmp_path, workers=1) as server:
            assert canonical(server.request("POST", "/query", b'{"query":"a"}', JSON)) == (502, "remote_unreachable")
            assert until(lambda: not [pid for worker in server.workers() for pid in children(worker)], 1)


def test_a_remote_that_refuses_our_password_is_502_and_the_password_is_nowhere(
    environ: dict[str, str], tmp_path: Path
) -> None:
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="x"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as forge:
        threading.Thread(target=forge.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{forge.server_address[1]}"
        environ["GIT_REMOTE_URL"] = f"http://robot:hunter%2B2secret@{address}/x.git"
        with served(environ, tmp_path, workers=1) as server:
            answer = server.request("POST", "/query", b'{"query":"a"}', JSON)
            assert canonical(answer) == (502, "remote_auth_failed")
            status = server.request("GET", "/status")
            assert json.loads(status[2])["mirror"]["remote"] == f"http://***@{address}/x.git"
            seen = answer[2] + status[2] + server.out.read_bytes() + server.err.read_bytes()
            assert b"hunter" not in seen
            assert b"robot" not in seen
        forge.shutdown()


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 1", (502, "engine_failed")),
        ("kill -9 $$", (502, "engine_failed")),
        ("echo 'Warning: something'; echo '[]'; exit 0", (502, "engine_bad_output")),
        ("echo '{}'; exit 0", (502, "engine_bad_output")),
        ("exit 0", (502, "engine_bad_output")),
        ("yes; exit 0", (502, "engine_bad_output")),
        ("sleep 1000 & sleep 1000", (504, "deadline_exceeded")),
        ("trap '' TERM INT; while :; do sleep 1000; done", (504, "deadline_exceeded")),
    ],
)
def test_a_search_that_misbehaves_is_an_error_and_leaves_nothing_behind(
    faulty: Faulty, script: str, expected: tuple[int, str]
) -> None:
    server, fake_qmd = faulty.server, faulty.fake_qmd
    assert server.query("alpha")["results"]
    updates = fake_qmd.calls("update")
    fake_qmd.does("search", script)
    assert canonical(server.request("POST", "/query", b'{"query":"alpha"}', JSON)) == expected
    assert until(lambda: not faulty.started(), 1)
    fake_qmd.behaves()
    assert server.query("alpha")["results"]
    assert fake_qmd.calls("update") == updates  # the index was whole: no reason to make it again


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 1", (502, "engine_failed")),
        ("echo Indexed everything; exit 0", (502, "engine_failed")),
        ("echo 'SqliteError: database or disk is full' >&2; exit 1", (507, "storage_full")),
        ("sleep 1000", (504, "deadline_exceeded")),
    ],
)
def test_an_update_that_misbehaves_is_an_error_and_the_next_answer_is_right(
    faulty: Faulty, script: str, expected: tuple[int, str]
) -> None:
    server, fake_qmd = faulty.server, faulty.fake_qmd
    assert server.query("alpha")["results"]
    commit = faulty.upstream.commit("main", {"a.md": f"# A\n\nalpha {expected} {script}\n"})
    fake_qmd.does("update", script)
    assert canonical(server.request("POST", "/query", b'{"query":"alpha"}', JSON)) == expected
    assert until(lambda: not faulty.started(), 1)
    fake_qmd.behaves()
    answer = server.query("alpha")
    assert (answer["commit_hash"], len(answer["results"])) == (commit, 1)


def test_a_missing_qmd_is_502_and_the_rest_works(environ: dict[str, str], tmp_path: Path, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n"})
    environ["MEMGW_QMD"] = str(tmp_path / "nothing" / "qmd.js")
    with served(environ, tmp_path, workers=1) as server:
        assert canonical(server.request("POST", "/query", b'{"query":"a"}', JSON)) == (502, "engine_failed")
        assert json.loads(server.request("GET", "/status")[2])["versions"]["qmd"] is None


def test_a_branch_that_is_being_worked_on_for_too_long_is_503_with_retry_after(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream, fake_qmd: FakeQmd
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    upstream.commit("other", {"a.md": "# A\n\nalpha\n"})
    go_on = tmp_path / "go_on"
    fake_qmd.does("update", f'case "$*" in *ws-main*) while [ ! -f {go_on} ]; do sleep 0.05; done;; esac')
    environ["MEMGW_LOCK_TIMEOUT_SECONDS"] = "1"
    with served(environ, tmp_path, workers=1) as server:
        slow: list[Any] = []
        thread = threading.Thread(target=lambda: slow.append(server.post("/query", {"query": "alpha"})))
        thread.start()
        assert until(lambda: fake_qmd.calls("update"))
        answer = server.request("POST", "/query", b'{"query":"alpha"}', JSON)
        assert canonical(answer) == (503, "workspace_busy")
        assert int(answer[1]["retry-after"]) > 0
        assert server.query("alpha", branch="other")["results"]  # other workspaces go on
        assert json.loads(server.request("GET", "/status", timeout=2)[2])["ok"]
        assert server.request("GET", "/health", timeout=1)[0] == 200
        go_on.touch()
        thread.join()
        assert slow[0][0] == 200
        assert server.query("alpha")["results"]


def test_an_unforeseen_error_is_500_and_logged_once_with_its_request_id(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream, data: Path
) -> None:
    upstream.commit("main", {"a.md": "# A\n"})
    with served(environ, tmp_path, workers=1) as server:
        files.remove(data)
        data.write_text("a file where the data directory was")
        answer = server.request("POST", "/query", b'{"query":"a"}', JSON)
        assert canonical(answer) == (500, "internal_error")
        events = [json.loads(line) for line in server.err.read_text().splitlines() if line.startswith("{")]
        mine = [event for event in events if event.get("request_id") == answer[1]["x-request-id"]]
        assert len(mine) == 1
        assert "Traceback" in mine[0]["trace"]
        data.unlink()
        assert server.query("a")["ok"]
