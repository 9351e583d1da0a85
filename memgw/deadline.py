"""The time that one request may spend. Every step asks here for what is left."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from memgw.errors import DeadlineExceeded


@dataclass
class Deadline:
    """A point in monotonic time, made once for a request and handed to each of its steps.

    It also keeps the books: `timings_ms` maps a step's name to the milliseconds spent in it.
    """

    seconds: float
    started: float = field(default_factory=monotonic)
    timings_ms: dict[str, float] = field(default_factory=dict)

    def left(self, cap: float | None = None) -> float:
        """Seconds left, at most `cap`. Raises DeadlineExceeded when there are none."""
        left = self.started + self.seconds - monotonic()
        if left <= 0:
            raise self.exceeded()
        return left if cap is None else min(left, cap)

    @property
    def is_over(self) -> bool:
        """Whether nothing, or too little to start anything with, is left."""
        return self.started + self.seconds - monotonic() < 0.05

    def exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the request was not done within {self.seconds:g} seconds")

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Adds the time spent inside to `timings_ms[name]`, whatever way it is left."""
        begin = monotonic()
        try:
            yield
        finally:
            spent = (monotonic() - begin) * 1000
            self.timings_ms[name] = round(self.timings_ms.get(name, 0.0) + spent, 1)
