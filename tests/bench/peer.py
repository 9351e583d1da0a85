"""Baseline (c): markdown-vault-mcp, the nearest product, in keyword mode over a clone that it manages itself."""

import hashlib
import hmac
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.actors import until
from tests.bench.stack import Client, free_port, health

REQUIREMENT = "markdown-vault-mcp==5.1.*"
SECRET = "bench"  # noqa: S105  of a server on loopback, for minutes
START_SECONDS = 120


class NoPeer(Exception):
    """Why it can't be measured here."""


class Peer:
    """Its MCP server over streamable HTTP, asked by plain JSON-RPC on one kept connection."""

    def __init__(self, port: int) -> None:
        self._client = Client(port, "/mcp", {"Accept": "application/json, text/event-stream"})
        about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}}
        self._client.post(_message("initialize", about))
        self._client.headers["mcp-session-id"] = self._client.head["mcp-session-id"]
        self._client.post(json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}).encode())

    def search(self, text: str) -> tuple[float, list[str]]:
        """Seconds and paths, from what is here."""
        taken, found = self._call("search", {"query": text, "mode": "keyword", "limit": 10})
        return taken, [hit["path"] for hit in found]

    def ask(self, text: str) -> tuple[float, list[str]]:
        """Looks at the remote, then searches: two calls of tools."""
        synced, said = self._call("git_sync", {"direction": "pull"})
        if not said["pull"]["applied"]:
            raise NoPeer(f"git_sync: {said}")
        searched, paths = self.search(text)
        return synced + searched, paths

    def deliver(self, text: str) -> tuple[float, list[str]]:
        """A push is announced by webhook, then searched for until something is found."""
        body = b"{}"
        sign = "sha256=" + hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
        start = time.perf_counter()
        told = self._client.post(body, {"X-GitHub-Event": "push", "X-Hub-Signature-256": sign}, "/github-webhook")
        if told.status != 200:
            raise NoPeer(f"webhook: {told.body!r}")
        while not (paths := self.search(text)[1]):
            if time.perf_counter() - start > 60:
                raise NoPeer(f"a push did not become searchable: {text}")
        return time.perf_counter() - start, paths

    def close(self) -> None:
        self._client.close()

    def _call(self, tool: str, arguments: dict[str, Any]) -> tuple[float, Any]:
        answer = self._client.post(_message("tools/call", {"name": tool, "arguments": arguments}))
        lines = answer.body.decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        said = json.loads(data[-1] if data else answer.body)
        if answer.status != 200 or "error" in said or said["result"].get("isError"):
            raise NoPeer(f"{tool}: {answer.body[:300]!r}")
        content = said["result"]["structuredContent"]
        return answer.seconds, content.get("result", content)


def _message(method: str, params: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()


def install(cache: Path) -> Path:
    """Its command, in an environment of its own. Raises NoPeer."""
    venv = cache / "peer"
    command = venv / "bin" / "markdown-vault-mcp"
    try:
        if not command.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True, capture_output=True)
            pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", REQUIREMENT]
            subprocess.run(pip, check=True, capture_output=True)
    except subprocess.CalledProcessError as exc:
        last = exc.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise NoPeer(f"{REQUIREMENT} can't be installed: {''.join(last)}") from exc
    return command


@contextmanager
def running(command: Path, folder: Path, remote: str, known: str) -> Iterator[Peer]:
    """A server for as long as this lasts; ready once it finds `known`. Raises NoPeer."""
    port = free_port()
    folder.mkdir()
    settings = {
        "SOURCE_DIR": str(folder / "vault"),
        "INDEX_PATH": str(folder / "index.sqlite"),
        "GIT_REPO_URL": remote,
        "GIT_LFS": "false",
        "DEFAULT_SEARCH_MODE": "keyword",
        "GITHUB_WEBHOOK_SECRET": SECRET,
    }
    environ = {**os.environ, **{f"MARKDOWN_VAULT_MCP_{name}": value for name, value in settings.items()}}
    with (folder / "log").open("wb") as log:
        serve = [str(command), "serve", "--transport", "http", "--port", str(port)]
        process = subprocess.Popen(serve, env=environ, stdout=log, stderr=log)
    try:
        if not until(lambda: health(port, "/health/ready") or process.poll() is not None, START_SECONDS):
            raise NoPeer("does not get ready")
        if process.poll() is not None:
            raise NoPeer(f"does not start: {(folder / 'log').read_text()[-300:]}")
        peer = Peer(port)
        if not until(lambda: peer.search(known)[1], START_SECONDS):
            raise NoPeer(f"does not find {known!r}")
        yield peer
        peer.close()
    finally:
        process.terminate()
        process.wait(30)
