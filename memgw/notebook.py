"""What housekeeping has to remember from one round to the next."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from time import time

from memgw import files
from memgw.errors import FULL


class Notebook:
    """A number for each of some names, kept in a file; an empty one when that is lost or damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def missing(self, names: Collection[str], seconds: float) -> list[str]:
        """Notes that just these are missing now, and returns those that were at each look for so many seconds."""
        known, now = self.load(), time()
        moments = {name: min(known.get(name, now), now) for name in names}
        self.save(moments)
        return [name for name, moment in moments.items() if now - moment >= seconds]

    def load(self) -> dict[str, float]:
        try:
            return {name: float(number) for name, number in json.loads(self._path.read_text("utf-8")).items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}

    def save(self, numbers: Mapping[str, float]) -> None:
        """Nothing on a full disk, which is no reason to take nothing away."""
        try:
            files.replace(self._path, json.dumps(numbers))
        except OSError as exc:
            if exc.errno not in FULL:
                raise
