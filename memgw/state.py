"""What is known of a workspace, kept in `<data>/state/`; each file is replaced whole.

`<workspace>.json` is the state proper: written under the workspace lock only. `notes/<workspace>.json` is what requests
without the lock want to tell: the last one to write wins, and nothing depends on it. `used/<workspace>` is empty; its
time tells when a request last used the workspace.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from time import time
from typing import Any, TypeVar, get_type_hints

from memgw import files
from memgw.index import Identity

FORMAT = 1

Record = TypeVar("Record")


def now() -> str:
    """This moment, RFC 3339, UTC."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Stamp:
    """Proof that an index is the index of `commit`: made after everything was checked, taken back before anything
    is changed. `serial` is never used twice, so that two equal stamps mean that nothing happened between."""

    serial: str
    commit: str
    qmd: str
    collection: str
    embed_model: str
    identity: Identity
    documents: int
    skipped: int


@dataclass(frozen=True)
class State:
    """`worktree_commit`, `stamp.commit` and `embedded_commit` move one after the other; any can be None."""

    branch: str
    worktree_commit: str | None = None
    stamp: Stamp | None = None
    embedded_commit: str | None = None
    synced_at: str | None = None
    worktree_bytes: int = 0

    def but(self, **changes: Any) -> "State":
        return replace(self, **changes)


@dataclass(frozen=True)
class LastError:
    """`kind`: the name of the error's class."""

    at: str
    kind: str
    detail: str


@dataclass(frozen=True)
class Notes:
    """When the remote was last asked and gave `asked_commit`; the last error, if nothing has worked since."""

    asked_at: str | None = None
    asked_commit: str | None = None
    last_error: LastError | None = None


class StateFile:
    """The two files of one workspace."""

    def __init__(self, folder: Path, workspace: str) -> None:
        self.workspace = workspace
        self._state = folder / f"{workspace}.json"
        self._notes = folder / "notes" / f"{workspace}.json"
        self._used = folder / "used" / workspace

    def load(self) -> State | None:
        """None when there is no file, or one that can't be understood: then nothing is known."""
        try:
            data = json.loads(self._state.read_text("utf-8"))
            if data.pop("format") != FORMAT:
                return None
            if data["stamp"]:
                data["stamp"]["identity"] = _typed(Identity(**data["stamp"]["identity"]))
                data["stamp"] = _typed(Stamp(**data["stamp"]))
            return _typed(State(**data))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def save(self, state: State) -> None:
        """For whoever holds the workspace lock."""
        files.replace(self._state, json.dumps({"format": FORMAT} | asdict(state), indent=1) + "\n")

    def remove_leftovers(self) -> None:
        """What writers that were killed left beside the files. For whoever holds the workspace lock."""
        for file in (self._state, self._notes):
            files.remove_leftovers(file)

    def notes(self) -> Notes:
        try:
            data = json.loads(self._notes.read_text("utf-8"))
            if data["last_error"]:
                data["last_error"] = _typed(LastError(**data["last_error"]))
            return _typed(Notes(**data))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return Notes()

    def note_asked(self, at: str, commit: str) -> None:
        """Keeps that the remote had `commit` at `at`; a second is exact enough, and saves most of the writes."""
        old = self.notes()
        known = old.asked_commit == commit and at[:19] <= (old.asked_at or "")[:19] <= now()
        if not known or old.last_error:
            self._save_notes(Notes(at, commit))

    def note_error(self, kind: str, detail: str) -> None:
        """Keeps the last error of a workspace that exists; a name that somebody made up leaves nothing behind."""
        if self._state.exists():
            self._save_notes(replace(self.notes(), last_error=LastError(now(), kind, detail)))

    def note_used(self) -> None:
        """Keeps that a request uses the workspace from now on; a second is exact enough here, too."""
        with suppress(OSError):
            try:
                if abs(time() - self._used.stat().st_mtime) > 1:
                    os.utime(self._used)
            except FileNotFoundError:
                if self._state.exists():
                    files.make_folder(self._used.parent)
                    self._used.touch()

    def used_at(self) -> float:
        """When a request last used it, in seconds of the epoch; 0 if that is not known."""
        for file in (self._used, self._state):
            with suppress(OSError):
                used, now = file.stat().st_mtime, time()
                if used > now + 1:  # the clock was put back: it counts from here on
                    os.utime(file)
                return min(used, now)
        return 0.0

    def _save_notes(self, notes: Notes) -> None:
        with suppress(OSError):  # a full disk must not fail what needs no disk
            files.replace(self._notes, json.dumps(asdict(notes)) + "\n")


def _typed(record: Record) -> Record:
    """Raises TypeError when a field has another type than it says: JSON may have been anything."""
    for name, kind in _types(type(record)).items():  # type: ignore[arg-type]  # a type is hashable
        if not isinstance(getattr(record, name), kind):
            raise TypeError(f"{name} is no {kind}")
    return record


@cache
def _types(record: type) -> dict[str, Any]:
    return get_type_hints(record)


def all_states(folder: Path) -> Iterator[StateFile]:
    """Of every workspace there is, by name."""
    for path in sorted(folder.glob("[!.]*.json")):
        yield StateFile(folder, path.name.removesuffix(".json"))
