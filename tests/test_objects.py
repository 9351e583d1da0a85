"""What the mirror's object store tells of two commits and of blobs, seen through real repositories."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from memgw.deadline import Deadline
from memgw.errors import DeadlineExceeded, MirrorDamaged
from memgw.objects import CHUNK_BLOBS, CHUNK_BYTES, Difference, Objects, Side
from tests.actors import Upstream

DEADLINE = 30.0
MISSING = "1" * 40


@pytest.fixture
def objects(upstream: Upstream) -> Objects:
    return Objects(upstream.path, {"PATH": os.environ["PATH"]})


def blob(upstream: Upstream, commit: str, path: str) -> str:
    command = ["git", f"--git-dir={upstream.path}", "rev-parse", f"{commit}:{path}"]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()


def differences(objects: Objects, old: str | None, new: str) -> list[Difference]:
    found = objects.differences(old, new, Deadline(DEADLINE))
    assert found is not None
    return found


def test_added_changed_and_deleted_files_differ_and_no_others(objects: Objects, upstream: Upstream) -> None:
    old = upstream.commit("main", {"same.md": "same", "changed.md": "one", "gone.md": "gone", "sub/deep.md": "deep"})
    new = upstream.commit("main", {"changed.md": "two", "gone.md": None, "sub/new.md": "new"})
    assert differences(objects, old, new) == [
        Difference(
            "changed.md",
            Side("100644", blob(upstream, old, "changed.md")),
            Side("100644", blob(upstream, new, "changed.md")),
        ),
        Difference("gone.md", Side("100644", blob(upstream, old, "gone.md")), None),
        Difference("sub/new.md", None, Side("100644", blob(upstream, new, "sub/new.md"))),
    ]
    back = [Difference(item.path, item.new, item.old) for item in differences(objects, old, new)]
    assert differences(objects, new, old) == back
    assert differences(objects, old, old) == []


def test_a_rename_is_two_paths(objects: Objects, upstream: Upstream) -> None:
    old = upstream.commit("main", {"a.md": "the same\n" * 50})
    new = upstream.commit("main", {"a.md": None, "b.md": "the same\n" * 50})
    assert [(item.path, item.old is None, item.new is None) for item in differences(objects, old, new)] == [
        ("a.md", False, True),
        ("b.md", True, False),
    ]


def test_from_nothing_every_file_differs(objects: Objects, upstream: Upstream) -> None:
    commit = upstream.commit("main", {"a.md": "a", "sub/b.md": "b"})
    found = differences(objects, None, commit)
    assert [(item.path, item.old) for item in found] == [("a.md", None), ("sub/b.md", None)]
    empty = upstream.commit("main", {}, clear=True)
    assert differences(objects, None, empty) == []
    assert [(item.path, item.new) for item in differences(objects, commit, empty)] == [
        ("a.md", None),
        ("sub/b.md", None),
    ]


def test_modes_are_told_as_git_writes_them(objects: Objects, upstream: Upstream) -> None:
    old = upstream.push_tree("main", {name: ("100644", b"a.md") for name in ("x.md", "link.md", "run.md")})
    new = upstream.push_tree(
        "main",
        {
            "x.md": ("160000", MISSING.encode()),
            "link.md": ("120000", b"a.md"),
            "run.md": ("100755", b"a.md"),
        },
    )
    found = {item.path: item for item in differences(objects, old, new)}
    modes = {path: item.new.mode for path, item in found.items() if item.new}
    assert modes == {"x.md": "160000", "link.md": "120000", "run.md": "100755"}
    assert [item.new.is_regular for item in found.values() if item.new] == [False, True, False]
    assert found["run.md"].old == Side("100644", found["run.md"].new.blob if found["run.md"].new else "")
    assert found["x.md"].new == Side("160000", MISSING)


def test_a_file_that_becomes_a_folder_is_both(objects: Objects, upstream: Upstream) -> None:
    old = upstream.commit("main", {"x.md": "file"})
    new = upstream.commit("main", {"x.md": None, "x.md/in.md": "inside"})
    assert {(item.path, bool(item.old), bool(item.new)) for item in differences(objects, old, new)} == {
        ("x.md", True, False),
        ("x.md/in.md", False, True),
    }


ODD = [
    "new\nline.md",
    "tab\t.md",
    "a b.md",
    '"quoted".md',
    "back\\slash.md",
    "bad\udcff.md",
    "记忆/三月.md",
    "\x7f.md",
    ":x.md",
]


def test_odd_names_are_the_names_to_the_letter(objects: Objects, upstream: Upstream) -> None:
    commit = upstream.commit("main", {name: f"text {number}" for number, name in enumerate(ODD)})
    assert {item.path for item in differences(objects, None, commit)} == set(ODD)
    assert objects.documents(commit, Deadline(DEADLINE)).keys() == set(ODD)


def test_a_commit_that_is_gone_is_no_error_but_one_to_go_to_is(objects: Objects, upstream: Upstream) -> None:
    commit = upstream.commit("main", {"a.md": "a"})
    assert objects.differences(MISSING, commit, Deadline(DEADLINE)) is None
    with pytest.raises(MirrorDamaged):
        objects.differences(None, MISSING, Deadline(DEADLINE))
    assert objects.differences("--output=/tmp/x", commit, Deadline(DEADLINE)) is None


def test_a_repository_that_is_gone_is_damage(objects: Objects, upstream: Upstream) -> None:
    commit = upstream.commit("main", {"a.md": "a"})
    shutil.rmtree(upstream.path / "objects")
    assert objects.differences(commit, commit, Deadline(DEADLINE)) is None
    for act in (
        lambda: objects.differences(None, commit, Deadline(DEADLINE)),
        lambda: objects.documents(commit, Deadline(DEADLINE)),
        lambda: objects.newest_of({commit}, commit, Deadline(DEADLINE)),
        lambda: objects.blobs(Deadline(DEADLINE)).sizes([MISSING]),
    ):
        with pytest.raises(MirrorDamaged):
            act()


def test_no_time_is_left_is_said(objects: Objects, upstream: Upstream) -> None:
    commit = upstream.commit("main", {"a.md": "a"})
    with pytest.raises(DeadlineExceeded):
        objects.differences(None, commit, Deadline(0))


def test_documents_are_regular_files_with_a_documents_name(objects: Objects, upstream: Upstream) -> None:
    commit = upstream.push_tree(
        "main",
        {
            "a.md": ("100644", b"alpha"),
            "run.md": ("100755", b""),
            "link.md": ("120000", b"a.md"),
            "module.md": ("160000", MISSING.encode()),
            "code.py": ("100644", b"x"),
            "vendor/x.md": ("100644", b"x"),
            ".hidden/x.md": ("100644", b"x"),
            "sub/b.md": ("100644", "记".encode()),
        },
    )
    assert objects.documents(commit, Deadline(DEADLINE)) == {
        path: (blob(upstream, commit, path), size) for path, size in (("a.md", 5), ("run.md", 0), ("sub/b.md", 3))
    }


def test_blobs_are_the_bytes_that_were_pushed(objects: Objects, upstream: Upstream) -> None:
    contents = {
        "empty": b"", "newline": b"\n", "newlines": b"\n\n\n", "nul": b"\0", "all": bytes(range(256)),
        "like a header": f"{MISSING} blob 3\nabc\n".encode(), "large": os.urandom(3_000_000), "crlf": b"a\r\nb\r\n",
    }  # fmt: skip
    commit = upstream.commit("main", contents)
    names = {blob(upstream, commit, path): path for path in contents}
    sizes = objects.blobs(Deadline(DEADLINE)).sizes(list(names))
    assert {names[oid]: size for oid, size in sizes.items()} == {path: len(data) for path, data in contents.items()}
    found: dict[str, bytes] = {}
    for some in objects.blobs(Deadline(DEADLINE)).contents(list(names)):
        found |= {names[oid]: data for oid, data in some.items()}
    assert found == contents


def test_blobs_come_a_few_at_a_time_in_order_and_each_once(objects: Objects, upstream: Upstream) -> None:
    small = {f"{number:03}": f"text {number}" for number in range(CHUNK_BLOBS + 50)}
    large = {f"large {number}": str(number) * (CHUNK_BYTES // 2 + 1) for number in range(3)}
    commit = upstream.commit("main", small | large)
    listed = {item.path: item.new.blob for item in differences(objects, None, commit) if item.new}
    asked = [listed[path] for path in [*small, *large, "000", "001"]]
    chunks = list(objects.blobs(Deadline(DEADLINE)).contents(asked))
    assert [len(chunk) for chunk in chunks] == [CHUNK_BLOBS, 51, 1, 1]
    assert [oid for chunk in chunks for oid in chunk] == asked[:-2]
    assert list(objects.blobs(Deadline(DEADLINE)).contents([])) == []


def test_a_blob_that_is_missing_is_damage(objects: Objects, upstream: Upstream) -> None:
    commit = upstream.commit("main", {"a.md": "a"})
    there = blob(upstream, commit, "a.md")
    with pytest.raises(MirrorDamaged):
        objects.blobs(Deadline(DEADLINE)).sizes([there, MISSING])
    with pytest.raises(MirrorDamaged):
        objects.blobs(Deadline(DEADLINE)).sizes([commit])  # no blob
    with pytest.raises(MirrorDamaged):
        list(objects.blobs(Deadline(DEADLINE)).contents([there, MISSING]))


def test_the_newest_of_some_commits_is_found_in_the_history(objects: Objects, upstream: Upstream) -> None:
    first = upstream.commit("main", {"a.md": "1"})
    second = upstream.commit("main", {"a.md": "2"})
    third = upstream.commit("main", {"a.md": "3"})
    other = upstream.commit("other", {"a.md": "4"}, parent=None)
    deadline = Deadline(DEADLINE)
    assert objects.newest_of({first, second, other}, third, deadline) == second
    assert objects.newest_of({first, third}, third, deadline) == third
    assert objects.newest_of({other, MISSING}, third, deadline) is None
    assert objects.newest_of(set(), third, deadline) is None
    assert objects.newest_of({first}, other, deadline) is None


def test_only_the_given_repository_is_read(objects: Objects, upstream: Upstream, tmp_path: Path) -> None:
    """Whatever GIT_* may be set here, and whatever repository we are in."""
    commit = upstream.commit("main", {"a.md": "a"})
    other = Upstream(tmp_path / "elsewhere.git")
    elsewhere = Objects(other.path, {"PATH": os.environ["PATH"]})
    with pytest.raises(MirrorDamaged):
        elsewhere.differences(None, commit, Deadline(DEADLINE))
    assert [item.path for item in differences(objects, None, commit)] == ["a.md"]
