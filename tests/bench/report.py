"""Rows to a Markdown table and to JSON."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from tests.bench.sample import Sample


class Kind(StrEnum):
    """How a row is judged: times better than the baseline, times the baseline's time, or an amount by itself."""

    FASTER = "faster"
    TIMES = "times"
    AMOUNT = "amount"


@dataclass(frozen=True)
class Row:
    """One line of the table. `against` names the baseline; `note` is said beneath the table.

    `target`: at least so many times faster, at most so many times the baseline, at most so much.
    """

    name: str
    against: str = ""
    baseline: Sample | None = None
    memgw: Sample | None = None
    kind: Kind = Kind.FASTER
    target: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Of the medians."""
        if not self.baseline or not self.memgw:
            return None
        ratio = self.memgw.median / self.baseline.median
        return ratio if self.kind == Kind.TIMES or self.memgw.unit == "/s" else 1 / ratio

    @property
    def met(self) -> bool | None:
        """None where there is nothing to judge. An amount is judged by its largest value."""
        value = max(self.memgw.values) if self.memgw and self.kind == Kind.AMOUNT else self.ratio
        if self.target is None or value is None:
            return None
        return value >= self.target if self.kind == Kind.FASTER else value <= self.target


def table(rows: Iterable[Row]) -> str:
    """Markdown: a line a row, and the notes below."""
    lines = [
        "| | beside | median · p99 (n) | memgw: median · p99 (n) | ratio | target | met |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    notes = []
    for row in rows:
        ratio = "–" if row.ratio is None else f"{row.ratio:.3g} × {_words(row)}"
        met = {None: "–", True: "yes", False: "**missed**"}[row.met]
        cells = (row.name, row.against or "–", _cell(row.baseline), _cell(row.memgw), ratio, _target(row), met)
        lines.append(f"| {' | '.join(cells)} |")
        if row.note:
            notes.append(f"- {row.name}, {row.against}: {row.note}")
    return "\n".join([*lines, *([""] if notes else []), *notes])


def as_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """All of it, every single value too."""
    return [
        asdict(row) | {"baseline": _figures(row.baseline), "memgw": _figures(row.memgw)}
        | {"ratio": row.ratio, "met": row.met}
        for row in rows
    ]  # fmt: skip


def amount(value: float, unit: str) -> str:
    """Three digits, in the unit that people read."""
    if unit == "s" and value < 1:
        value, unit = value * 1000, "ms"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _cell(sample: Sample | None) -> str:
    if not sample:
        return "–"
    tail = f" · {amount(sample.p99, sample.unit)}" if sample.unit != "/s" and len(sample.values) > 1 else ""
    return f"{amount(sample.median, sample.unit)}{tail} ({sample.count})"


def _words(row: Row) -> str:
    return "faster" if row.kind == Kind.FASTER else "the time"


def _target(row: Row) -> str:
    if row.target is None:
        return "–"
    return {Kind.FASTER: "≥ {:g} ×", Kind.TIMES: "≤ {:g} ×", Kind.AMOUNT: "≤ {:g} MB"}[row.kind].format(row.target)


def _figures(sample: Sample | None) -> dict[str, Any] | None:
    if not sample:
        return None
    values = [round(value, 6) for value in sample.values]
    return {"unit": sample.unit, "median": sample.median, "p99": sample.p99, "n": sample.count, "values": values}
