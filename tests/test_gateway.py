"""The story told by gateway and workspace when things change or break in the middle of it."""

import os
import subprocess
from pathlib import Path

import pytest

from memgw.app import create_app
from memgw.branch import Branch
from memgw.config import Config, ConfigError, environment
from memgw.deadline import Deadline
from memgw.errors import DeadlineExceeded, MirrorDamaged, RemoteUnreachable
from memgw.objects import Objects
from memgw.remote import Remote
from tests.actors import FakeQmd, Upstream
from tests.conftest import Client


@pytest.fixture
def faked(environ: dict[str, str], fake_qmd: FakeQmd, upstream: Upstream, nothing_ahead: None) -> Client:
    """A client over a fake qmd, its first index made."""
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    client = Client(create_app(Config.load(environ), environ))
    client.sync()
    return client


def test_an_index_that_changes_under_every_search_gives_no_answer(faked: Client, fake_qmd: FakeQmd) -> None:
    fake_qmd.does("search", 'touch "$INDEX_PATH"')
    assert faked.problem("/query", {"query": "alpha"}) == (502, "engine_failed")
    assert fake_qmd.calls("search") == 3  # twice without the lock, once with it
    fake_qmd.behaves()
    assert faked.paths("alpha") == ["a.md"]


def test_a_search_during_which_the_index_changed_once_is_done_again(faked: Client, fake_qmd: FakeQmd) -> None:
    fake_qmd.does("search", 'rm "$here/search"; touch "$INDEX_PATH"; echo "[]"; exit 0')
    assert faked.paths("alpha") == ["a.md"]
    assert fake_qmd.calls("search") == 2


def test_a_search_that_breaks_the_index_is_answered_from_a_new_one(faked: Client, fake_qmd: FakeQmd) -> None:
    fake_qmd.does("search", 'rm "$here/search"; echo garbage > "$INDEX_PATH"; exit 1')
    assert faked.paths("alpha") == ["a.md"]
    assert fake_qmd.calls("update") == 2


def test_a_lock_that_is_deleted_under_its_owner_stamps_nothing(
    faked: Client, fake_qmd: FakeQmd, upstream: Upstream, data: Path
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nbeta\n"})
    fake_qmd.does("update", f'rm -r "{data}/locks"')
    assert faked.problem("/query", {"query": "beta"}) == (503, "workspace_busy")
    fake_qmd.behaves()
    assert faked.paths("beta") == ["a.md"]


def test_a_qmd_that_vanishes_between_two_calls_is_missing_and_not_broken(
    faked: Client, fake_qmd: FakeQmd, upstream: Upstream
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nbeta\n"})
    fake_qmd.does("update", "exit 127")
    assert faked.problem("/query", {"query": "beta"}) == (502, "engine_failed")
    assert fake_qmd.calls("update") == 2  # no second try: there is nothing to try with
    fake_qmd.does("search", "exit 127")
    fake_qmd.does("update", "")
    assert faked.problem("/query", {"query": "beta"}) == (502, "engine_failed")


def test_an_update_that_does_nothing_is_not_believed_and_a_new_index_is_built(
    faked: Client, fake_qmd: FakeQmd, upstream: Upstream
) -> None:
    commit = upstream.commit("main", {"a.md": "# A\n\nbeta\n"})
    fake_qmd.does("update", 'rm "$here/update"; echo "Indexed: 0 new, 1 updated"; exit 0')
    answer = faked.query("beta")
    assert (answer["commit_hash"], len(answer["results"])) == (commit, 1)
    assert fake_qmd.calls("update") == 3


def test_a_remote_of_sha256_objects_is_refused_with_a_word(environ: dict[str, str], tmp_path: Path) -> None:
    remote = tmp_path / "sha256.git"
    subprocess.run(["git", "init", "--quiet", "--bare", "--object-format=sha256", str(remote)], check=True)
    commit = "commit refs/heads/main\ncommitter t <t@e> 1 +0000\ndata 1\nm\nM 100644 inline a.md\ndata 1\na\n"
    subprocess.run(["git", f"--git-dir={remote}", "fast-import", "--quiet"], input=commit.encode(), check=True)
    environ["GIT_REMOTE_URL"] = str(remote)
    status, answer = Client(create_app(Config.load(environ), environ)).post("/query", {"query": "a"})
    assert (status, answer["code"]) == (502, "remote_unreachable")
    assert "SHA-1" in answer["detail"]


def test_without_time_or_git_mirror_and_remote_say_which(client: Client, upstream: Upstream, tmp_path: Path) -> None:
    upstream.commit("main", {"a.md": "# A\n"})
    client.sync()
    mirror = client.app.extensions["memgw"].mirror
    remote = Remote(tmp_path / "other", "git://127.0.0.1:1/x", os.environ, timeout=30)
    with pytest.raises(DeadlineExceeded):
        remote.ask(Branch("main"), Deadline(0))
    slow = tmp_path / "slow" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    path, mirror.env["PATH"] = mirror.env["PATH"], f"{slow.parent}:{mirror.env['PATH']}"
    remote.env["PATH"] = mirror.env["PATH"]
    for ask in (mirror.tip, remote.ask):
        with pytest.raises(DeadlineExceeded):
            ask(Branch("other"), Deadline(0.3))
    mirror.env["PATH"] = path
    assert mirror.sound(Deadline(60))
    remote.env["PATH"] = mirror.env["PATH"] = "/nowhere"
    with pytest.raises(RemoteUnreachable, match="git can't be started"):
        remote.ask(Branch("main"), Deadline(5))
    with pytest.raises(MirrorDamaged):
        mirror.tip(Branch("other"), Deadline(5))
    with pytest.raises(MirrorDamaged):
        Objects(mirror.path, mirror.env).differences(None, "0" * 40, Deadline(5))


def test_a_settings_file_that_is_not_utf_8_is_a_mistake_like_any_other(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_bytes(b"GIT_REMOTE_URL=\xff\n")
    with pytest.raises(ConfigError, match=r"\.env: is not UTF-8"):
        environment({}, file)
    file.write_text("GIT_REMOTE_URL='https://u:pa$HOME@host/x'\n")
    assert environment({"HOME": "/h"}, file)["GIT_REMOTE_URL"] == "https://u:pa$HOME@host/x"
