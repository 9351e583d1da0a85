"""A branch read from the files of its repository: always what git would say, or nothing."""

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from memgw import refs
from tests.actors import Upstream

MAIN = "refs/heads/main"


def git(repository: Path, *arguments: str, stdin: str = "") -> str:
    command = ["git", f"--git-dir={repository}", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, check=True, text=True).stdout.strip()


def read(path: Path, ref: str = MAIN) -> str | None:
    return refs.read(os.fsencode(path), ref)


def fill(upstream: Upstream, names: list[str]) -> dict[str, str]:
    """Packed branches, each with a commit of its own kind; tags with a peeled line between them."""
    first, second = upstream.commit("main", {"a.md": "a\n"}), upstream.commit("main", {"a.md": "b\n"})
    commits = {name: (first, second)[number % 2] for number, name in enumerate(names)}
    git(
        upstream.path,
        "update-ref",
        "--stdin",
        stdin="".join(f"create refs/heads/{name} {commit}\n" for name, commit in commits.items()),
    )
    for number in range(3):
        git(upstream.path, "-c", "user.name=t", "-c", "user.email=t@e", "tag", "-am", "m", f"t{number}", first)
    git(upstream.path, "pack-refs", "--all")
    return commits


def test_a_branch_is_read_loose_packed_and_loose_over_packed(upstream: Upstream) -> None:
    first = upstream.commit("main", {"a.md": "a\n"})
    assert read(upstream.path) == first
    git(upstream.path, "pack-refs", "--all")
    assert not (upstream.path / MAIN).exists()
    assert read(upstream.path) == first
    second = upstream.commit("main", {"a.md": "b\n"})
    assert read(upstream.path) == second
    upstream.delete("main")
    assert read(upstream.path) is None
    upstream.move("main", first)
    assert read(upstream.path) == first


def test_every_one_of_many_packed_branches_is_found_and_no_other(upstream: Upstream) -> None:
    names = [f"a/{'x' * (number % 7)}{number}" for number in range(300)] + ["a-", "a.b", "zz", "Ab", "é", "记忆"]
    commits = fill(upstream, names)
    assert {name: read(upstream.path, f"refs/heads/{name}") for name in names} == commits
    for absent in ("a", "a/", "a/1x", "A", "0", "zzz", "记", "t0", ""):
        assert read(upstream.path, f"refs/heads/{absent}") is None
    assert read(upstream.path, "refs/tags/t1") == git(upstream.path, "rev-parse", "refs/tags/t1")


def test_a_hundred_thousand_branches_cost_no_more_than_a_few(upstream: Upstream) -> None:
    commit = upstream.commit("main", {"a.md": "a\n"})
    lines = "".join(f"{commit} refs/heads/{number:06}\n" for number in range(100_000))
    packed = upstream.path / "packed-refs"
    packed.write_text("# pack-refs with: peeled fully-peeled sorted \n" + lines)
    begin = monotonic()
    for number in range(0, 100_000, 1_000):
        assert read(upstream.path, f"refs/heads/{number:06}") == commit
    assert monotonic() - begin < 0.5  # 5 ms each; a scan of the file takes longer by itself


@pytest.mark.parametrize("ending", ["", "/", "//"])
def test_a_repository_is_found_where_git_finds_it(upstream: Upstream, tmp_path: Path, ending: str) -> None:
    commit = upstream.commit("main", {"a.md": "a\n"})
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(upstream.path), str(clone)], check=True)
    for path in (upstream.path, upstream.path.with_suffix(""), clone, clone / ".git"):
        assert refs.read(os.fsencode(path) + ending.encode(), MAIN) == commit
    subprocess.run(["git", "clone", "--quiet", str(upstream.path), str(tmp_path / "both.git")], check=True)
    assert read(tmp_path / "both") == commit


def test_a_url_names_a_place_of_this_machine_or_none() -> None:
    assert refs.place("/srv/a b.git") == b"/srv/a b.git"
    assert refs.place("file:///srv/a%20b.git") == b"/srv/a b.git"
    for url in ("file://host/x", "FILE:///x", "https://h/x", "ssh://h/x", "git@h:x", "h:/x", "x/y", ""):
        assert refs.place(url) is None


def symbolic(repository: Path) -> None:
    git(repository, "symbolic-ref", MAIN, "refs/heads/other")


def linked(repository: Path) -> None:
    target = repository / MAIN
    target.rename(repository / "elsewhere")
    target.symlink_to(repository / "elsewhere")


def piped(repository: Path) -> None:
    (repository / MAIN).unlink()
    os.mkfifo(repository / MAIN)


def setting(name: str, value: str) -> Callable[[Path], object]:
    return lambda repository: git(repository, "config", name, value)


def content(name: str, text: str) -> Callable[[Path], object]:
    return lambda repository: (repository / name).write_text(text)


def removed(name: str) -> Callable[[Path], object]:
    return lambda repository: (repository / name).unlink()


def packed(text: str) -> Callable[[Path], object]:
    def spoil(repository: Path) -> None:
        commit = git(repository, "rev-parse", MAIN)
        (repository / MAIN).unlink()
        (repository / "packed-refs").write_text(text.format(commit=commit))

    return spoil


SORTED = "# pack-refs with: peeled fully-peeled sorted \n"


@pytest.mark.parametrize(
    "spoil",
    [
        symbolic,
        linked,
        piped,
        setting("transfer.hideRefs", "refs/heads/main"),
        setting("uploadpack.hideRefs", "refs"),
        setting("include.path", "/nowhere"),
        setting("extensions.worktreeConfig", "true"),
        setting("core.repositoryFormatVersion", "2"),
        content("commondir", "../other.git\n"),
        content("config", "[core]\n" + "#" * 70_000),
        content(MAIN, ""),
        content(MAIN, "0" * 40 + "\n"),
        content(MAIN, "a" * 40),
        content(MAIN, "A" * 40 + "\n"),
        content(MAIN, "a" * 64 + "\n"),
        content("HEAD", "rubbish\n"),
        removed("config"),
        removed(MAIN),
        packed("{commit} refs/heads/main\n"),
        packed("# pack-refs with: peeled \n{commit} refs/heads/main\n"),
        packed(SORTED + "{commit} refs/heads/main"),
        packed(SORTED + "{commit}  refs/heads/main\n"),
        packed(SORTED + "^{commit} refs/heads/main\n"),
        packed(SORTED + "{commit:.39} refs/heads/main\n"),
        packed(SORTED),
        packed(""),
    ],
)
def test_what_is_unusual_is_left_to_git(upstream: Upstream, spoil: Callable[[Path], object]) -> None:
    assert read(upstream.path) is None
    upstream.commit("main", {"a.md": "a\n"})
    assert read(upstream.path)
    spoil(upstream.path)
    assert read(upstream.path) is None


def test_a_repository_elsewhere_is_left_to_git(upstream: Upstream, tmp_path: Path) -> None:
    upstream.commit("main", {"a.md": "a\n"})
    git(upstream.path, "worktree", "add", "--quiet", "--detach", str(tmp_path / "tree"), "main")
    assert read(tmp_path / "tree") is None
    assert read(upstream.path / "worktrees" / "tree") is None
    git(upstream.path, "bundle", "create", "--quiet", str(tmp_path / "bundle"), "main")
    assert read(tmp_path / "bundle") is None
    assert read(tmp_path) is None
    assert refs.read(b"/nul\0", MAIN) is None


def test_an_empty_folder_in_the_place_of_a_branch_does_not_hide_it(upstream: Upstream) -> None:
    commit = upstream.commit("task/a", {"a.md": "a\n"})
    git(upstream.path, "pack-refs", "--all")
    (upstream.path / "refs/heads/task/a").mkdir(parents=True)
    assert read(upstream.path, "refs/heads/task/a") == commit
    assert read(upstream.path, "refs/heads/task/a/b") is None
    upstream.move("task/c", commit)
    assert read(upstream.path, "refs/heads/task/c/d") is None


def test_while_refs_are_pushed_packed_deleted_and_made_again_every_value_was_the_tip(upstream: Upstream) -> None:
    """One thread moves the branch through known values and packs, several read: what they get was the tip at a moment
    of the reading. A reading that finds nothing is git's to answer."""
    commits = [upstream.commit("main", {"a.md": f"{number}\n"}) for number in range(20)]
    upstream.move("other", commits[0])
    tips: list[tuple[float, float, str | None]] = []  # from when until when a value was being set
    done = threading.Event()
    wrong: list[str] = []

    def set_to(commit: str | None) -> None:
        begin = monotonic()
        upstream.delete("main") if commit is None else upstream.move("main", commit)
        tips.append((begin, monotonic(), commit))

    set_to(commits[-1])

    def ask() -> None:
        while not done.is_set():
            begin = monotonic()
            value = read(upstream.path)
            end = monotonic()
            if value is not None:
                readings.append((begin, end, value))

    readings: list[tuple[float, float, str]] = []
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number, commit in enumerate(commits * 2):
        set_to(commit)
        if number % 2:
            git(upstream.path, "pack-refs", "--all")
        if number % 5 == 4:
            set_to(None)
        if number % 3 == 2:  # another deletion writes packed-refs as well, with what it held of ours
            upstream.move("other", commit)
            upstream.delete("other")
    done.set()
    for thread in threads:
        thread.join()
    for begin, end, value in readings:
        spans = [(tips[at][0], tips[at + 1][1]) for at in range(len(tips) - 1) if tips[at][2] == value]
        spans += [(tips[-1][0], float("inf"))] if tips[-1][2] == value else []
        if not any(started <= end and replaced >= begin for started, replaced in spans):
            wrong.append(value)
    assert not wrong
    assert len({value for _, _, value in readings}) > 10
