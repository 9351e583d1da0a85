"""Kill anything, damage anything under data/: the next answer is right, without an operator."""

import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from memgw.app import create_app
from memgw.config import Config
from tests.actors import FakeQmd, Server, Upstream, processes_with, served, until
from tests.conftest import Client

Damage = Callable[[Path], object]
Place = Callable[[Path], Path]

FILES = {f"notes/{number}.md": f"# Note {number}\n\nneedle number{number}\n" for number in range(12)}


def mirror(data: Path) -> Path:
    return data / "git-mirror" / "repo.git"


def worktree(data: Path) -> Path:
    return data / "workspaces" / "main"


def admin(data: Path) -> Path:
    return mirror(data) / "worktrees" / "main"


def index(data: Path) -> Path:
    return next((data / "qmd-cache" / "ws-main").glob("*.sqlite"))


def state(data: Path) -> Path:
    return data / "state" / "main.json"


def rewrite(path: Path, content: bytes) -> None:
    if path.exists():  # git's files are read-only
        path.chmod(0o644)
    path.write_bytes(content)


def edit_unseen(path: Path) -> None:
    """Changes a file and leaves size and times as they were, so that git's own look does not see it."""
    before = path.stat()
    path.write_text(path.read_text().replace("needle", "noodle"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def scribble(path: Path) -> None:
    """Overwrites the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(os.urandom(8192))


def sql(statement: str) -> Damage:
    def damage(data: Path) -> None:
        with sqlite3.connect(index(data)) as db:
            db.execute(statement)
        db.close()

    return damage


def each(pattern: str, act: Damage) -> Damage:
    def damage(data: Path) -> None:
        found = list(data.glob(pattern))
        assert found, pattern
        for path in found:
            act(path)

    return damage


def deleted(place: Place) -> Damage:
    def damage(data: Path) -> None:
        path = place(data)
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def holds(place: Place, content: bytes) -> Damage:
    return lambda data: rewrite(place(data), content)


def is_a_file(place: Place) -> Damage:
    def damage(data: Path) -> None:
        shutil.rmtree(place(data))
        place(data).write_text("x")

    return damage


def is_a_folder(place: Place) -> Damage:
    def damage(data: Path) -> None:
        path = place(data)
        path.unlink()
        path.mkdir()

    return damage


def linked_to_itself(place: Place) -> Damage:
    def damage(data: Path) -> None:
        path = place(data)
        path.unlink()
        path.symlink_to(path)

    return damage


def below(*names: str) -> Place:
    return lambda data: data.joinpath(*names)


def of_worktree(*names: str) -> Place:
    return lambda data: worktree(data).joinpath(*names)


def of_mirror(*names: str) -> Place:
    return lambda data: mirror(data).joinpath(*names)


def of_admin(*names: str) -> Place:
    return lambda data: admin(data).joinpath(*names)


def git_was_killed(data: Path) -> None:
    for path in (
        admin(data) / "index.lock",
        admin(data) / "HEAD.lock",
        mirror(data) / "packed-refs.lock",
        mirror(data) / "config.lock",
        next((mirror(data) / "refs" / "memgw").iterdir()).with_suffix(".lock"),
        mirror(data) / "objects" / "pack" / "tmp_pack_x",
    ):
        path.touch()


PACKS = "git-mirror/repo.git/objects/pack/*"
MIRROR_REF = "git-mirror/repo.git/refs/memgw/*"
NOTES = "workspaces/main/notes/*.md"
SETTINGS = below("qmd-config", "ws-main.yml")

DAMAGES: dict[str, Damage] = {
    "everything is deleted": shutil.rmtree,
    "the mirror is deleted": deleted(mirror),
    "the mirror's folder is deleted": deleted(below("git-mirror")),
    "the mirror's objects are deleted": deleted(of_mirror("objects")),
    "the mirror's packs are deleted": each(PACKS, Path.unlink),
    "the mirror's packs are garbage": each(f"{PACKS}.pack", lambda path: rewrite(path, b"x" * 99)),
    "the mirror's packs are cut": each(f"{PACKS}.pack", lambda path: os.truncate(path, path.stat().st_size // 2)),
    "the mirror's refs are deleted": deleted(of_mirror("refs")),
    "the mirror's ref is garbage": each(MIRROR_REF, lambda path: path.write_text("zzz")),
    "the mirror's ref is another commit": each(MIRROR_REF, lambda path: path.write_text("1" * 40)),
    "the mirror's HEAD is deleted": deleted(of_mirror("HEAD")),
    "the mirror's config is garbage": holds(of_mirror("config"), b"[[[\0"),
    "the mirror is a file": is_a_file(mirror),
    "the mirror's attributes are changed": holds(of_mirror("info", "attributes"), b"* eol=crlf\n"),
    "the mirror's settings are deleted": deleted(below("git-mirror", "gitconfig")),
    "the mirror's settings are garbage": holds(below("git-mirror", "gitconfig"), b"[[["),
    "the mirror has the locks of a killed git": git_was_killed,
    "the worktree is deleted": deleted(worktree),
    "the worktree is a file": is_a_file(worktree),
    "the worktree lost a file": deleted(of_worktree("notes", "3.md")),
    "the worktree has changed files": each(NOTES, lambda path: path.write_text("needle changed")),
    "the worktree has files changed unseen": each(NOTES, edit_unseen),
    "the worktree has more files": holds(of_worktree("more.md"), b"needle more"),
    "the worktree's pointer is deleted": deleted(of_worktree(".git")),
    "the worktree's pointer is garbage": holds(of_worktree(".git"), b"\xff\0"),
    "the worktree's pointer is a folder": is_a_folder(of_worktree(".git")),
    "the worktree's index is garbage": holds(of_admin("index"), b"garbage"),
    "the worktree's index is deleted": deleted(of_admin("index")),
    "the worktree's HEAD is a branch": holds(of_admin("HEAD"), b"ref: refs/heads/x\n"),
    "the worktree's entry is deleted": deleted(admin),
    "the index is deleted": deleted(index),
    "the index's folder is deleted": deleted(below("qmd-cache")),
    "the index is empty": holds(index, b""),
    "the index is cut": lambda data: os.truncate(index(data), index(data).stat().st_size // 2),
    "the index is garbage in the middle": lambda data: scribble(index(data)),
    "the index is garbage": holds(index, os.urandom(50_000)),
    "the index is a folder": is_a_folder(index),
    "the index lost its documents": sql("DELETE FROM documents"),
    "the index lost a text row": sql("DELETE FROM documents_fts WHERE rowid = 3"),
    "the index has another text": sql("UPDATE content SET doc = replace(doc, 'needle', 'noodle')"),
    "the index has one document too many": sql(
        "INSERT INTO documents (collection, path, title, hash, created_at, modified_at)"
        " SELECT collection, 'more.md', title, hash, created_at, modified_at FROM documents LIMIT 1"
    ),
    "the index's log is garbage": lambda data: Path(f"{index(data)}-wal").write_bytes(os.urandom(5000)),
    "the state is deleted": deleted(below("state")),
    "the state is garbage": holds(state, b"\xff{"),
    "the state is cut": lambda data: os.truncate(state(data), 100),
    "the state is another branch's": lambda data: rewrite(state(data), state(data).read_bytes().replace(b"main", b"x")),
    "the state is a folder": is_a_folder(state),
    "the notes are garbage": holds(below("state", "notes", "main.json"), b"[1]"),
    "qmd's settings are deleted": deleted(below("qmd-config")),
    "qmd's settings are garbage": holds(SETTINGS, b"{{{"),
    "qmd's settings name nothing": holds(SETTINGS, b"collections: {}"),
    "the lock is a folder": is_a_folder(below("locks", "workspaces", "main.lock")),
    "the mirror's lock is a folder": is_a_folder(below("locks", "mirror.lock")),
    "the mirror's info is a file": is_a_file(of_mirror("info")),
    "the mirror's settings are a link to themselves": linked_to_itself(below("git-mirror", "gitconfig")),
    "the index's own folder is a file": is_a_file(below("qmd-cache", "ws-main")),
    "the locks are deleted": deleted(below("locks")),
    **{
        f"{name} is a file": is_a_file(below(name))
        for name in ("state", "locks", "qmd-config", "qmd-cache", "workspaces", "git-mirror")
    },
}


def assert_right(client: Client, upstream: Upstream, files: dict[str, str]) -> None:
    answer = client.query("needle", limit=50, full=True)
    assert answer["commit_hash"] == upstream.tip("main")
    assert {hit["path"]: hit["body"] for hit in answer["results"]} == files
    assert answer["degraded"] == []


BESIDE_THE_INDEX = [name for name in DAMAGES if "worktree" in name or "mirror" in name]
"""Noticed only when the branch moves: the index that answers until then is not touched by them."""


@dataclass
class Settled:
    """A gateway whose workspace was right a moment ago; one after the other damages it, and leaves it right."""

    client: Client
    upstream: Upstream
    data: Path
    files: dict[str, str]
    pushes: int = 0

    def push(self) -> None:
        self.pushes += 1
        changed = {"notes/3.md": f"# Changed\n\nneedle changed {self.pushes}\n"}
        self.files |= changed
        self.upstream.commit("main", changed)

    def assert_right(self) -> None:
        assert_right(self.client, self.upstream, self.files)


@pytest.fixture(scope="module")
def shared_settled(tmp_path_factory: pytest.TempPathFactory) -> Settled:
    folder = tmp_path_factory.mktemp("settled")
    upstream = Upstream(folder / "upstream.git")
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "GIT_REMOTE_URL": upstream.url,
        "MEMGW_DATA_DIR": str(folder / "data"),
    }
    upstream.commit("main", FILES)
    return Settled(Client(create_app(Config.load(environ), environ)), upstream, folder / "data", dict(FILES))


@pytest.fixture
def settled(shared_settled: Settled) -> Settled:
    shared_settled.client.sync()
    return shared_settled


@pytest.mark.parametrize("name", [name for name in DAMAGES if name not in BESIDE_THE_INDEX])
def test_the_next_answer_is_right_after(settled: Settled, name: str) -> None:
    DAMAGES[name](settled.data)
    settled.assert_right()


@pytest.mark.parametrize("name", BESIDE_THE_INDEX)
def test_a_push_after_the_damage_is_answered_right(settled: Settled, name: str) -> None:
    DAMAGES[name](settled.data)
    settled.push()
    settled.assert_right()


@pytest.mark.parametrize(
    "name", ["the mirror is deleted", "the worktree is deleted", "the worktree's pointer is garbage"]
)
def test_an_unmoved_branch_is_answered_right_and_the_next_push_too(
    client: Client, upstream: Upstream, data: Path, name: str
) -> None:
    upstream.commit("main", FILES)
    client.sync()
    DAMAGES[name](data)
    assert_right(client, upstream, FILES)
    assert client.sync()["changed"] is False
    upstream.commit("main", {"more.md": "# More\n\nneedle\n"})
    assert_right(client, upstream, FILES | {"more.md": "# More\n\nneedle\n"})


def test_an_old_copy_of_the_index_is_not_taken_for_the_new_one(client: Client, upstream: Upstream, data: Path) -> None:
    upstream.commit("main", FILES)
    client.query("needle")
    old = index(data).read_bytes()
    files = FILES | {"notes/3.md": "# Changed\n\nneedle changed\n"}
    upstream.commit("main", {"notes/3.md": files["notes/3.md"]})
    client.query("needle")
    index(data).write_bytes(old)
    assert_right(client, upstream, files)


def test_an_index_of_another_qmd_is_made_again(
    environ: dict[str, str], upstream: Upstream, fake_qmd: FakeQmd, data: Path
) -> None:
    upstream.commit("main", FILES)
    client = Client(create_app(Config.load(environ), environ))
    client.query("needle")
    before = index(data)
    (fake_qmd.path.parent / "package.json").write_text('{"version": "9.9.9"}')
    assert_right(client, upstream, FILES)
    assert index(data) != before


def test_a_damaged_worktree_never_makes_git_touch_the_checkout_around_it(
    client: Client, upstream: Upstream, data: Path, tmp_path: Path
) -> None:
    around = tmp_path / "precious.txt"
    around.write_text("uncommitted work")
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    upstream.commit("main", FILES)
    client.query("needle")
    (worktree(data) / ".git").unlink()
    shutil.rmtree(mirror(data))
    assert_right(client, upstream, FILES)
    (worktree(data) / ".git").write_text(f"gitdir: {tmp_path}/.git\n")
    upstream.commit("main", {"z.md": "# Z\n"})
    assert_right(client, upstream, FILES)
    assert around.read_text() == "uncommitted work"
    assert (tmp_path / ".git" / "HEAD").read_text().startswith("ref: ")


@pytest.fixture
def busy_server(environ: dict[str, str], tmp_path: Path, upstream: Upstream) -> Iterator[Server]:
    """A server with a corpus whose update takes long enough to be hit in the middle."""
    corpus = {f"d/{number}.md": f"# Doc {number}\n\nneedle {'filler text ' * 50}\n" for number in range(150)}
    upstream.commit("main", corpus)
    with served(environ, tmp_path, measured=False) as server:
        assert len(server.query("needle", limit=50)["results"]) == 50
        yield server


def test_the_answer_is_whole_after_workers_were_killed_in_the_middle_of_an_update(
    busy_server: Server, upstream: Upstream
) -> None:
    random = Random(7)
    for turn in range(6):
        changed = {
            f"d/{number}.md": f"# Doc {number}\n\nneedle turn{turn}x\n" for number in range(turn * 8, turn * 8 + 8)
        }
        commit = upstream.commit("main", changed)
        asking = [threading.Thread(target=ask_in_vain, args=(busy_server,)) for _ in range(2)]
        for thread in asking:
            thread.start()
        threading.Event().wait(random.uniform(0.02, 0.6))  # where it hits is the point
        if turn % 2:
            for worker in busy_server.workers():
                os.kill(worker, signal.SIGKILL)
        else:
            busy_server.kill_all()
            busy_server.restart()
        for thread in asking:
            thread.join()
        assert until(lambda: healthy(busy_server))
        answer = busy_server.query(f"turn{turn}x", limit=50)
        assert answer["commit_hash"] == commit
        assert sorted(hit["path"] for hit in answer["results"]) == sorted(changed)


def ask_in_vain(server: Server) -> None:
    """A request that is allowed to break off, and nothing else than to break off or be right."""
    try:
        status, answer = server.post("/query", {"query": "needle"})
    except (OSError, ValueError, AssertionError):
        return
    assert status == 200, answer


def healthy(server: Server) -> bool:
    try:
        return server.request("GET", "/health", timeout=2)[0] == 200
    except (OSError, ValueError):
        return False


def test_what_a_killed_gateway_had_started_is_gone_and_its_lock_is_free(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream, fake_qmd: FakeQmd, data: Path
) -> None:
    commit = upstream.commit("main", FILES)
    fake_qmd.does("update", "sleep 1000")
    with served(environ, tmp_path, measured=False) as server:
        asking = threading.Thread(target=ask_in_vain, args=(server,))
        asking.start()
        assert until(lambda: fake_qmd.calls("update"))
        server.kill_all()
        asking.join()
        assert until(lambda: not processes_with(str(data)), 3)
        fake_qmd.behaves()
        server.restart()
        answer = server.query("needle", limit=50)
        assert (answer["commit_hash"], len(answer["results"])) == (commit, len(FILES))


def test_a_restart_makes_no_second_index_of_an_unchanged_branch(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream, fake_qmd: FakeQmd
) -> None:
    upstream.commit("main", FILES)
    with served(environ, tmp_path, measured=False) as server:
        server.query("needle")
        server.stop()
        server.restart()
        assert len(server.query("needle", limit=50)["results"]) == len(FILES)
        server.kill_all()
        server.restart()
        assert len(server.query("needle", limit=50)["results"]) == len(FILES)
        assert fake_qmd.calls("update") == 1


def test_a_search_that_fails_on_a_broken_index_is_answered_from_a_new_one(
    environ: dict[str, str], upstream: Upstream, data: Path
) -> None:
    """QMD_UPDATE_ON_LATEST_QUERY=false proves nothing before a search, so that the search is what finds the damage."""
    environ["QMD_UPDATE_ON_LATEST_QUERY"] = "false"
    client = Client(create_app(Config.load(environ), environ))
    upstream.commit("main", FILES)
    client.query("needle")
    index(data).write_bytes(os.urandom(50_000))
    assert_right(client, upstream, FILES)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def test_a_full_disk_is_507_and_the_next_answer_is_right(
    environ: dict[str, str], upstream: Upstream, tmp_path: Path
) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)], capture_output=True).returncode:
        pytest.skip("only root may mount a small file system here")
    try:
        environ["MEMGW_DATA_DIR"] = str(place / "data")
        client = Client(create_app(Config.load(environ), environ))
        upstream.commit("main", FILES)
        assert_right(client, upstream, FILES)
        ballast = place / "ballast"
        with pytest.raises(OSError, match="No space"):
            fill(ballast)
        files = FILES | {"notes/3.md": "# Changed\n\nneedle changed\n" * 4000}
        upstream.commit("main", {"notes/3.md": files["notes/3.md"]})
        assert client.problem("/query", {"query": "needle"}) == (507, "storage_full")
        assert client.problem("/query", {"query": "needle"}) == (507, "storage_full")
        ballast.unlink()
        assert_right(client, upstream, files)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_many_requests_after_one_push_share_the_work(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream, fake_qmd: FakeQmd
) -> None:
    upstream.commit("main", FILES)
    with served(environ, tmp_path, measured=False) as server:
        server.query("needle")
        commit = upstream.commit("main", {"notes/3.md": "# Changed\n\nneedle changed\n"})
        before = fake_qmd.calls("update")
        answers: list[dict[str, Any]] = []
        threads = [threading.Thread(target=lambda: answers.append(server.query("changed"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answer["commit_hash"] for answer in answers] == [commit] * 8
        assert [len(answer["results"]) for answer in answers] == [1] * 8
        assert fake_qmd.calls("update") - before == 1


def test_a_worktree_left_in_the_middle_of_an_alignment_is_not_gone_on_from(
    environ: dict[str, str], data: Path, upstream: Upstream, tmp_path: Path
) -> None:
    stuck, git = tmp_path / "stuck", tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text(
        f"#!/bin/sh\nif [ -e {shlex.quote(str(stuck))} ]; then case $1 in checkout)\n"
        f'echo garbage > "$GIT_WORK_TREE/0.md"; exec sleep 60;; esac; fi\nexec {shutil.which("git")} "$@"\n'
    )
    git.chmod(0o755)
    environ |= {"PATH": f"{git.parent}:{environ['PATH']}", "QMD_TIMEOUT_SECONDS": "3"}
    client = Client(create_app(Config.load(environ), environ))
    files = {f"{number}.md": f"# {number}\n\nneedle\n" for number in range(600)}
    first = upstream.commit("main", files)
    assert client.query("needle")["commit_hash"] == first
    stuck.touch()
    upstream.commit("main", dict.fromkeys(files, "# Other\n"))  # too many to be brought in one by one
    assert client.problem("/query", {"query": "needle"}) == (504, "deadline_exceeded")
    stuck.unlink()
    upstream.commit("main", {"1.md": "# One\n\nchanged\n"}, parent=first)  # a force-push, one file from the first
    assert client.paths("changed") == ["1.md"]
    assert (data / "workspaces" / "main" / "0.md").read_text() == files["0.md"]
