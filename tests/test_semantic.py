"""Search by meaning over HTTP, with a real model: vectors follow Git, and what can't be done is said."""

import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from memgw.app import create_app, create_gateway
from memgw.config import Config
from memgw.embedder import Embedder
from tests.actors import Upstream, WarmHost, until
from tests.conftest import Client

DOCUMENTS = {
    "holds.md": "# Holds\n\nA seat is reserved for eight minutes while its buyer pays.\n",
    "deploy.md": "# Deploying\n\nReleases go out on Tuesday and Thursday before noon.\n",
    "leak.md": "# 2026-02-20\n\nThe service was ended with OOMKilled every forty minutes.\n",
    "money.md": "# Amounts\n\nMoney is a whole number of cents, never a float.\n",
}
PARAPHRASE = "how long may somebody take to buy a ticket"
SEMANTIC = ("vsearch", "query")


@pytest.fixture(params=["auto", "cli"])
def semantic(
    request: pytest.FixtureRequest, environ: dict[str, str], data: Path, host: WarmHost, minilm: Path
) -> Client:
    """A client with a model, over the warm host and over the command line."""
    environ |= {"QMD_EMBED_MODEL_URI": str(minilm), "QMD_ENGINE": request.param, "MEMGW_EMBED_BUDGET_SECONDS": "60"}
    return over(host, environ, data)


@pytest.fixture
def warm(environ: dict[str, str], data: Path, host: WarmHost, minilm: Path) -> Client:
    environ |= {"QMD_EMBED_MODEL_URI": str(minilm), "MEMGW_EMBED_BUDGET_SECONDS": "60"}
    return over(host, environ, data)


def over(host: WarmHost, environ: dict[str, str], data: Path, **more: str) -> Client:
    shutil.rmtree(data / "run", ignore_errors=True)
    host.serve(data)
    environ |= more
    return Client(create_app(Config.load(environ), environ))


def codes(answer: dict[str, Any]) -> list[str]:
    return [note["code"] for note in answer["degraded"]]


def test_a_paragraph_is_found_by_paraphrase_from_its_push_to_its_deletion(semantic: Client, upstream: Upstream) -> None:
    upstream.commit("main", DOCUMENTS)
    for query_type in SEMANTIC:
        answer = semantic.query(PARAPHRASE, query_type=query_type, debug=True)
        assert (answer["results"][0]["path"], codes(answer)) == ("holds.md", [])
        assert answer["debug"]["mode_used"] == query_type
        assert answer["debug"]["index"]["pending_embeddings"] == 0
    commit = upstream.commit("main", {"pets.md": "# Animals\n\nDogs may be brought along when they keep quiet.\n"})
    answer = semantic.query("can I take my puppy to work", query_type="vsearch")
    assert (answer["commit_hash"], answer["results"][0]["path"], codes(answer)) == (commit, "pets.md", [])
    upstream.commit("main", {"pets.md": None})
    answer = semantic.query("can I take my puppy to work", query_type="vsearch")
    assert "pets.md" not in {hit["path"] for hit in answer["results"]}
    status = semantic.http.get("/status").get_json()
    assert status["workspaces"][0]["embedded_commit"] == upstream.tip("main") == answer["commit_hash"]
    assert status["models"]["embed"] == {"uri": "minilm-l6-v2-q8_0.gguf", "loadable": True, "detail": None}


def test_words_and_meaning_are_fused_and_each_is_found_alone(warm: Client, upstream: Upstream) -> None:
    upstream.commit("main", DOCUMENTS)
    assert warm.query("why was it OOMKilled", query_type="query")["results"][0]["path"] == "leak.md"
    parts = [{"type": "lex", "query": "OOMKilled"}, {"type": "vec", "query": "when do we ship a new version"}]
    status, answer = warm.post("/query", {"queries": parts, "query_type": "query", "explain": True})
    assert status == 200, answer
    assert {hit["path"] for hit in answer["results"][:2]} == {"leak.md", "deploy.md"}
    assert all(hit["explain"]["rrf"]["rank"] >= 1 for hit in answer["results"])
    assert warm.query('"eight minutes', query_type="query")["results"][0]["path"] == "holds.md"
    assert codes(warm.query('-money "float', query_type="vsearch")) == []


def test_what_models_are_missing_for_is_answered_with_less(warm: Client, upstream: Upstream) -> None:
    upstream.commit("main", DOCUMENTS)
    answer = warm.query(PARAPHRASE, query_type="deep_search", debug=True)
    assert (answer["results"][0]["path"], answer["debug"]["mode_used"]) == ("holds.md", "query")
    assert codes(answer) == ["model_unavailable"]
    assert warm.problem("/query", {"query": "x", "query_type": "deep_search", "strict": True}) == (
        503,
        "model_unavailable",
    )
    assert codes(warm.query("cents", query_type="vsearch", expand=True)) == ["model_unavailable"]


MODELS = {
    "missing": (None, "model_unavailable"),
    "garbage": (b"<!doctype html>" * 1000, "model_unavailable"),
    "broken": (b"GGUF" + bytes(5000), "vectors_pending"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_can_not_be_loaded_is_said_and_left_where_it_is(
    name: str, environ: dict[str, str], data: Path, tmp_path: Path, upstream: Upstream
) -> None:
    content, code = MODELS[name]
    model = tmp_path / "model.gguf"
    if content:
        model.write_bytes(content)
    upstream.commit("main", DOCUMENTS)
    with TemporaryDirectory(prefix="memgw") as folder:
        host = WarmHost({**os.environ, "QMD_EMBED_MODEL_URI": str(model)}, Path(folder))
        try:
            client = over(host, environ, data, QMD_EMBED_MODEL_URI=str(model))
            for query_type in SEMANTIC:
                answer = client.query("cents", query_type=query_type, debug=True)
                assert ([hit["path"] for hit in answer["results"]], codes(answer)) == (["money.md"], [code])
                assert answer["debug"]["mode_used"] == "search"
            strict = {"query": "cents", "query_type": "query", "strict": True}
            assert client.problem("/query", strict) == (503, code)
            assert client.query("cents")["degraded"] == []
        finally:
            host.stop()
    assert (model.read_bytes() if content else None) == content


def test_a_hub_that_can_not_be_reached_costs_nothing(client: Client, upstream: Upstream) -> None:
    upstream.commit("main", DOCUMENTS)
    answer = client.query("cents", query_type="query", debug=True)  # qmd's own models, which nobody has fetched
    assert ([hit["path"] for hit in answer["results"]], codes(answer)) == (["money.md"], ["model_unavailable"])


def test_text_known_from_another_branch_is_not_embedded_again(warm: Client, upstream: Upstream, data: Path) -> None:
    upstream.commit("main", DOCUMENTS)
    assert codes(warm.query(PARAPHRASE, query_type="vsearch")) == []
    nursery = next((data / "qmd-cache" / "vectors").glob("*.sqlite"))
    before = vectors_in(nursery)
    assert before == len(DOCUMENTS)
    upstream.commit("task/T-1", DOCUMENTS | {"new.md": "# New\n\nBicycles are parked behind the house.\n"}, parent=None)
    assert (
        warm.query("where do I leave my bike", query_type="vsearch", branch="task/T-1")["results"][0]["path"]
        == "new.md"
    )
    assert vectors_in(nursery) == before + 1
    assert "new.md" not in {hit["path"] for hit in warm.query("bike", query_type="vsearch")["results"]}


def vectors_in(nursery: Path) -> int:
    with closing(sqlite3.connect(nursery)) as db:
        return int(db.execute("SELECT count(*) FROM content_vectors").fetchone()[0])


def test_what_is_left_for_later_is_said_and_made_by_the_embedder(
    environ: dict[str, str], data: Path, host: WarmHost, minilm: Path, upstream: Upstream
) -> None:
    client = over(host, environ, data, QMD_EMBED_MODEL_URI=str(minilm), QMD_EMBED_ON_CHANGE="false")
    upstream.commit("main", DOCUMENTS)
    answer = client.query("cents", query_type="query")
    assert ([hit["path"] for hit in answer["results"]], codes(answer)) == (["money.md"], ["vectors_pending"])
    assert client.problem("/query", {"query": "x", "query_type": "query", "strict": True}) == (503, "vectors_pending")
    embedder = Embedder(create_gateway(Config.load(environ), environ))
    before = client.http.get("/status").get_json()["workspaces"]
    assert embedder.turn(until=time.monotonic()), "housekeeping is due: the turn is not over"
    assert client.http.get("/status").get_json()["workspaces"] == before
    assert embedder.turn()
    assert until(lambda: not embedder.turn(), 60)  # on a slow machine one turn only loads the model
    answer = client.query(PARAPHRASE, query_type="query")
    assert (answer["results"][0]["path"], codes(answer)) == ("holds.md", [])
    upstream.commit("main", {"pets.md": "# Animals\n\nDogs may be brought along.\n"})
    assert codes(client.query(PARAPHRASE, query_type="query")) == ["vectors_pending"]  # found with what is there


def test_another_model_makes_all_vectors_anew_and_says_so_until_then(
    environ: dict[str, str], data: Path, host: WarmHost, minilm: Path, upstream: Upstream, tmp_path: Path
) -> None:
    upstream.commit("main", DOCUMENTS)
    client = over(host, environ, data, QMD_EMBED_MODEL_URI=str(minilm), MEMGW_EMBED_BUDGET_SECONDS="60")
    assert codes(client.query(PARAPHRASE, query_type="vsearch")) == []
    other = tmp_path / "other.gguf"
    shutil.copy(minilm, other)
    with TemporaryDirectory(prefix="memgw") as folder:
        second = WarmHost({**os.environ, "QMD_EMBED_MODEL_URI": str(other)}, Path(folder))
        try:
            client = over(second, environ, data, QMD_EMBED_MODEL_URI=str(other), QMD_EMBED_ON_CHANGE="false")
            assert codes(client.query("cents", query_type="vsearch")) == ["vectors_pending"]
            client = over(second, environ, data, QMD_EMBED_ON_CHANGE="true")
            answer = client.query(PARAPHRASE, query_type="vsearch")
            assert (answer["results"][0]["path"], codes(answer)) == ("holds.md", [])
        finally:
            second.stop()


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"query_type": "query"}, "query"),
        ({"query": "x", "queries": [{"type": "lex", "query": "x"}], "query_type": "query"}, "queries"),
        ({"queries": [{"type": "lex", "query": "x"}]}, "queries"),
        ({"queries": [], "query_type": "query"}, "queries"),
        ({"queries": [{"type": "lex", "query": 'a "b'}], "query_type": "query"}, "queries"),
        ({"queries": [{"type": "vec", "query": "a -b"}], "query_type": "query"}, "queries"),
        ({"queries": [{"type": "vec", "query": "a\nb"}], "query_type": "query"}, "queries"),
        ({"queries": [{"type": "bm25", "query": "a"}], "query_type": "query"}, "queries"),
        ({"queries": [{"type": "vec", "query": "a", "more": 1}], "query_type": "query"}, "queries"),
        ({"query": "x", "expand": True}, "expand"),
        ({"query": "x", "expand": "true", "query_type": "query"}, "expand"),
        ({"query": "x", "intent": "a\nb"}, "intent"),
        ({"query": "x", "candidate_limit": 0}, "candidate_limit"),
    ],
)
def test_a_semantic_question_is_checked_strictly(client: Client, wrong: dict[str, Any], field: str) -> None:
    status, answer = client.post("/query", wrong)
    assert (status, answer["code"], list(answer["errors"])) == (422, "validation_failed", [field])
