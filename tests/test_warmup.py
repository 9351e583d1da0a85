"""bin/warmup.sh: light questions of each branch, a line on each, and an end at once."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

from memgw.config import ROOT
from tests.actors import Server, Upstream, until


class Warmup:
    """A running bin/warmup.sh."""

    def __init__(self, port: int, log: Path, environ: Mapping[str, str]) -> None:
        self._log = log
        own = {"MEMGW_PYTHON": sys.executable, "GIT_REMOTE_URL": "/nowhere", "MEMGW_BIND": f"127.0.0.1:{port}"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                ["bash", "bin/warmup.sh"], cwd=ROOT, env={**os.environ, **own, **environ}, stderr=file
            )

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def asked(self, branch: str) -> int:
        return sum(line["branch"] == branch for line in self.lines())


@contextmanager
def warmup(port: int, log: Path, **environ: str) -> Iterator[Warmup]:
    running = Warmup(port, log, environ)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def test_each_branch_is_asked_again_and_again_and_a_line_tells_how_long_it_took(
    server: Server, upstream: Upstream, tmp_path: Path
) -> None:
    tips = {
        "main": upstream.commit("main", {"a.md": "# A\n\nmemory\n"}),
        "task/A": upstream.commit("task/A", {"b.md": "# B\n\nmemory\n"}),
    }
    with warmup(
        server.port, tmp_path / "log", MEMGW_WARMUP_BRANCHES="main,task/A,gone", MEMGW_WARMUP_SECONDS="1"
    ) as running:
        assert until(lambda: all(running.asked(branch) >= 2 for branch in (*tips, "gone")), 30)
        running.process.terminate()
        assert running.process.wait(5) == 0
    for line in running.lines():
        assert line["event"] == "warmup"
        assert line["ms"] > 0
        if line["branch"] == "gone":
            assert (line["status"], line["code"], line["level"]) == (404, "branch_not_found", "WARNING")
        else:
            assert (line["status"], line["commit"], line["level"]) == (200, tips[line["branch"]], "INFO")


def test_without_a_list_the_default_branch_is_asked(server: Server, upstream: Upstream, tmp_path: Path) -> None:
    upstream.commit("team/memory", {"a.md": "# A\n"})
    with warmup(server.port, tmp_path / "log", DEFAULT_BRANCH="team/memory") as running:
        assert until(lambda: running.asked("team/memory") == 1, 20)
        assert running.lines()[0]["status"] == 200


def test_a_gateway_that_is_away_is_asked_in_its_turn(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with warmup(port, tmp_path / "log", MEMGW_WARMUP_SECONDS="1") as running:
        assert until(lambda: running.asked("main") >= 2, 20)
        assert {line["code"] for line in running.lines()} == {"unreachable"}


def test_term_ends_it_in_the_middle_of_a_question(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with warmup(silent.getsockname()[1], tmp_path / "log") as running:
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(4) == b"POST"
                running.process.send_signal(signal.SIGTERM)
                assert running.process.wait(5) == 0


def test_a_wrong_setting_is_told_in_a_line() -> None:
    environ = {**os.environ, "MEMGW_PYTHON": sys.executable, "GIT_REMOTE_URL": "/n", "MEMGW_WARMUP_SECONDS": "often"}
    done = subprocess.run(["bash", "bin/warmup.sh"], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr == "memgw: MEMGW_WARMUP_SECONDS: must be a whole number from 1 to 86400\n"


def test_pauses_differ_by_a_quarter_and_keep_their_mean() -> None:
    script = "import json, warmup; print(json.dumps([warmup.pause(60) for _ in range(2000)]))"
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'bin'}"}
    pauses = json.loads(subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, env=environ))
    assert 45 <= min(pauses) < 50
    assert 70 < max(pauses) <= 75
    assert abs(mean(pauses) - 60) < 2
