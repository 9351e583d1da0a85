"""What is seen of an index of the real qmd from outside: that it is whole, that nobody touched it, what it holds."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import pytest

from memgw.errors import IndexDamaged
from memgw.index import COLLECTION, Identity, IndexFolder
from tests.actors import until
from tests.test_documents import Library

TEXTS = {
    "a.md": "# Alpha\n\nfirst words of alpha\n",
    "folder/b b.md": "# 记忆\n\nsecond words \0 of \"beta\" 'x' 🙂\n",
    "same.md": "# Gamma\n\nthe same words\n",
    "same too.md": "# Gamma\n\nthe same words\n",
    **{f"many/{number}.md": f"# Number {number}\n\n" + f"filler{number} words\n" * 40 for number in range(60)},
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Not to be changed: `index` copies it."""
    library = Library(tmp_path_factory.mktemp("built"))
    for name, text in TEXTS.items():
        library.write(name, text)
    library.update()
    library.index.settle(library.file)
    return library


class Index:
    """A copy of the built index, and ways to damage it."""

    def __init__(self, built: Library, folder: Path) -> None:
        shutil.copytree(built.index.path, folder)
        self.folder = IndexFolder(folder)
        self.name = built.file
        self.file = folder / built.file
        self.wanted = built.wanted()

    def check(self, *, deep: bool = False) -> set[str]:
        return self.folder.check(self.name, self.wanted, deep=deep)

    def identity(self) -> Identity | None:
        return self.folder.identity(self.name)

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.file, isolation_level=None)) as db:
            yield db

    def sql(self, *statements: str) -> None:
        with self.opened() as db:
            for statement in statements:
                db.execute(statement)

    def is_damaged(self, *, deep: bool = False) -> bool:
        try:
            self.check(deep=deep)
        except IndexDamaged as exc:
            return bool(exc.detail)
        return False


@pytest.fixture
def index(built: Library, tmp_path: Path) -> Index:
    return Index(built, tmp_path / "index")


def test_an_index_of_the_commit_lacks_nothing(index: Index) -> None:
    assert index.wanted.keys() == TEXTS.keys()
    assert index.check() == set()
    assert index.check(deep=True) == set()


def test_a_document_that_is_not_in_the_index_is_told(index: Index) -> None:
    index.wanted |= {"new.md": "0" * 64, "other.md": "1" * 64}
    assert index.check() == {"new.md", "other.md"}
    index.sql("UPDATE documents SET active = 0 WHERE path = 'a.md'")
    assert index.check(deep=True) == {"new.md", "other.md", "a.md"}
    assert index.folder.documents(index.name) == len(TEXTS) - 1


def test_a_document_that_is_not_in_the_commit_is_damage(index: Index) -> None:
    del index.wanted["a.md"]
    assert index.is_damaged()


def test_a_document_with_another_content_than_the_commits_is_damage(index: Index) -> None:
    index.wanted["a.md"] = index.wanted["same.md"]
    assert index.is_damaged()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE documents SET path = 'c.md' WHERE path = 'a.md'",
        "UPDATE documents SET hash = (SELECT hash FROM documents WHERE path = 'same.md') WHERE path = 'a.md'",
        "UPDATE documents SET collection = 'other' WHERE path = 'a.md'",
        "INSERT INTO documents (collection, path, title, hash, created_at, modified_at, active)"
        " SELECT 'other', path, title, hash, created_at, modified_at, 1 FROM documents WHERE path = 'a.md'",
        "INSERT INTO documents (collection, path, title, hash, created_at, modified_at, active)"
        " SELECT collection, 'extra.md', title, hash, created_at, modified_at, 1 FROM documents WHERE path = 'a.md'",
        "DELETE FROM documents_fts WHERE rowid = (SELECT id FROM documents WHERE path = 'a.md')",
        "DELETE FROM documents_fts",
        "INSERT INTO documents_fts(rowid, filepath, title, body) VALUES (9999, '_/x.md', 'x', 'x')",
        "UPDATE content SET doc = doc || '.' WHERE hash = (SELECT hash FROM documents WHERE path = 'a.md')",
        "UPDATE content SET doc = CAST(doc AS BLOB) WHERE hash = (SELECT hash FROM documents WHERE path = 'a.md')",
        "UPDATE content SET hash = 'x' WHERE hash = (SELECT hash FROM documents WHERE path = 'a.md')",
        "DELETE FROM content WHERE hash = (SELECT hash FROM documents WHERE path = 'a.md')",
        "DROP TABLE documents_fts",
        "DROP TABLE documents",
        "ALTER TABLE documents RENAME COLUMN active TO live",
    ],
)
def test_rows_that_are_not_what_they_have_to_be_are_damage(index: Index, statement: str) -> None:
    index.sql("PRAGMA foreign_keys = OFF", statement)
    assert index.is_damaged()


def test_what_the_engine_left_of_old_contents_is_no_damage(index: Index) -> None:
    index.sql("INSERT INTO content (hash, doc, created_at) VALUES ('wrong', 'nobody has it', 'then')")
    assert index.check(deep=True) == set()


def test_words_that_lead_to_no_document_are_found_by_a_deep_look_only(index: Index) -> None:
    index.sql("DELETE FROM documents_fts_data WHERE id > 10")
    assert not index.is_damaged()
    assert index.is_damaged(deep=True)


@pytest.mark.parametrize("content", [b"", b"no database", bytes(100_000), b"SQLite format 3\0", os.urandom(100_000)])
def test_a_file_that_is_no_database_is_damage(index: Index, content: bytes) -> None:
    index.file.write_bytes(content)
    assert index.is_damaged()
    for look in (index.folder.documents, index.folder.contents, index.folder.count_texts):
        with pytest.raises(IndexDamaged):
            look(index.name)
    with pytest.raises(IndexDamaged):
        index.folder.bodies(index.name, ["a.md"])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
def test_a_file_that_was_cut_off_is_damage(index: Index, share: float) -> None:
    os.truncate(index.file, int(index.file.stat().st_size * share))
    assert index.is_damaged(deep=True)


def test_a_file_that_is_gone_is_damage(index: Index) -> None:
    index.file.unlink()
    assert index.is_damaged()
    assert index.is_damaged(deep=True)
    assert not index.file.exists()
    index.file.mkdir()
    assert index.is_damaged()
    shutil.rmtree(index.folder.path)
    assert index.is_damaged()
    with pytest.raises(IndexDamaged):
        index.folder.settle(index.name)


def found_by(index: Index) -> list[tuple[str, str, list[str]]]:
    """All that an answer is made of: paths, texts, and which documents the words lead to."""
    with index.opened() as db:
        rows = db.execute("SELECT path, doc FROM documents JOIN content USING (hash) WHERE active = 1 ORDER BY path")
        return [
            (
                path,
                doc,
                sorted(
                    hit[0]
                    for hit in db.execute(
                        "SELECT path FROM documents_fts JOIN documents ON id = documents_fts.rowid"
                        " WHERE documents_fts MATCH ?",
                        ('"' + path.split("/")[-1].removesuffix(".md") + '"',),
                    )
                ),
            )
            for path, doc in rows.fetchall()
        ]


def test_what_passes_a_deep_look_gives_right_answers_wherever_bytes_were_damaged(index: Index) -> None:
    right, whole = found_by(index), index.file.read_bytes()
    dice = Random(20260301)
    damaged = 0
    for _ in range(120):
        broken = bytearray(whole)
        at = dice.randrange(len(whole))
        length = dice.choice([1, 4, 100, 4096])
        broken[at : at + length] = dice.randbytes(len(broken[at : at + length]))
        index.file.write_bytes(broken)
        if index.is_damaged(deep=True):
            damaged += 1
        else:
            assert found_by(index) == right, (at, length)
    assert damaged > 40


def test_a_text_that_is_no_utf_8_is_damage(index: Index) -> None:
    index.sql("UPDATE documents SET path = CAST(x'ff2e6d64' AS TEXT) WHERE path = 'a.md'")
    assert index.is_damaged()
    index.sql("UPDATE documents SET path = 'a.md' WHERE path = CAST(x'ff2e6d64' AS TEXT)")
    assert not index.is_damaged()
    index.sql(
        "UPDATE content SET doc = CAST(x'ff' AS TEXT) WHERE hash = (SELECT hash FROM documents WHERE path = 'a.md')"
    )
    assert index.is_damaged()
    with pytest.raises(IndexDamaged):
        index.folder.bodies(index.name, ["a.md"])


def test_the_identity_is_that_of_the_file(index: Index) -> None:
    seen = index.file.stat()
    assert index.identity() == Identity(index.name, seen.st_ino, seen.st_size, seen.st_mtime_ns)
    assert index.folder.identity("nothing.sqlite") is None
    assert IndexFolder(index.folder.path / "nowhere").identity(index.name) is None


def test_looking_does_not_change_the_identity(index: Index) -> None:
    before = index.identity()
    assert before
    index.check()
    index.check(deep=True)
    index.folder.documents(index.name)
    index.folder.pending_embeddings(index.name, "a model")
    index.folder.bodies(index.name, ["a.md"])
    index.folder.settle(index.name)
    index.folder.bytes()
    assert index.identity() == before


def test_searching_and_other_readers_do_not_change_the_identity(built: Library) -> None:
    before = built.index.identity(built.file)
    assert before
    assert built.search("alpha") == {"a.md"}
    read = (
        "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1]).execute('SELECT count(*) FROM documents').fetchone())"
    )
    command = [sys.executable, "-c", read, str(built.index.path / built.file)]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"{len(TEXTS)}\n"
    assert built.search("nowhere to be found") == set()
    assert built.index.identity(built.file) == before


def test_an_update_changes_the_identity(tmp_path: Path) -> None:
    library = Library(tmp_path)
    identities = []
    for text in ("one", "two", "one"):
        library.write("a.md", text)
        library.update()
        library.index.settle(library.file)
        identities.append(library.index.identity(library.file))
    assert None not in identities
    assert len(set(identities)) == 3


def test_a_write_by_anybody_changes_the_identity(index: Index) -> None:
    before = index.identity()
    index.sql("UPDATE documents SET title = 'x' WHERE path = 'a.md'")
    assert index.identity() != before
    before = index.identity()
    assert before
    probe = index.file.with_name("probe")
    assert until(lambda: probe.write_bytes(b"") == 0 and probe.stat().st_mtime_ns > before.mtime_ns)  # the clock's tick
    index.file.write_bytes(index.file.read_bytes())
    assert index.identity() != before


def test_a_copy_in_its_place_has_another_identity(index: Index) -> None:
    before = index.identity()
    copy = index.file.with_name("copy")
    shutil.copy2(index.file, copy)
    os.replace(copy, index.file)
    assert index.identity() != before


def test_what_waits_in_the_write_ahead_log_has_no_identity_until_it_is_settled(index: Index, tmp_path: Path) -> None:
    with index.opened() as db:
        assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        db.execute("UPDATE documents SET title = 'x' WHERE path = 'a.md'")
        assert index.identity() is None
        shutil.copytree(index.folder.path, tmp_path / "killed")  # as a writer that was killed leaves it
        index.folder.settle(index.name)
        settled = index.identity()
        assert settled is not None
    assert index.identity() == settled
    killed = IndexFolder(tmp_path / "killed")
    assert killed.identity(index.name) is None
    killed.settle(index.name)
    assert killed.identity(index.name) is not None
    with closing(sqlite3.connect(tmp_path / "killed" / index.name)) as db:
        assert db.execute("SELECT title FROM documents WHERE path = 'a.md'").fetchone() == ("x",)
    assert killed.check(index.name, index.wanted, deep=True) == set()


def test_a_log_that_belongs_to_no_file_or_is_empty_does_no_harm(index: Index) -> None:
    before = index.identity()
    log = index.file.with_name(f"{index.name}-wal")
    log.touch()
    assert index.identity() == before
    log.write_bytes(b"garbage")
    assert index.identity() is None


def test_bodies_are_the_texts_to_the_letter(index: Index) -> None:
    assert index.folder.bodies(index.name, list(TEXTS)) == TEXTS
    assert index.folder.bodies(index.name, ["a.md", "a.md"]) == {"a.md": TEXTS["a.md"]}
    assert index.folder.bodies(index.name, []) == {}


@pytest.mark.parametrize("path", ["nothing.md", "A.md", "%", "' OR 1=1 --", "_/a.md", "記.md", "bad\udcff.md"])
def test_a_body_that_is_not_there_is_damage(index: Index, path: str) -> None:
    with pytest.raises(IndexDamaged):
        index.folder.bodies(index.name, ["a.md", path])


def test_a_body_of_a_document_that_was_removed_is_not_there(index: Index) -> None:
    index.sql("UPDATE documents SET active = 0 WHERE path = 'a.md'")
    with pytest.raises(IndexDamaged):
        index.folder.bodies(index.name, ["a.md"])


def test_documents_are_counted_and_contents_without_a_vector(index: Index) -> None:
    assert index.folder.documents(index.name) == len(TEXTS)
    assert index.folder.pending_embeddings(index.name, "a model") == len(TEXTS) - 1  # two have the same content
    index.sql(
        "UPDATE documents SET active = 0 WHERE path LIKE 'many/%'",
        "UPDATE documents SET active = 0 WHERE path = 'same.md'",
    )
    assert index.folder.documents(index.name) == 3
    assert index.folder.pending_embeddings(index.name, "a model") == 3
    index.sql(
        "INSERT INTO content_vectors (hash, seq, pos, model, embedded_at) SELECT hash, 0, 0, 'a model', 't'"
        " FROM documents"
        " WHERE path = 'same.md'"
    )
    assert index.folder.pending_embeddings(index.name, "a model") == 2


def test_a_new_index_gets_a_name_that_was_never_used(tmp_path: Path) -> None:
    folder = IndexFolder(tmp_path / "qmd-cache" / "ws-main")
    names = {folder.new_file() for _ in range(50)}
    assert len(names) == 50
    assert all(name.startswith("index-") and name.endswith(".sqlite") for name in names)
    assert os.listdir(folder.path) == []


def test_all_but_the_kept_index_is_removed(index: Index) -> None:
    before = set(os.listdir(index.folder.path))
    assert index.name in before
    for name in (f"{index.name}-wal", f"{index.name}-shm"):
        (index.folder.path / name).touch()
    for name in ("index-0.sqlite", "index-0.sqlite-wal", "other", ".hidden", f"x{index.name}"):
        (index.folder.path / name).touch()
    (index.folder.path / "folder" / "deep").mkdir(parents=True)
    index.folder.keep_only(index.name)
    left = set(os.listdir(index.folder.path))
    assert left == {name for name in before if name.startswith(index.name)} | {f"{index.name}-wal", f"{index.name}-shm"}
    assert index.check() == set()


def test_the_size_is_that_of_all_files(index: Index) -> None:
    (index.folder.path / "more").write_bytes(bytes(1000))
    assert index.folder.bytes() == sum(path.stat().st_size for path in index.folder.path.iterdir())
    assert index.folder.bytes() > 1000


def test_the_collections_name_is_no_word_that_finds_everything(built: Library) -> None:
    assert COLLECTION == "_"
    assert built.search("_") == set()
