"""Whether `/ready` says no for each thing that is really broken, says why, and is never late or used as a hammer."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from memgw import files
from memgw.app import SPARE_THREADS, create_app
from memgw.config import Config
from memgw.readiness import SHARED_SECONDS
from tests.actors import FakeQmd, Upstream, git_http, served, until
from tests.conftest import Client

CHECKS = {"remote", "engine", "data", "disk"}
READY = {"ok": True, "checks": {name: {"ok": True} for name in CHECKS}}


@pytest.fixture
def readiness(environ: dict[str, str], upstream: Upstream) -> Callable[[], dict[str, str]]:
    """Asks a gateway of its own, so that nothing is remembered, and returns why it is not ready, by check."""
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})

    def ask() -> dict[str, str]:
        return reasons(Client(create_app(Config.load(environ), environ)))

    return ask


def reasons(client: Client) -> dict[str, str]:
    answer = client.http.get("/ready")
    body = answer.get_json()
    assert answer.content_type == "application/json"
    assert set(body["checks"]) == CHECKS
    found = {name: check["detail"] for name, check in body["checks"].items() if not check["ok"]}
    assert all("detail" not in check for check in body["checks"].values() if check["ok"])
    assert (body["ok"], answer.status_code) == ((False, 503) if found else (True, 200))
    for secret in ("/tmp", "Traceback", "fatal", "git", "token", "secret"):
        assert secret not in answer.text
    return found


def test_a_gateway_that_can_answer_is_ready(client: Client, upstream: Upstream) -> None:
    answer = client.http.get("/ready")
    assert (answer.status_code, answer.get_json()) == (200, READY)  # an empty remote is one that answers


def test_a_remote_that_is_away_is_told_and_so_is_its_return(
    readiness: Callable[[], dict[str, str]], client: Client, upstream: Upstream
) -> None:
    assert readiness() == {}
    away = upstream.path.rename(upstream.path.with_name("away.git"))
    assert readiness() == {"remote": "the remote could not be reached, or not understood"}
    assert reasons(client) == {"remote": "the remote could not be reached, or not understood"}
    away.rename(upstream.path)
    assert until(lambda: reasons(client) == {}, 3 * SHARED_SECONDS)


def test_a_remote_that_refuses_us_is_told_without_the_token(environ: dict[str, str], upstream: Upstream) -> None:
    with git_http(upstream) as remote:
        remote.door = lambda headers: (401, {"WWW-Authenticate": "Basic"})
        environ["GIT_REMOTE_URL"] = remote.url.replace("http://", "http://token:secret@")
        found = reasons(Client(create_app(Config.load(environ), environ)))
        assert found == {"remote": "the remote refused the gateway's credentials"}


def test_qmd_that_is_missing_or_hangs_is_told(
    readiness: Callable[[], dict[str, str]], fake_qmd: FakeQmd, environ: dict[str, str]
) -> None:
    assert readiness() == {}
    text = fake_qmd.path.read_text()
    fake_qmd.path.unlink()
    assert readiness() == {"engine": "the search engine can't be started"}
    fake_qmd.path.write_text("#!/bin/sh\nexit 3\n")
    fake_qmd.path.chmod(0o755)
    assert readiness() == {"engine": "the search engine failed"}
    fake_qmd.path.write_text("#!/bin/sh\nsleep 60\n")
    assert readiness() == {"engine": "no answer within 2 s"}
    fake_qmd.path.write_text(text)
    assert readiness() == {}


def test_the_command_line_makes_up_for_a_host_that_is_away_unless_the_host_alone_may_answer(
    readiness: Callable[[], dict[str, str]], environ: dict[str, str], data: Path
) -> None:
    environ["QMD_ENGINE"] = "host"
    if os.environ.get("TEST_ENGINE") != "cli":
        assert readiness() == {}
    (data / "run" / "qmd-host.sock").unlink(missing_ok=True)
    assert readiness() == {"engine": "the warm host is not there"}
    environ["QMD_ENGINE"] = "auto"
    assert readiness() == {}
    environ["MEMGW_QMD"] = str(data / "gone" / "qmd")
    assert readiness()["engine"]


def test_a_data_directory_that_can_not_be_written_to_is_told(
    readiness: Callable[[], dict[str, str]], client: Client, data: Path
) -> None:
    assert reasons(client) == {}
    files.remove(data)
    data.write_text("no folder")
    time.sleep(SHARED_SECONDS)
    assert reasons(client)["data"] == "can't be written to: File exists"
    data.unlink()
    assert until(lambda: "data" not in reasons(client), 3 * SHARED_SECONDS)


def test_a_data_directory_that_is_read_only_is_told(environ: dict[str, str], client: Client, data: Path) -> None:
    with read_only(data):
        assert reasons(client)["data"] == "can't be written to: Read-only file system"


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    if subprocess.run(["mount", "--bind", str(folder), str(folder)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_too_little_space_is_told(readiness: Callable[[], dict[str, str]], environ: dict[str, str]) -> None:
    environ["MEMGW_DISK_FLOOR_MB"] = "100000000"
    found = readiness()
    assert set(found) == {"disk"}
    assert found["disk"].endswith(" MB are free, of the 100000000 that are wanted")
    environ["MEMGW_DISK_FLOOR_MB"] = "0"
    assert readiness() == {}


@contextmanager
def silence() -> Iterator[tuple[str, Callable[[], int]]]:
    """The URL of a remote that takes connections and says nothing, and how many it has."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as server:
        server.settimeout(0.05)
        taken: list[socket.socket] = []

        def count() -> int:
            try:
                while True:
                    taken.append(server.accept()[0])
            except TimeoutError:
                return len(taken)

        yield f"http://127.0.0.1:{server.getsockname()[1]}/memory.git", count
        for connection in taken:
            connection.close()


def test_a_remote_that_hangs_is_told_in_time_and_asked_once_for_all_who_want_to_know(
    environ: dict[str, str], tmp_path: Path
) -> None:
    with silence() as (url, connections):
        environ["GIT_REMOTE_URL"] = url
        with served(environ, tmp_path, workers=1, measured=False) as server:

            def look() -> tuple[float, int, dict[str, Any]]:
                begin = time.monotonic()
                status, _, body = server.request("GET", "/ready")
                return time.monotonic() - begin, status, json.loads(body)

            with ThreadPoolExecutor(20) as pool:
                looks = [pool.submit(look) for _ in range(20)]
                time.sleep(0.3)
                begin = time.monotonic()
                assert server.request("GET", "/health", timeout=2)[0] == 200
                assert time.monotonic() - begin < 1
                answers = [future.result() for future in looks]
            assert max(seconds for seconds, _, _ in answers) < 5  # 2 s, and what a busy machine adds
            assert {status for _, status, _ in answers} == {503}
            assert len({json.dumps(body["checks"]["remote"]) for _, _, body in answers}) == 1
            assert answers[0][2]["checks"]["engine"] == {"ok": True}
            assert 1 <= connections() <= 2, "one try of ours, one of git's"


def test_asking_often_asks_the_remote_no_more_often(environ: dict[str, str], upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    with git_http(upstream) as remote:
        environ["GIT_REMOTE_URL"] = remote.url
        client = Client(create_app(Config.load(environ), environ))
        begin = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: client.app.test_client().get("/ready").status_code, range(100)))
        assert set(found) == {200}
        spent = time.monotonic() - begin
        assert [method for method, _ in remote.seen].count("POST") <= 1 + spent / SHARED_SECONDS


def test_it_answers_while_all_slots_are_taken_and_a_workspace_is_locked(
    environ: dict[str, str], fake_qmd: FakeQmd, tmp_path: Path, upstream: Upstream
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    fake_qmd.does("update", "sleep 4")
    environ["MEMGW_THREADS"] = "8"
    with served(environ, tmp_path, workers=1, measured=False) as server, ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(server.post, "/query", {"query": "alpha"}) for _ in range(8 - SPARE_THREADS)]
        assert until(lambda: fake_qmd.calls("update"))
        status, _, body = server.request("GET", "/ready", timeout=3)
        assert (status, json.loads(body)) == (200, READY)
        assert not [future for future in busy if future.done()]
