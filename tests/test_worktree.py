"""A worktree is brought from commit to commit by their difference: to the very files, and to nothing outside of it."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from memgw import locks
from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.documents import MAX_BYTES
from memgw.errors import DeadlineExceeded, MirrorDamaged, WorktreeDamaged
from memgw.mirror import Mirror
from memgw.objects import Blobs, Difference, Side
from memgw.remote import Remote
from memgw.worktree import Worktree
from tests.actors import Upstream
from tests.test_indexer import EXECUTABLE, REGULAR, SUBMODULE, SYMLINK, lie, listing, type_of_tree

MAIN = Branch.parse("main")


@dataclass
class Place:
    """A mirror and one worktree of it, whose lock is held."""

    upstream: Upstream
    mirror: Mirror
    worktree: Worktree
    held: int

    def push(self, tree: type_of_tree, *, parent: str | None = "") -> str:
        commit = self.upstream.push_tree("main", tree, parent=parent)
        self.mirror.prepare(Deadline(30))
        self.mirror.fetch(MAIN, Deadline(30))
        return commit

    def align(self, tree: type_of_tree) -> str:
        commit = self.push(tree)
        self.worktree.align(commit, Deadline(30), self.held)
        self.assert_is(commit)
        return commit

    def differences(self, old: str, new: str) -> list[Difference]:
        found = self.mirror.objects.differences(old, new, Deadline(30))
        assert found is not None
        return found

    def blobs(self) -> Blobs:
        return self.mirror.objects.blobs(Deadline(30))

    def apply(self, old: str, new: str) -> int:
        return self.worktree.apply(self.differences(old, new), self.blobs(), old, new, Deadline(30))

    def assert_is(self, commit: str) -> None:
        assert lie(self.worktree.path) == listing(self.upstream, commit)
        assert self.worktree.head() == commit

    def blob(self, content: bytes) -> str:
        """The name of a blob that the mirror has."""
        commit = self.push({"blob": (REGULAR, content)})
        return listing(self.upstream, commit)["blob"][1]

    def bytes(self) -> int:
        return sum(
            os.lstat(os.path.join(folder, name)).st_size
            for folder, folders, names in os.walk(self.worktree.path)
            for name in [*names, *(name for name in folders if os.path.islink(os.path.join(folder, name)))]
            if name != ".git"
        )


@pytest.fixture
def place(upstream: Upstream, data: Path) -> Iterator[Place]:
    data.mkdir(exist_ok=True)
    (data / "git-mirror").mkdir()
    remote = Remote(data, upstream.url, {"PATH": os.environ["PATH"]}, timeout=30)
    mirror = Mirror(data, remote, lock_timeout=30)
    with locks.hold(data / "locks" / "workspace", Deadline(60), 30) as held:
        yield Place(upstream, mirror, Worktree(data / "workspaces" / "main", mirror), held)


def files(*names: str, text: str = "text") -> type_of_tree:
    return {name: (REGULAR, f"{text} of {name}\n".encode(errors="replace")) for name in names}


STEPS: dict[str, tuple[type_of_tree, type_of_tree]] = {
    "nothing": (files("a.md"), files("a.md")),
    "added, changed, deleted": (files("a.md", "b.md"), files("b.md", text="new") | files("c.md")),
    "all deleted": (files("a.md", "x/y/z.md"), {}),
    "a folder emptied": (files("a.md", "x/y/z.md", "x/a.md"), files("a.md", "x/a.md")),
    "folders emptied to the top": (files("a.md", "x/y/z/b.md"), files("a.md")),
    "a file becomes a folder": (files("x"), files("x/y/z.md")),
    "a folder becomes a file": (files("x/y/z.md", "x/a.md"), files("x")),
    "executable": (files("a.md"), {"a.md": (EXECUTABLE, files("a.md")["a.md"][1])}),
    "no longer executable": ({"a.md": (EXECUTABLE, b"x")}, {"a.md": (REGULAR, b"x")}),
    "a file becomes a link": (files("a.md", "b.md"), files("b.md") | {"a.md": (SYMLINK, b"b.md")}),
    "a link becomes a file": (files("b.md") | {"a.md": (SYMLINK, b"b.md")}, files("a.md", "b.md")),
    "a folder becomes a link": (files("x/a.md", "y/a.md"), files("y/a.md") | {"x": (SYMLINK, b"y")}),
    "a link becomes a folder": (files("y/a.md") | {"x": (SYMLINK, b"y")}, files("x/a.md", "y/a.md")),
    "a link leads elsewhere": ({"x": (SYMLINK, b"y")}, {"x": (SYMLINK, b"/nowhere")}),
    "a link whose target is no UTF-8": ({}, {"x": (SYMLINK, b"\xff\n"), "\udcff.md": (REGULAR, b"x")}),
    "case only": (files("Read.md", "Dir/a.md"), files("read.md", "dir/a.md")),
    "odd names": (files("a"), files("new\nline", "a b", "记忆/三.md", "bad\udcff", "...", "..a/b", "a..", "-x", "%s")),
    "names close to git's": (files("a"), files(".gitignore", ".git2/x", "a.git/x", "git/x", ".gitattributes", "git~")),
    "ignored files": (files("a") | {".gitignore": (REGULAR, b"*\n")}, files("b") | {".gitignore": (REGULAR, b"*\n")}),
    "line ends": ({".gitattributes": (REGULAR, b"* text eol=crlf\n")},
                  {".gitattributes": (REGULAR, b"* text eol=crlf\n"), "a.md": (REGULAR, b"a\r\nb\nc\r")}),
    "one content in many files": ({}, {f"{number}": (REGULAR, b"same") for number in range(10)}),
    "large and empty": ({}, {"large": (REGULAR, bytes(5_000_000)), "empty": (REGULAR, b"")}),
    "as many as it takes on": ({}, files(*(f"{number}" for number in range(500)))),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), STEPS.values(), ids=STEPS)
def test_the_difference_makes_the_very_files_forwards_and_back(
    place: Place, old: type_of_tree, new: type_of_tree
) -> None:
    first = place.align(old)
    second = place.push(new)
    before = place.bytes()
    grown = place.apply(first, second)
    place.assert_is(second)
    assert grown == place.bytes() - before
    assert place.apply(second, first) == -grown
    place.assert_is(first)
    place.worktree.align(second, Deadline(30), place.held)  # Git's own index was left behind
    place.assert_is(second)


def test_what_did_not_change_is_not_touched(place: Place) -> None:
    first = place.align(files("a.md", "b.md", "x/c.md"))
    before = {name: (place.worktree.path / name).stat() for name in ("a.md", "x/c.md")}
    place.apply(first, place.push(files("a.md", "x/c.md") | files("b.md", text="new")))
    for name, seen in before.items():
        now = (place.worktree.path / name).stat()
        assert (now.st_ino, now.st_mtime_ns) == (seen.st_ino, seen.st_mtime_ns)


def test_submodules_are_left_to_git(place: Place) -> None:
    first = place.align(files("a.md"))
    second = place.push(files("a.md") | {"module": (SUBMODULE, b"1" * 40)})
    for old, new in ((first, second), (second, first)):
        with pytest.raises(WorktreeDamaged):
            place.apply(old, new)
        assert place.worktree.head() == old
        place.worktree.align(new, Deadline(30), place.held)
        place.assert_is(new)


def filled(folder: Path) -> None:
    (folder / "leftover.md").write_text("leftover")


def a_file(folder: Path) -> None:
    folder.rmdir()
    folder.write_text("leftover")


def a_link_out(folder: Path) -> None:
    folder.rmdir()
    folder.symlink_to(folder.parent.parent)


SPOILT_FOLDERS: list[Callable[[Path], None]] = [filled, Path.rmdir, a_file, a_link_out]


def test_nothing_is_left_where_a_submodule_is_to_be(place: Place) -> None:
    first = place.align(files("a.md"))
    second = place.push(files("a.md", "x.md/in.md"))
    place.apply(first, second)  # Git's own index does not know of it
    third = place.push(files("a.md") | {"x.md": (SUBMODULE, b"1" * 40)})
    with pytest.raises(WorktreeDamaged):
        place.apply(second, third)
    place.worktree.align(third, Deadline(30), place.held)
    place.assert_is(third)
    outside = place.worktree.path.parent
    for spoil in SPOILT_FOLDERS:
        spoil(place.worktree.path / "x.md")
        place.worktree.align(third, Deadline(30), place.held)
        place.assert_is(third)
    assert outside.is_dir()


def test_a_file_too_large_for_memory_is_left_to_git(place: Place) -> None:
    first = place.align(files("a.md"))
    second = place.push(files("a.md") | {"large.bin": (REGULAR, bytes(MAX_BYTES + 1))})
    with pytest.raises(WorktreeDamaged):
        place.apply(first, second)
    place.assert_is(first)
    place.worktree.align(second, Deadline(30), place.held)
    assert (place.worktree.path / "large.bin").stat().st_size == MAX_BYTES + 1
    third = place.push(files("a.md"))
    place.apply(second, third)
    place.assert_is(third)


def test_more_than_it_takes_on_is_left_to_git(place: Place) -> None:
    first = place.align(files("a.md"))
    second = place.push(files("a.md", *(f"{number}" for number in range(501))))
    with pytest.raises(WorktreeDamaged):
        place.apply(first, second)
    place.assert_is(first)


HOSTILE = [
    "..", "../evil", "x/../../evil", "./evil", "x/./evil", ".git", ".git/config", ".GIT/config", ".Git/hooks/x",
    "x/.git/config", "x/.gIt", "git~1", "GIT~1/config", "x/git~2/config", "x\\..\\..\\evil", ".git\\config", "\\evil",
    "/evil", "x//evil", "", "x/",
]  # fmt: skip


def test_a_name_that_leads_elsewhere_is_never_written(place: Place, tmp_path: Path) -> None:
    """Git itself refuses to make such trees, so that the difference is handed over as it would come out of one."""
    first = place.align(files("x/a.md"))
    oid = place.blob(b"evil")
    second = place.push(files("x/a.md", "harmless.md"))
    before = everything(tmp_path)
    plain = Difference("harmless.md", None, Side(REGULAR, oid))
    for name in HOSTILE:
        for side in (Side(REGULAR, oid), Side(SYMLINK, oid)):
            for hostile in (Difference(name, None, side), Difference(name, side, None), Difference(name, side, side)):
                with pytest.raises(WorktreeDamaged):
                    place.worktree.apply([plain, hostile], place.blobs(), first, second, Deadline(30))
                assert everything(tmp_path) == before, hostile
    place.assert_is(first)


def everything(root: Path) -> dict[str, tuple[int, float]]:
    """All files below a folder, with their sizes and times."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            seen = os.lstat(os.path.join(folder, name))
            found[os.path.join(folder, name)] = (seen.st_size, seen.st_mtime)
    return found


def outside_link(place: Place, tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.md").write_text("precious")
    shutil.rmtree(place.worktree.path / "x")
    (place.worktree.path / "x").symlink_to(outside)
    return outside


CHANGES: dict[str, type_of_tree] = {
    "added": files("x/a.md", "x/y/b.md", "x/c.md"),
    "changed": files("x/a.md", "x/y/b.md", text="new"),
    "deleted": files("other.md"),
}


@pytest.mark.parametrize("new", CHANGES.values(), ids=CHANGES)
def test_a_link_in_the_place_of_a_folder_leads_nowhere(place: Place, tmp_path: Path, new: type_of_tree) -> None:
    first = place.align(files("x/a.md", "x/y/b.md"))
    outside = outside_link(place, tmp_path)
    second = place.push(new)
    with pytest.raises(WorktreeDamaged):
        place.apply(first, second)
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"a.md": "precious"}
    place.worktree.align(second, Deadline(30), place.held)
    place.assert_is(second)
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"a.md": "precious"}


def test_a_link_of_the_commit_itself_is_not_followed(place: Place, tmp_path: Path) -> None:
    """No tree has a link and something below it, but a difference that is pieced together could."""
    first = place.align(files("a.md"))
    link = place.blob(os.fsencode(tmp_path))
    text = place.blob(b"evil")
    second = place.push(files("a.md", "b.md"))
    pieced = [Difference("x", None, Side(SYMLINK, link)), Difference("x/evil.md", None, Side(REGULAR, text))]
    for order in (pieced, pieced[::-1]):
        with pytest.raises(WorktreeDamaged):
            place.worktree.apply(order, place.blobs(), first, second, Deadline(30))
        assert not (tmp_path / "evil.md").exists()
        assert place.worktree.head() == first
        place.worktree.align(first, Deadline(30), place.held)


def test_a_link_with_a_nul_in_it_is_left_to_git(place: Place) -> None:
    first = place.align(files("a.md"))
    second = place.push({"x": (SYMLINK, b"a\0b")})
    with pytest.raises(WorktreeDamaged):
        place.apply(first, second)
    assert place.worktree.head() == first


def a_folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


LEFTOVERS: dict[str, Callable[[Path], object]] = {
    "a file where one is to come": lambda tree: (tree / "new.md").write_text("leftover"),
    "a link where a file is to come": lambda tree: (tree / "new.md").symlink_to("/etc/hostname"),
    "a link to nowhere where a file is to come": lambda tree: (tree / "new.md").symlink_to(tree.parent / "made"),
    "a folder where a file is to come": lambda tree: (tree / "new.md").mkdir(),
    "a pipe where a file is to come": lambda tree: os.mkfifo(tree / "new.md"),
    "a file where a folder is to come": lambda tree: (tree / "folder").write_text("leftover"),
    "a file that is to go is gone": lambda tree: (tree / "old.md").unlink(),
    "a folder where a file is to go": lambda tree: a_folder_instead(tree / "old.md"),
    "the pointer is gone": lambda tree: (tree / ".git").unlink(),
    "the pointer leads elsewhere": lambda tree: (tree / ".git").write_text("gitdir: /nowhere\n"),
    "the worktree is gone": lambda tree: shutil.rmtree(tree),
}


@pytest.mark.parametrize("leftover", LEFTOVERS.values(), ids=LEFTOVERS)
def test_what_is_not_as_it_was_left_is_found_out_and_git_mends_it(
    place: Place, leftover: Callable[[Path], object]
) -> None:
    first = place.align(files("old.md", "a.md"))
    leftover(place.worktree.path)
    second = place.push(files("new.md", "folder/new.md", "a.md"))
    with pytest.raises(WorktreeDamaged):
        place.apply(first, second)
    assert not (place.worktree.path.parent / "made").exists()
    place.worktree.align(second, Deadline(30), place.held)
    place.assert_is(second)


def test_another_file_where_one_is_to_go_or_change_is_no_hindrance(place: Place) -> None:
    first = place.align(files("old.md", "changed.md", "a.md"))
    (place.worktree.path / "old.md").write_text("something else")
    (place.worktree.path / "changed.md").unlink()
    (place.worktree.path / "changed.md").symlink_to("/etc/hostname")
    second = place.push(files("a.md") | files("changed.md", text="new"))
    place.apply(first, second)
    place.assert_is(second)


def test_only_the_worktree_of_the_old_commit_is_taken_on(place: Place) -> None:
    first = place.align(files("a.md"))
    second = place.push(files("a.md", "b.md"))
    third = place.push(files("a.md", "c.md"))
    with pytest.raises(WorktreeDamaged):
        place.apply(second, third)
    place.assert_is(first)


def test_a_blob_that_the_mirror_lacks_is_the_mirrors_damage(place: Place) -> None:
    first = place.align(files("a.md"))
    second = place.push(files("a.md", "b.md"))
    lacking = [Difference("b.md", None, Side(REGULAR, "1" * 40))]
    with pytest.raises(MirrorDamaged):
        place.worktree.apply(lacking, place.blobs(), first, second, Deadline(30))
    place.assert_is(first)


def test_what_is_left_half_way_is_still_called_the_old_commits_and_made_whole(place: Place) -> None:
    first = place.align(files("a.md", "b.md", "c.md"))
    second = place.push(files("a.md", "b.md", text="new") | files("d.md"))
    differences = place.differences(first, second)
    (place.worktree.path / "d.md").write_text("leftover")
    with pytest.raises(WorktreeDamaged):  # as far as it gets: what goes is gone, what comes is not there
        place.worktree.apply(differences, place.blobs(), first, second, Deadline(30))
    assert place.worktree.head() == first
    assert not (place.worktree.path / "c.md").exists()
    with pytest.raises(WorktreeDamaged):
        place.apply(first, second)
    place.worktree.align(second, Deadline(30), place.held)
    place.assert_is(second)


def test_no_time_is_left_is_said(place: Place) -> None:
    first = place.align(files("a.md"))
    second = place.push(files("a.md", "b.md"))
    differences, late = place.differences(first, second), place.mirror.objects.blobs(Deadline(0))
    with pytest.raises(DeadlineExceeded):
        place.worktree.apply(differences, late, first, second, Deadline(0))


def test_files_are_for_whom_the_umask_lets(place: Place) -> None:
    first = place.align({})
    second = place.push({"a.md": (REGULAR, b"x"), "run": (EXECUTABLE, b"x")})
    mask = os.umask(0o027)
    try:
        place.apply(first, second)
    finally:
        os.umask(mask)
    modes = {name: stat.S_IMODE((place.worktree.path / name).stat().st_mode) for name in ("a.md", "run")}
    assert modes == {"a.md": 0o640, "run": 0o750}


def test_one_that_resembles_another_shares_its_files_until_either_moves(place: Place) -> None:
    first = place.align(
        {**files("a.md", "x/y/b.md", ".git-not/c.md"), "link": (SYMLINK, b"/nowhere"), "run": (EXECUTABLE, b"x")}
    )
    other = Place(
        place.upstream, place.mirror, Worktree(place.worktree.path.with_name("other"), place.mirror), place.held
    )
    other.worktree.resemble(place.worktree, first, Deadline(30), place.held)
    other.assert_is(first)
    assert (other.worktree.path / "a.md").samefile(place.worktree.path / "a.md")
    second = place.push(files("a.md", text="new") | files("x/c.md"))
    other.apply(first, second)
    other.assert_is(second)
    place.assert_is(first)
    place.worktree.align(second, Deadline(30), place.held)
    place.assert_is(second)
    other.assert_is(second)


def test_damage_to_a_shared_file_is_mended_in_both(place: Place) -> None:
    first = place.align(files("a.md", "b.md"))
    other = Place(
        place.upstream, place.mirror, Worktree(place.worktree.path.with_name("other"), place.mirror), place.held
    )
    other.worktree.resemble(place.worktree, first, Deadline(30), place.held)
    (place.worktree.path / "a.md").write_text("damage")
    for one in (other, place):
        one.worktree.align(first, Deadline(30), place.held)
        one.assert_is(first)


def test_one_of_another_commit_is_not_resembled(place: Place) -> None:
    first = place.align(files("a.md"))
    second = place.push(files("b.md"))
    other = Worktree(place.worktree.path.with_name("other"), place.mirror)
    with pytest.raises(WorktreeDamaged):
        other.resemble(place.worktree, second, Deadline(30), place.held)
    assert other.head() is None
    place.assert_is(first)
