"""The index files of one workspace: what qmd wrote, looked at from outside.

qmd's exit status proves little, so that this module reads its SQLite file (tables `documents`, `content`,
`documents_fts`, as qmd 2.8.3 makes them) and compares it with the commit. It never changes a row.
"""

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from memgw import files
from memgw.errors import IndexDamaged, StorageFull

COLLECTION = "_"
"""qmd indexes the collection's name as text. This one has no letter or digit: it is no word that a query could find."""


@dataclass(frozen=True)
class Identity:
    """Tells one state of an index file from every other: whoever writes to the file changes it."""

    file: str
    inode: int
    size: int
    mtime_ns: int


class IndexFolder:
    """`<data>/qmd-cache/<prefix>-<workspace>/`. An index that is built from nothing gets a new file name, so
    that a process which still reads the old one can't mix the two up."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def new_file(self) -> str:
        """A name that was never used here."""
        files.make_folder(self.path)
        return f"index-{uuid4().hex[:12]}.sqlite"

    def keep_only(self, file: str) -> None:
        """Removes all indexes but `file`. For whoever holds the workspace lock."""
        for entry in self.path.iterdir():
            if not entry.name.startswith(file):
                files.remove(entry)

    def identity(self, file: str) -> Identity | None:
        """None when there is no such file, or its write-ahead log holds what is not in the file yet."""
        try:
            seen = os.stat(self.path / file)
            log = self.path / f"{file}-wal"
            if log.exists() and log.stat().st_size:
                return None
        except OSError:
            return None
        return Identity(file, seen.st_ino, seen.st_size, seen.st_mtime_ns)

    def bytes(self) -> int:
        """What the indexes take on disk."""
        return files.size(self.path)

    def documents(self, file: str) -> int:
        """How many documents can be found. Raises IndexDamaged."""
        with self._open(file) as db:
            return _number(db, "SELECT count(*) FROM documents WHERE collection = ? AND active = 1", COLLECTION)

    def pending_embeddings(self, file: str, model: str) -> int:
        """How many different contents lack vectors of `model`. Raises IndexDamaged."""
        with self._open(file) as db:
            return _number(
                db,
                "SELECT count(DISTINCT hash) FROM documents WHERE active = 1 AND hash NOT IN"
                " (SELECT hash FROM content_vectors WHERE model = ? GROUP BY hash HAVING count(*) = max(total_chunks))",
                model,
            )

    def contents(self, file: str) -> int:
        """How many different contents it has. Raises IndexDamaged."""
        with self._open(file) as db:
            return _number(db, "SELECT count(DISTINCT hash) FROM documents WHERE active = 1")

    def listing(self, file: str) -> dict[str, str]:
        """Path → content hash of all documents that can be found. Raises IndexDamaged."""
        with self._open(file) as db:
            return dict(
                db.execute(
                    "SELECT path, hash FROM documents JOIN documents_fts_docsize USING (id) JOIN content USING (hash)"
                    " WHERE collection = ? AND active = 1",
                    (COLLECTION,),
                )
            )

    def texts(self, file: str) -> set[str]:
        """The hashes of all contents. Raises IndexDamaged."""
        with self._open(file) as db:
            return {row[0] for row in db.execute("SELECT DISTINCT hash FROM documents WHERE active = 1")}

    def embedded(self, file: str, before: str) -> set[str]:
        """The hashes of contents that had a vector `before` a moment (ISO 8601, UTC). Raises IndexDamaged."""
        with self._open(file) as db:
            rows = db.execute("SELECT hash FROM content_vectors GROUP BY hash HAVING max(embedded_at) < ?", (before,))
            return {row[0] for row in rows}

    def bodies(self, file: str, paths: Sequence[str]) -> dict[str, str]:
        """The whole text of documents, by path. Raises IndexDamaged when one is not there."""
        with self._open(file) as db:
            rows = db.execute(
                "SELECT path, doc FROM documents JOIN content USING (hash)"  # noqa: S608  only marks are put in
                f" WHERE collection = ? AND active = 1 AND path IN ({_marks(paths)})",
                (COLLECTION, *paths),
            )
            found = dict(rows)
        if len(found) != len(set(paths)):
            raise IndexDamaged("a document of the index has no content")
        return found

    def hashes(self, file: str, paths: Sequence[str]) -> dict[str, str]:
        """Path → content hash of those of `paths` that the index has. Raises IndexDamaged."""
        found: dict[str, str] = {}
        with self._open(file) as db:
            for some in _portions(paths):
                rows = db.execute(
                    "SELECT path, hash FROM documents JOIN documents_fts_docsize USING (id) JOIN content USING (hash)"  # noqa: S608
                    f" WHERE collection = ? AND active = 1 AND path IN ({_marks(some)})",
                    (COLLECTION, *some),
                )
                found.update(rows)
        return found

    def count_texts(self, file: str) -> int:
        """How many rows the text index has. Raises IndexDamaged."""
        with self._open(file) as db:
            return _number(db, "SELECT count(*) FROM documents_fts_docsize")

    def adopt(self, source: Path) -> str:
        """Copies another workspace's index here, for a start, and returns its name. Raises IndexDamaged."""
        file = self.new_file()
        try:
            shutil.copyfile(source, self.path / file)
        except FileNotFoundError as exc:
            raise IndexDamaged("the index to start from is gone") from exc
        return file

    def check(self, file: str, wanted: Mapping[str, str], *, deep: bool = False) -> set[str]:
        """Compares the index with `wanted` (path → content hash) and returns the paths that it lacks.

        Whatever it holds must be wanted, with exactly that content, and be in the text index; anything
        else raises IndexDamaged. `deep` also has SQLite and FTS5 examine their own structures.
        """
        with self._open(file) as db:
            held = dict(db.execute("SELECT path, hash FROM documents WHERE active = 1"))
            if held.items() - wanted.items():
                raise IndexDamaged("the index holds what is not in the commit")
            if _number(db, "SELECT count(*) FROM documents WHERE active = 1 AND collection <> ?", COLLECTION):
                raise IndexDamaged("the index holds another collection")
            texts = {row[0] for row in db.execute("SELECT id FROM documents_fts_docsize")}
            if texts != {row[0] for row in db.execute("SELECT id FROM documents WHERE active = 1")}:
                raise IndexDamaged("the text index does not match the documents")
            texts_by_hash = db.execute("SELECT hash, doc FROM content")
            intact = {key for key, text in texts_by_hash if sha256(str(text).encode()).hexdigest() == key}
            if not set(held.values()) <= intact:
                raise IndexDamaged("a document's text is not what its hash says")
        if deep:
            self._examine(file)
        return wanted.keys() - held.keys()

    def settle(self, file: str) -> None:
        """Moves the write-ahead log into the file, so that no later close of a reader changes the file."""
        with self._open(file, mode="rw") as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def _examine(self, file: str) -> None:
        with self._open(file, mode="rw") as db:
            if db.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                raise IndexDamaged("SQLite finds the index broken")
            db.execute("INSERT INTO documents_fts(documents_fts, rank) VALUES ('integrity-check', 0)")
            db.rollback()

    @contextmanager
    def _open(self, file: str, mode: str = "ro") -> Iterator[sqlite3.Connection]:
        uri = f"{(self.path / file).as_uri()}?mode={mode}"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=10)) as db:
                yield db
        except (sqlite3.Error, UnicodeError) as exc:
            if "disk is full" in str(exc):
                raise StorageFull("no space is left where memgw keeps its data") from exc
            raise IndexDamaged("the index can't be read") from exc


class Counts:
    """What was counted in an index, once for each state of its file. Safe to share between threads."""

    _MOST = 1024

    def __init__(self) -> None:
        self._known: dict[tuple[str, Path, Identity], int] = {}

    def documents(self, folder: IndexFolder, identity: Identity) -> int:
        """Raises IndexDamaged."""
        return self._once("documents", folder, identity, folder.documents)

    def contents(self, folder: IndexFolder, identity: Identity) -> int:
        """Raises IndexDamaged."""
        return self._once("contents", folder, identity, folder.contents)

    def pending_embeddings(self, folder: IndexFolder, identity: Identity, model: str) -> int:
        """Raises IndexDamaged."""
        count = partial(folder.pending_embeddings, model=model)
        return self._once(f"pending {model}", folder, identity, count)

    def _once(self, what: str, folder: IndexFolder, identity: Identity, count: Callable[[str], int]) -> int:
        key = (what, folder.path, identity)
        number = self._known.get(key)
        if number is None:
            number = count(identity.file)
            if len(self._known) >= self._MOST:
                self._known.clear()
            if folder.identity(identity.file) == identity:
                self._known[key] = number
        return number


def _portions(values: Sequence[str], size: int = 500) -> Iterator[Sequence[str]]:
    """SQLite takes a bounded number of parameters."""
    return (values[at : at + size] for at in range(0, len(values), size))


def _marks(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))


def _number(db: sqlite3.Connection, sql: str, *values: str) -> int:
    return int(db.execute(sql, values).fetchone()[0])
