"""What memgw asks of a search engine. `QmdCli` is the reference; a faster one has to give the same answers."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from memgw.deadline import Deadline
from memgw.results import Hit


class QueryType(StrEnum):
    """How to search; `search` is BM25, the others need models."""

    SEARCH = "search"
    VSEARCH = "vsearch"
    QUERY = "query"
    DEEP_SEARCH = "deep_search"


@dataclass(frozen=True)
class Place:
    """Where one workspace's documents and index are. `index` names it to qmd: `<prefix>-<workspace>`."""

    index: str
    worktree: Path
    folder: Path
    file: str


class Kind(StrEnum):
    """What a part of a query document is for: BM25, vectors, or vectors of an invented answer."""

    LEX = "lex"
    VEC = "vec"
    HYDE = "hyde"


@dataclass(frozen=True)
class Part:
    """One line of a query document."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Question:
    """`text` is untrusted: it reaches no argument that can be read as an option. `limit` 1 to 50, `min_score` 0 to 1.

    `parts`: a query document of the asker's own, in place of `text`. `expand`: let the generation model write parts.
    `candidate_limit`: how many candidates go into fusion and reranking; qmd's own number when None.
    """

    text: str
    query_type: QueryType = QueryType.SEARCH
    limit: int = 10
    min_score: float = 0.0
    parts: tuple[Part, ...] = ()
    expand: bool = False
    intent: str = ""
    candidate_limit: int | None = None
    explain: bool = False


@dataclass(frozen=True)
class Batch:
    """Documents that go, by path, and documents that come or change: path and text."""

    gone: list[str]
    put: list[tuple[str, str]]


class Engine(Protocol):
    """All calls raise EngineFailed, EngineBadOutput, StorageFull or DeadlineExceeded, and nothing else."""

    def version(self) -> str:
        """The engine's version; an index is only good for the one that wrote it."""
        ...

    def check(self, deadline: Deadline) -> None:
        """Returns when the engine answers; for whoever asks whether we are ready."""
        ...

    def update(self, place: Place, deadline: Deadline, held: int) -> None:
        """Brings the index to the worktree's files, making it when there is none. A writer: `held` is the
        descriptor of the workspace lock."""
        ...

    @property
    def incremental(self) -> bool:
        """Whether `apply` can be used now."""
        ...

    def apply(self, place: Place, batches: Iterable[Batch], deadline: Deadline) -> None:
        """Brings changes into the index, making it when there is none; takes from `batches` as it goes. A writer: what
        it leaves when it fails, or when we are killed meanwhile, is worth nothing."""
        ...

    def embed(self, place: Place, deadline: Deadline, seconds: float) -> Path | None:
        """Makes vectors that the index lacks, for at most so many seconds; changes nothing in the index. A reader.
        Returns what `adopt` needs to find them; `discard` it if that is not called."""
        ...

    def adopt(self, place: Place, made: Path | None, deadline: Deadline, held: int) -> str:
        """Brings what `embed` made into the index, and returns the file that this is in then. A writer; it is done in
        the deadline's time; what was done stays when it fails."""
        ...

    def prune(self, place: Place, drop: Collection[str], deadline: Deadline) -> None:
        """Forgets vectors, kept for all branches, of texts that no index has, by content hash. Changes no index;
        `place`: of any."""
        ...

    def clean(self, place: Place, deadline: Deadline, held: int) -> str:
        """Takes out of the index what no document needs, makes the file small, and returns it. A writer, likewise."""
        ...

    def search(self, place: Place, question: Question, deadline: Deadline) -> list[Hit]:
        """The best hits first. A reader: runs beside others, and beside a writer."""
        ...

    def explain(self, place: Place, question: Question) -> list[str]:
        """The command that `search` stands for, without paths of this machine: for people to repeat it."""
        ...
