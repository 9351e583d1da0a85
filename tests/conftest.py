"""Fixtures that make accidents impossible: no setting of the user's, no fixed port, no process left over."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient

from memgw import gateway
from memgw.app import create_app
from memgw.config import ROOT, Config
from memgw.remote import Remote
from tests.actors import (
    MINILM,
    FakeQmd,
    HostProxy,
    Server,
    Upstream,
    WarmHost,
    host_proxy,
    served,
    warm_host_of_its_own,
)


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """HOME and what git reads are of this test alone. What Node compiled may be used again, to save time."""
    home = tmp_path / "home"
    home.mkdir()
    for name in list(os.environ):
        if name.startswith(("GIT_", "QMD_", "MEMGW_", "XDG_", "CUDA_")) or name in ("CI", "INDEX_PATH", "RUNTIME"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("NODE_COMPILE_CACHE", str(tmp_path_factory.getbasetemp() / "node"))


@pytest.fixture
def nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """No search begins before the remote has answered, however slow that is here: then searches can be counted."""
    monkeypatch.setattr(gateway, "WORTH_A_THREAD_MS", inf)


@pytest.fixture
def upstream(tmp_path: Path) -> Upstream:
    return Upstream(tmp_path / "upstream.git")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture(scope="session")
def warm_host() -> Iterator[WarmHost]:
    """One for all tests of this process."""
    with TemporaryDirectory(prefix="memgw") as folder:  # not pytest's own: a socket's address is short
        host = WarmHost(os.environ, Path(folder))
        yield host
        host.stop()


@pytest.fixture(scope="session")
def minilm() -> Path:
    """A small embedding model, made once for this checkout: whoever comes first makes it, the others wait."""
    subprocess.run([sys.executable, "bin/minilm.py", str(MINILM)], cwd=ROOT, check=True)
    return MINILM


@pytest.fixture
def own_host() -> Iterator[WarmHost]:
    """One for this test alone, to be treated badly."""
    with warm_host_of_its_own(os.environ) as host:
        yield host


@pytest.fixture
def proxy(warm_host: WarmHost) -> Iterator[HostProxy]:
    """In front of the host that all tests share; `serve` puts it before a data directory."""
    with host_proxy(warm_host) as proxy:
        yield proxy


@pytest.fixture
def environ(upstream: Upstream, data: Path, warm_host: WarmHost) -> dict[str, str]:
    """The environment of a gateway over `upstream`, with a warm host unless TEST_ENGINE=cli."""
    engine = os.environ.get("TEST_ENGINE", "auto")
    if engine != "cli":
        warm_host.serve(data)
    return {**os.environ, "GIT_REMOTE_URL": upstream.url, "MEMGW_DATA_DIR": str(data), "QMD_ENGINE": engine}


@pytest.fixture
def fake_qmd(tmp_path: Path, environ: dict[str, str]) -> FakeQmd:
    """Takes the place of qmd; behaves until told otherwise."""
    fake = FakeQmd(tmp_path / "fake")
    environ["QMD_ENGINE"] = "cli"
    environ["MEMGW_QMD"] = str(fake.path)
    return fake


@pytest.fixture
def connect(data: Path) -> Callable[..., Remote]:
    """Makes the remote behind a URL or a path; more words are variables of its environment."""

    def connected(url: str | Path, timeout: float = 30, **environ: str) -> Remote:
        return Remote(data, str(url), {**os.environ, **environ}, timeout=timeout)

    return connected


class Client:
    """The application without a server in front: the same code, in this process."""

    def __init__(self, app: Flask) -> None:
        self.app = app
        self.http: FlaskClient = app.test_client()

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        answer = self.http.post(path, json=body)
        return answer.status_code, answer.get_json()

    def query(self, text: str, **more: Any) -> dict[str, Any]:
        """The answer to a query that has to succeed."""
        status, answer = self.post("/query", {"query": text, **more})
        assert status == 200, answer
        return answer

    def paths(self, text: str, **more: Any) -> list[str]:
        """The paths that a query finds, in order."""
        return [result["path"] for result in self.query(text, **more)["results"]]

    def sync(self, **more: Any) -> dict[str, Any]:
        status, answer = self.post("/sync", more)
        assert status == 200, answer
        return answer

    def problem(self, path: str, body: Any) -> tuple[int, str]:
        """Status and code of a request that has to fail."""
        status, answer = self.post(path, body)
        assert answer["ok"] is False, answer
        return status, answer["code"]


@pytest.fixture
def client(environ: dict[str, str]) -> Client:
    return Client(create_app(Config.load(environ), environ))


@pytest.fixture
def server(environ: dict[str, str], tmp_path: Path) -> Iterator[Server]:
    with served(environ, tmp_path, measured=False) as running:
        yield running


@pytest.fixture(scope="module")
def host(minilm: Path) -> Iterator[WarmHost]:
    """A warm host with the small model; for tests that may kill no other's."""
    with TemporaryDirectory(prefix="memgw") as folder:
        host = WarmHost({**os.environ, "QMD_EMBED_MODEL_URI": str(minilm)}, Path(folder))
        yield host
        host.stop()
