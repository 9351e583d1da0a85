"""Housekeeping: what nobody needs goes, what anybody uses stays, and whatever happens, the next answer is right."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from memgw import files, locks
from memgw.app import create_app, create_gateway
from memgw.branch import Branch
from memgw.config import ROOT, Config
from memgw.deadline import Deadline
from memgw.engine import Place
from memgw.errors import WorkspaceBusy
from memgw.housekeeping import Bounds, Housekeeper, Round
from memgw.vectors import rewritten
from tests.actors import Server, Upstream, git_http, until
from tests.conftest import Client
from tests.test_promise import fire
from tests.test_recovery import fill

DAY = 86_400.0


class House:
    """A housekeeper over the data directory of the tests; bounds in the words of `Bounds`, none by default."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.gateway = create_gateway(Config.load(environ), environ)
        self.data = self.gateway.layout.data

    def keeper(
        self, gone_seconds: float = 0.0, max_workspaces: int = 0, max_bytes: int = 0, request_seconds: float = 0.0
    ) -> Housekeeper:
        return Housekeeper(self.gateway, Bounds(gone_seconds, max_workspaces, max_bytes, request_seconds))

    def round(self, *, now: bool = False, **bounds: Any) -> Round:
        return self.keeper(**bounds).round(now=now)

    def removed(self, **how: Any) -> list[str]:
        """What a round without failures took away."""
        done = self.round(**how)
        assert done.failed == []
        return [freed.what for freed in done.freed]

    def workspaces(self) -> set[str]:
        return {path.stem for path in (self.data / "state").glob("*.json")}

    def traces(self, branch: str) -> list[str]:
        """All that is on disk of a branch's workspace, but its locks."""
        name = Branch.parse(branch).workspace
        found = [str(path.relative_to(self.data)) for path in self.gateway.layout.places(name) if path.exists()]
        admin = self.data / "git-mirror" / "repo.git" / "worktrees" / name
        refs = self.gateway.mirror.refs(Deadline(10)) & {Branch.parse(branch).mirror_ref}
        return found + [str(path) for path in [admin] if path.exists()] + sorted(refs)

    def age(self, branch: str, seconds: float) -> None:
        """As if it had been used so long ago."""
        used = self.data / "state" / "used" / Branch.parse(branch).workspace
        os.utime(used, (time.time() - seconds,) * 2)


@pytest.fixture
def house(environ: dict[str, str], client: Client, upstream: Upstream) -> House:
    """main, task/a and task/b are in use."""
    for branch in ("main", "task/a", "task/b"):
        upstream.commit(branch, {"note.md": f"# Note\n\nneedle of {branch}\n"})
        assert client.paths("needle", branch=branch) == ["note.md"]
    return House(environ)


def put_back(house: House, seconds: float) -> None:
    """As if the branches that are missing had been seen so for longer."""
    book = house.keeper()._branches
    book.save({name: moment - seconds for name, moment in book.load().items()})


def test_a_branch_that_is_gone_goes_after_the_time_of_grace_and_not_before(
    house: House, client: Client, upstream: Upstream
) -> None:
    upstream.delete("task/a")
    assert house.removed(gone_seconds=DAY) == []
    put_back(house, DAY - 60)
    assert house.removed(gone_seconds=DAY) == []
    put_back(house, 61)
    assert house.removed(gone_seconds=DAY) == ["workspace task-a"]
    assert house.traces("task/a") == []
    assert house.workspaces() == {"main", "task-b"}
    assert client.problem("/query", {"query": "needle", "branch": "task/a"}) == (404, "branch_not_found")
    commit = upstream.commit("task/a", {"other.md": "# Other\n\nneedle again\n"}, parent=None)
    answer = client.query("needle", branch="task/a")
    assert (answer["commit_hash"], [hit["path"] for hit in answer["results"]]) == (commit, ["other.md"])


def test_a_branch_that_comes_back_has_its_time_of_grace_anew(house: House, upstream: Upstream) -> None:
    commit = upstream.tip("task/a")
    assert commit
    upstream.delete("task/a")
    assert house.removed(gone_seconds=DAY) == []
    put_back(house, 2 * DAY)
    upstream.move("task/a", commit)
    assert house.removed(gone_seconds=DAY) == []
    upstream.delete("task/a")
    assert house.removed(gone_seconds=DAY) == []
    assert house.workspaces() == {"main", "task-a", "task-b"}


def test_a_branch_that_is_there_when_asked_once_more_stays(house: House, upstream: Upstream, data: Path) -> None:
    """The list lies: it lacks a branch that the remote has."""
    with git_http(upstream) as remote:
        environ = {**os.environ, "GIT_REMOTE_URL": remote.url, "MEMGW_DATA_DIR": str(data), "QMD_ENGINE": "cli"}
        lacking = b"refs/heads/task/a\n"

        def spoil(request: bytes, answer: bytes) -> bytes:
            if b"ref-prefix refs/heads/task/a\n" in request:
                return answer
            lines = [line for line in packets(answer) if not line.endswith(lacking)]
            return b"".join(b"%04x%s" % (len(line) + 4, line) for line in lines) + answer[-4:]

        remote.spoil = lambda request, answer: spoil(request, answer) if b"command=ls-refs" in request else answer
        listed = House(environ)
        assert listed.gateway.remote.branches(Deadline(10)) == {"main", "task/b"}
        assert listed.removed() == []
    assert house.workspaces() == {"main", "task-a", "task-b"}


def packets(answer: bytes) -> list[bytes]:
    lines, at = [], 0
    while (size := int(answer[at : at + 4], 16)) > 4:
        lines.append(answer[at + 4 : at + size])
        at += size
    return lines


def test_nothing_goes_when_the_remote_fails_or_lists_nothing(
    house: House, upstream: Upstream, data: Path, tmp_path: Path
) -> None:
    empty, other = Upstream(tmp_path / "empty.git"), Upstream(tmp_path / "other.git")
    other.commit("trunk", {"a.md": "# A\n"})
    with git_http(upstream) as broken:
        broken.spoil = lambda request, answer: b"0000"
        for url in (empty.url, other.url, broken.url, str(tmp_path / "nowhere.git"), "http://127.0.0.1:9/x.git"):
            done = House({**os.environ, "GIT_REMOTE_URL": url, "MEMGW_DATA_DIR": str(data)}).round()
            assert done == Round([], ["branches that are gone"]), url
    assert house.workspaces() == {"main", "task-a", "task-b"}


@pytest.mark.parametrize(
    "said",
    [b"\n", b"x\trefs/heads/main\n", b"%s\trefs/tags/v1\n" % (b"a" * 40), b"%s\trefs/heads/main" % (b"a" * 40)],
)
def test_a_list_that_is_not_to_the_letter_is_none(
    house: House, said: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    git = tmp_path / "bin" / "git"
    git.parent.mkdir()
    (tmp_path / "said").write_bytes(said)
    git.write_text(f'#!/bin/sh\ncase "$*" in *--heads*) exec cat {tmp_path}/said;; esac\nexec /usr/bin/git "$@"\n')
    git.chmod(0o755)
    lying = House({**environ, "PATH": f"{git.parent}:{os.environ['PATH']}"})
    assert lying.round() == Round([], ["branches that are gone"])


def test_what_is_gone_goes_on_a_full_disk(environ: dict[str, str], upstream: Upstream, tmp_path: Path) -> None:
    """It has no room for its own notes either."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)], capture_output=True).returncode:
        pytest.skip("only root may mount a small file system here")
    try:
        environ |= {"MEMGW_DATA_DIR": str(place / "data"), "QMD_ENGINE": "cli"}
        client, house = Client(create_app(Config.load(environ), environ)), House(environ)
        for branch in ("main", "task/a"):
            upstream.commit(branch, {"note.md": "# Note\n\nneedle\n"})
            assert client.paths("needle", branch=branch) == ["note.md"]
        assert house.removed() == []
        upstream.delete("task/a")
        with pytest.raises(OSError, match="No space"):
            fill(place / "ballast")
        assert "workspace task-a" in [freed.what for freed in house.round().freed]
        assert house.workspaces() == {"main"}
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_clock_that_was_put_back_keeps_nothing_for_good(house: House, upstream: Upstream) -> None:
    upstream.delete("task/a")
    house.age("task/a", -365 * DAY)
    assert house.removed(gone_seconds=DAY, request_seconds=300) == []
    book = house.keeper()._branches
    book.save({"task/a": time.time() + 365 * DAY})
    assert house.removed(gone_seconds=DAY, request_seconds=300) == []
    put_back(house, DAY)
    assert house.removed(gone_seconds=DAY, request_seconds=300) == []
    assert time.time() - house.gateway.workspace(Branch.parse("task/a")).record.used_at() < 60
    assert (house.data / "state" / "used" / "task-a").stat().st_mtime < time.time() + 1
    house.age("task/a", 301)
    assert house.removed(gone_seconds=DAY, request_seconds=300) == ["workspace task-a"]


def test_what_is_held_or_was_just_used_stays(house: House, upstream: Upstream) -> None:
    upstream.delete("task/a")
    with locks.hold(house.gateway.layout.lock("task-a"), Deadline(10), 1):
        assert house.removed() == []
    assert house.removed(request_seconds=300) == []
    house.age("task/a", 301)
    assert house.removed(request_seconds=300) == ["workspace task-a"]


def test_asking_for_what_is_gone_does_not_keep_it(house: House, client: Client, upstream: Upstream) -> None:
    upstream.delete("task/a")
    house.age("task/a", 301)
    assert client.problem("/query", {"query": "needle", "branch": "task/a"}) == (404, "branch_not_found")
    house.age("task/b", 301)
    assert client.paths("needle", branch="task/b", require_latest=False) == ["note.md"]
    assert house.removed(request_seconds=300) == ["workspace task-a"]
    assert house.removed(request_seconds=300, max_workspaces=1) == []


def test_those_used_longest_ago_go_first_and_the_default_branch_never(house: House, upstream: Upstream) -> None:
    house.age("main", 900)
    house.age("task/a", 100)
    house.age("task/b", 500)
    assert house.removed(max_workspaces=3) == []
    assert house.removed(max_workspaces=2) == ["workspace task-b"]
    assert house.removed(max_workspaces=1) == ["workspace task-a"]
    upstream.delete("main")
    assert house.removed(max_workspaces=1, max_bytes=1) == []
    assert house.workspaces() == {"main"}


def test_disk_is_freed_until_it_fits_and_the_numbers_are_true(house: House, client: Client, upstream: Upstream) -> None:
    upstream.commit("task/b", {f"{number}.md": f"# Big {number}\n\n{'word ' * 5000}\n" for number in range(40)})
    client.sync(branch="task/b")
    house.age("task/a", 900)
    house.age("task/b", 500)
    assert house.removed() == []  # and its own books are there
    counted = list(house.keeper()._counted())
    before, everything = files.space(*counted), files.space(house.data)
    done = house.round(max_bytes=before - 1)
    assert [freed.what for freed in done.freed] == ["workspace task-a"]
    now = files.space(*counted)
    assert everything - files.space(house.data) == done.freed[0].bytes > before - now > 0
    assert [freed.what for freed in house.round(max_bytes=now - 2_000_000).freed] == ["workspace task-b"]
    assert client.paths("needle", branch="task/a") == ["note.md"]


def test_a_file_with_two_names_takes_its_space_once_and_frees_none_until_both_go(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x" * 100_000)
    os.link(tmp_path / "a" / "file", tmp_path / "b" / "file")
    one, both = files.space(tmp_path / "a"), files.space(tmp_path / "a", tmp_path / "b")
    assert 100_000 <= one <= both < 200_000
    assert files.space(tmp_path / "a", freed=True) < 100_000
    assert files.space(tmp_path / "a", tmp_path / "b", freed=True) == both
    assert files.space(tmp_path / "none") == 0


@pytest.mark.parametrize("steps", range(1, 8))
def test_after_a_kill_in_the_middle_the_next_answer_is_right_and_the_rest_goes_later(
    house: House, client: Client, upstream: Upstream, environ: dict[str, str], steps: int
) -> None:
    """Killed after each step of a removal in turn."""
    killed_after(house, environ, steps)
    assert "state/task-a.json" not in house.traces("task/a")
    if steps % 2:
        upstream.commit("task/a", {"new.md": "# New\n\nneedle here, too\n"})
        assert sorted(client.paths("needle", branch="task/a")) == ["new.md", "note.md"]
    else:
        left = house.traces("task/a")
        assert left
        house.round()
        assert house.traces("task/a") == []
    assert client.paths("needle", branch="task/b") == ["note.md"]
    assert client.paths("needle", branch="task/a", require_latest=False)


def killed_after(house: House, environ: dict[str, str], steps: int) -> None:
    house.age("task/a", 900)
    code = f"""
import os, signal, sys
from memgw import files
from memgw.app import create_gateway
from memgw.config import Config
from memgw.housekeeping import Bounds, Housekeeper
remove, left = files.remove, [{steps}]
def removing(path):
    remove(path)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
keeper = Housekeeper(create_gateway(Config.load(dict(os.environ)), os.environ), Bounds(0, 2, 0, 0))
files.remove = removing
keeper.round()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_remains_go_while_what_is_being_made_stays(house: House) -> None:
    (house.data / "state" / "task-a.json").unlink()
    strange = house.data / "qmd-cache" / "other" / "file"
    strange.parent.mkdir()
    strange.write_text("not ours")
    with locks.hold(house.gateway.layout.lock("task-a"), Deadline(10), 1):
        assert house.removed(request_seconds=300) == []
    assert house.removed(request_seconds=300) == ["remains of task-a"]
    assert house.traces("task/a") == [Branch.parse("task/a").mirror_ref]  # which may be that of a sync
    assert house.removed(request_seconds=0) == ["1 refs of the mirror"]
    assert house.traces("task/a") == []
    assert strange.exists()
    assert house.removed() == []


def test_what_others_keep_beside_workspaces_is_not_touched(house: House, tmp_path: Path) -> None:
    """A data directory that was not ours alone: `workspaces` is a name that many programs take."""
    strange = ["workspaces/project", "workspaces/project-a", "workspaces/notes~2026", "workspaces/a~0123456789abc/x"]
    strange += ["qmd-cache/ws-x-main", "qmd-config/ws-other.yml", "askings/x.json", "state/notes/x.json"]
    for name in strange:
        (house.data / name).mkdir(parents=True)
    left = house.data / "workspaces" / Branch.parse("no/standard").workspace / "x"
    left.mkdir(parents=True)
    assert house.removed() == [f"remains of {left.parent.name}"]
    assert [name for name in strange if not (house.data / name).exists()] == []


def test_what_can_not_be_removed_keeps_no_other(house: House) -> None:
    for name in ("task-a", "task-b"):
        (house.data / "state" / f"{name}.json").unlink()
    lock = house.gateway.layout.lock("task-a")
    lock.unlink()
    lock.symlink_to("/nowhere/x")
    done = house.round()
    assert ([freed.what for freed in done.freed], done.failed) == (
        ["remains of task-b", "2 refs of the mirror"],
        ["remains"],
    )
    lock.unlink()
    assert house.removed() == ["remains of task-a"]


@pytest.mark.parametrize("said", ['{"format": 2, "branch": "task/a"}', "", "main"])
def test_a_state_that_is_not_understood_is_kept_for_weeks_and_not_for_good(house: House, said: str) -> None:
    """Damaged, of a version that may come back, or a copy of another's."""
    state = house.data / "state" / "task-a.json"
    state.write_text((state.parent / f"{said}.json").read_text() if said == "main" else said)
    house.age("task/a", 13 * DAY)
    assert "remains of task-a" not in house.removed(max_workspaces=2, request_seconds=300)
    assert house.workspaces() == {"main", "task-a", "task-b"}
    house.age("task/a", 15 * DAY)
    assert house.removed(max_workspaces=2, request_seconds=300) == ["remains of task-a"]
    assert house.workspaces() == {"main", "task-b"}


def test_bounds_that_can_not_be_kept_are_told(house: House, caplog: pytest.LogCaptureFixture) -> None:
    assert house.removed(max_workspaces=2, request_seconds=300) == []
    assert house.removed(max_bytes=1, request_seconds=300) == []
    assert [record.message for record in caplog.records] == ["bounds_passed"] * 2
    caplog.clear()
    assert house.removed(max_workspaces=3, max_bytes=10**12) == []
    assert caplog.records == []


def test_no_lock_is_held_for_longer_than_requests_wait(
    house: House, upstream: Upstream, environ: dict[str, str], tmp_path: Path
) -> None:
    environ |= {"MEMGW_LOCK_TIMEOUT_SECONDS": "10"}
    client = Client(create_app(Config.load(environ), environ))
    hanging = {"PATH": f"{slow_git(tmp_path, 'repack').parent}:{os.environ['PATH']}"}
    with subprocess.Popen([sys.executable, "bin/housekeeping.py"], cwd=ROOT, env=environ | hanging) as gc:
        lock = house.data / "locks" / "mirror.lock"
        assert until(lambda: is_taken(lock), 20)
        commit = upstream.commit("task/a", {"new.md": "# New\n\nneedle\n"})
        assert client.query("needle", branch="task/a")["commit_hash"] == commit
        assert gc.wait(60) == 1


def is_taken(lock: Path) -> bool:
    """For a second at least: fetches take it, too."""
    try:
        with locks.hold(lock, Deadline(1.5), 1):
            return False
    except WorkspaceBusy:
        return True


def test_the_command_line_claims_no_vectors(house: House, environ: dict[str, str]) -> None:
    nursery = house.gateway.layout.nursery
    nursery.parent.mkdir(exist_ok=True)
    with closing(sqlite3.connect(nursery)) as db, db:
        db.execute("CREATE TABLE content_vectors (hash TEXT, embedded_at TEXT)")
        db.execute("INSERT INTO content_vectors VALUES ('x', '2020-01-01')")
    assert "vectors of 1 texts" not in House(environ | {"QMD_ENGINE": "cli"}).removed(now=True)


def test_nothing_is_written_anew_on_a_disk_that_this_would_fill(
    house: House, client: Client, full: Callable[[], None]
) -> None:
    full()
    before = house.gateway.workspace(Branch.parse("main")).state().stamp
    assert [freed.what for freed in house.round(now=True).freed] == ["mirror"]
    assert house.gateway.workspace(Branch.parse("main")).state().stamp == before


def test_vectors_of_a_model_that_is_not_in_use_go_after_weeks(house: House) -> None:
    mine = house.gateway.layout.nursery
    mine.parent.mkdir()
    old, new = mine.with_name("old.sqlite"), mine.with_name("new.sqlite")
    for path in (mine, old, mine.with_name("old.sqlite-wal"), new):
        path.write_bytes(b"x" * 10_000)
        if path != new:
            os.utime(path, (time.time() - 15 * DAY,) * 2)
    assert house.removed() == ["vectors old"]
    assert sorted(path.name for path in mine.parent.iterdir()) == sorted([mine.name, new.name])


def test_many_packs_become_one_when_it_is_quiet(house: House, client: Client, upstream: Upstream) -> None:
    for number in range(51):
        upstream.commit("task/a", {"note.md": f"# Note\n\nneedle {number}\n"})
        client.sync(branch="task/a")
    assert house.gateway.mirror.packs() > 50
    assert house.removed() == []
    for branch in ("main", "task/a", "task/b"):
        house.age(branch, 61)
    before = files.space(house.gateway.mirror.path)
    [freed] = house.round().freed
    assert freed.what == "mirror"
    assert freed.bytes == before - files.space(house.gateway.mirror.path) > 0
    assert house.gateway.mirror.packs() == 1
    assert house.gateway.mirror.sound(Deadline(10))
    commit = upstream.commit("task/a", {"new.md": "# New\n\nneedle\n"})
    assert client.query("needle", branch="task/a")["commit_hash"] == commit


def with_packs(house: House, client: Client, upstream: Upstream, packs: int) -> str:
    """Fetches so often, and returns the last commit."""
    for number in range(packs):
        commit = upstream.commit("task/a", {"note.md": f"# Note\n\nneedle {number}\n"})
        client.sync(branch="task/a")
    for branch in ("main", "task/a", "task/b"):
        house.age(branch, 61)
    return commit


@pytest.mark.parametrize("damage", ["index", "HEAD", "ref"])
def test_damage_that_nobody_meets_does_not_keep_the_mirror_from_being_repacked(
    house: House, client: Client, upstream: Upstream, damage: str
) -> None:
    """As a power failure leaves it: files of a worktree that is brought along without Git, or of a branch of others."""
    mirror = house.gateway.mirror
    with_packs(house, client, upstream, 51)
    admin = mirror.path / "worktrees" / "task-b"
    place = {"index": admin / "index", "HEAD": admin / "HEAD", "ref": mirror.path / "refs" / "memgw" / "x"}[damage]
    place.write_text("1" * 40 + "\n" if damage == "HEAD" else "")
    before = mirror.packs()
    assert house.removed() == ["mirror"]
    assert mirror.packs() < 10 < 50 < before
    commit = upstream.commit("task/b", {"new.md": "# New\n\nneedle\n"})
    assert client.query("needle", branch="task/b")["commit_hash"] == commit
    assert client.paths("needle", branch="task/a") == ["note.md"]


def test_a_mirror_that_takes_too_long_to_copy_has_its_small_packs_put_together(
    house: House, client: Client, upstream: Upstream, tmp_path: Path, environ: dict[str, str]
) -> None:
    with_packs(house, client, upstream, 51)
    slow = slow_git(tmp_path, "--cruft")
    mirror = House({**environ, "PATH": f"{slow.parent}:{os.environ['PATH']}"}).gateway.mirror
    began = time.monotonic()
    mirror.repack(Deadline(16))
    assert 8 < time.monotonic() - began < 16
    assert 0 < mirror.packs() < 10


def test_a_mirror_is_not_copied_onto_a_disk_that_this_would_fill(
    house: House, client: Client, upstream: Upstream, tmp_path: Path, environ: dict[str, str], full: Callable[[], None]
) -> None:
    with_packs(house, client, upstream, 51)
    slow = slow_git(tmp_path, "--cruft")
    mirror = House({**environ, "PATH": f"{slow.parent}:{os.environ['PATH']}"}).gateway.mirror
    full()
    began = time.monotonic()
    mirror.repack(Deadline(120))
    assert time.monotonic() - began < 50
    assert 0 < mirror.packs() < 10


def slow_git(folder: Path, word: str) -> Path:
    """A git that hangs when it is told this."""
    git = folder / "slow" / "git"
    git.parent.mkdir()
    git.write_text(f'#!/bin/sh\ncase "$*" in *{word}*) exec sleep 60;; esac\nexec /usr/bin/git "$@"\n')
    git.chmod(0o755)
    return git


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has the system say that next to nothing is free, once it is called."""
    statvfs = os.statvfs

    def little(path: Any) -> os.statvfs_result:
        said = list(statvfs(path))
        said[4] = 1  # f_bavail, in f_frsize
        return os.statvfs_result(said)

    return lambda: monkeypatch.setattr(os, "statvfs", little)


def test_what_a_force_push_left_is_kept_for_now_and_dropped_when_it_is_old(
    house: House, client: Client, upstream: Upstream
) -> None:
    old = upstream.tip("task/a")
    assert old
    upstream.commit("task/a", {"else.md": "# Else\n\nneedle\n"}, parent=None)
    client.sync(branch="task/a")
    mirror = house.gateway.mirror
    house.round(now=True)
    assert mirror.objects.documents(old, Deadline(10)).keys() == {"note.md"}
    for path in mirror.path.glob("objects/pack/*"):
        path.chmod(0o644)
        os.utime(path, (time.time() - 15 * DAY,) * 2)
    for path in mirror.path.glob("objects/pack/*.mtimes"):
        path.unlink()  # so that Git goes by the time of the pack
    house.round(now=True)
    assert mirror.objects.differences(old, str(upstream.tip("task/a")), Deadline(10)) is None
    assert mirror.sound(Deadline(10))
    assert client.paths("needle", branch="task/a") == ["else.md"]


def test_an_index_that_has_grown_is_cleaned_when_it_is_quiet(house: House, client: Client, upstream: Upstream) -> None:
    def turned(number: int) -> dict[str, str]:
        return {f"{at}.md": f"# File {at}\n\nneedle {number} {words(at, number)}\n" for at in range(30)}

    upstream.commit("main", turned(0))
    client.sync()
    assert house.removed() == []
    for number in range(1, 12):
        upstream.commit("main", turned(number))
        client.sync()
    workspace = house.gateway.workspace(Branch.parse("main"))
    before = workspace.state().stamp
    assert before
    assert house.removed() == []
    house.age("main", 61)
    [freed] = house.round().freed
    after = workspace.proven(before.commit)
    assert after
    assert (freed.what, after.documents) == ("index of main", before.documents)
    assert freed.bytes == before.identity.size - after.identity.size > 0
    assert house.removed() == []
    answer = client.query("needle", limit=50)
    assert (answer["commit_hash"], len(answer["results"])) == (before.commit, 31)
    assert workspace.proven() == after, "it was made again"


def test_a_sync_while_an_index_is_cleaned_reports_no_change(house: House, client: Client) -> None:
    """Its stamp is taken back meanwhile, as if it had been lost."""
    workspace = house.gateway.workspace(Branch.parse("main"))
    stamp = workspace.state().stamp
    assert stamp
    reports: list[dict[str, Any]] = []
    other = threading.Thread(target=lambda: reports.append(client.sync()))

    def clean(place: Place, limit: Deadline, descriptor: int) -> str:
        other.start()
        time.sleep(1)
        return place.file

    with workspace.hold(Deadline(30)) as held:
        assert rewritten(workspace, stamp, clean, 20, held)
    other.join()
    [report] = reports
    assert (report["changed"], report["previous_commit"], report["added"]) == (False, stamp.commit, 0)


def words(at: int, number: int) -> str:
    random = Random(f"{at} {number}")
    return " ".join(f"w{random.randrange(10_000)}" for _ in range(300))


def test_an_index_that_its_cleaning_changed_is_not_believed(
    house: House, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many documents as before, one by another name."""

    def clean(engine: object, place: Place, *_: object) -> str:
        with closing(sqlite3.connect(place.folder / place.file)) as db, db:
            db.execute("UPDATE documents SET path = 'other.md'")
        return place.file

    monkeypatch.setattr(type(house.gateway.engine), "clean", clean)
    assert house.round(now=True).failed == ["indexes"]
    for branch in ("main", "task/a", "task/b"):
        assert client.paths("needle", branch=branch) == ["note.md"]


def test_one_housekeeper_at_a_time(house: House) -> None:
    with locks.hold(house.data / "locks" / "housekeeping.lock", Deadline(10), 1), pytest.raises(WorkspaceBusy):
        house.round()


def test_make_gc_does_it_now_and_prints_what_it_freed(
    house: House, upstream: Upstream, environ: dict[str, str], data: Path
) -> None:
    upstream.delete("task/a")
    house.age("task/a", 301)

    def gc(**more: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "bin/housekeeping.py"]
        return subprocess.run(command, cwd=ROOT, env=environ | more, capture_output=True, text=True)

    first = gc()
    assert (first.returncode, "workspace task-a" in first.stdout, "mirror: " in first.stdout) == (0, False, True)
    before = files.space(data)
    done = gc(MEMGW_GONE_BRANCH_HOURS="0")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "workspace task-a: gone from the remote" in lines[0]
    assert lines[-1].endswith(" MB  freed")
    assert float(lines[-1].split()[0]) == pytest.approx((before - files.space(data)) / 1e6, abs=0.01)
    failed = gc(GIT_REMOTE_URL="/nowhere.git")
    assert (failed.returncode, "branches that are gone: could not" in failed.stderr) == (1, True)
    (data / "locks" / "housekeeping.lock").unlink()
    (data / "locks" / "housekeeping.lock").symlink_to("/nowhere/x")
    stuck = gc()
    assert (stuck.returncode, "can't be used" in stuck.stderr, "Traceback" in stuck.stderr) == (1, True, False)
    assert gc(MEMGW_GONE_BRANCH_HOURS="x").returncode == 1
    assert gc(MEMGW_DATA_DIR=str(data / "none")).stdout == "memgw: there is nothing yet\n"


def test_the_process_in_the_background_does_it_and_ends_at_term(
    house: House, upstream: Upstream, environ: dict[str, str]
) -> None:
    house.age("task/a", 301)
    upstream.delete("task/a")
    code = (
        "import memgw.background as b, memgw.config as c;"
        "real = c.Config.load.__func__;"
        "import dataclasses;"
        "c.Config.load = classmethod(lambda k, e: dataclasses.replace(real(k, e), housekeeping_minutes=0.01));"
        "raise SystemExit(b.main())"
    )
    lock = house.data / "locks" / "housekeeping.lock"
    lock.symlink_to("/nowhere/x")
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environ | {"MEMGW_GONE_BRANCH_HOURS": "0"}) as it:
        try:
            assert not until(lambda: it.poll() is not None, 4), "it ended when it could not begin"
            lock.unlink()
            assert until(lambda: house.traces("task/a") == [], 20)
        finally:
            it.terminate()
        assert it.wait(20) == 0


@contextmanager
def kept_busy(*acts: Callable[[], object]) -> Iterator[list[int]]:
    """Each act goes on in a thread of its own, without a pause, for as long as this lasts; how often they were done."""
    stop, counts = threading.Event(), [0] * len(acts)
    failures: list[BaseException] = []

    def go_on(number: int) -> None:
        try:
            while not stop.is_set():
                acts[number]()
                counts[number] += 1
        except BaseException as exc:
            failures.append(exc)
            raise

    threads = [threading.Thread(target=go_on, args=(number,)) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_every_answer_is_right_while_housekeeping_takes_away_all_it_can(
    server: Server, upstream: Upstream, environ: dict[str, str]
) -> None:
    """The promise, with one workspace allowed, no grace, no rest, and the mirror repacked all the time."""
    house = House(environ)
    removed: list[str] = []

    def tidy() -> None:
        done = house.round(max_workspaces=1, now=True)
        assert done.failed == []
        removed.extend(freed.what for freed in done.freed)

    with kept_busy(tidy):
        assert fire(server, upstream, 100) >= 100
    assert {"workspace memory-2026-03", "workspace task-T-1", "mirror"} <= set(removed)
    log = server.err.read_text()
    assert "healing" not in log or "MirrorDamaged" not in log


def test_with_its_ordinary_bounds_nothing_in_use_goes(
    server: Server, upstream: Upstream, environ: dict[str, str], client: Client
) -> None:
    house = House(environ)

    def tidy() -> None:
        done = house.round(max_workspaces=1, request_seconds=300.0)
        assert (done.failed, [freed for freed in done.freed if freed.what != "mirror"]) == ([], [])
        time.sleep(0.05)

    with kept_busy(tidy) as counts:
        assert fire(server, upstream, 60) >= 60
    assert counts[0] > 10
