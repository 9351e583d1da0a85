"""bin/bootstrap.sh, run for real on a copy of bin/ in an otherwise empty project root."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
FOLDERS = {"main": "main", "memory/2026-03": "memory-2026-03", "task/TASK-001": "task-TASK-001"}
GIT = shutil.which("git") or "git"


def make_root(path: Path) -> Path:
    path.mkdir(parents=True)
    shutil.copytree(PROJECT / "bin", path / "bin")
    return path


def clean_env(home: Path, **extra: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), **extra}


def start(root: Path, *, cwd: Path | None = None, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(root / "bin" / "bootstrap.sh")],
        cwd=cwd or root,
        env=clean_env(root.parent / "no-home", **extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return output


def bootstrap(root: Path, *, cwd: Path | None = None, **extra: str) -> str:
    return finish(start(root, cwd=cwd, **extra))


def git(*args: str, cwd: Path) -> bytes:
    env = clean_env(
        cwd,
        GIT_CONFIG_GLOBAL="/dev/null",
        GIT_CONFIG_NOSYSTEM="1",
        GIT_AUTHOR_NAME="user",
        GIT_AUTHOR_EMAIL="user@example.com",
        GIT_COMMITTER_NAME="user",
        GIT_COMMITTER_EMAIL="user@example.com",
    )
    return subprocess.run([GIT, *args], cwd=cwd, env=env, check=True, capture_output=True, timeout=60).stdout


def remote_of(root: Path) -> Path:
    return root / "data" / "remote-memory.git"


def hashes(root: Path) -> dict[str, str]:
    return {branch: git("rev-parse", branch, cwd=remote_of(root)).decode().strip() for branch in FOLDERS}


def demo_files(root: Path, branch: str) -> dict[str, bytes]:
    folder = root / "bin" / "demo-memory" / FOLDERS[branch]
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.md")}


def branch_files(root: Path, branch: str) -> dict[str, bytes]:
    names = git("ls-tree", "-r", "-z", "--name-only", branch, cwd=remote_of(root)).decode().split("\0")
    return {name: git("cat-file", "blob", f"{branch}:{name}", cwd=remote_of(root)) for name in names if name}


def everything_under(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Each path with its inode, time of change and content: equal only when nothing was written."""
    found = {}
    for path in sorted([root, *root.rglob("*")]):
        state = path.stat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (state.st_ino, state.st_mtime_ns, content)
    return found


def assert_one_good_remote(root: Path) -> None:
    assert [path.name for path in (root / "data").iterdir()] == ["remote-memory.git"]
    assert sorted(path.name for path in root.iterdir()) == [".env", "bin", "data"]
    assert sorted(path.name for path in remote_of(root).iterdir()) == ["HEAD", "config", "objects", "refs"]
    git("fsck", "--strict", cwd=remote_of(root))
    assert branch_files(root, "main") == demo_files(root, "main")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path / "project")


@pytest.fixture
def path_where(tmp_path: Path) -> Callable[[str, str, str], str]:
    """A PATH whose command, when called with that first argument, runs a line of shell before it goes on."""

    def make(command: str, argument: str, line: str) -> str:
        folder = tmp_path / f"{command}-{argument}"
        folder.mkdir()
        wrapper = folder / command
        real = shutil.which(command)
        wrapper.write_text(f'#!/bin/sh\nif [ "$1" = {argument} ]; then {line}; fi\nexec "{real}" "$@"\n')
        wrapper.chmod(0o755)
        return f"{folder}:{os.environ['PATH']}"

    return make


def test_three_branches_hold_the_demo_memory(root: Path) -> None:
    bootstrap(root)

    refs = git("for-each-ref", "--format=%(refname)", cwd=remote_of(root)).decode().split()
    assert refs == [f"refs/heads/{branch}" for branch in FOLDERS]
    for branch in FOLDERS:
        assert branch_files(root, branch) == demo_files(root, "main") | demo_files(root, branch)
    assert git("symbolic-ref", "HEAD", cwd=remote_of(root)) == b"refs/heads/main\n"
    assert git("rev-parse", "--is-bare-repository", cwd=remote_of(root)) == b"true\n"
    assert int(git("rev-list", "--count", "main", cwd=remote_of(root))) > 1


@pytest.mark.parametrize("branch", ["memory/2026-03", "task/TASK-001"])
def test_a_branch_changes_two_memories_of_main_and_adds_its_own(root: Path, branch: str) -> None:
    bootstrap(root)

    assert git("merge-base", "main", branch, cwd=remote_of(root)).decode().strip() == hashes(root)["main"]
    fields = git("diff", "--name-status", "--no-renames", "-z", "main", branch, cwd=remote_of(root)).decode()
    kinds, names = fields.split("\0")[0:-1:2], fields.split("\0")[1:-1:2]
    assert set(names) == set(demo_files(root, branch))
    assert kinds.count("M") == 2
    assert kinds.count("A") == len(kinds) - 2 > 0


def test_the_demo_has_names_with_a_space_and_in_chinese(root: Path) -> None:
    bootstrap(root)

    names = branch_files(root, "main")
    assert "runbooks/replay carrier events.md" in names
    assert "runbooks/值班交接.md" in names


def test_an_env_file_points_at_the_remote(root: Path) -> None:
    bootstrap(root)

    comment, setting = (root / ".env").read_text().splitlines()
    assert comment.startswith("# ")
    assert setting == "GIT_REMOTE_URL=data/remote-memory.git"


def test_the_working_directory_and_a_link_to_the_script_do_not_matter(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / "link"
    link.symlink_to(root / "bin" / "bootstrap.sh")

    env = clean_env(tmp_path, CDPATH=str(tmp_path))
    subprocess.run(["bash", "../link"], cwd=elsewhere, env=env, check=True, capture_output=True, timeout=60)

    assert list(elsewhere.iterdir()) == []
    assert_one_good_remote(root)


@pytest.mark.parametrize("given", ["other data", "/absolute"])
def test_the_data_directory_can_be_chosen(root: Path, tmp_path: Path, given: str) -> None:
    data = tmp_path / "absolute" if given == "/absolute" else root / given
    bootstrap(root, cwd=tmp_path, MEMGW_DATA_DIR=str(data) if given == "/absolute" else given)

    assert not (root / "data").exists()
    assert [path.name for path in data.iterdir()] == ["remote-memory.git"]
    setting = (root / ".env").read_text().splitlines()[1].removeprefix("GIT_REMOTE_URL=")
    assert setting.strip("'") == str(data / "remote-memory.git")


def test_a_second_run_writes_nothing(root: Path) -> None:
    bootstrap(root)
    before = everything_under(root)

    output = bootstrap(root)

    assert everything_under(root) == before
    assert output.splitlines() == [
        "bootstrap: data/remote-memory.git is there already: left alone",
        "bootstrap: .env is there already: left alone",
    ]


def test_pushes_deletions_and_force_pushes_are_taken_and_outlive_a_second_run(root: Path, tmp_path: Path) -> None:
    bootstrap(root)
    clone = tmp_path / "clone"
    git("clone", "--quiet", str(remote_of(root)), str(clone), cwd=tmp_path)
    (clone / "new.md").write_text("# New\n")
    git("add", "new.md", cwd=clone)
    git("commit", "--quiet", "--amend", "--message=rewritten", cwd=clone)
    git("push", "--quiet", "--force", "origin", "main", cwd=clone)
    git("push", "--quiet", "origin", "--delete", "task/TASK-001", cwd=clone)
    git("push", "--quiet", "origin", "main:task/mine", cwd=clone)
    before = everything_under(root)

    bootstrap(root)

    assert everything_under(root) == before
    assert branch_files(root, "task/mine")["new.md"] == b"# New\n"


def test_an_env_file_of_the_user_is_kept(root: Path) -> None:
    (root / ".env").write_text("GIT_REMOTE_URL=https://git.example.com/memory.git\n")

    output = bootstrap(root)

    assert (root / ".env").read_text() == "GIT_REMOTE_URL=https://git.example.com/memory.git\n"
    assert "bootstrap: .env is there already: left alone" in output.splitlines()
    assert_one_good_remote(root)


def test_hashes_are_the_same_on_each_machine(root: Path, tmp_path: Path) -> None:
    other = make_root(tmp_path / "machine two" / "checkout")
    for path in (other / "bin" / "demo-memory").rglob("*.md"):
        path.chmod(0o755)
        os.utime(path, (1, 1))
    bootstrap(root)
    bootstrap(other, TZ="Asia/Shanghai", LANG="zh_CN.UTF-8", USER="someone", EMAIL="someone@example.com")

    assert hashes(other) == hashes(root)
    assert len(set(hashes(root).values())) == 3


def test_the_settings_of_the_users_git_change_nothing(root: Path, tmp_path: Path) -> None:
    hostile = make_root(tmp_path / "hostile" / "project")
    for place in (root, hostile):  # line ends that core.autocrlf would turn
        (place / "bin" / "demo-memory" / "main" / "dos.md").write_bytes(b"# From DOS\r\n")
    home = tmp_path / "hostile" / "home"
    hooks = home / "template" / "hooks"
    hooks.mkdir(parents=True)
    for name in ("pre-commit", "commit-msg", "post-commit", "reference-transaction", "post-index-change"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch '{home}/hook-ran'\nexit 1\n")
        (hooks / name).chmod(0o755)
    (home / "all-markdown").write_text("*.md\n")
    (home / "attributes").write_text("* text=auto eol=lf\n")
    for name, text in {"ignore": "*.md\n", "attributes": "* text=auto eol=lf\n"}.items():
        (home / ".config" / "git").mkdir(parents=True, exist_ok=True)
        (home / ".config" / "git" / name).write_text(text)
    (home / ".gitconfig").write_text(
        f"""
        [user]
            name = Someone Else
            email = else@example.com
            signingKey = none
        [init]
            defaultBranch = trunk
            templateDir = {home}/template
        [core]
            autocrlf = true
            hooksPath = {hooks}
            excludesFile = {home}/all-markdown
            attributesFile = {home}/attributes
        [commit]
            gpgSign = true
        [gpg]
            program = /bin/false
        [i18n]
            commitEncoding = ISO-8859-1
        """
    )
    bootstrap(root)
    bootstrap(
        hostile,
        HOME=str(home),
        GIT_CONFIG_GLOBAL=str(home / ".gitconfig"),
        GIT_CONFIG_COUNT="1",
        GIT_CONFIG_KEY_0="core.autocrlf",
        GIT_CONFIG_VALUE_0="true",
        GIT_DIR=str(home / "git-dir"),
        GIT_WORK_TREE=str(home),
        GIT_INDEX_FILE=str(home / "index"),
        GIT_OBJECT_DIRECTORY=str(home / "objects"),
        GIT_TEMPLATE_DIR=str(home / "template"),
        GIT_DEFAULT_HASH="sha256",
        GIT_AUTHOR_NAME="Someone Else",
        GIT_COMMITTER_DATE="2001-01-01T00:00:00Z",
    )

    assert hashes(hostile) == hashes(root)
    assert_one_good_remote(hostile)
    assert sorted(path.name for path in home.iterdir()) == [
        ".config",
        ".gitconfig",
        "all-markdown",
        "attributes",
        "template",
    ]


def test_a_file_that_is_not_a_memory_does_not_get_in(root: Path) -> None:
    bootstrap(make_root(root.parent / "plain"))
    (root / "bin" / "demo-memory" / "main" / ".DS_Store").write_bytes(b"\0")
    (root / ".gitignore").write_text("*.md\ndata/\n")
    git("init", "--quiet", cwd=root)
    bootstrap(root)

    assert hashes(root) == hashes(root.parent / "plain")


@pytest.mark.parametrize("moment", ["init", "write-tree", "update-ref", "read-tree"])
def test_what_a_killed_run_left_is_cleaned_up(
    root: Path, path_where: Callable[[str, str, str], str], moment: str
) -> None:
    killed = start(root, PATH=path_where("git", moment, "kill -KILL 0"))
    killed.communicate(timeout=60)
    assert killed.returncode == -9
    leftover = next((root / "data").iterdir())
    assert leftover.name != "remote-memory.git"
    (root / f".env.bootstrap-tmp.{leftover.name.split('.bootstrap-tmp.')[1]}").write_text("half a li")

    output = bootstrap(root)

    assert f"bootstrap: removed data/{leftover.name}, left by a killed run" in output.splitlines()
    assert_one_good_remote(root)


def test_what_was_left_is_cleaned_up_also_when_the_remote_is_there(root: Path) -> None:
    bootstrap(root)
    gone = subprocess.Popen(["true"])
    gone.wait(timeout=60)
    host = subprocess.run(
        ["bash", "-c", "echo $HOSTNAME"],
        env=clean_env(root),
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.strip()
    (root / "data" / f".remote-memory.git.bootstrap-tmp.{host}.{gone.pid}" / "repo.git").mkdir(parents=True)

    bootstrap(root)

    assert_one_good_remote(root)


def test_a_build_of_another_host_is_cleaned_up_only_when_it_is_old(root: Path) -> None:
    (root / "data").mkdir()
    young, old = (root / "data" / f".remote-memory.git.bootstrap-tmp.{host}.1" for host in ("a.example", "b"))
    young.mkdir()
    old.mkdir()
    two_hours_ago = time.time() - 7200
    os.utime(old, (two_hours_ago, two_hours_ago))

    bootstrap(root)

    assert young.exists()
    assert not old.exists()


def test_a_terminated_run_leaves_nothing(root: Path, path_where: Callable[[str, str, str], str]) -> None:
    stopped = start(root, PATH=path_where("git", "read-tree", "kill -TERM $PPID"))
    stopped.communicate(timeout=60)

    assert stopped.returncode in (-15, 143)
    assert list((root / "data").iterdir()) == []


def test_runs_at_once_leave_one_good_remote(root: Path) -> None:
    outputs = [finish(process) for process in [start(root) for _ in range(4)]]

    lines = [line for output in outputs for line in output.splitlines()]
    assert len([line for line in lines if line.startswith("bootstrap: made data/")]) == 1
    assert len([line for line in lines if line.startswith("bootstrap: made .env")]) == 1
    assert_one_good_remote(root)


def test_a_run_that_was_overtaken_keeps_the_remote_of_the_other(
    root: Path, path_where: Callable[[str, str, str], str]
) -> None:
    here, go = root.parent / "here", root.parent / "go"
    slow = start(root, PATH=path_where("git", "init", f"touch '{here}'; while [ ! -e '{go}' ]; do sleep 0.02; done"))
    try:
        deadline = time.monotonic() + 30
        while not here.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        quick = bootstrap(root)
        before = everything_under(remote_of(root))
    finally:
        go.touch()
        output = finish(slow)

    assert "removed" not in quick
    assert "bootstrap: data/remote-memory.git was made by another run meanwhile: left alone" in output.splitlines()
    assert everything_under(remote_of(root)) == before
    assert_one_good_remote(root)


def test_an_env_file_that_came_meanwhile_is_kept(root: Path, path_where: Callable[[str, str, str], str]) -> None:
    output = bootstrap(root, PATH=path_where("mv", "-nT", f"echo mine >'{root}/.env'"))

    assert (root / ".env").read_text() == "mine\n"
    assert "bootstrap: .env was made by another run meanwhile: left alone" in output.splitlines()
    assert_one_good_remote(root)


def test_an_empty_directory_in_its_place_becomes_the_remote(root: Path) -> None:
    git("init", "--quiet", cwd=root)  # a search upwards from data/ would find this one
    remote_of(root).mkdir(parents=True)

    bootstrap(root)

    shutil.rmtree(root / ".git")
    assert_one_good_remote(root)


def test_something_else_in_its_place_is_refused_and_kept(root: Path) -> None:
    remote_of(root).mkdir(parents=True)
    (remote_of(root) / "thesis.txt").write_text("mine")

    process = start(root)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == 1
    assert output.startswith("bootstrap: data/remote-memory.git is in the way and is not a Git repository")
    assert [path.name for path in (root / "data").iterdir()] == ["remote-memory.git"]
    assert [path.name for path in remote_of(root).iterdir()] == ["thesis.txt"]
    assert not (root / ".env").exists()
