"""What makes an answer right. A wrong one ends its rows: it must not count as fast."""

from collections.abc import Collection, Sequence
from typing import Any

Hits = Sequence[tuple[str, float]]
"""Paths with scores, the best first."""


class WrongAnswer(Exception):
    """Who answered, what was asked, and what is wrong."""


def check(who: str, text: str, found: Hits, expected: Hits) -> None:
    """Of up to ten found, scores must agree as far as qmd prints them; and so must the paths, but for those whose place
    a tie could have given to another."""
    seen = [round(score, 2) for _, score in found]
    wanted = [score for _, score in expected[: len(found)]]
    if len(found) != min(len(expected), 10) or any(abs(a - b) > 0.011 for a, b in zip(seen, wanted, strict=True)):
        raise WrongAnswer(f"{who}: {text!r}: {found} instead of {expected[:10]}")
    last = wanted[-1] if wanted else 0
    missing = {path for path, score in expected if score > last} - {path for path, _ in found}
    if missing:
        raise WrongAnswer(f"{who}: {text!r}: {sorted(missing)} not found")


def check_order(who: str, text: str, found: Hits, expected: Hits) -> None:
    """The same paths in the same order, with the same scores as far as qmd prints them."""
    same = [path for path, _ in found] == [path for path, _ in expected]
    if not same or any(abs(a - b) > 0.0051 for (_, a), (_, b) in zip(found, expected, strict=True)):
        raise WrongAnswer(f"{who}: {text!r}: {found} instead of {expected}")


def check_paths(who: str, text: str, found: Collection[str], expected: Collection[str]) -> None:
    """These and no others were found."""
    if set(found) != set(expected):
        raise WrongAnswer(f"{who}: {text!r}: found {sorted(found)} instead of {sorted(expected)}")


def check_commit(answer: dict[str, Any], text: str, commit: str) -> None:
    """A fresh answer, from this commit."""
    if answer.get("commit_hash") != commit or answer.get("freshness") != "fresh" or answer.get("degraded"):
        raise WrongAnswer(f"memgw: {text!r}: not a fresh answer from {commit}: {answer}")
