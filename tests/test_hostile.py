"""Remotes and commits that are at fault themselves: said as what they are, and no harm to what others use."""

import http.server
import json
import os
import shlex
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memgw.app import create_app
from memgw.config import Config
from memgw.documents import MAX_BYTES
from tests.actors import FakeQmd, Upstream, git_http, served, until
from tests.conftest import Client


def mirror_identity(data: Path) -> str:
    return (data / "git-mirror" / "repo.git" / "memgw-identity").read_text()


def git(upstream: Upstream, *arguments: str, stdin: bytes = b"") -> str:
    command = ["git", f"--git-dir={upstream.path}", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, check=True).stdout.decode().strip()


def commit_of(upstream: Upstream, branch: str, *entries: tuple[str, str, str]) -> str:
    """A commit with exactly these entries (mode, name, object), whether git would make such a tree or not."""
    raw = b"".join(f"{mode} {name}".encode() + b"\0" + bytes.fromhex(oid) for mode, name, oid in entries)
    tree = git(upstream, "hash-object", "-t", "tree", "-w", "--literally", "--stdin", stdin=raw)
    lines = f"tree {tree}\nauthor t <t@example.com> 1 +0000\ncommitter t <t@example.com> 1 +0000\n\nm\n"
    commit = git(upstream, "hash-object", "-t", "commit", "-w", "--literally", "--stdin", stdin=lines.encode())
    (upstream.path / "refs" / "heads" / branch).write_text(f"{commit}\n")
    return commit


def blob(upstream: Upstream, content: bytes) -> str:
    return git(upstream, "hash-object", "-w", "--stdin", stdin=content)


def cut(request: bytes, answer: bytes) -> bytes:
    return answer[: len(answer) // 2] if b"command=fetch" in request else answer


def garbled(request: bytes, answer: bytes) -> bytes:
    at = answer.find(b"PACK")
    return answer[: at + 30] + bytes(20) + answer[at + 50 :] if at >= 0 else answer


def silent(request: bytes, answer: bytes) -> bytes:
    return b"" if b"command=fetch" in request else answer


@pytest.mark.parametrize("spoil", [cut, garbled, silent])
def test_a_fetch_that_breaks_on_its_way_is_the_remotes_fault_and_the_mirror_stays(
    environ: dict[str, str], upstream: Upstream, data: Path, spoil: Callable[[bytes, bytes], bytes]
) -> None:
    with git_http(upstream) as remote:
        environ["GIT_REMOTE_URL"] = remote.url
        client = Client(create_app(Config.load(environ), environ))
        upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
        assert client.paths("alpha") == ["a.md"]
        identity = mirror_identity(data)
        commit = upstream.commit("main", {"a.md": "# A\n\nalpha beta\n"})
        remote.spoil = spoil
        assert client.problem("/query", {"query": "alpha"}) == (502, "remote_unreachable")
        assert mirror_identity(data) == identity
        remote.spoil = lambda request, answer: answer
        assert client.query("beta")["commit_hash"] == commit
        assert mirror_identity(data) == identity


@pytest.mark.parametrize("body", [b"", b"<html>maintenance</html>", b"<html>\nmaintenance\n</html>\n", b"{}"])
def test_a_web_server_that_is_no_git_server_does_not_make_a_branch_absent(environ: dict[str, str], body: bytes) -> None:
    class Web(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        environ["GIT_REMOTE_URL"] = f"http://127.0.0.1:{web.server_address[1]}/x.git"
        client = Client(create_app(Config.load(environ), environ))
        assert client.problem("/query", {"query": "alpha"}) == (502, "remote_unreachable")
        web.shutdown()


def test_an_absent_branch_over_http_is_404(environ: dict[str, str], upstream: Upstream) -> None:
    with git_http(upstream) as remote:
        environ["GIT_REMOTE_URL"] = remote.url
        client = Client(create_app(Config.load(environ), environ))
        upstream.commit("task/x", {"a.md": "# A\n"})  # HEAD of the remote points at main, which is not there
        assert client.problem("/query", {"query": "a"}) == (404, "branch_not_found")
        upstream.commit("main", {"a.md": "# A\n"})
        assert client.problem("/query", {"query": "a", "branch": "gone"}) == (404, "branch_not_found")


@pytest.mark.parametrize("name", ["x" * 260 + ".md", ".git", ".."])
def test_a_commit_that_can_not_be_laid_out_is_said_to_be_one_and_other_branches_keep_their_mirror(
    client: Client, upstream: Upstream, data: Path, name: str
) -> None:
    upstream.commit("good", {"a.md": "# A\n\nalpha\n"})
    assert client.paths("alpha", branch="good") == ["a.md"]
    identity = mirror_identity(data)
    commit_of(upstream, "main", ("100644", name, blob(upstream, b"# X\n")))
    assert client.problem("/query", {"query": "x"}) == (502, "commit_unusable")
    assert mirror_identity(data) == identity
    upstream.commit("good", {"a.md": "# A\n\nbeta\n"})
    assert client.paths("beta", branch="good") == ["a.md"]
    upstream.commit("main", {"b.md": "# B\n\ngamma\n"}, parent=None)
    assert client.paths("gamma") == ["b.md"]


def test_a_link_that_has_the_name_of_a_memory_is_not_followed(client: Client, upstream: Upstream) -> None:
    text, link = blob(upstream, b"# A\n\nalpha\n"), blob(upstream, b"/dev/zero")
    commit_of(upstream, "main", ("100644", "a.md", text), ("120000", "a.md", link))
    assert client.problem("/query", {"query": "alpha"}) == (502, "commit_unusable")
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"}, parent=None)
    assert client.paths("alpha") == ["a.md"]
    commit_of(upstream, "main", ("100644", "a.md", text), ("120000", "a.md", link))  # only the second one is new
    assert client.problem("/query", {"query": "alpha"}) == (502, "commit_unusable")


def test_a_file_larger_than_any_memory_is_left_out_and_said_so(client: Client, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n", "huge.md": b"alpha \n" * (MAX_BYTES // 7 + 1)})
    answer = client.query("alpha")
    assert [hit["path"] for hit in answer["results"]] == ["a.md"]
    assert [note["detail"] for note in answer["degraded"]] == ["1 file of this commit could not be indexed"]


def test_the_users_own_ssh_command_is_used(environ: dict[str, str], tmp_path: Path) -> None:
    ssh, said = tmp_path / "my-ssh", tmp_path / "said"
    ssh.write_text(f'#!/bin/sh\necho "$@" >> {said}\necho "Host key verification failed." >&2\nexit 255\n')
    ssh.chmod(0o755)
    (tmp_path / "home" / ".gitconfig").write_text(f"[core]\n\tsshCommand = {ssh} -i key\n")
    environ["GIT_REMOTE_URL"] = "git@example.com:team/memory.git"
    client = Client(create_app(Config.load(environ), environ))
    assert client.problem("/query", {"query": "a"}) == (502, "remote_auth_failed")
    assert said.read_text().startswith("-i key")
    assert "git@example.com" in said.read_text()


def test_many_waiting_requests_leave_health_and_status_alone(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream, fake_qmd: FakeQmd
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    go_on = tmp_path / "go_on"
    fake_qmd.does("update", f"while [ ! -f {go_on} ]; do sleep 0.05; done")
    environ["MEMGW_THREADS"] = "12"
    with served(environ, tmp_path, workers=1) as server:
        answers: list[tuple[int, dict[str, Any]]] = []
        threads = [
            threading.Thread(target=lambda: answers.append(server.post("/query", {"query": "alpha"})))
            for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        assert until(lambda: len(answers) >= 12)  # eight are at work, the others were told at once
        assert {(status, answer["code"]) for status, answer in answers} == {(503, "workspace_busy")}
        assert server.request("GET", "/health", timeout=1)[0] == 200
        assert json.loads(server.request("GET", "/status", timeout=2)[2])["ok"]
        go_on.touch()
        for thread in threads:
            thread.join()
        assert sorted(status for status, _ in answers) == [200] * 8 + [503] * 12
        assert server.query("alpha")["results"]


def test_an_emptied_index_is_noticed_in_every_mode(environ: dict[str, str], upstream: Upstream, data: Path) -> None:
    environ["QMD_UPDATE_ON_LATEST_QUERY"] = "false"
    client = Client(create_app(Config.load(environ), environ))
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    client.sync()
    (index,) = (data / "qmd-cache" / "ws-main").glob("*.sqlite")
    index.write_bytes(b"")
    assert client.paths("alpha") == ["a.md"]


def test_synced_at_is_true_of_the_commit_after_an_update_that_broke_off(
    environ: dict[str, str], upstream: Upstream, fake_qmd: FakeQmd
) -> None:
    client = Client(create_app(Config.load(environ), environ))
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    first = client.query("alpha")
    second = upstream.commit("main", {"a.md": "# A\n\nbeta\n"})
    fake_qmd.does("update", "exit 1")
    assert client.problem("/query", {"query": "beta"}) == (502, "engine_failed")
    fake_qmd.behaves()
    answer = client.query("beta", require_latest=False)
    assert (answer["commit_hash"], answer["freshness"]) == (second, "unknown")
    assert answer["synced_at"] > first["synced_at"]


def test_a_qmd_that_is_a_script_elsewhere_tells_its_version_itself(
    environ: dict[str, str], upstream: Upstream, tmp_path: Path
) -> None:
    wrapper = tmp_path / "bin" / "qmd"
    wrapper.parent.mkdir()
    wrapper.write_text("#!/bin/sh\nexec " + shlex.join(Config.load(environ).launcher) + ' "$@"\n')
    wrapper.chmod(0o755)
    environ["MEMGW_QMD"] = str(wrapper)
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    client = Client(create_app(Config.load(environ), environ))
    assert client.paths("alpha") == ["a.md"]
    assert json.loads(client.http.get("/status").data)["versions"]["qmd"] == "2.8.3"
    assert os.access(wrapper, os.X_OK)
