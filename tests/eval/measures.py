"""How well answers were found, and the tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from tests.eval.questions import KINDS, Question

DEPTH = 10
"""A document below is as good as not found."""


@dataclass(frozen=True)
class Score:
    """Shares of the questions whose answer came first and among the first five, and the mean reciprocal rank."""

    first: float
    five: float
    mrr: float

    def __str__(self) -> str:
        return f"{self.first:.2f} · {self.five:.2f} · {self.mrr:.3f}"


def rank(found: Sequence[str], answers: Iterable[str]) -> int | None:
    """Of the best answer, from 1; None when none is among the first ten."""
    return next((at for at, path in enumerate(found[:DEPTH], 1) if path in set(answers)), None)


def score(ranks: Sequence[int | None]) -> Score:
    """Raises StatisticsError without any."""
    return Score(
        first=mean(place == 1 for place in ranks),
        five=mean(place is not None and place <= 5 for place in ranks),
        mrr=mean(1 / place if place else 0.0 for place in ranks),
    )


def by_kind(asked: Sequence[Question], ranks: Sequence[int | None]) -> dict[str, Score]:
    """Kind → score, and `all`."""
    scores = {}
    for kind in KINDS:
        if of_kind := [place for question, place in zip(asked, ranks, strict=True) if question.kind == kind]:
            scores[kind] = score(of_kind)
    return scores | {"all": score(ranks)}


def table(scores: Mapping[str, Mapping[str, Score]]) -> str:
    """Way → kind → score as Markdown, a line a way."""
    kinds = list(next(iter(scores.values())))
    lines = [f"| recall@1 · recall@5 · MRR | {' | '.join(kinds)} |", f"| --- |{' --- |' * len(kinds)}"]
    lines += [f"| {way} | {' | '.join(str(of[kind]) for kind in kinds)} |" for way, of in scores.items()]
    return "\n".join(lines)
