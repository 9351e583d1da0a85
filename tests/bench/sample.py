"""Measurements: how often to repeat, and what is said of a series."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

T = TypeVar("T")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class Sample:
    """A series in one unit: `s`, `/s` or `MB`."""

    values: tuple[float, ...]
    unit: str = "s"
    n: int = 0
    """How many answers stand behind it, where that is not the number of values."""

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def p99(self) -> float:
        """The worst, of less than 100 values."""
        return percentile(self.values, 0.99)

    @property
    def count(self) -> int:
        return self.n or len(self.values)


def seconds(values: Sequence[float]) -> Sample:
    return Sample(tuple(values))


def rounds(most: int, limit: float, least: int = 3) -> Iterator[int]:
    """Counts up to `most`, but stops after `limit` seconds once `least` are done."""
    end = time.monotonic() + limit
    for number in range(most):
        if number >= least and time.monotonic() > end:
            return
        yield number


def in_turns(items: Iterable[T], turns: Iterable[int], *sides: Callable[[T], float | None]) -> list[list[float]]:
    """Gives every item to every side, a series a side; who goes first changes, and None sits a turn out.

    So a noisy moment hits all, and no side is the one that finds the caches warm.
    """
    series: list[list[float]] = [[] for _ in sides]
    pairs = list(zip(sides, series, strict=True))
    source = iter(items)
    for turn in turns:
        item = next(source)
        for side, values in reversed(pairs) if turn % 2 else pairs:
            value = side(item)
            if value is not None:
                values.append(value)
    return series


def every(step: int, side: Callable[[T], float]) -> Callable[[T], float | None]:
    """A side that plays only each `step`-th time, because it is slow."""
    count = 0

    def sparse(item: T) -> float | None:
        nonlocal count
        count += 1
        return side(item) if count % step == 1 % step else None

    return sparse
