"""Baseline (b), the floor: nobody can know the tip without `git ls-remote`, nor find without the query itself."""

import re
import shutil
import sqlite3
import subprocess
import time
from pathlib import Path

from memgw.index import COLLECTION

LIMIT = 50
"""What `qmd search -n 10` asks of its index: five times as much as it shows."""

# dist/store.js, searchFTS, word by word
SQL = f"""
    WITH fts_matches AS (
      SELECT rowid, bm25(documents_fts, 1.5, 4.0, 1.0) as bm25_score
      FROM documents_fts
      WHERE documents_fts MATCH ?
      ORDER BY bm25_score ASC
      LIMIT {LIMIT * 10}
    )
    SELECT
      'qmd://' || d.collection || '/' || d.path as filepath,
      d.collection || '/' || d.path as display_path,
      d.title,
      content.doc as body,
      d.hash,
      fm.bm25_score
    FROM fts_matches fm
    JOIN documents d ON d.id = fm.rowid
    JOIN content ON content.hash = d.hash
    WHERE d.active = 1
    AND d.collection = ? ORDER BY fm.bm25_score ASC LIMIT ?
"""  # noqa: S608  a constant is put in


class Floor:
    """A copy of an index of qmd's, open in this process, and the remote that it is of."""

    def __init__(self, index: Path, copy: Path, remote: str) -> None:
        self._remote = remote
        with sqlite3.connect(index) as source:
            source.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        source.close()
        shutil.copy(index, copy)
        self._db = sqlite3.connect(f"{copy.as_uri()}?mode=ro", uri=True)

    def ask(self, text: str) -> tuple[float, str, list[tuple[str, float]]]:
        """Seconds, the tip, and paths with scores."""
        start = time.perf_counter()
        said = subprocess.run(["git", "ls-remote", self._remote, "refs/heads/main"], stdout=subprocess.PIPE, check=True)
        rows = self._db.execute(SQL, (fts_query(text), COLLECTION, LIMIT)).fetchall()
        taken = time.perf_counter() - start
        return taken, said.stdout.split()[0].decode(), [_hit(row) for row in rows]

    def search(self, text: str) -> list[tuple[str, float]]:
        """What is right, to compare others with."""
        return [_hit(row) for row in self._db.execute(SQL, (fts_query(text), COLLECTION, LIMIT))]

    def close(self) -> None:
        self._db.close()


def fts_query(text: str) -> str:
    """qmd's buildFTS5Query for plain words: each as a beginning, Chinese as a phrase of its characters."""
    return " AND ".join(
        f'"{" ".join(word)}"' if re.match("[\u4e00-\u9fff]", word) else f'"{word}"*' for word in text.split()
    )


def _hit(row: tuple[str, str, str, str, str, float]) -> tuple[str, float]:
    size = abs(row[5])
    return row[1].removeprefix(f"{COLLECTION}/"), size / (1 + size)
