"""The qmd command line: the reference engine."""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import BoundedSemaphore
from uuid import uuid4

from memgw import documents, files, gguf, modes, proc
from memgw.deadline import Deadline
from memgw.engine import Batch, Place, QueryType, Question
from memgw.environ import for_qmd
from memgw.errors import (
    DeadlineExceeded,
    EngineBadOutput,
    EngineFailed,
    EngineMissing,
    IndexDamaged,
    MemgwError,
    StorageFull,
    ToolError,
    ToolMissing,
    ToolOutputTooLarge,
    ToolTimeout,
)
from memgw.index import COLLECTION, IndexFolder
from memgw.models import Models, Role
from memgw.results import Hit, parse_hits

MAX_OUTPUT = 8 * 1024 * 1024
"""Fifty hits take some 40 kB."""


MODEL_VARIABLES = {"embed": "QMD_EMBED_MODEL", "generate": "QMD_GENERATE_MODEL", "rerank": "QMD_RERANK_MODEL"}

QMD_CONTEXT = 2048
"""Tokens of an embedding that qmd makes room for, unless told otherwise."""


class QmdCli:
    """Runs `qmd`, one process a call. `launcher` is the beginning of its command line."""

    incremental = False

    def __init__(self, launcher: Sequence[str], data: Path, environ: Mapping[str, str], models: Models) -> None:
        self._launcher = list(launcher)
        self._environ = dict(environ)
        self._cache = data / "qmd-cache"
        self._config = data / "qmd-config"
        self._models = models
        self._searches = BoundedSemaphore(max(4, os.cpu_count() or 1))  # each is a Node process of some 100 MB

    def version(self) -> str:
        """From package.json above the script, else what `qmd --version` says. Raises EngineMissing."""
        if self._package is None:
            return self._said_version
        try:
            return str(json.loads(self._package.read_bytes())["version"])
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise EngineMissing("the search engine is not installed properly") from exc

    @cached_property
    def _package(self) -> Path | None:
        places = (folder / "package.json" for folder in Path(self._launcher[-1]).resolve().parents)
        return next((place for place in places if place.is_file()), None)

    @cached_property
    def _said_version(self) -> str:
        try:
            said = proc.run(
                [*self._launcher, "--version"], cwd=self._home(), env=self._env(self._cache / "none"), timeout=10
            )
        except ToolError as exc:
            raise EngineMissing("the search engine is not installed") from exc
        found = re.search(rb"\d+(\.\d+)+", said)
        if not found:
            raise EngineMissing("the search engine does not tell its version")
        return found[0].decode()

    def check(self, deadline: Deadline) -> None:
        """`qmd --version`, whatever it says: it runs."""
        try:
            proc.run(
                [*self._launcher, "--version"],
                cwd=self._home(),
                env=self._env(self._cache / "none"),
                timeout=deadline.left(),
                max_output=MAX_OUTPUT,
            )
        except ToolError as exc:
            raise _translated(exc, deadline) from exc

    def update(self, place: Place, deadline: Deadline, held: int) -> None:
        """`qmd update`: reads and hashes every file."""
        self._run(place, ["update"], deadline, (held,))

    def apply(self, place: Place, batches: Iterable[Batch], deadline: Deadline) -> None:
        raise EngineFailed("the command line has no way to take changes")

    def embed(self, place: Place, deadline: Deadline, seconds: float) -> Path | None:
        """`qmd embed` on a copy of the index, which it would keep locked otherwise; what it has made when its time
        is up is kept."""
        aside = IndexFolder(place.folder / f"embed-{uuid4().hex[:12]}")
        files.make_folder(aside.path)
        try:
            shutil.copyfile(place.folder / place.file, aside.path / place.file)
            with suppress(DeadlineExceeded):
                self._run(replace(place, folder=aside.path), ["embed"], Deadline(deadline.left(seconds)))
            aside.settle(place.file)
        except (FileNotFoundError, IndexDamaged) as exc:  # another request has replaced the index
            files.remove(aside.path)
            raise EngineFailed("the index went while vectors were made") from exc
        except BaseException:
            files.remove(aside.path)
            raise
        return aside.path / place.file

    def adopt(self, place: Place, made: Path | None, deadline: Deadline, held: int) -> str:
        """The copy takes the place of the index, under a new name, so that readers can't mix the two up."""
        if not made:
            return place.file
        file = IndexFolder(place.folder).new_file()
        try:
            os.replace(made, place.folder / file)
        except FileNotFoundError as exc:
            raise EngineFailed("the index went while vectors were made") from exc
        finally:
            files.remove(made.parent)
        return file

    def prune(self, place: Place, drop: Collection[str], deadline: Deadline) -> None:
        """Nothing: it keeps vectors in the indexes alone."""

    def clean(self, place: Place, deadline: Deadline, held: int) -> str:
        """`qmd cleanup`: cached model answers, vectors and texts without a document, FTS5's remains, free pages."""
        self._run(place, ["cleanup"], deadline, (held,))
        return place.file

    def search(self, place: Place, question: Question, deadline: Deadline) -> list[Hit]:
        """`qmd search`, `query` or `vsearch`, with `--json`."""
        if not self._searches.acquire(timeout=deadline.left()):
            raise DeadlineExceeded(f"no search was free within {deadline.seconds:g} seconds")
        try:
            output = self._run(place, _search(question), deadline)
        finally:
            self._searches.release()
        return parse_hits(output, place.index, COLLECTION)

    def explain(self, place: Place, question: Question) -> list[str]:
        return ["qmd", "--index", place.index, *_search(question)]

    def serve_mcp(self, place: Place, host: str, port: int) -> proc.Process:
        """Starts `qmd mcp --http`; it reads the index as it goes and stays until it is ended."""
        self.settings(place)
        command = [*self._launcher, "--index", place.index, "mcp", "--http", "--host", host]
        return proc.start([*command, "--port", str(port)], cwd=self._home(), env=self._env(place.folder / place.file))

    def _run(self, place: Place, command: Sequence[str], deadline: Deadline, keep_open: tuple[int, ...] = ()) -> bytes:
        self.settings(place)
        try:
            return proc.run(
                [*self._launcher, "--index", place.index, *command],
                cwd=self._home(),
                env=self._env(place.folder / place.file),
                timeout=deadline.left(),
                keep_open=keep_open,
                max_output=MAX_OUTPUT,
            )
        except ToolError as exc:
            raise _translated(exc, deadline) from exc

    def _home(self) -> Path:
        home = self._config / "home"
        files.make_folder(home)
        return home

    def host_env(self) -> dict[str, str]:
        """The environment of the warm host: the same qmd, for all indexes."""
        named = {name: self._models.uris[role] for role, name in MODEL_VARIABLES.items()}
        return self._env(self._cache / "none") | named

    def _env(self, index: Path) -> dict[str, str]:
        environ = for_qmd(self._environ, home=self._home(), cache=self._cache, config=self._config, index=index)
        return environ | self._room()

    def _room(self) -> dict[str, str]:
        """qmd cuts a text at the length that the model was made for, and then puts a token before it and one behind:
        the model aborts, and Node with it. qmd's own model takes more than its longest text."""
        model = self._models.file(Role.EMBED)
        length = gguf.context_length(model) if model else None
        return {"QMD_EMBED_CONTEXT_SIZE": str(length - 2)} if length and 2 < length <= QMD_CONTEXT else {}

    def settings(self, place: Place) -> Path:
        """qmd's config file, brought up to date: one collection over the worktree. JSON is YAML; written only when it
        differs, so mostly only read."""
        collection = {"path": str(place.worktree), "pattern": documents.PATTERN}
        text = json.dumps({"collections": {COLLECTION: collection}, "models": self._models.uris}, indent=2)
        path = self._config / f"{place.index}.yml"
        files.ensure(path, text + "\n")
        return path


def _search(question: Question) -> list[str]:
    floor = ["--min-score", repr(question.min_score)] if question.min_score else []
    common = ["--json", "-n", str(question.limit), *floor]
    if question.query_type is QueryType.SEARCH:
        return ["search", *common, "--", question.text]
    if question.intent:
        common += [f"--intent={question.intent}"]
    if question.query_type is QueryType.VSEARCH and modes.expands(question):
        return ["vsearch", *common, "--", modes.document(question)]
    if question.candidate_limit:
        common += ["--candidate-limit", str(question.candidate_limit)]
    if question.query_type is not QueryType.DEEP_SEARCH:
        common += ["--no-rerank"]
    if question.explain:
        common += ["--explain"]
    return ["query", *common, "--", modes.document(question)]


def _translated(exc: ToolError, deadline: Deadline) -> MemgwError:
    if isinstance(exc, ToolTimeout):
        return DeadlineExceeded(f"the search engine was not done within {deadline.seconds:g} seconds")
    if isinstance(exc, ToolMissing):
        return EngineMissing("the search engine can't be started")
    if isinstance(exc, ToolOutputTooLarge):
        return EngineBadOutput("the search engine's answer is far too long")
    if exc.disk_is_full:
        return StorageFull("no space is left where memgw keeps its data")
    return EngineFailed("the search engine failed")
