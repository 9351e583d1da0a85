"""Search by meaning when something is broken, killed, slow or busy: the answer is right, and says what it lacks."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from memgw.app import create_app, create_gateway, create_housekeeper
from memgw.config import ROOT, Config
from memgw.embedder import Embedder
from memgw.housekeeping import Housekeeper
from tests.actors import FakeQmd, HostProxy, Upstream, WarmHost, host_proxy, served, until, warm_host_of_its_own
from tests.bench import corpus
from tests.conftest import Client
from tests.test_semantic import DOCUMENTS, PARAPHRASE, codes, over, vectors_in

SEMANTIC = ("vsearch", "query")


@pytest.fixture(scope="module")
def host(minilm: Path) -> Iterator[WarmHost]:
    with TemporaryDirectory(prefix="memgw") as folder:
        host = WarmHost({**os.environ, "QMD_EMBED_MODEL_URI": str(minilm), "CI": "true"}, Path(folder))
        yield host
        host.stop()


@pytest.fixture
def before(host: WarmHost) -> Iterator[HostProxy]:
    """Stands before the host with the model."""
    with host_proxy(host) as proxy:
        yield proxy


@pytest.fixture
def settings(environ: dict[str, str], data: Path, host: WarmHost, minilm: Path) -> dict[str, str]:
    """Of a gateway with the model."""
    environ |= {"QMD_EMBED_MODEL_URI": str(minilm), "MEMGW_EMBED_BUDGET_SECONDS": "60"}
    shutil.rmtree(data / "run", ignore_errors=True)
    host.serve(data)
    return environ


def client_of(settings: dict[str, str], **more: str) -> Client:
    environ = settings | more
    return Client(create_app(Config.load(environ), environ))


def embedder_of(settings: dict[str, str]) -> Embedder:
    return Embedder(create_gateway(Config.load(settings), settings))


def pending(client: Client, branch: str = "main") -> int:
    spaces = client.http.get("/status").get_json()["workspaces"]
    found = next(space["pending_embeddings"] for space in spaces if space["branch"] == branch)
    return 10_000 if found is None else int(found)  # None: just now it is being changed


def complete_answer(client: Client, branch: str = "main") -> dict[str, Any]:
    """Once all vectors are there, however slow this machine is."""
    for _ in range(20):
        answer = client.query(PARAPHRASE, query_type="vsearch", branch=branch, debug=True)
        if not answer["degraded"]:
            return answer
        assert codes(answer) == ["vectors_pending"]
    raise AssertionError(answer)


def nursery_of(data: Path) -> Path:
    return next((data / "qmd-cache" / "vectors").glob("*.sqlite"))


def notes(count: int, start: int = 0) -> dict[str, str | bytes | None]:
    """Short ones, each of its own."""
    words = corpus.vocabulary()
    return {
        f"notes/{number}.md": f"# Note {number}\n\n{' '.join(words[9 * number : 9 * number + 9])}.\n"
        for number in range(start, start + count)
    }


@pytest.mark.parametrize("engine", ["auto", "cli"])
def test_ci_in_the_environment_takes_nothing_away(engine: str, settings: dict[str, str], upstream: Upstream) -> None:
    upstream.commit("main", DOCUMENTS)
    client = client_of(settings, CI="true", QMD_ENGINE=engine)
    for query_type in SEMANTIC:
        answer = client.query(PARAPHRASE, query_type=query_type)
        assert (answer["results"][0]["path"], codes(answer)) == ("holds.md", [])


def test_a_host_killed_while_it_embeds_is_made_up_for_by_the_next(
    settings: dict[str, str], data: Path, minilm: Path, upstream: Upstream
) -> None:
    commit = upstream.commit("main", {**notes(30), **DOCUMENTS})
    with warm_host_of_its_own({**os.environ, "QMD_EMBED_MODEL_URI": str(minilm)}) as mortal:
        client = over(mortal, settings, data, MEMGW_EMBED_BUDGET_SECONDS="20")
        client.query("cents")
        threading.Timer(1, mortal.kill).start()
        answer = client.query("cents", query_type="query")  # goes on with the command line, or without vectors
        assert answer["commit_hash"] == commit
        assert "money.md" in {hit["path"] for hit in answer["results"]}
        assert client.paths("cents") == ["money.md"]
        mortal.process.wait(10)
        mortal.start()
        answer = complete_answer(client)
        assert answer["results"][0]["path"] == "holds.md"
        assert answer["debug"]["index"] == {"documents": 34, "pending_embeddings": 0}


def test_an_embedder_killed_at_work_leaves_an_index_that_is_whole(
    settings: dict[str, str], data: Path, upstream: Upstream
) -> None:
    upstream.commit("main", {**notes(40), **DOCUMENTS})
    client = client_of(settings, QMD_EMBED_ON_CHANGE="false")
    client.sync()
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-m", "memgw.background"], cwd=ROOT, env=settings)
        time.sleep(1.5)
        process.kill()
        process.wait()
        assert client.paths("cents") == ["money.md"]
        answer = client.query("cents", query_type="vsearch")
        assert set(codes(answer)) <= {"vectors_pending"}
        assert "money.md" in {hit["path"] for hit in answer["results"]}
    embedder = embedder_of(settings)
    assert until(lambda: not embedder.turn() and not pending(client), 200)
    assert client.query(PARAPHRASE, query_type="query", strict=True)["results"][0]["path"] == "holds.md"


def test_the_command_line_s_embedding_ends_with_its_budget_and_keeps_what_it_made(
    settings: dict[str, str], data: Path, upstream: Upstream
) -> None:
    upstream.commit("main", {**notes(900), **DOCUMENTS})
    for seconds in (3, 6, 12, 24, 48):  # loading the model alone may take as long
        client = client_of(settings, QMD_ENGINE="cli", MEMGW_EMBED_BUDGET_SECONDS=str(seconds))
        begun = time.monotonic()
        answer = client.query("cents", query_type="query")
        assert time.monotonic() - begun < 10 + seconds + 10  # the search has a budget, too
        assert set(codes(answer)) <= {"vectors_pending", "budget_exceeded"}
        assert "money.md" in {hit["path"] for hit in answer["results"]}
        if pending(client) < 904:
            break
    assert pending(client) < 904
    assert client.paths("cents") == ["money.md"]
    assert [entry.name for entry in (data / "qmd-cache" / "ws-main").iterdir() if entry.is_dir()] == []


def test_two_branches_embed_at_once(settings: dict[str, str], upstream: Upstream) -> None:
    branches = {"main": "holds.md", "task/T-1": "holds.md", "task/T-2": "holds.md"}
    for number, branch in enumerate(branches):
        upstream.commit(branch, {**notes(6, 6 * number), **DOCUMENTS}, parent=None)
    clients = [client_of(settings) for _ in branches]
    found: dict[str, dict[str, Any]] = {}

    def ask(client: Client, branch: str) -> None:
        found[branch] = complete_answer(client, branch)

    threads = [threading.Thread(target=ask, args=pair) for pair in zip(clients, branches, strict=True)]
    embedder = threading.Thread(target=lambda: embedder_of(settings).turn())
    for thread in (*threads, embedder):
        thread.start()
    for thread in (*threads, embedder):
        thread.join()
    for branch in branches:
        assert found[branch]["commit_hash"] == upstream.tip(branch)
        assert (found[branch]["results"][0]["path"], codes(found[branch])) == ("holds.md", [])
        assert found[branch]["debug"]["index"] == {"documents": 10, "pending_embeddings": 0}


@pytest.mark.parametrize("engine", ["auto", "cli"])
def test_bm25_is_answered_at_once_while_vectors_are_made(
    engine: str, settings: dict[str, str], upstream: Upstream
) -> None:
    commit = upstream.commit("main", {**notes(200), **DOCUMENTS})
    settings |= {"QMD_ENGINE": engine}
    client = client_of(settings, QMD_EMBED_ON_CHANGE="false")
    client.sync()
    embedder = embedder_of(settings)
    working = threading.Thread(target=lambda: until(lambda: not embedder.turn() or pending(client) < 204, 100))
    working.start()
    waited = []
    while working.is_alive():
        answer = client.query("cents", debug=True)
        waited.append(answer["debug"]["lock_wait_ms"])
        assert (answer["commit_hash"], [hit["path"] for hit in answer["results"]]) == (commit, ["money.md"])
    assert pending(client) < 204
    assert len(waited) > 3
    assert max(waited) < 2000


BUDGET = ("budget_exceeded", "engine_error")


@pytest.mark.parametrize("query_type", SEMANTIC)
@pytest.mark.parametrize("code", BUDGET)
def test_a_host_that_does_not_search_by_meaning_is_stepped_down_from(
    code: str, query_type: str, settings: dict[str, str], data: Path, before: HostProxy, upstream: Upstream
) -> None:
    upstream.commit("main", DOCUMENTS)
    before.serve(data)
    client = client_of(settings, QMD_ENGINE="host", MEMGW_QUERY_BUDGET_SECONDS="1")
    client.query(PARAPHRASE, query_type=query_type)
    never = threading.Event()

    def spoilt(request: dict[str, Any]) -> bytes | None:
        if request["op"] != "semantic":
            return None
        if code == "budget_exceeded":
            never.wait(60)
            return b""
        hits = {"ok": True, "qmd": "2.8.3", "hits": []}
        return b"garbage\n" if query_type == "query" else json.dumps(hits).encode() + b"\n"

    before.answer = spoilt
    begun = time.monotonic()
    answer = client.query("cents", query_type=query_type, debug=True, full=True)
    assert time.monotonic() - begun < 20
    assert ([hit["path"] for hit in answer["results"]], codes(answer)) == (["money.md"], [code])
    assert answer["results"][0]["body"] == DOCUMENTS["money.md"]
    assert answer["debug"]["mode_used"] == "search"
    assert client.problem("/query", {"query": "cents", "query_type": query_type, "strict": True}) == (503, code)
    assert client.query("cents")["degraded"] == []
    never.set()
    before.answer = lambda request: None
    assert codes(client_of(settings, QMD_ENGINE="host").query(PARAPHRASE, query_type=query_type)) == []


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("sleep 60", "budget_exceeded"),
        ("echo nonsense; exit 0", "engine_error"),
        ("echo '[]'; exit 0", "engine_error"),
        ("exit 7", "engine_error"),
    ],
)
def test_a_command_line_that_does_not_search_by_meaning_is_stepped_down_from(
    script: str, code: str, fake_qmd: FakeQmd, settings: dict[str, str], upstream: Upstream
) -> None:
    upstream.commit("main", DOCUMENTS)
    client = client_of(settings, MEMGW_QUERY_BUDGET_SECONDS="1")
    client.sync()
    fake_qmd.does("query", script)
    begun = time.monotonic()
    answer = client.query("cents", query_type="query", debug=True)
    assert time.monotonic() - begun < 20
    assert ([hit["path"] for hit in answer["results"]], codes(answer)) == (["money.md"], [code])
    assert answer["debug"]["mode_used"] == "search"
    assert client.problem("/query", {"query": "cents", "query_type": "query", "strict": True}) == (503, code)


def test_a_host_that_hangs_at_embedding_costs_the_budget_and_no_more(
    settings: dict[str, str], data: Path, before: HostProxy, upstream: Upstream
) -> None:
    upstream.commit("main", DOCUMENTS)
    before.serve(data)
    client = client_of(settings, MEMGW_EMBED_BUDGET_SECONDS="1")
    never = threading.Event()
    before.answer = lambda request: b"" if request["op"] == "embed" and never.wait(60) else None
    begun = time.monotonic()
    answer = client.query("cents", query_type="query")
    assert time.monotonic() - begun < 20  # the budget, the grace, and a slow machine: far from the host's 60
    assert ([hit["path"] for hit in answer["results"]], codes(answer)) == (["money.md"], ["vectors_pending"])
    assert client.sync()["documents"] == 4
    never.set()
    before.answer = lambda request: None
    assert codes(client_of(settings).query(PARAPHRASE, query_type="query")) == []


def test_bringing_vectors_in_may_fail_at_any_moment_and_costs_no_index(
    settings: dict[str, str], data: Path, before: HostProxy, upstream: Upstream
) -> None:
    upstream.commit("main", DOCUMENTS)
    before.serve(data)
    client = client_of(settings)
    full = json.dumps({"ok": False, "qmd": "2.8.3", "kind": "full", "error": "no space"}).encode() + b"\n"
    for said in (full, b"garbage\n", b""):
        before.answer = lambda request, said=said: said if request["op"] == "adopt" else None  # type: ignore[misc]
        answer = client.query("cents", query_type="vsearch")
        assert ([hit["path"] for hit in answer["results"]], codes(answer)) == (["money.md"], ["vectors_pending"])
    applied = len(before.of("apply"))
    before.answer = lambda request: None
    assert codes(client.query(PARAPHRASE, query_type="vsearch")) == []
    assert len(before.of("apply")) == applied  # the index is the same


def test_an_answer_without_asking_the_remote_is_found_by_meaning_too(
    settings: dict[str, str], upstream: Upstream
) -> None:
    commit = upstream.commit("main", DOCUMENTS)
    client = client_of(settings)
    client.sync()
    upstream.commit("main", {"holds.md": None})
    for query_type in SEMANTIC:
        answer = client.query(PARAPHRASE, query_type=query_type, require_latest=False, full=True)
        assert (answer["commit_hash"], answer["freshness"], codes(answer)) == (commit, "unknown", [])
        assert (answer["results"][0]["path"], answer["results"][0]["body"]) == ("holds.md", DOCUMENTS["holds.md"])


QUESTIONS: list[dict[str, Any]] = [
    {"query": PARAPHRASE, "query_type": "vsearch"},
    {"query": 'why was it "OOMKilled" -cents', "query_type": "query"},
    {"query": PARAPHRASE, "query_type": "query", "explain": True, "intent": "buying", "candidate_limit": 3},
    {
        "queries": [
            {"type": "lex", "query": "OOMKilled"},
            {"type": "vec", "query": "when do we ship"},
            {"type": "hyde", "query": "We ship on Tuesdays."},
        ],
        "query_type": "query",
        "explain": True,
        "full": True,
    },
    {"queries": [{"type": "lex", "query": "cents"}], "query_type": "query"},
    {"queries": [{"type": "lex", "query": "nowhere"}], "query_type": "query", "strict": True},
]


def test_host_and_command_line_give_the_same_answers(settings: dict[str, str], upstream: Upstream) -> None:
    upstream.commit("main", DOCUMENTS)
    warm, cold = client_of(settings, QMD_ENGINE="host"), client_of(settings, QMD_ENGINE="cli")
    warm.sync()
    for question in QUESTIONS:
        answers = [client.post("/query", question) for client in (warm, cold)]
        assert [status for status, _ in answers] == [200, 200]
        first, second = (answer["results"] for _, answer in answers)
        assert first == second
        assert all(("explain" in hit) == question.get("explain", False) for hit in first)
        assert [answer["degraded"] for _, answer in answers] == [[], []]


def test_a_question_of_words_alone_needs_no_model(client: Client, upstream: Upstream) -> None:
    upstream.commit("main", DOCUMENTS)
    status, answer = client.post("/query", {"queries": [{"type": "lex", "query": "cents"}], "query_type": "query"})
    assert (status, [hit["path"] for hit in answer["results"]], codes(answer)) == (200, ["money.md"], [])


def test_vectors_survive_an_index_that_is_made_anew(
    settings: dict[str, str], data: Path, before: HostProxy, upstream: Upstream
) -> None:
    upstream.commit("main", DOCUMENTS)
    before.serve(data)
    client = client_of(settings)
    assert codes(client.query(PARAPHRASE, query_type="vsearch")) == []
    with closing(sqlite3.connect(nursery_of(data))) as db:
        made = db.execute("SELECT hash, embedded_at FROM content_vectors ORDER BY 1").fetchall()
    shutil.rmtree(data / "qmd-cache" / "ws-main")
    assert client.query(PARAPHRASE, query_type="vsearch", strict=True)["results"][0]["path"] == "holds.md"
    with closing(sqlite3.connect(nursery_of(data))) as db:
        assert db.execute("SELECT hash, embedded_at FROM content_vectors ORDER BY 1").fetchall() == made


def test_an_index_made_anew_is_embedded_anew_in_the_background(
    settings: dict[str, str], data: Path, upstream: Upstream
) -> None:
    upstream.commit("main", DOCUMENTS)
    client = client_of(settings)
    client.query(PARAPHRASE, query_type="vsearch")
    shutil.rmtree(data / "qmd-cache" / "ws-main")
    later = client_of(settings, QMD_EMBED_ON_CHANGE="false")
    assert codes(later.query("cents", query_type="query")) == ["vectors_pending"]
    assert later.http.get("/status").get_json()["workspaces"][0]["embedded_commit"] is None
    assert embedder_of(settings).turn()
    assert codes(later.query(PARAPHRASE, query_type="query")) == []


def garbage(path: Path) -> None:
    path.write_bytes(b"no database " * 1000)


def gone(path: Path) -> None:
    path.unlink()


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def old_schema(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript("DROP TABLE content_vectors; CREATE TABLE content_vectors (hash TEXT, seq INTEGER);")


def rows_without_vectors(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript("DELETE FROM vectors_vec_rowids; DELETE FROM vectors_vec_chunks;")


@pytest.mark.parametrize("damage", [garbage, gone, folder_instead, old_schema, rows_without_vectors])
def test_a_damaged_nursery_is_made_anew(damage: Any, settings: dict[str, str], data: Path, upstream: Upstream) -> None:
    upstream.commit("main", DOCUMENTS)
    client = client_of(settings)
    assert codes(client.query(PARAPHRASE, query_type="vsearch")) == []
    nursery = nursery_of(data)
    with closing(sqlite3.connect(nursery)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    damage(nursery)
    upstream.commit("task/T-1", DOCUMENTS | {"pets.md": "# Animals\n\nDogs may be brought along.\n"}, parent=None)
    assert client.paths("cents", branch="task/T-1") == ["money.md"]
    shutil.rmtree(data / "qmd-cache" / "ws-task-T-1")
    shutil.rmtree(data / "qmd-cache" / "ws-main")
    answer = client.query("can I take my puppy to work", query_type="vsearch", branch="task/T-1")
    assert (answer["results"][0]["path"], codes(answer)) == ("pets.md", [])
    assert vectors_in(nursery) == len(DOCUMENTS) + 1


def aged(nursery: Path, days: int) -> None:
    with closing(sqlite3.connect(nursery)) as db, db:
        db.execute("UPDATE content_vectors SET embedded_at = datetime('now', ?)", (f"-{days} days",))


def made_in(nursery: Path) -> dict[str, str]:
    with closing(sqlite3.connect(nursery)) as db:
        return dict(db.execute("SELECT hash, embedded_at FROM content_vectors"))


def housekeeper_of(settings: dict[str, str]) -> Housekeeper:
    config = Config.load(settings)
    return create_housekeeper(config, create_gateway(config, settings))


def test_vectors_of_texts_that_no_index_has_go_after_their_time(
    settings: dict[str, str], data: Path, upstream: Upstream
) -> None:
    upstream.commit("main", {**notes(40), **DOCUMENTS})
    upstream.commit("task/T-1", {"pets.md": "# Animals\n\nDogs may be brought along.\n"}, parent=None)
    client = client_of(settings)
    for branch in ("main", "task/T-1"):
        complete_answer(client, branch)
    upstream.commit("main", dict.fromkeys(notes(40)))
    client.sync()
    nursery, housekeeper = nursery_of(data), housekeeper_of(settings)

    def vectors_freed() -> list[str]:
        done = housekeeper.round(now=True)
        assert done.failed == []
        return [freed.what for freed in done.freed if freed.what.startswith("vectors")]

    aged(nursery, 13)
    assert (vectors_freed(), vectors_in(nursery)) == ([], 45)
    aged(nursery, 15)
    before = made_in(nursery)
    assert not [freed for freed in housekeeper.round().freed if freed.what.startswith("vectors")]  # too few, of itself
    assert (vectors_freed(), vectors_in(nursery)) == (["vectors of 40 texts"], 5)
    assert made_in(nursery).items() <= before.items()
    assert vectors_freed() == []
    assert sorted(path.name for path in nursery.parent.iterdir() if "next" in path.name) == []
    for branch, found in (("main", "holds.md"), ("task/T-1", "pets.md")):
        shutil.rmtree(data / "qmd-cache" / f"ws-{branch.replace('/', '-')}")
        answer = complete_answer(client, branch)
        assert found in {hit["path"] for hit in answer["results"]}
    assert made_in(nursery).items() <= before.items()  # nothing was embedded again
    upstream.commit("main", notes(1))
    complete_answer(client)
    assert vectors_in(nursery) == 6


@pytest.mark.parametrize("left", ["without a stamp", "without an index"])
def test_a_workspace_that_was_left_half_made_does_not_keep_vectors_for_good(
    settings: dict[str, str], data: Path, upstream: Upstream, left: str
) -> None:
    upstream.commit("main", {**notes(5), **DOCUMENTS})
    upstream.commit("task/T-1", {"pets.md": "# Animals\n\nDogs may be brought along.\n"}, parent=None)
    client = client_of(settings)
    for branch in ("main", "task/T-1"):
        complete_answer(client, branch)
    upstream.commit("main", dict.fromkeys(notes(5)))
    client.sync()
    aged(nursery_of(data), 15)
    state, used = data / "state" / "task-T-1.json", data / "state" / "used" / "task-T-1"
    if left == "without a stamp":
        state.write_text(json.dumps({**json.loads(state.read_text()), "stamp": None}))
    else:
        shutil.rmtree(data / "qmd-cache" / "ws-task-T-1")

    def vectors_freed() -> list[str]:
        done = housekeeper_of(settings).round(now=True)
        return [freed.what for freed in done.freed if freed.what.startswith("vectors")]

    assert vectors_freed() == []  # it may just be made
    os.utime(used, (time.time() - 3700,) * 2)
    assert vectors_freed() == ["vectors of 6 texts"]
    assert "pets.md" in {hit["path"] for hit in complete_answer(client, "task/T-1")["results"]}


def test_vectors_are_made_and_searched_while_others_go(
    settings: dict[str, str], data: Path, upstream: Upstream
) -> None:
    upstream.commit("main", {**notes(60), **DOCUMENTS})
    client = client_of(settings)
    complete_answer(client)
    nursery, done = nursery_of(data), threading.Event()
    failed: list[str] = []

    def prune() -> None:
        housekeeper = housekeeper_of(settings)
        while not done.is_set():
            failed.extend(housekeeper.round(now=True).failed)

    pruning = threading.Thread(target=prune)
    pruning.start()
    try:
        for turn in range(6):
            aged(nursery, 20)
            upstream.commit("main", dict.fromkeys(notes(10, 10 * turn)) | notes(5, 100 + 5 * turn))
            answer = complete_answer(client)
            assert (answer["commit_hash"], answer["results"][0]["path"]) == (upstream.tip("main"), "holds.md")
            assert answer["debug"]["index"]["pending_embeddings"] == 0
    finally:
        done.set()
        pruning.join()
    assert failed == []
    aged(nursery, 20)
    assert housekeeper_of(settings).round(now=True).failed == []
    assert vectors_in(nursery) == 30 + len(DOCUMENTS)


def test_a_large_document_is_embedded_in_turns_and_keeps_no_other_waiting(
    settings: dict[str, str], upstream: Upstream
) -> None:
    words = corpus.vocabulary()
    large = "# Large\n\n" + "".join(f"{' '.join(words[at : at + 60])}.\n\n" for at in range(0, 4_200, 60))
    upstream.commit("main", DOCUMENTS)
    client_of(settings).sync()
    upstream.commit("main", {"a.md": large, "pets.md": "# Animals\n\nDogs may be brought along.\n"})
    client = client_of(settings, MEMGW_EMBED_BUDGET_SECONDS="1")
    found: list[tuple[bool, str]] = []
    while (not found or found[-1][0]) and len(found) < 90:
        answer = client.query("can I take my puppy to work", query_type="vsearch")
        found.append(("vectors_pending" in codes(answer), answer["results"][0]["path"]))
    assert (True, "pets.md") in found
    assert found[-1] == (False, "pets.md")


def test_vectors_of_deleted_texts_do_not_stay(settings: dict[str, str], data: Path, upstream: Upstream) -> None:
    client = client_of(settings)
    for number in range(4):
        upstream.commit("main", DOCUMENTS | {"log.md": f"# Log\n\nEntry {number} of the log.\n"})
        client.sync()
    index = next((data / "qmd-cache" / "ws-main").glob("*.sqlite"))
    assert vectors_in(index) == len(DOCUMENTS) + 1


def test_the_embedder_takes_the_newest_first_in_turns_and_ends_on_term(
    settings: dict[str, str], data: Path, before: HostProxy, upstream: Upstream, tmp_path: Path
) -> None:
    client = client_of(settings, QMD_EMBED_ON_CHANGE="false")
    branches = ("main", "task/T-1", "task/T-2")
    for number, branch in enumerate(branches):
        upstream.commit(branch, {**notes(10, 10 * number), **DOCUMENTS}, parent=None)
        client.sync(branch=branch)
    (data / "state" / "broken.json").write_text('{"format": 1, "branch": 7}')
    (data / "state" / "none.json").write_text("{")
    before.serve(data)
    with (tmp_path / "embedder.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "memgw.background"], cwd=ROOT, env=settings, stderr=log)
    try:
        assert until(lambda: not any(pending(client, branch) for branch in branches), 60)
        asked = [Path(request["file"]).parent.name for request in before.of("embed")]
        assert list(dict.fromkeys(asked)) == ["ws-task-T-2", "ws-task-T-1", "ws-main"]
        upstream.commit("main", notes(900, 100))
        client.sync()
        assert until(lambda: len(before.of("embed")) > len(asked), 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
    assert client.paths("cents") == ["money.md"]
    assert b"Traceback" not in (tmp_path / "embedder.log").read_bytes()


def test_every_answer_is_of_its_commit_while_vectors_are_made_and_pushes_go_on(
    settings: dict[str, str], upstream: Upstream, tmp_path: Path
) -> None:
    """The promise (DESIGN.md §1), with the embedder among the clients."""
    pushed: list[tuple[float, str]] = []

    def push(turn: int) -> None:
        files: dict[str, str | bytes | None] = {
            f"notes/{turn}.md": f"# Note {turn}\n\nneedle of turn{turn}, by the river.\n"
        }
        files |= {"log.md": f"# Log\n\nneedle turn{turn} in the log\n"}
        if turn > 3:
            files[f"notes/{turn - 3}.md"] = None
        commit = upstream.commit("main", files)
        pushed.append((time.monotonic(), commit))

    push(0)
    end = time.monotonic() + 15
    failures: list[BaseException] = []
    answered = dict.fromkeys(("search", "vsearch", "query"), 0)

    def at_work() -> bool:
        return not failures and (time.monotonic() < end or (min(answered.values()) < 5 and time.monotonic() < end + 60))

    settings |= {"MEMGW_EMBED_BUDGET_SECONDS": "1"}
    with served(settings, tmp_path, measured=False) as server:
        embedder = subprocess.Popen([sys.executable, "-m", "memgw.background"], cwd=ROOT, env=settings)

        def client(seed: int) -> None:
            mine = Random(seed)
            try:
                while at_work():
                    query_type = mine.choice(list(answered))
                    floor = max(number for number, (at, _) in enumerate(pushed) if at < time.monotonic())
                    answer = server.query("needle", query_type=query_type, limit=50, full=True)
                    commits = [commit for _, commit in pushed]
                    commit = answer["commit_hash"]
                    assert (commits.index(commit) if commit in commits else len(commits)) >= floor
                    assert answer["results"]
                    assert set(codes(answer)) <= {"vectors_pending"}, answer["degraded"]
                    for hit in answer["results"]:
                        assert hit["body"] == upstream.blob(commit, hit["path"])
                        assert hit["snippet"] in hit["body"]
                    answered[query_type] += 1
            except BaseException as exc:
                failures.append(exc)

        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(5)]
        for thread in threads:
            thread.start()
        turn = 1
        while at_work():
            push(turn)
            turn += 1
            time.sleep(0.7)
        for thread in threads:
            thread.join()
        embedder.terminate()
        embedder.wait(10)
    assert failures == []
    assert min(answered.values()) >= 5, answered
