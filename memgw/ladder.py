"""A ladder, never a cliff: what can't be answered as asked is answered in a way that needs less, and says so."""

from dataclasses import dataclass, field, replace

from memgw import modes, vectors
from memgw.deadline import Deadline
from memgw.engine import Engine, QueryType, Question
from memgw.errors import (
    BudgetExceeded,
    DeadlineExceeded,
    EngineBadOutput,
    EngineError,
    EngineFailed,
    IndexDamaged,
    ModelUnavailable,
    NotAsAsked,
    StorageFull,
    VectorsPending,
    storage_full_translated,
)
from memgw.layout import Layout
from memgw.models import Models, Role
from memgw.results import Hit
from memgw.state import Stamp
from memgw.workspace import Held, Workspace


@dataclass(frozen=True)
class Degraded:
    """Something that could not be done as asked, for the client."""

    code: str
    detail: str


@dataclass(frozen=True)
class Asking:
    """A question with what is wanted around it."""

    question: Question
    bodies: bool
    strict: bool


@dataclass(frozen=True)
class Found:
    """`bodies`: path → whole text, for those who asked for it."""

    hits: list[Hit]
    bodies: dict[str, str]


@dataclass(frozen=True)
class Landed:
    """What was found in the index with `stamp`; `ask` is what was asked in the end, `notes` why."""

    stamp: Stamp
    ask: Asking
    found: Found
    notes: list[Degraded] = field(default_factory=list)


class Moved(Exception):
    """The index was changed by somebody else meanwhile: what was found is worth nothing."""


class Ladder:
    """Searches a stamped index in the way that is asked for, or in the best one below that works."""

    def __init__(self, layout: Layout, engine: Engine, models: Models) -> None:
        self._layout, self._engine, self._models = layout, engine, models

    def climb(
        self, workspace: Workspace, stamp: Stamp, ask: Asking, deadline: Deadline, held: Held | None = None
    ) -> Landed:
        """Raises Moved; when `ask.strict`, NotAsAsked in place of a step down; what a search by BM25 raises."""
        notes: list[Degraded] = []
        while ask.question.query_type is not QueryType.SEARCH:
            try:
                return self._semantic(workspace, stamp, ask, deadline, held, notes)
            except NotAsAsked as exc:
                if not isinstance(exc, ModelUnavailable):
                    stamp = workspace.proven(stamp.commit) or _moved()
                if ask.strict:
                    raise
                if (note := Degraded(exc.code, exc.detail)) not in notes:
                    notes.append(note)
                ask = replace(ask, question=modes.below(ask.question))
        return Landed(stamp, ask, self.find(workspace, stamp, ask, deadline), notes)

    def find(self, workspace: Workspace, stamp: Stamp, ask: Asking, deadline: Deadline) -> Found:
        """What the engine finds, no more and no less."""
        place = workspace.place(stamp)
        with deadline.step("search"):
            hits = self._engine.search(place, ask.question, deadline)
            texts = workspace.index.bodies(place.file, [hit.path for hit in hits]) if ask.bodies and hits else {}
        return Found(hits, texts)

    def vectorized(self, workspace: Workspace, stamp: Stamp, deadline: Deadline, held: Held | None = None) -> Stamp:
        """Makes the vectors that there is time for, if that is a request's to do; the stamp of the index with them.
        Whatever hinders it, there is less to search by, and no more to say than that: the documents are there."""
        if not self._layout.embed_on_change or self._models.why_not(Role.EMBED):
            return stamp
        try:
            with storage_full_translated():
                done = vectors.complete(workspace, stamp, self._layout.embed_seconds, deadline, held)
        except (IndexDamaged, StorageFull) as exc:
            workspace.report(exc)
            done = None
        return done or workspace.proven(stamp.commit) or stamp

    def _semantic(
        self,
        workspace: Workspace,
        stamp: Stamp,
        ask: Asking,
        deadline: Deadline,
        held: Held | None,
        notes: list[Degraded],
    ) -> Landed:
        """Raises NotAsAsked when it can't be found like this, and Moved."""
        kind = ask.question.query_type
        needed = modes.needs(ask.question)
        for role in needed:
            if why := self._models.why_not(role):
                raise ModelUnavailable(why)
        if Role.EMBED in needed:
            stamp = self.vectorized(workspace, stamp, deadline, held)
            notes = notes + self._waiting(workspace, stamp, ask)
        seconds = self._layout.deep_seconds if kind is QueryType.DEEP_SEARCH else self._layout.query_seconds
        budget = Deadline(min(seconds, deadline.left()), timings_ms=deadline.timings_ms)
        try:
            found = self.find(workspace, stamp, ask, budget)
        except DeadlineExceeded as exc:
            if deadline.is_over:
                raise
            raise BudgetExceeded(f"{kind} took more than its {seconds:g} seconds") from exc
        except (EngineFailed, EngineBadOutput) as exc:
            raise EngineError(f"the search engine failed at {kind}") from exc
        if not found.hits and stamp.documents and modes.always_finds(ask.question):
            raise EngineError(f"{kind} found nothing at all, as vectors never do")
        return Landed(stamp, ask, found, notes)

    def _waiting(self, workspace: Workspace, stamp: Stamp, ask: Asking) -> list[Degraded]:
        """What is to be said of texts without vectors. Raises VectorsPending when there are too few to search by."""
        pending = workspace.pending_embeddings(stamp)
        if not pending:
            return []
        waiting = VectorsPending(f"{pending} texts of the branch have no vectors yet")
        if ask.strict or not workspace.has_vectors(stamp):
            raise waiting
        return [Degraded(waiting.code, waiting.detail)]


def _moved() -> Stamp:
    raise Moved
