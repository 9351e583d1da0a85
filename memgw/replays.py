"""Deliveries that were taken lately, so that none is taken twice: for all workers of a data directory."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time

from memgw import files, locks
from memgw.deadline import Deadline
from memgw.errors import HookReplayed, storage_full_translated

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 2.0
MOST = 4096
"""With more, those are forgotten that would be first."""

_LONGEST = 1_000_000
_FURTHEST_SECONDS = 200_000.0


class Replays:
    """Safe to share between threads and processes. A file that was lost or damaged forgets, and no more."""

    def __init__(self, data: Path) -> None:
        self._file, self._lock = data / "hooks" / "taken.json", data / "locks" / "hooks.lock"

    @contextmanager
    def once(self, mark: str, until: float) -> Iterator[None]:
        """Does what is inside, and remembers `mark` until the moment `until`, unless what is inside fails.

        Raises HookReplayed, and does nothing, when it is remembered; WorkspaceBusy; StorageFull.
        """
        deadline = Deadline(2 * PATIENCE_SECONDS)  # so that it is the lock that is told of
        with storage_full_translated(), locks.hold(self._lock, deadline, PATIENCE_SECONDS, poll=0.002):
            taken = self._taken()
            if mark in taken:
                raise HookReplayed("it was taken before; to have it done again, wait, or use /sync")
            yield
            taken[mark] = until
            if len(taken) > MOST:
                taken = dict(sorted(taken.items(), key=lambda item: item[1])[-MOST:])
            files.replace(self._file, json.dumps(taken))

    def _taken(self) -> dict[str, float]:
        """Without those that need not be remembered any more, or that no window explains."""
        now = time()
        try:
            with self._file.open(encoding="utf-8") as file:
                found = json.loads(file.read(_LONGEST))
            return {mark: until for mark, until in found.items() if now <= until <= now + _FURTHEST_SECONDS}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as exc:
            log.warning("healing", extra={"reason": "the list of hooks that were taken is damaged"}, exc_info=exc)
            return {}
