"""Branch names are held to Git's own judgement; workspaces to the promise that no two branches share one."""

import re
import subprocess
from collections.abc import Iterable
from itertools import product
from random import Random

import pytest

from memgw.branch import MAX_BRANCH_BYTES, MAX_WORKSPACE_BYTES, WORKSPACE, Branch
from memgw.errors import InvalidBranch, InvalidProfile

PIECES = [
    "a", "B", "7", "main", "task", "memory", "2026-03", "TASK-001", "HEAD", "lock", ".lock", "@", "{", "}", "@{", "-",
    "--", "+", "_", ".", "..", "/", "//", " ", "\t", "\n", "\r", "\x01", "\x1f", "\x7f", "~", "^", ":", "?", "*", "[",
    "]", "\\", "!", '"', "'", "$(id)", "%2e", "#", "&", ";", "|", "<", "(", ")", ",", "=", "`", "é", "e\u0301",
    "记忆", "🙂", "\u00a0", "\u2028", "\ufeff", "\x85",
]  # fmt: skip


def nasty_names(count: int) -> set[str]:
    """The same ones every time."""
    dice = Random(20260301)
    return {"".join(dice.choices(PIECES, k=dice.randint(1, 6))) for _ in range(count)}


def taken_by_git(names: Iterable[str]) -> list[str]:
    """Those for which `git check-ref-format` says yes. One shell for all of them: starting one each takes longer."""
    script = 'for name; do git check-ref-format "refs/heads/$name"; echo $?; done'
    asked = list(names)
    answer = subprocess.run(["sh", "-c", script, "sh", *asked], capture_output=True, text=True, check=True)
    statuses = answer.stdout.split()
    assert set(statuses) <= {"0", "1"}
    return [name for name, status in zip(asked, statuses, strict=True) if status == "0"]


def is_taken(name: str) -> bool:
    try:
        branch = Branch.parse(name)
    except InvalidBranch:
        return False
    assert branch.name == name
    return True


def test_a_name_is_taken_when_git_takes_it_and_it_is_no_option() -> None:
    names = nasty_names(600) | {
        "".join(pair) for pair in product(["a", ".", "/", "-", "@", "{", ".lock", "é"], repeat=2)
    }
    expected = {name for name in taken_by_git(names) if not name.startswith("-")}
    assert len(expected) > 100
    assert {name for name in names if is_taken(name)} == expected


@pytest.mark.parametrize(
    "name",
    [
        "-x", "--upload-pack=touch y", "a..b", "x.lock", "x.lock/y", "@{-1}", "main@{1}", "", "a b", "a~b", "a^b",
        "a:b", "a.", "a/", "/a", "a//b", ".a", "a/.b", "a\0b", "a\x7fb", "a\nb", "a?b", "a*b", "a[b", "a\\b",
        "a" * 300, "\udc80", "a\ud83d", "\x00", " ", ".", "..", "/", "main\n",
    ],
)  # fmt: skip
def test_a_name_that_git_refuses_is_refused(name: str) -> None:
    with pytest.raises(InvalidBranch):
        Branch.parse(name)


@pytest.mark.parametrize(
    "name",
    ["+main", "$(id)", "%2e", "记忆", "@", "HEAD", "a/b/c", "feature/x-1.2", "a'b", 'a"b', "a;b", "a-", "]", "a]"],
)
def test_a_name_that_only_looks_dangerous_is_taken(name: str) -> None:
    assert taken_by_git([name]) == [name]
    assert Branch.parse(name).ref == f"refs/heads/{name}"


def test_a_name_may_be_as_long_as_its_lock_file_fits_the_file_system() -> None:
    assert MAX_BRANCH_BYTES == 244
    assert Branch.parse("a" * 244).name == "a" * 244
    assert Branch.parse("é" * 122).name == "é" * 122
    for too_long in ("a" * 245, "é" * 123, "记" * 82):
        with pytest.raises(InvalidBranch, match="longer than 244 bytes"):
            Branch.parse(too_long)


def test_the_refusal_says_why_and_never_repeats_the_name() -> None:
    for name in ("--upload-pack=touch y", "\udc80secret", "secret" * 60):
        with pytest.raises(InvalidBranch) as caught:
            Branch.parse(name)
        assert caught.value.detail
        assert "upload" not in caught.value.detail
        assert "secret" not in caught.value.detail


@pytest.mark.parametrize(
    ("profile", "branch"),
    [
        ("stable", "main"),
        ("monthly-2026-03", "memory/2026-03"),
        ("monthly-2026-12", "memory/2026-12"),
        ("monthly-0001-01", "memory/0001-01"),
        ("task-TASK-001", "task/TASK-001"),
        ("task-a/b", "task/a/b"),
        ("task--x", "task/-x"),
        ("task-记忆", "task/记忆"),
    ],
)
def test_a_profile_stands_for_a_branch(profile: str, branch: str) -> None:
    assert Branch.of_profile(profile) == Branch.parse(branch)
    assert Branch.parse(branch).has_profile


@pytest.mark.parametrize(
    "name", ["master", "memory", "memory/2026-13", "memory/2026-03/x", "memory/x", "task", "tasks/1", "main/x"]
)
def test_other_branches_have_no_profile(name: str) -> None:
    assert not Branch.parse(name).has_profile


@pytest.mark.parametrize(
    "profile",
    [
        "", "Stable", "stable ", "stable-", "main", "monthly", "monthly-", "monthly-2026-00", "monthly-2026-13",
        "monthly-2026-3", "monthly-26-03", "monthly-2026-03-01", "monthly-2026-03\n", "monthly-２０２６-03",
        "monthly-2026-03/x", "task", "task-", "task-a b", "task-a..b", "task-/a", "task-a/", "task-x.lock",
        "task-\udc80", "task-" + "a" * 240, "weekly-2026-03", "-", "Task-a",
    ],
)  # fmt: skip
def test_any_other_profile_is_refused(profile: str) -> None:
    with pytest.raises(InvalidProfile):
        Branch.of_profile(profile)


@pytest.mark.parametrize(
    ("branch", "workspace"),
    [
        ("main", "main"),
        ("memory/2026-03", "memory-2026-03"),
        ("task/TASK-001", "task-TASK-001"),
        ("task/a.b_c", "task-a.b_c"),
        ("task/" + "a" * 95, "task-" + "a" * 95),
    ],
)
def test_a_standard_branch_has_a_plain_workspace(branch: str, workspace: str) -> None:
    assert Branch.parse(branch).workspace == workspace


@pytest.mark.parametrize(
    ("branch", "slug"),
    [
        ("a/b", "a-b"),
        ("Main", "Main"),
        ("memory-2026-03", "memory-2026-03"),
        ("memory/2026-13", "memory-2026-13"),
        ("memory/２０２６-03", "memory-03"),
        ("task/a/b", "task-a-b"),
        ("task/" + "a" * 96, "task-" + "a" * 55),
        ("记忆", "branch"),
        ("feature/fix'it", "feature-fix-it"),
    ],
)
def test_any_other_branch_has_a_readable_slug_and_a_hash(branch: str, slug: str) -> None:
    assert re.fullmatch(re.escape(slug) + r"~[0-9a-f]{12}", Branch.parse(branch).workspace)


ALIKE = [
    "main", "Main", "MAIN", "main-", "main]", "memory/2026-03", "memory-2026-03", "memory/2026-3",
    "memory/２０２６-03", "memory/2026/03", "task/a", "task-a", "task/A", "task/a/b", "task/a-b", "task-a/b",
    "task/a.b", "a/b", "a-b", "a_b", "a+b", "A/b", "é", "e\u0301", "记忆", "记憶", "记", "branch", "branch!",
    "x" * 61, "x" * 62, "task/" + "x" * 95, "task/" + "x" * 96, "task/" + "x" * 97,
]  # fmt: skip


def test_branches_that_look_alike_have_different_workspaces() -> None:
    assert len({Branch.parse(name).workspace for name in ALIKE}) == len(ALIKE)
    assert len({Branch.parse(name).mirror_ref for name in ALIKE}) == len(ALIKE)


def test_no_two_branches_share_a_workspace() -> None:
    names = {name for name in nasty_names(30_000) if is_taken(name)}
    assert len(names) > 4000
    assert len({Branch.parse(name).workspace for name in names}) == len(names)


def test_a_workspace_is_a_short_plain_file_name() -> None:
    for name in filter(is_taken, [*nasty_names(10_000), *ALIKE]):
        workspace = Branch.parse(name).workspace
        assert re.fullmatch(r"[A-Za-z0-9._~-]+", workspace), name
        assert WORKSPACE.fullmatch(workspace), name
        assert len(workspace.encode()) <= MAX_WORKSPACE_BYTES == 100
        assert workspace not in (".", "..")
        assert not workspace.startswith("-")


@pytest.mark.parametrize("name", ["main", "task/a", "task/a/b", "HEAD", "x" * 244])
def test_the_mirror_keeps_heads_side_by_side(name: str) -> None:
    assert re.fullmatch(r"refs/memgw/[0-9a-f]{40}", Branch.parse(name).mirror_ref)
