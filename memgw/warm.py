"""qmd in the warm host, and the way back to the command line. The answers are the same."""

import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from memgw import files, metrics, modes
from memgw.deadline import Deadline
from memgw.engine import Batch, Engine, Place, QueryType, Question
from memgw.errors import DeadlineExceeded, EngineBadOutput, EngineFailed, HostAway, MemgwError
from memgw.host import PATIENCE_SECONDS, Host
from memgw.index import COLLECTION
from memgw.results import Hit, read_hits

log = logging.getLogger(__name__)

BATCH_SECONDS = 60.0
"""Some megabytes take less than one."""

SLICE_SECONDS = 5.0
"""Vectors are made for so long at a time, then brought in."""

GRACE_SECONDS = 2.0
"""What the host may take longer than it was told: it looks at the time between two parts of its work."""


class QmdHost:
    """qmd in the warm host. `reference`: the command line of the same installation; what it says of itself counts."""

    def __init__(self, host: Host, reference: Engine, settings: Callable[[Place], Path], nursery: Path) -> None:
        self._host, self._reference, self._settings, self._nursery = host, reference, settings, nursery

    @property
    def incremental(self) -> bool:
        try:
            self._call({"op": "status"}, Deadline(2 * PATIENCE_SECONDS), PATIENCE_SECONDS)
        except MemgwError:
            return False
        return True

    def version(self) -> str:
        return self._reference.version()

    def check(self, deadline: Deadline) -> None:
        self._call({"op": "status"}, deadline)

    def update(self, place: Place, deadline: Deadline, held: int) -> None:
        """qmd's own update, in the host."""
        self._call({"op": "update", **self._target(place)}, deadline)

    def apply(self, place: Place, batches: Iterable[Batch], deadline: Deadline) -> None:
        target = self._target(place)
        for batch in batches:
            self._call({"op": "apply", **target, "gone": batch.gone, "put": batch.put}, deadline, BATCH_SECONDS)

    def embed(self, place: Place, deadline: Deadline, seconds: float) -> Path | None:
        """Some seconds' worth, so that what was made is soon there for others. What it has not yet said when time is up
        is made nevertheless."""
        files.make_folder(self._nursery.parent)
        seconds = min(seconds, SLICE_SECONDS)
        request = {"op": "embed", **self._target(place), "nursery": str(self._nursery), "seconds": seconds}
        self._call(request, Deadline(deadline.left(seconds + GRACE_SECONDS)))
        return None

    def adopt(self, place: Place, made: Path | None, deadline: Deadline, held: int) -> str:
        seconds = max(deadline.left() - GRACE_SECONDS, 0.1)
        request = {"op": "adopt", **self._target(place), "nursery": str(self._nursery), "seconds": seconds}
        self._call(request, deadline)
        return place.file

    def prune(self, place: Place, drop: Collection[str], deadline: Deadline) -> None:
        config = str(self._settings(place))
        self._call({"op": "prune", "nursery": str(self._nursery), "config": config, "drop": list(drop)}, deadline)

    def clean(self, place: Place, deadline: Deadline, held: int) -> str:
        """By the command line: it takes a second for each 10,000 documents, in which the host could answer nobody."""
        return self._reference.clean(place, deadline, held)

    def search(self, place: Place, question: Question, deadline: Deadline) -> list[Hit]:
        request: dict[str, Any] = {
            "op": "search",
            "file": str(place.folder / place.file),
            "limit": question.limit,
            "min_score": question.min_score,
        }
        patience: float | None = PATIENCE_SECONDS
        if question.query_type is QueryType.SEARCH:
            request["query"] = question.text
        else:
            request |= _semantic(question)
            patience = None  # models take their time: the question's own limit counts
        answer = self._call(request, deadline, patience)
        return read_hits(answer.get("hits"), f"{COLLECTION}/", "")

    def explain(self, place: Place, question: Question) -> list[str]:
        return self._reference.explain(place, question)

    def _target(self, place: Place) -> dict[str, Any]:
        settings = str(self._settings(place))
        return {"file": str(place.folder / place.file), "config": settings, "collection": COLLECTION}

    def _call(self, request: dict[str, Any], deadline: Deadline, at_most: float | None = None) -> dict[str, Any]:
        answer = self._host.call(request, deadline, at_most)
        if answer.get("qmd") != self.version():  # qmd was exchanged under the host
            raise HostAway("the warm host runs another qmd than the one that is installed")
        return answer


def _semantic(question: Question) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "op": "semantic",
        "collection": COLLECTION,
        "rerank": question.query_type is QueryType.DEEP_SEARCH,
        "explain": question.explain,
    }
    if modes.expands(question):
        asked["query"] = modes.document(question)
        asked["vectors_only"] = question.query_type is QueryType.VSEARCH
    else:
        asked["queries"] = [{"type": part.kind, "query": part.text} for part in modes.parts(question)]
    if question.intent:
        asked["intent"] = question.intent
    if question.candidate_limit:
        asked["candidate_limit"] = question.candidate_limit
    return asked


class QmdAuto:
    """The warm host, and the command line whenever the host can't do it: the answers are the same."""

    def __init__(self, host: QmdHost, cli: Engine) -> None:
        self._host, self._cli = host, cli

    @property
    def incremental(self) -> bool:
        if self._host.incremental:
            return True
        metrics.fell_back("apply")
        return False

    def version(self) -> str:
        return self._cli.version()

    def check(self, deadline: Deadline) -> None:
        try:  # a third of the time, which is no reason to think that it hangs
            self._host.check(Deadline(deadline.left() / 3))
        except (EngineFailed, EngineBadOutput, DeadlineExceeded):
            self._cli.check(deadline)

    def update(self, place: Place, deadline: Deadline, held: int) -> None:
        self._cli.update(place, deadline, held)

    def apply(self, place: Place, batches: Iterable[Batch], deadline: Deadline) -> None:
        try:
            self._host.apply(place, batches, deadline)
        except HostAway:  # then `update` does it
            metrics.fell_back("apply")
            raise

    def embed(self, place: Place, deadline: Deadline, seconds: float) -> Path | None:
        try:
            return self._host.embed(place, deadline, seconds)
        except HostAway:
            metrics.fell_back("embed")
            return self._cli.embed(place, deadline, seconds)

    def adopt(self, place: Place, made: Path | None, deadline: Deadline, held: int) -> str:
        return (self._cli if made else self._host).adopt(place, made, deadline, held)

    def prune(self, place: Place, drop: Collection[str], deadline: Deadline) -> None:
        self._host.prune(place, drop, deadline)

    def clean(self, place: Place, deadline: Deadline, held: int) -> str:
        return self._host.clean(place, deadline, held)

    def search(self, place: Place, question: Question, deadline: Deadline) -> list[Hit]:
        try:
            return self._host.search(place, question, deadline)
        except (EngineFailed, EngineBadOutput) as exc:
            log.info("engine_fallback", extra={"reason": exc.detail})
            metrics.fell_back("search")
        return self._cli.search(place, question, deadline)

    def explain(self, place: Place, question: Question) -> list[str]:
        return self._cli.explain(place, question)
