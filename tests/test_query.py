"""What a query answers: newest commit, this branch only, exactly the text of the commit."""

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from memgw.app import create_app
from memgw.config import Config
from memgw.schemas import AnswerOut, StatusOut, SyncOut
from tests.actors import FakeQmd, Upstream
from tests.conftest import Client


def test_a_query_answers_from_the_newest_commit_and_names_it(client: Client, upstream: Upstream) -> None:
    commit = upstream.commit("main", {"notes/retry.md": "# Retries\n\nWe retry five times.\n", "other.md": "# Other\n"})
    before = datetime.now(UTC)
    answer = client.query("retry")
    synced_at = datetime.fromisoformat(answer.pop("synced_at"))
    assert before <= synced_at <= datetime.now(UTC)
    assert answer == {
        "ok": True,
        "branch": "main",
        "resolved_workspace": "main",
        "commit_hash": commit,
        "freshness": "fresh",
        "qmd_collection": "ws-main",
        "degraded": [],
        "query_type": "search",
        "results": [
            {
                "path": "notes/retry.md",
                "docid": answer["results"][0]["docid"],
                "title": "Retries",
                "score": answer["results"][0]["score"],
                "line": 3,
                "snippet": "\nWe retry five times.\n",
            }
        ],
    }


def test_a_push_after_the_last_query_is_found_and_what_it_replaced_is_not(client: Client, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nold wording\n"})
    assert client.paths("old wording") == ["a.md"]
    commit = upstream.commit("main", {"a.md": "# A\n\nfresh wording\n"})
    answer = client.query("fresh wording")
    assert (answer["commit_hash"], [hit["path"] for hit in answer["results"]]) == (commit, ["a.md"])
    assert client.paths("old wording") == []


def test_added_renamed_and_deleted_files_are_followed(client: Client, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n", "b.md": "# B\n\nbeta\n"})
    assert client.paths("beta") == ["b.md"]
    upstream.commit("main", {"b.md": None, "sub/c.md": "# B\n\nbeta\n", "d.md": "# D\n\ndelta\n"})
    assert client.paths("beta") == ["sub/c.md"]
    assert client.paths("delta") == ["d.md"]
    upstream.commit("main", {"a.md": "# A\n\nzeta\n"}, clear=True)
    assert client.paths("beta") == []
    assert client.paths("zeta") == ["a.md"]


@pytest.mark.parametrize("emptied", ["", " \n\ufeff\u3000"])
def test_a_file_that_was_emptied_is_not_found_by_its_old_text(client: Client, upstream: Upstream, emptied: str) -> None:
    upstream.commit("main", {"a.md": "# A\n\nsecret plan\n", "b.md": "# B\n\nkept\n"})
    assert client.paths("secret plan") == ["a.md"]
    commit = upstream.commit("main", {"a.md": emptied})
    answer = client.query("secret plan")
    assert (answer["commit_hash"], answer["results"], answer["degraded"]) == (commit, [], [])
    assert client.paths("kept") == ["b.md"]


def test_branches_do_not_see_each_other(client: Client, upstream: Upstream) -> None:
    base = upstream.commit("main", {"shared.md": "# Shared\n\ncommon ground\n", "m.md": "# M\n\nmainonly\n"})
    upstream.commit("task/T-1", {"shared.md": "# Shared\n\ntaskversion\n", "m.md": None}, parent=base)
    assert client.paths("taskversion") == []
    assert client.paths("taskversion", branch="task/T-1") == ["shared.md"]
    assert client.paths("mainonly", branch="task/T-1") == []
    assert client.paths("mainonly") == ["m.md"]


def test_the_names_of_branch_index_and_collection_are_no_words_of_the_index(client: Client, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    for word in ("main", "ws", "_", "md", "workspaces"):
        expected = ["a.md"] if word == "md" else []  # the path is in the index, as qmd has it
        assert client.paths(word) == expected, word


def test_branch_beats_profile_beats_default(client: Client, upstream: Upstream) -> None:
    tips = {
        name: upstream.commit(name, {"a.md": f"# A\n\nalpha {name}\n"})
        for name in ("main", "memory/2026-03", "task/TASK-001")
    }
    rows: list[tuple[dict[str, str], str, str]] = [
        ({}, "main", "main"),
        ({"memory_profile": "stable"}, "main", "main"),
        ({"memory_profile": "monthly-2026-03"}, "memory/2026-03", "memory-2026-03"),
        ({"memory_profile": "task-TASK-001"}, "task/TASK-001", "task-TASK-001"),
        ({"branch": "task/TASK-001"}, "task/TASK-001", "task-TASK-001"),
        ({"branch": "main", "memory_profile": "monthly-2026-03"}, "main", "main"),
    ]
    for selection, branch, workspace in rows:
        answer = client.query("alpha", **selection)
        assert (answer["branch"], answer["resolved_workspace"]) == (branch, workspace), selection
        assert answer["commit_hash"] == tips[branch]


def test_odd_branch_names_are_branches(client: Client, upstream: Upstream) -> None:
    for name in ("+main", "$(id)", "%2e", "记忆/三月", "a/b", "a-b", "HEAD", "refs/heads/main", "x" * 244):
        assert client.problem("/query", {"query": "x", "branch": name}) == (404, "branch_not_found"), name
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    names = ("+main", "$(id)", "%2e", "记忆/三月", "a\u2028b", "a\x85b", "a/b", "a-b", "Main", "memory-2026-03")
    tips = {name: upstream.commit(name, {"a.md": f"# A\n\nalpha {number}word\n"}) for number, name in enumerate(names)}
    for number, name in enumerate(names):
        answer = client.query(f"{number}word", branch=name)
        assert (answer["commit_hash"], len(answer["results"])) == (tips[name], 1)


def test_a_branch_and_one_below_it_take_turns(client: Client, upstream: Upstream) -> None:
    for _ in range(2):
        first = upstream.commit("task/a", {"a.md": "# A\n\nupper\n"})
        assert client.query("upper", branch="task/a")["commit_hash"] == first
        upstream.delete("task/a")
        second = upstream.commit("task/a/b", {"a.md": "# A\n\nlower\n"})
        answer = client.query("lower", branch="task/a/b")
        assert (answer["commit_hash"], len(answer["results"])) == (second, 1)
        assert client.problem("/query", {"query": "x", "branch": "task/a"}) == (404, "branch_not_found")
        upstream.delete("task/a/b")


def test_force_pushes_win_forwards_and_back(client: Client, upstream: Upstream) -> None:
    old = upstream.commit("main", {"a.md": "# A\n\noriginal\n"})
    assert client.query("original")["commit_hash"] == old
    new = upstream.commit("main", {"b.md": "# B\n\nrewritten\n"}, parent=None)
    for _ in range(2):
        assert client.query("rewritten")["commit_hash"] == new
        assert client.paths("original") == []
        upstream.move("main", old)
        assert client.query("original")["commit_hash"] == old
        assert client.paths("rewritten") == []
        upstream.move("main", new)


def test_a_deleted_branch_is_gone_and_one_created_again_is_new(client: Client, upstream: Upstream) -> None:
    upstream.commit("task/x", {"a.md": "# A\n\nfirstlife\n"})
    assert client.paths("firstlife", branch="task/x") == ["a.md"]
    upstream.delete("task/x")
    assert client.problem("/query", {"query": "firstlife", "branch": "task/x"}) == (404, "branch_not_found")
    commit = upstream.commit("task/x", {"b.md": "# B\n\nsecondlife\n"}, parent=None)
    assert client.query("secondlife", branch="task/x")["commit_hash"] == commit
    assert client.paths("firstlife", branch="task/x") == []


def test_every_path_is_exactly_the_path_in_git(client: Client, upstream: Upstream) -> None:
    names = [
        "with space.md", "hash#tag.md", "what?.md", "50%.md", "a%20b.md", "new\nline.md", "tab\t.md", "quote\"'.md",
        "[x](y){z}*.md", "!not.md", "-dash.md", "q?index=ws-main.md", "中文/记忆.md", "e\u0301.md", "é.md",
         "deep/er/est/x.md",
        " lead.md", "semi;colon.md", "$(touch x).md", "`id`.md", "Build/y.md", "x.md.md", "qmd:/_/x.md",
    ]  # fmt: skip
    upstream.commit("main", {name: f"# T\n\nfindme {number}unit\n" for number, name in enumerate(names)})
    assert sorted(client.paths("findme", limit=50)) == sorted(names)
    for number, name in list(enumerate(names))[::3]:
        assert client.paths(f"{number}unit") == [name]


def test_files_that_qmd_can_not_open_are_said_to_be_missing(client: Client, upstream: Upstream) -> None:
    upstream.commit(
        "main", {"back\\slash.md": "# X\n\nalpha\n", "bad\udcff.md": "# Y\n\nalpha\n", "ok.md": "# Z\n\nalpha\n"}
    )
    answer = client.query("alpha")
    assert [hit["path"] for hit in answer["results"]] == ["ok.md"]
    assert answer["degraded"] == [
        {"code": "documents_skipped", "detail": "2 files of this commit could not be indexed"}
    ]
    upstream.commit("main", {"ok.md": "# Z\n\nbeta\n"})
    assert client.query("beta")["degraded"] == answer["degraded"]
    upstream.commit("main", {"back\\slash.md": None, "bad\udcff.md": None})
    assert client.query("beta")["degraded"] == []


@pytest.mark.parametrize(
    ("name", "behind"),
    [("x\\.d\\y.md", "x/.d/y.md"), ("vendor\\y.md", "vendor/y.md"), ("q\\..\\a.md", "a.md"), ("c:\\a.md", "c:/a.md")],
)
def test_a_name_with_a_backslash_brings_nothing_in_by_another_name(
    client: Client, upstream: Upstream, name: str, behind: str
) -> None:
    files = {"a.md": "# A\n\nalpha\n", behind: "# B\n\nalpha\n", name: "# C\n\nalpha\n", "q/b.md": "# Q\n"}
    upstream.commit("main", files)
    answer = client.query("alpha", full=True)
    assert {hit["path"]: hit["body"] for hit in answer["results"]} == {"a.md": files["a.md"]}
    assert [note["code"] for note in answer["degraded"]] == ["documents_skipped"]


def test_attributes_of_the_branch_and_settings_of_the_user_change_no_byte(
    client: Client, upstream: Upstream, tmp_path: Path
) -> None:
    (tmp_path / "home" / ".gitconfig").write_text(
        "[core]\n autocrlf = true\n eol = crlf\n hooksPath = /nowhere\n"
        '[filter "x"]\n smudge = sed s/alpha/beta/\n clean = cat\n'
    )
    text = "# A\r\n\nalpha $Id$ umlaut ä\r\n"
    upstream.commit(
        "main",
        {
            ".gitattributes": "a.md text eol=crlf ident filter=x\nb.md working-tree-encoding=UTF-16\n",
            "a.md": text,
            "b.md": "# B\n\nalpha bravo\n",
        },
    )
    answer = client.query("alpha", full=True)
    assert {hit["path"]: hit["body"] for hit in answer["results"]} == {"a.md": text, "b.md": "# B\n\nalpha bravo\n"}


def test_links_submodules_and_other_files_are_no_memories(client: Client, upstream: Upstream) -> None:
    upstream.commit(
        "main", {"real.md": "# R\n\nalpha\n", "x.txt": "alpha", ".hidden/y.md": "alpha", "vendor/z.md": "alpha"}
    )
    upstream.commit("main", {"link.md": "real.md"}, mode="120000")
    upstream.commit("main", {"outside.md": "/etc/hostname", "dir": "/etc"}, mode="120000")
    answer = client.query("alpha")
    assert [hit["path"] for hit in answer["results"]] == ["real.md"]
    assert answer["degraded"] == []


def test_a_branch_without_memories_answers_with_nothing(client: Client, upstream: Upstream) -> None:
    commit = upstream.commit("main", {"code.py": "print()"})
    answer = client.query("print")
    assert (answer["commit_hash"], answer["results"]) == (commit, [])
    upstream.commit("main", {"a.md": "# A\n\nprint\n"})
    assert client.paths("print") == ["a.md"]


def test_limit_min_score_and_full(client: Client, upstream: Upstream) -> None:
    files = {f"{number}.md": f"# N{number}\n\n{'needle ' * (number + 1)}{'straw ' * 40}\n" for number in range(12)}
    upstream.commit("main", files | {f"x{number}.md": f"# X\n\nhay {number}\n" for number in range(40)})
    answer = client.query("needle", limit=50)
    scores = [hit["score"] for hit in answer["results"]]
    assert len(scores) == 12
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > scores[-1] > 0
    assert client.paths("needle") == [hit["path"] for hit in answer["results"][:10]]
    assert len(client.paths("needle", limit=1)) == 1
    middle = (scores[0] + scores[-1]) / 2
    some = client.query("needle", limit=50, min_score=middle)["results"]
    assert some == [hit for hit in answer["results"] if hit["score"] >= middle - 0.005][: len(some)]
    assert 0 < len(some) < 12
    assert client.query("needle", min_score=1)["results"] == []
    body = client.query("needle", full=True, limit=1)["results"][0]
    assert body["body"] == files[body["path"]]
    assert "body" not in answer["results"][0]


def test_debug_shows_the_command_the_times_and_the_index(client: Client, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n", "b.md": "# B\n"})
    first = client.query("-x alpha", debug=True, limit=3, min_score=0.25)["debug"]
    command = ["qmd", "--index", "ws-main", "search", "--json", "-n", "3", "--min-score", "0.25", "--", "-x alpha"]
    assert first["qmd_command"] == command
    assert first["index"] == {"documents": 2, "pending_embeddings": 2}
    assert set(first["timings_ms"]) == {"ask", "wait", "fetch", "align", "index", "search"}
    second = client.query("alpha", debug=True)["debug"]
    assert set(second["timings_ms"]) == {"ask", "search"}  # nothing to do, so nothing is done
    assert second["lock_wait_ms"] == 0
    assert "debug" not in client.query("alpha")


def test_an_empty_result_costs_what_a_full_one_does(client: Client, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    client.query("alpha")
    assert set(client.query("nothinglikeit", debug=True)["debug"]["timings_ms"]) == {"ask", "search"}


def test_semantic_questions_are_answered_with_bm25_and_say_so(client: Client, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    plain = client.query("alpha")["results"]
    for query_type in ("vsearch", "query", "deep_search"):
        answer = client.query("alpha", query_type=query_type)
        assert answer["query_type"] == query_type
        assert [note["code"] for note in answer["degraded"]] == ["model_unavailable"]
        assert answer["results"] == plain


def test_odd_questions_are_answered(client: Client, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha beta\n"})
    for text in [
        "-alpha",
        "--index x",
        "--",
        '"',
        '"alpha',
        '-"alpha"',
        "*",
        "a OR b",
        "NEAR(a b)",
        "col:x",
        "alpha\nbeta",
        "\u200b",
        "'; DROP TABLE documents; --",
        "%00",
        "$(id)",
        "alpha" * 204,
        "字" * 1024,
        "😀",
        "-n",
        "--full-path alpha",
    ]:
        answer = client.query(text)
        assert answer["degraded"] == []
        assert [hit["path"] for hit in answer["results"]] in ([], ["a.md"]), text


def test_ten_hits_of_long_chinese_text_stay_under_8_kb(client: Client, upstream: Upstream) -> None:
    line = "发布窗口是每周二和周四，超时重试五次，之后进入死信队列。" * 12
    files = {
        f"会议记录/2026-03-{number:02}-发布评审.md": f"# {line}\n\n{line}\n{line}\n{line}\n" for number in range(12)
    }
    upstream.commit("main", files)
    answer = client.http.post("/query", json={"query": "死信队列"})
    hits = answer.get_json()["results"]
    assert len(hits) == 10
    assert len(answer.data) < 8000
    for hit in hits:
        assert hit["snippet"] in files[hit["path"]]
        assert hit["title"]
    assert answer.headers["Content-Type"] == "application/json"
    assert "死信队列" in answer.data.decode()  # as it is, not as six bytes of escapes


def test_without_require_latest_the_remote_is_not_asked(client: Client, upstream: Upstream) -> None:
    old = upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    first = client.query("alpha", require_latest=False)
    assert (first["commit_hash"], first["freshness"]) == (old, "fresh")  # first use still syncs
    new = upstream.commit("main", {"a.md": "# A\n\nalpha beta\n"})
    second = client.query("alpha", require_latest=False)
    assert (second["commit_hash"], second["freshness"]) == (old, "unknown")
    assert second["synced_at"] == first["synced_at"]
    third = client.query("alpha")
    assert (third["commit_hash"], third["freshness"]) == (new, "fresh")
    upstream.path.rename(upstream.path.with_name("away.git"))
    fourth = client.query("beta", require_latest=False)
    assert (fourth["commit_hash"], fourth["freshness"]) == (new, "unknown")
    assert fourth["synced_at"] >= third["synced_at"][:19]
    assert client.problem("/query", {"query": "beta"}) == (502, "remote_unreachable")
    assert client.problem("/query", {"query": "b", "branch": "other", "require_latest": False}) == (
        502,
        "remote_unreachable",
    )


def test_without_require_latest_a_lost_index_is_made_again_without_the_remote(
    client: Client, upstream: Upstream, data: Path
) -> None:
    commit = upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    client.query("alpha")
    upstream.path.rename(upstream.path.with_name("away.git"))
    for index in (data / "qmd-cache" / "ws-main").iterdir():
        index.unlink()
    answer = client.query("alpha", require_latest=False)
    assert (answer["commit_hash"], answer["freshness"], len(answer["results"])) == (commit, "unknown", 1)


@pytest.mark.parametrize(("mode", "updates"), [("true", 0), ("always", 1), ("false", 0)])
def test_update_on_latest_query_decides_when_qmd_updates_an_unmoved_branch(
    environ: dict[str, str], upstream: Upstream, fake_qmd: FakeQmd, mode: str, updates: int
) -> None:
    environ["QMD_UPDATE_ON_LATEST_QUERY"] = mode
    client = Client(create_app(Config.load(environ), environ))
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    assert client.paths("alpha") == ["a.md"]
    before = fake_qmd.calls("update")
    assert client.paths("alpha") == ["a.md"]
    assert fake_qmd.calls("update") - before == updates
    upstream.commit("main", {"a.md": "# A\n\nbeta\n"})
    assert client.paths("beta") == ["a.md"]
    assert fake_qmd.calls("update") - before == updates + 1


def test_nothing_is_ever_written_to_the_remote(client: Client, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    listing = ["git", f"--git-dir={upstream.path}", "for-each-ref"]
    before = subprocess.run(listing, capture_output=True, check=True).stdout
    client.query("alpha")
    client.sync()
    assert subprocess.run(listing, capture_output=True, check=True).stdout == before


def test_every_answer_fits_its_schema(client: Client, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    for schema, answer in (
        (AnswerOut(), client.query("alpha", full=True, debug=True)),
        (SyncOut(), client.sync(debug=True)),
        (StatusOut(), json.loads(client.http.get("/status").data)),
    ):
        assert schema.validate(answer) == {}
