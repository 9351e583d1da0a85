"""What `/sync` counts and what `/status` shows."""

import json
import threading
from pathlib import Path

from memgw import __version__
from memgw.app import create_app
from memgw.config import Config
from tests.actors import FakeQmd, Upstream, until
from tests.conftest import Client


def test_sync_counts_the_files_between_the_two_commits(client: Client, upstream: Upstream) -> None:
    first = upstream.commit("main", {"a.md": "# A\n", "b.md": "# B\n", "c.txt": "c"})
    answer = client.sync()
    assert answer.pop("synced_at")
    assert answer == {
        "ok": True,
        "branch": "main",
        "resolved_workspace": "main",
        "commit_hash": first,
        "freshness": "fresh",
        "qmd_collection": "ws-main",
        "degraded": [],
        "changed": True,
        "previous_commit": None,
        "documents": 2,
        "added": 3,
        "modified": 0,
        "deleted": 0,
    }
    second = upstream.commit("main", {"a.md": "# A2\n", "b.md": None, "d.md": "# D\n", "e.md": "# E\n"})
    answer = client.sync()
    counts = {key: answer[key] for key in ("commit_hash", "previous_commit", "changed", "documents")}
    assert counts == {"commit_hash": second, "previous_commit": first, "changed": True, "documents": 3}
    assert (answer["added"], answer["modified"], answer["deleted"]) == (2, 1, 1)
    answer = client.sync()
    assert (answer["changed"], answer["added"], answer["modified"], answer["deleted"]) == (False, 0, 0, 0)
    assert answer["previous_commit"] == answer["commit_hash"] == second


def test_a_query_after_a_sync_has_nothing_left_to_do(client: Client, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    assert set(client.sync(debug=True)["debug"]["timings_ms"]) == {"ask", "wait", "fetch", "align", "index"}
    assert set(client.query("alpha", debug=True)["debug"]["timings_ms"]) == {"ask", "search"}


def test_a_commit_that_the_mirror_lost_is_no_longer_named_as_previous(
    client: Client, upstream: Upstream, data: Path
) -> None:
    upstream.commit("main", {"a.md": "# A\n"})
    client.sync()
    upstream.commit("main", {"b.md": "# B\n"}, parent=None)
    (data / "git-mirror" / "repo.git" / "HEAD").unlink()  # so that the mirror is made again
    answer = client.sync()
    assert (answer["changed"], answer["previous_commit"], answer["added"]) == (True, None, 1)


def test_status_shows_versions_and_every_workspace(client: Client, upstream: Upstream) -> None:
    status = json.loads(client.http.get("/status").data)
    assert status["workspaces"] == []
    commit = upstream.commit("main", {"a.md": "# A\n", "b.md": "# B\n"})
    other = upstream.commit("task/x.notes", {"a.md": "# A\n"})
    synced_at = client.sync()["synced_at"]
    client.sync(branch="task/x.notes")
    assert client.problem("/query", {"query": "x", "branch": "made-up"}) == (404, "branch_not_found")
    status = json.loads(client.http.get("/status").data)
    assert status["default_branch"] == "main"
    assert status["versions"]["memgw"] == __version__
    assert status["versions"]["qmd"] == "2.8.3"
    assert int(status["versions"]["node"].split(".")[0]) >= 22
    assert status["versions"]["git"].count(".") >= 1
    assert status["mirror"]["remote"] == upstream.url
    assert status["mirror"]["bytes"] > 0
    main, task = status["workspaces"]
    assert main.pop("bytes") > 50_000
    assert main == {
        "workspace": "main",
        "branch": "main",
        "commit": commit,
        "indexed_commit": commit,
        "embedded_commit": None,
        "synced_at": synced_at,
        "documents": 2,
        "pending_embeddings": 2,
        "last_error": None,
    }
    assert (task["workspace"], task["branch"], task["indexed_commit"]) == ("task-x.notes", "task/x.notes", other)


def test_an_error_of_a_workspace_is_shown_until_it_works_again(client: Client, upstream: Upstream) -> None:
    commit = upstream.commit("task/x", {"a.md": "# A\n"})
    client.sync(branch="task/x")
    upstream.delete("task/x")
    assert client.problem("/sync", {"branch": "task/x"}) == (404, "branch_not_found")
    (workspace,) = json.loads(client.http.get("/status").data)["workspaces"]
    error = workspace["last_error"]
    assert (error["code"], error["detail"]) == ("branch_not_found", "the remote has no branch 'task/x'")
    assert error["at"] > workspace["synced_at"]
    upstream.move("task/x", commit)
    client.sync(branch="task/x")
    (workspace,) = json.loads(client.http.get("/status").data)["workspaces"]
    assert workspace["last_error"] is None


def test_status_answers_while_a_workspace_is_held(
    environ: dict[str, str], upstream: Upstream, fake_qmd: FakeQmd, tmp_path: Path
) -> None:
    client = Client(create_app(Config.load(environ), environ))
    upstream.commit("main", {"a.md": "# A\n"})
    client.sync()
    upstream.commit("main", {"a.md": "# A2\n"})
    go_on = tmp_path / "go_on"
    fake_qmd.does("update", f"while [ ! -f {go_on} ]; do sleep 0.02; done")
    thread = threading.Thread(target=client.sync)
    thread.start()
    assert until(lambda: fake_qmd.calls("update") == 2)
    (workspace,) = json.loads(client.http.get("/status").data)["workspaces"]
    assert workspace["indexed_commit"] is None  # the stamp is taken back before anything is changed
    assert thread.is_alive()
    go_on.touch()
    thread.join()
    (workspace,) = json.loads(client.http.get("/status").data)["workspaces"]
    assert workspace["indexed_commit"] == upstream.tip("main")


def test_status_answers_over_damaged_states(client: Client, upstream: Upstream, data: Path) -> None:
    upstream.commit("main", {"a.md": "# A\n"})
    client.sync()
    for name, content in {
        "garbage.json": "{",
        "x.json": '{"format":1,"branch":"a..b","stamp":null}',
        "y.json": '{"format":1,"branch":5,"stamp":null}',
        "z.json": '{"format":1,"branch":"gone","stamp":null,"worktree_bytes":"many"}',
    }.items():
        (data / "state" / name).write_text(content)
    (data / "state" / "folder.json").mkdir()
    status = client.http.get("/status")
    assert status.status_code == 200
    assert "main" in [workspace["workspace"] for workspace in status.get_json()["workspaces"]]
