"""qmd as its user has it, without memgw: a clone, an index of its own, its command line and its MCP server."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from memgw.config import Config
from memgw.index import COLLECTION
from tests.actors import until
from tests.bench.stack import Client, free_port, health

Hits = list[tuple[str, float]]
"""Paths and scores, the best first."""

LIMIT = 10

MODES: dict[str, tuple[str, ...]] = {"search": (), "vsearch": ("vec",), "query": ("lex", "vec")}
"""What each is in qmd's words, with no model but the embedding one: `qmd search`, or `qmd query` of these kinds."""


class Plain:
    """An index of a commit with vectors. The collection has memgw's name, since the name is indexed as text."""

    def __init__(self, folder: Path, remote: str, commit: str, model: Path) -> None:
        self.clone = folder / "clone"
        subprocess.run(["git", "clone", "--quiet", remote, str(self.clone)], check=True)
        subprocess.run(["git", "-C", str(self.clone), "checkout", "--quiet", "--detach", commit], check=True)
        self._launcher = Config.load({"GIT_REMOTE_URL": "/nowhere"}).launcher
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "QMD_CONFIG_DIR": str(folder / "config"),
            "QMD_EMBED_MODEL": str(model),
            "QMD_EMBED_CONTEXT_SIZE": "510",
            "LC_ALL": "C.UTF-8",
            "NO_COLOR": "1",
        }
        self.index = folder / "cache" / "qmd" / "eval.sqlite"
        self.settings = folder / "config" / "eval.yml"
        self.settings.parent.mkdir(parents=True)
        collection = {"path": str(self.clone), "pattern": "**/*.md"}
        self.settings.write_text(json.dumps({"collections": {COLLECTION: collection}}))
        self.run("update")
        self.run("embed")

    def run(self, *command: str) -> str:
        """What the command line says on stdout. Raises CalledProcessError."""
        argv = [*self._launcher, "--index", "eval", *command]
        return subprocess.run(
            argv, cwd=self.clone, env=self.environ, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def search(self, text: str) -> Hits:
        """`qmd search`."""
        return _hits(json.loads(self.run("search", "--json", "-n", str(LIMIT), "--", text)))

    def rows(self, document: str) -> list[dict[str, Any]]:
        """`qmd query` of a document of typed lines (`vec: …`), not reranked; loads the model each time."""
        found = json.loads(self.run("query", "--json", "--no-rerank", "-n", str(LIMIT), "--", document))
        return [{**row, "file": _path(row["file"])} for row in found]

    @contextmanager
    def served(self) -> Iterator["PlainServer"]:
        """Its MCP server, for as long as this lasts: it keeps the model loaded."""
        port = free_port()
        argv = [*self._launcher, "--index", "eval", "mcp", "--http", "--port", str(port)]
        process = subprocess.Popen(argv, cwd=self.clone, env=self.environ, stderr=subprocess.DEVNULL)
        try:
            assert until(lambda: health(port) or process.poll() is not None, 30)
            yield PlainServer(self, port)
        finally:
            process.terminate()
            process.wait(30)


class PlainServer:
    def __init__(self, plain: Plain, port: int) -> None:
        self._plain, self._client = plain, Client(port)
        self._searched: dict[str, Hits] = {}

    def ask(self, mode: str, text: str) -> Hits:
        kinds = MODES[mode]
        return self.typed([(kind, text) for kind in kinds]) if kinds else self._search(text)

    def repeat(self, command: list[str]) -> Hits:
        """What qmd says to a command line that `debug` of an answer names."""
        subcommand, text = command[3], command[-1]
        if subcommand == "search":
            return self._search(text)
        return self.typed([_typed(line) for line in text.splitlines()])

    def typed(self, searches: list[tuple[str, str]]) -> Hits:
        """`[("lex" or "vec", text)]`, fused by qmd and not reranked."""
        asked = [{"type": kind, "query": text} for kind, text in searches]
        answer = self._client.post(json.dumps({"searches": asked, "rerank": False, "limit": LIMIT}).encode())
        if answer.status != 200:
            raise RuntimeError(f"qmd answered {answer.status}: {answer.body[:200]!r}")
        return [(unquote(path), score) for path, score in _hits(answer.json["results"])]

    def _search(self, text: str) -> Hits:
        """By the command line: the server has no plain search. Each text once."""
        if text not in self._searched:
            self._searched[text] = self._plain.search(text)
        return self._searched[text]


def _typed(line: str) -> tuple[str, str]:
    kind, _, text = line.partition(":")
    return kind.strip(), text.strip()


def _hits(rows: list[dict[str, Any]]) -> Hits:
    return [(_path(row["file"]), row["score"]) for row in rows]


def _path(file: str) -> str:
    return file.removeprefix(f"qmd://{COLLECTION}/").removesuffix("?index=eval")
