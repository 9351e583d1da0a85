"""The local stack as an operator starts and stops it: real supervisor, gunicorn, qmd's MCP server."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memgw import files
from memgw.config import ROOT
from tests.actors import FakeQmd, Upstream, children, processes_with, until


class Stack:
    """`bin/stack.py` with ports and data of its own."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.port, self.mcp_port = free_port(), free_port()
        self.data = Path(environ["MEMGW_DATA_DIR"])
        self.environ = {
            **environ,
            "RUNTIME": "local",
            "MEMGW_BIND": f"127.0.0.1:{self.port}",
            "MEMGW_MCP_PORT": str(self.mcp_port),
        }

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=self.environ, capture_output=True, text=True, timeout=120
        )

    def do(self, command: str) -> "subprocess.CompletedProcess[str]":
        return self.run("bin/stack.py", command)

    def query(self, text: str, port: int | None = None) -> Any:
        question: dict[str, object] = {"query": text}
        if port:  # qmd's own
            question = {"searches": [{"type": "lex", "query": text}], "rerank": False}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port or self.port}/query",
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def pid(self, name: str) -> int:
        return int((self.data / "run" / f"{name}.pid").read_text())

    def alone(self) -> bool:
        return not processes_with(str(self.data))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def stack(environ: dict[str, str], fake_qmd: FakeQmd, upstream: Upstream) -> Iterator[Stack]:
    upstream.commit("main", {"deploy.md": "# Deploy\n\nWe deploy on Tuesdays.\n"})
    stack = Stack(environ)
    yield stack
    stack.do("down")
    assert until(stack.alone), "processes are left"


def test_up_ends_with_a_real_answer_and_down_and_up_make_no_second_index(
    stack: Stack, fake_qmd: FakeQmd, upstream: Upstream
) -> None:
    started = stack.do("up")
    assert started.returncode == 0, started.stderr
    assert str(upstream.tip("main")) in started.stdout
    assert "We deploy on Tuesdays." in started.stdout
    assert "curl -s http://127.0.0.1:" in started.stdout
    again = stack.do("up")
    assert (again.returncode, "is running already" in again.stdout) == (0, True)

    assert until(lambda: port_answers(stack.mcp_port))
    assert stack.query("tuesdays", stack.mcp_port)["results"][0]["file"].endswith("deploy.md")
    assert len((stack.data / "logs" / "requests.log").read_text().splitlines()) >= 2
    assert "GET /health" in (stack.data / "logs" / "gunicorn.log").read_text()

    stopped = stack.do("down")
    assert (stopped.returncode, stopped.stdout) == (0, "memgw: stopped\n")
    assert stack.alone()
    assert fake_qmd.calls("update") == 1
    assert stack.do("up").returncode == 0
    assert fake_qmd.calls("update") == 1
    upstream.commit("main", {"deploy.md": "# Deploy\n\nWe deploy on Fridays.\n"})
    assert stack.query("fridays")["commit_hash"] == upstream.tip("main")
    assert until(lambda: stack.query("fridays", stack.mcp_port)["results"])


def test_what_dies_is_started_again_and_mcp_follows_a_new_index(stack: Stack, data: Path) -> None:
    assert stack.do("up").returncode == 0
    assert until(lambda: port_answers(stack.mcp_port))
    before = stack.pid("gateway")
    os.kill(before, signal.SIGKILL)
    for child in children(stack.pid("supervisord")):
        for qmd in children(child):
            if b"mcp" in Path(f"/proc/{qmd}/cmdline").read_bytes():
                os.kill(qmd, signal.SIGKILL)
    assert until(lambda: stack.pid("gateway") != before and port_answers(stack.port), 20)
    assert until(lambda: port_answers(stack.mcp_port), 20)
    for index in (data / "qmd-cache" / "ws-main").glob("*.sqlite"):
        index.unlink()
    assert until(lambda: answers_right(stack), 20)
    assert until(lambda: mcp_answers_right(stack), 20)


def test_the_warm_host_of_the_stack_is_started_again_and_mcp_serves_its_index(
    environ: dict[str, str], data: Path, upstream: Upstream
) -> None:
    upstream.commit("main", {"deploy.md": "# Deploy\n\nWe deploy on Tuesdays.\n"})
    files.remove(data / "run")  # the tests' own host
    stack = Stack(environ)
    try:
        assert stack.do("up").returncode == 0
        assert until(lambda: mcp_answers_right(stack), 20)
        (host,) = processes_with(str(data / "run" / "qmd-host.sock"))
        os.kill(host, signal.SIGKILL)
        assert answers_right(stack)
        assert until(lambda: set(processes_with(str(data / "run" / "qmd-host.sock"))) - {host}, 20)
        upstream.commit("main", {"deploy.md": "# Deploy\n\nWe deploy on Tuesdays, too.\n"})
        assert until(lambda: answers_right(stack), 20)
        events = (data / "logs" / "gunicorn.log").read_text()
        assert "healing" not in events
        for name in ("qmd-mcp", "background", "supervisord"):
            assert "Traceback" not in (data / "logs" / f"{name}.log").read_text()
    finally:
        stack.do("down")
    assert until(stack.alone), "processes are left"


def port_answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


def answers_right(stack: Stack) -> bool:
    try:
        return len(stack.query("tuesdays")["results"]) == 1
    except OSError:
        return False


def mcp_answers_right(stack: Stack) -> bool:
    try:
        return len(stack.query("tuesdays", stack.mcp_port)["results"]) == 1
    except OSError:
        return False


def test_the_smoke_test_passes_against_a_stack_of_its_own(stack: Stack) -> None:
    smoke = stack.run("bin/smoke.py")
    assert smoke.returncode == 0, smoke.stdout + smoke.stderr
    lines = [line for line in smoke.stdout.splitlines() if ": ok: " in line]
    assert [line.split(".")[0] for line in lines] == ["1", "2", "3", "4", "5", "6", "7", "8"]
    assert "8 of 8" in smoke.stdout
    assert until(stack.alone)


def test_the_smoke_test_fails_when_a_step_fails(stack: Stack, fake_qmd: FakeQmd, upstream: Upstream) -> None:
    fake_qmd.does("search", "echo '[]'; exit 0")
    smoke = stack.run("bin/smoke.py")
    assert smoke.returncode == 1
    assert "3. basic query: FAILED: task/smoke-" in smoke.stdout
    assert (
        subprocess.run(
            ["git", f"--git-dir={upstream.path}", "for-each-ref", "--format=%(refname)"],
            capture_output=True,
            check=True,
        ).stdout
        == b"refs/heads/main\n"
    )


def test_serve_stays_in_the_foreground_and_term_ends_every_process(stack: Stack) -> None:
    process = subprocess.Popen([sys.executable, "bin/stack.py", "serve"], cwd=ROOT, env=stack.environ)
    assert until(lambda: port_answers(stack.port), 30)
    assert answers_right(stack)
    assert "make down first" in stack.do("serve").stderr
    process.terminate()
    assert process.wait(30) == 0
    assert stack.alone()


def test_down_also_ends_what_a_killed_supervisor_left(stack: Stack) -> None:
    assert stack.do("up").returncode == 0
    os.kill(stack.pid("supervisord"), signal.SIGKILL)
    assert stack.do("down").returncode == 0
    assert until(stack.alone)


def test_a_taken_port_and_wrong_settings_are_told_in_a_line_each(stack: Stack) -> None:
    with socket.create_server(("127.0.0.1", stack.port)):
        taken = stack.do("up")
    assert (taken.returncode, taken.stderr) == (
        1,
        f"memgw: MEMGW_BIND: can't listen on 127.0.0.1:{stack.port}: Address already in use\n",
    )
    with socket.create_server(("127.0.0.1", stack.mcp_port)):  # of this one, only MCP has need
        started = stack.do("up")
        assert (started.returncode, answers_right(stack)) == (0, True)
        assert "going on without qmd's MCP server" in started.stderr
        stack.do("down")
    stack.environ |= {"QMD_TIMEOUT_SECONDS": "soon", "MEMGW_BIND": "8787"}
    wrong = stack.do("up")
    assert wrong.returncode == 2
    assert [line.split(":")[1] for line in wrong.stderr.splitlines()] == [" QMD_TIMEOUT_SECONDS", " MEMGW_BIND"]
    stack.environ |= {"QMD_TIMEOUT_SECONDS": "", "MEMGW_BIND": f"127.0.0.1:{stack.port}"}


def test_gunicorn_stops_with_a_line_for_each_wrong_setting(environ: dict[str, str]) -> None:
    environ |= {"GIT_REMOTE_URL": "ext::sh -c touch% x", "MEMGW_WORKERS": "0"}
    command = [sys.executable, "-m", "gunicorn", "-c", "python:memgw.gunicorn_conf", "memgw.wsgi:app"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0
    assert done.stderr.splitlines() == [
        "memgw: GIT_REMOTE_URL: must be a URL or a path",
        "memgw: MEMGW_WORKERS: must be a whole number from 1 to 64",
    ]
