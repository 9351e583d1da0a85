"""An index that was made by differences is, row by row, the one that qmd builds from nothing over a fresh checkout."""

import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from hashlib import sha1
from pathlib import Path
from random import Random
from typing import Any

import pytest

from memgw import documents
from memgw.app import create_app
from memgw.config import Config
from tests.actors import HostProxy, Upstream, WarmHost, host_proxy, served
from tests.conftest import Client
from tests.test_documents import Library

type_of_tree = dict[str, tuple[str, bytes]]
REGULAR, EXECUTABLE, SYMLINK, SUBMODULE = "100644", "100755", "120000", "160000"

NAMES = [
    "a.md", "b.md", "a b.md", "a-b.md", "A B.md", "a_b.md", "a--b.md", "notes/one.md", "notes/two.md", "notes/Two.md",
    "Notes/two.md", "notes", "notes.md", "notes/deep/er/three.md", "x.md", "x.md/in.md", "x.md/in.md/deeper.md", "x",
    "记忆/三月.md", "记忆/三月 计划.md", "记忆.md", "x#y.md", "q?.md", "q?index=ws-main.md", "50%.md", "a%20b.md",
    "a b.md.md", "[br].md", "back\\slash.md", "c:x.md", "bad\udcff.md", "new\nline.md", "é.md", "e\u0301.md",
    "\ufeff.md", " lead.md", "trail .md", "Read.md", "read.md", "READ.md", "vendor/v.md", ".hidden/h.md", ".hidden.md",
    "node_modules/n.md", "notes/dist/d.md", "code.py", "x.MD", "x.markdown", "🙂/🙂.md", "!not.md", "-dash.md",
]  # fmt: skip

CONTENTS = [
    b"# Title\n\nplain text\n", b"no title at all", b"# Other title\r\n\r\nwith CRLF\r\n",
    b"\xef\xbb\xbf# BOM\n\ntext\n", b"latin \xfc\xff\n", b"cut \xe2\x82", b"nul \0 inside\n",
    "# 记忆\n\n发布窗口是每周二。\n".encode(),
    "混合 mixed 死信队列 text\n".encode(), "🙂👩‍👧\n".encode(), b"---\ntitle: front\n---\n\ntext\n", b"#\n",
    b"## Second\n", b"same words\n", b"same words\n", b"long line " * 500, b"line\n" * 500,
    "é e\u0301 \u00df\n".encode(),
]  # fmt: skip

BLANK = [b"", b"\n", b" \t\r\n", b"\xef\xbb\xbf", "\u3000\u2028\n".encode()]

TARGETS = [b"a.md", b"notes", b"..", b"/etc", b"nowhere", b"../../state", b"/etc/hostname"]


@dataclass
class Author:
    """Changes a tree at random, as people and tools do."""

    dice: Random
    tree: type_of_tree = field(default_factory=dict)

    def put(self, path: str, mode: str, content: bytes) -> None:
        """Nothing stays that the path would be below, or that would be below it."""
        for other in list(self.tree):
            if other.startswith(f"{path}/") or path.startswith(f"{other}/"):
                del self.tree[other]
        self.tree[path] = (mode, content)

    def content(self) -> bytes:
        text = self.dice.choice(CONTENTS)
        return text if self.dice.random() < 0.3 else text + f"number{self.dice.randrange(1000)}\n".encode()

    def any_name(self) -> str:
        return self.dice.choice(NAMES)

    def any_file(self) -> str:
        return self.dice.choice(sorted(self.tree)) if self.tree else self.any_name()

    def add(self) -> None:
        self.put(self.any_name(), REGULAR, self.content())

    def edit(self) -> None:
        path = self.any_file()
        self.put(path, REGULAR, self.content())

    def rename(self) -> None:
        mode, content = self.tree.pop(self.any_file(), (REGULAR, self.content()))
        self.put(self.any_name(), mode, content)

    def rename_in_case_only(self) -> None:
        path = self.any_file()
        mode, content = self.tree.pop(path, (REGULAR, self.content()))
        self.put(path.swapcase().replace(".MD", ".md"), mode, content)

    def copy(self) -> None:
        self.put(self.any_name(), *self.tree.get(self.any_file(), (REGULAR, self.content())))

    def swap(self) -> None:
        one, other = self.any_file(), self.any_file()
        if one in self.tree and other in self.tree:
            self.tree[one], self.tree[other] = self.tree[other], self.tree[one]

    def delete(self) -> None:
        self.tree.pop(self.any_file(), None)

    def blank(self) -> None:
        self.put(self.any_file(), REGULAR, self.dice.choice(BLANK))

    def chmod(self) -> None:
        path = self.any_file()
        mode, content = self.tree.get(path, (REGULAR, self.content()))
        if mode in (REGULAR, EXECUTABLE):
            self.put(path, REGULAR if mode == EXECUTABLE else EXECUTABLE, content)

    def link(self) -> None:
        self.put(self.any_file(), SYMLINK, self.dice.choice(TARGETS))

    def nest(self) -> None:
        self.put(f"{self.any_file()}/in.md", REGULAR, self.content())

    def submodule(self) -> None:
        self.put(self.dice.choice(["module", "x.md", "notes"]), SUBMODULE, b"1" * 40)

    def work(self) -> None:
        acts = [self.add] * 4 + [self.edit] * 4 + [self.rename] * 3 + [self.delete] * 2 + [self.blank] * 2
        acts += [self.rename_in_case_only, self.copy, self.swap, self.chmod, self.link, self.nest]
        for act in self.dice.choices(acts, k=self.dice.randint(1, 8)):
            act()
        if self.dice.random() < 0.1:
            self.submodule()


def texts(tree: type_of_tree) -> dict[str, str]:
    """The documents that qmd can take in."""
    found = {}
    for path, (mode, content) in tree.items():
        text = documents.text(content) if mode in (REGULAR, EXECUTABLE) else None
        if text is not None and documents.wanted(path) and documents.readable(path):
            found[path] = text
    return found


def blobs(tree: type_of_tree) -> dict[str, bytes]:
    """Of the files that could be documents."""
    return {path: content for path, (mode, content) in tree.items() if mode in (REGULAR, EXECUTABLE)}


def difference(old: type_of_tree, new: type_of_tree) -> dict[str, str | None]:
    """What the host has to be told of, at most and at least."""
    before, after = texts(old), texts(new)
    gone: dict[str, str | None] = dict.fromkeys(before.keys() - after.keys())
    return gone | {path: text for path, text in after.items() if blobs(old).get(path) != blobs(new)[path]}


def plain(*names: str, text: str = "needle") -> type_of_tree:
    return {name: (REGULAR, f"# Title of {name}\n\n{text} in {name}\n".encode(errors="replace")) for name in names}


def dump(file: Path, *, active_only: bool = False) -> dict[str, Any]:
    """All that an index holds, but for its numbers of rows, its times, and where its files were."""
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as db:
        db.execute("CREATE VIRTUAL TABLE temp.words USING fts5vocab('main', 'documents_fts', 'instance')")
        rows = db.execute("SELECT collection, path, title, hash, active FROM documents").fetchall()
        content = db.execute("SELECT hash, doc FROM content").fetchall()
        if active_only:
            rows = [row for row in rows if row[4]]
            content = [row for row in content if row[0] in {row[3] for row in rows}]
        return {
            "documents": sorted(rows),
            "content": sorted(content),
            "texts": sorted(
                db.execute(
                    "SELECT path, documents_fts.filepath, documents_fts.title, body"
                    " FROM documents_fts LEFT JOIN documents ON id = documents_fts.rowid"
                )
            ),
            "words": sorted(
                db.execute("SELECT path, term, col, offset FROM temp.words LEFT JOIN documents ON id = doc")
            ),
            "collections": sorted(
                db.execute(
                    "SELECT name, pattern, ignore_patterns, include_by_default, update_command, context"
                    " FROM store_collections"
                )
            ),
            "config": sorted(db.execute("SELECT key, value FROM store_config WHERE key <> 'config_hash'")),
            "vectors": sorted(db.execute("SELECT hash FROM content_vectors")),
        }


def listing(upstream: Upstream, commit: str) -> dict[str, tuple[str, str]]:
    """Path → mode and object of a commit, as Git lists it."""
    command = ["git", f"--git-dir={upstream.path}", "ls-tree", "-r", "-z", "--full-tree", commit]
    out = subprocess.run(command, capture_output=True, check=True).stdout
    found = {}
    for entry in out.split(b"\0")[:-1]:
        meta, _, path = entry.partition(b"\t")
        mode, _, oid = meta.decode().split()
        found[os.fsdecode(path)] = (mode, oid)
    return found


def lie(root: Path) -> dict[str, tuple[str, str]]:
    """The same of what lies in a folder; an empty folder is taken for a submodule's."""
    found = {}
    for place, folders, names in os.walk(root):
        inside = os.path.relpath(place, root)
        for name in [*folders, *names]:
            path = os.path.join(place, name)
            relative = name if inside == "." else f"{inside}/{name}"
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                found[relative] = (SYMLINK, blob_of(os.fsencode(os.readlink(path))))
            elif stat.S_ISREG(mode) and relative != ".git":
                found[relative] = (EXECUTABLE if mode & 0o100 else REGULAR, blob_of(Path(path).read_bytes()))
            elif stat.S_ISDIR(mode) and not os.listdir(path):
                found[relative] = (SUBMODULE, "1" * 40)
    return found


def blob_of(content: bytes) -> str:
    return sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@dataclass
class World:
    """A gateway whose host is listened to, the remote, and the real qmd as the one who knows."""

    upstream: Upstream
    client: Client
    data: Path
    proxy: HostProxy
    library: Library
    trees: dict[str, type_of_tree] = field(default_factory=dict)

    def push(self, tree: type_of_tree, branch: str = "main", parent: str | None = "") -> str:
        commit = self.upstream.push_tree(branch, tree, parent=parent)
        self.trees[commit] = dict(tree)
        return commit

    def state(self, branch: str = "main") -> Path:
        return self.data / "state" / f"{branch.replace('/', '-')}.json"

    def stamp(self, branch: str = "main") -> dict[str, Any]:
        stamp = json.loads(self.state(branch).read_text())["stamp"]
        assert isinstance(stamp, dict)
        return stamp

    def index(self, branch: str = "main") -> Path:
        name: str = self.stamp(branch)["identity"]["file"]
        return self.data / "qmd-cache" / f"ws-{branch.replace('/', '-')}" / name

    def change_stamp(self, **fields: Any) -> None:
        """What is stamped, with the file's identity as it is now."""
        state, seen = json.loads(self.state().read_text()), self.index().stat()
        identity = {"inode": seen.st_ino, "size": seen.st_size, "mtime_ns": seen.st_mtime_ns}
        state["stamp"] |= fields
        state["stamp"]["identity"] |= identity
        self.state().write_text(json.dumps(state))

    def sync(self, branch: str = "main") -> dict[str, str | None]:
        """Returns what the host was told of."""
        del self.proxy.asked[:]
        answer = self.client.sync(branch=branch)
        assert answer["commit_hash"] == self.upstream.tip(branch)
        return self.proxy.sent()

    def expected(self, commit: str) -> dict[str, Any]:
        """What the real qmd makes of a fresh checkout."""
        shutil.rmtree(self.library.tree)
        self.library.tree.mkdir()
        for path, (mode, content) in self.trees[commit].items():
            file = self.library.tree / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if mode == SYMLINK:
                os.symlink(content, os.fsencode(file))
            elif mode == SUBMODULE:
                file.mkdir()
            else:
                file.write_bytes(content)
        self.library.file = self.library.index.new_file()
        self.library.update()
        return dump(self.library.index.path / self.library.file)

    def assert_right(self, branch: str = "main", *, active_only: bool = False) -> None:
        commit = self.upstream.tip(branch)
        assert commit
        expected, found = self.expected(commit), dump(self.index(branch), active_only=active_only)
        for table, rows in expected.items():
            assert found[table] == rows, table
        known = texts(self.trees[commit])
        assert [row[1] for row in found["documents"]] == sorted(known)  # qmd and we agree on what a document is
        assert self.stamp(branch)["documents"] == len(known)
        lying, listed = lie(self.data / "workspaces" / branch.replace("/", "-")), listing(self.upstream, commit)
        unreadable = {path for path in listed if documents.wanted(path) and not documents.readable(path)}
        if active_only:  # a folder that only held such a file is left
            above = {str(folder) for path in unreadable for folder in Path(path).parents}
            lying = {path: seen for path, seen in lying.items() if seen[0] != SUBMODULE or path not in above}
        assert lying | {path: listed[path] for path in unreadable} == listed
        assert list(self.index(branch).parent.glob("*.sqlite")) == [self.index(branch)]


@pytest.fixture
def world(environ: dict[str, str], upstream: Upstream, data: Path, proxy: HostProxy, tmp_path: Path) -> World:
    environ["QMD_ENGINE"] = "auto"
    proxy.serve(data)
    root = tmp_path / "oracle"
    root.mkdir()
    client = Client(create_app(Config.load(environ), environ))
    return World(upstream, client, data, proxy, Library(root))


@pytest.mark.parametrize("seed", [1, 2, 102, 116])
def test_whatever_is_pushed_the_difference_leads_to_the_index_that_qmd_builds(world: World, seed: int) -> None:
    author = Author(Random(seed))
    for _ in range(10):
        author.add()
    world.push(author.tree)
    assert world.sync() == texts(author.tree)
    world.assert_right()
    file = world.index()
    for number in range(11):
        before = dict(author.tree)
        dice = author.dice.random()
        if number and dice < 0.15:
            older = author.dice.choice(sorted(world.trees))
            world.upstream.move("main", older)
            author.tree = dict(world.trees[older])
        elif dice < 0.3:
            author.tree = {}
            for _ in range(author.dice.randint(0, 12)):
                author.add()
            world.push(author.tree, parent=None)
        else:
            author.work()
            world.push(author.tree)
        told = world.sync()
        assert told == difference(before, author.tree)
        world.assert_right()
        assert world.index() == file
        assert world.proxy.of("update") == []


@pytest.mark.parametrize("seed", [5])
def test_the_command_line_and_the_host_may_take_turns(world: World, seed: int, environ: dict[str, str]) -> None:
    environ = environ | {"QMD_ENGINE": "cli"}
    clients = [world.client, Client(create_app(Config.load(environ), environ))]
    author = Author(Random(seed))
    for _ in range(8):
        for _ in range(2):
            author.work()
        world.push(author.tree)
        world.client = author.dice.choice(clients)
        world.sync()
        world.assert_right(active_only=True)


def test_a_new_branch_starts_from_the_one_it_left_and_is_told_only_what_differs(world: World) -> None:
    main = plain(*(f"notes/{number}.md" for number in range(60)))
    base = world.push(main)
    assert len(world.sync()) == 60
    before = world.index().read_bytes(), world.stamp()
    mine = main | plain("notes/3.md", "mine.md", text="changed needle")
    del mine["notes/4.md"]
    world.push(mine, branch="task/x", parent=base)
    assert world.sync("task/x") == difference(main, mine)
    world.assert_right("task/x")
    world.assert_right("main")
    assert (world.index().read_bytes(), world.stamp()) == before
    assert world.client.paths("changed", branch="task/x", limit=50) != []
    assert world.client.paths("changed") == []
    world.push(main, branch="task/y", parent=base)  # nothing differs at all
    assert world.sync("task/y") == {}
    world.assert_right("task/y")


def test_a_new_branch_starts_from_the_nearest_that_is_there(world: World) -> None:
    first = plain(*(f"{number}.md" for number in range(30)))
    root = world.push(first)
    world.sync()
    second = first | plain(*(f"second {number}.md" for number in range(30)))
    middle = world.push(second, branch="task/near", parent=root)
    world.sync("task/near")
    mine = second | plain("mine.md")
    world.push(mine, branch="task/mine", parent=middle)
    assert world.sync("task/mine") == difference(second, mine)
    world.assert_right("task/mine")
    unrelated = first | plain("unrelated.md")
    world.push(unrelated, branch="task/unrelated", parent=None)
    assert world.sync("task/unrelated") == difference(first, unrelated)  # the default branch's, for want of a nearer
    world.assert_right("task/unrelated")
    with closing(sqlite3.connect(world.index("task/near"))) as db:
        db.execute("UPDATE documents SET title = 'Spoilt' WHERE path = '3.md'")
        db.commit()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    again = second | plain("again.md")
    world.push(again, branch="task/again", parent=middle)
    assert world.sync("task/again") == texts(again)  # what is stamped of the nearest is not true
    world.assert_right("task/again")


def test_when_most_of_a_large_branch_differs_its_index_is_made_from_nothing(world: World) -> None:
    old = plain(*(f"{number}.md" for number in range(210)))
    world.push(old)
    world.sync()
    file = world.index()
    new = old | plain(*(f"{number}.md" for number in range(200)), text="changed")
    world.push(new)
    assert len(world.sync()) == 200
    assert world.index() == file
    newer = new | plain(*(f"{number}.md" for number in range(201)), text="changed again")
    world.push(newer)
    assert len(world.sync()) == 210
    assert world.index() != file
    world.assert_right()


def test_many_large_documents_come_in_pieces(world: World) -> None:
    tree = {f"{number}.md": (REGULAR, b"# Large\n\nneedle\n%d\n" % number + b"- " * 300_000) for number in range(8)}
    tree["empty.md"] = (REGULAR, b"")
    world.push(tree)
    assert world.sync() == texts(tree)
    assert len(world.proxy.of("apply")) > 2
    assert max(len(json.dumps(request)) for request in world.proxy.of("apply")) < 4_000_000
    world.assert_right()


def remake_the_mirror(world: World) -> None:
    shutil.rmtree(world.data / "git-mirror")


def forget_the_commit(world: World) -> None:
    """As `git gc` does, once nothing leads to a commit any more."""
    mirror = world.data / "git-mirror" / "repo.git"
    for ref in (mirror / "refs" / "memgw").iterdir():
        ref.unlink()
    shutil.rmtree(mirror / "worktrees")
    subprocess.run(["git", f"--git-dir={mirror}", "gc", "--prune=now", "--quiet"], check=True)


def lose_a_text_row(world: World) -> None:
    with closing(sqlite3.connect(world.index())) as db:
        db.execute("DELETE FROM documents_fts WHERE rowid = (SELECT id FROM documents WHERE path = '3.md')")
        db.commit()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    world.change_stamp()


def lose_a_document(world: World) -> None:
    with closing(sqlite3.connect(world.index())) as db:
        db.execute("DELETE FROM documents WHERE path = '3.md'")
        db.commit()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    world.change_stamp()


DOUBTS: dict[str, Callable[[World], object]] = {
    "the mirror was made again": remake_the_mirror,
    "the old commit is gone from the mirror": forget_the_commit,
    "another qmd made the index": lambda world: world.change_stamp(qmd="2.0.0"),
    "another collection was indexed": lambda world: world.change_stamp(collection="main"),
    "more documents are stamped": lambda world: world.change_stamp(documents=13),
    "fewer documents are stamped": lambda world: world.change_stamp(documents=11),
    "documents are said to have been left out": lambda world: world.change_stamp(skipped=1),
    "the index lost a text row": lose_a_text_row,
    "the index lost a document": lose_a_document,
    "the index was touched": lambda world: os.utime(world.index()),
    "the index is gone": lambda world: world.index().unlink(),
    "the index is garbage": lambda world: world.index().write_bytes(b"garbage"),
    "the state is gone": lambda world: world.state().unlink(),
}


@pytest.mark.parametrize("doubt", DOUBTS.values(), ids=DOUBTS)
def test_in_doubt_the_index_is_made_from_nothing(
    world: World, environ: dict[str, str], doubt: Callable[[World], object]
) -> None:
    """QMD_UPDATE_ON_LATEST_QUERY=false does not count the documents beforehand: left to the difference."""
    environ["QMD_UPDATE_ON_LATEST_QUERY"] = "false"
    world.client = Client(create_app(Config.load(environ), environ))
    tree = plain(*(f"{number}.md" for number in range(12)))
    world.push(tree)
    world.sync()
    file = world.index()
    doubt(world)
    tree = tree | plain("7.md", "new.md", text="changed")
    del tree["8.md"]
    world.push(tree, parent=None)
    told = world.sync()
    assert {path: told.get(path) for path in texts(tree)} == texts(tree)
    assert world.index() != file
    world.assert_right()


def test_what_qmd_cant_take_in_is_counted_as_it_comes_and_goes(world: World) -> None:
    tree = plain("a.md", "back\\slash.md", "bad\udcff.md", "c:x.md")
    steps: list[tuple[type_of_tree, int]] = [
        (tree, 3),
        (tree | plain("b.md"), 3),
        (tree | plain("a.md", "c:x.md", text="changed"), 3),
        (plain("a.md", "c:x.md"), 1),
        (plain("a.md", "c/x.md"), 0),
        (plain("a.md", "c\\x.md", "x\\.d\\y.md", "q\\..\\a.md"), 3),
        ({"a.md": (REGULAR, b""), "c:x.md": (SYMLINK, b"a.md"), "c\\x.md": (REGULAR, b"")}, 1),
        (plain("a.md"), 0),
    ]
    files = set()
    for number, (files_now, skipped) in enumerate(steps):
        commit = world.push(files_now)
        world.sync()
        assert world.stamp()["skipped"] == skipped, number
        assert sorted(row[1] for row in dump(world.index())["documents"]) == sorted(texts(files_now)), number
        assert world.stamp()["commit"] == commit
        files.add(world.index())
    assert len(files) == 1


MANY = plain(*(f"notes/{number}.md" for number in range(450)))
"""More than one batch."""


def assert_answers(world: World, tree: type_of_tree) -> None:
    answer = world.client.query("needle", limit=50, full=True)
    assert answer["commit_hash"] == world.upstream.tip("main")
    assert len(answer["results"]) == min(50, len(tree))
    for hit in answer["results"]:
        assert hit["body"].encode() == tree[hit["path"]][1]


def test_a_host_that_is_killed_in_the_middle_of_a_change_leaves_nothing_wrong(world: World, own_host: WarmHost) -> None:
    world.proxy.host = own_host

    def killed(request: dict[str, Any]) -> bytes | None:
        if len(world.proxy.of("apply")) == 2 and request["op"] == "apply":
            threading.Timer(0.02, own_host.process.send_signal, [signal.SIGKILL]).start()
        return None

    world.push(MANY)
    world.proxy.answer = killed
    assert_answers(world, MANY)
    assert own_host.process.wait(10) == -signal.SIGKILL
    world.proxy.answer = lambda request: None
    world.assert_right(active_only=True)
    own_host.start()
    changed = MANY | plain("notes/1.md", text="changed needle")
    world.push(changed)
    assert world.sync() == difference(MANY, changed)
    world.assert_right(active_only=True)


def test_a_change_that_outlasts_the_deadline_is_not_believed_afterwards(world: World, environ: dict[str, str]) -> None:
    world.push(MANY)
    world.sync()
    file = world.index()
    slow = Client(create_app(Config.load(environ | {"QMD_TIMEOUT_SECONDS": "2"}), environ))
    late = threading.Event()

    def held_up(request: dict[str, Any]) -> bytes | None:
        if request["op"] == "apply":
            late.wait(10)
        return None

    world.proxy.answer = held_up
    changed = MANY | plain(*(f"notes/{number}.md" for number in range(100)), text="changed needle")
    world.push(changed)
    assert slow.problem("/query", {"query": "needle"}) == (504, "deadline_exceeded")
    assert json.loads(world.state().read_text())["stamp"] is None
    world.proxy.answer = lambda request: None
    late.set()  # the host goes on with what was asked, in a file that nobody wants any more
    assert_answers(world, changed)
    assert world.index() != file
    world.assert_right()


def test_a_gateway_that_is_killed_in_the_middle_of_a_change_leaves_nothing_wrong(
    world: World, environ: dict[str, str], tmp_path: Path
) -> None:
    world.push(MANY)
    world.sync()
    file = world.index()
    changed = MANY | plain(*(f"notes/{number}.md" for number in range(150)), text="changed needle")
    world.push(changed)
    at_work, late = threading.Event(), threading.Event()

    def held_up(request: dict[str, Any]) -> bytes | None:
        if request["op"] == "apply":
            at_work.set()
            late.wait(10)
        return None

    world.proxy.answer = held_up
    with served(environ, tmp_path, measured=False) as server:
        asking = threading.Thread(target=in_vain, args=(server.query,))
        asking.start()
        assert at_work.wait(10)
        server.kill_all()
        asking.join()
        world.proxy.answer = lambda request: None
        late.set()
        assert_answers(world, changed)
    assert world.index() != file
    world.assert_right()


def in_vain(query: Callable[[str], object]) -> None:
    try:
        query("needle")
    except OSError:
        return
    raise AssertionError("an answer, though its server was killed")


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def test_a_disk_that_is_full_under_the_host_is_507_and_the_next_answer_is_right(
    environ: dict[str, str], upstream: Upstream, warm_host: WarmHost, tmp_path: Path
) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(place)], capture_output=True).returncode:
        pytest.skip("only root may mount a small file system here")
    try:
        environ |= {"MEMGW_DATA_DIR": str(place / "data"), "QMD_ENGINE": "auto"}
        root = tmp_path / "oracle"
        root.mkdir()
        with host_proxy(warm_host) as proxy:
            proxy.serve(place / "data")
            client = Client(create_app(Config.load(environ), environ))
            world = World(upstream, client, place / "data", proxy, Library(root))
            tree = plain(*(f"{number}.md" for number in range(40)))
            world.push(tree)
            world.sync()
            ballast = place / "ballast"
            with pytest.raises(OSError, match="No space"):
                fill(ballast)
            os.truncate(ballast, ballast.stat().st_size - 300_000)
            grown = tree | {f"{number}.md": (REGULAR, os.urandom(9_000).hex().encode()) for number in range(9)}
            world.push(grown)
            del proxy.asked[:]
            assert client.problem("/query", {"query": "needle"}) == (507, "storage_full")
            assert client.problem("/query", {"query": "needle"}) == (507, "storage_full")
            ballast.unlink()
            assert_answers(world, {path: file for path, file in grown.items() if b"needle" in file[1]})
            world.assert_right(active_only=True)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_several_branches_that_are_new_at_once_are_all_right(world: World) -> None:
    main = plain(*(f"{number}.md" for number in range(40)))
    base = world.push(main)
    world.sync()
    branches = [f"task/{number}" for number in range(6)]
    for branch in branches:
        world.push(main | plain(f"{branch[-1]}.md", text=f"only{branch[-1]}"), branch=branch, parent=base)
    found: dict[str, list[str]] = {}
    threads = [
        threading.Thread(
            target=lambda name: found.update({name: world.client.paths(f"only{name[-1]}", branch=name)}), args=(branch,)
        )
        for branch in branches
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {branch: [f"{branch[-1]}.md"] for branch in branches}
    for branch in branches[:2]:
        world.assert_right(branch)
