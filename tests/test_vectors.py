"""Search by meaning, with a real model: what the warm host finds is what qmd finds."""

from pathlib import Path
from typing import Any

import pytest

from memgw.index import COLLECTION
from tests.actors import Upstream, WarmHost
from tests.eval.plain import LIMIT, Plain

DOCUMENTS = {
    "eight-minutes.md": "# Holds\n\nA seat is reserved for eight minutes while its buyer pays.\n",
    "deploy.md": "# Deploying\n\nReleases go out on Tuesday and Thursday before noon.\n",
    "leak.md": "# 2026-02-20\n\nThe service was ended with OOMKilled every forty minutes.\n",
    "money.md": "# Amounts\n\nMoney is a whole number of cents, never a float.\n",
    "旅行.md": "# 出差\n\n出差前三天提交申请。\n",
    # 510, 511 and 512 tokens with what qmd puts before them: the most that the model takes is 512, two of them its own.
    **{f"{words} words.md": "# Long\n\n" + "a " * words for words in (502, 503, 504)},
}

QUESTIONS = {
    "how long may somebody take to buy a ticket": "eight-minutes.md",
    "process ran out of memory": "leak.md",
}


@pytest.fixture(scope="module")
def plain(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """qmd by its command line, with the model."""
    folder = tmp_path_factory.mktemp("plain")
    upstream = Upstream(folder / "upstream.git")
    return Plain(folder / "qmd", upstream.url, upstream.commit("main", DOCUMENTS), minilm)


@pytest.fixture(scope="module")
def index(host: WarmHost, plain: Plain) -> str:
    """Made by the host, vectors and all."""
    return made(host, plain, "index.sqlite")


def made(host: WarmHost, plain: Plain, name: str) -> str:
    path = str(plain.clone.parent / name)
    target = {"file": path, "config": str(plain.settings)}
    assert host.ask({"op": "update", **target})["ok"]
    target["nursery"] = str(plain.clone.parent / "nursery.sqlite")
    assert host.ask({"op": "embed", **target, "seconds": 60})["ok"]
    assert host.ask({"op": "adopt", **target, "seconds": 60})["pending"] == 0
    return path


def ask(host: WarmHost, op: str, index: str, **more: Any) -> list[dict[str, Any]]:
    request = {"op": op, "file": index, "collection": COLLECTION, "limit": LIMIT, "min_score": 0, **more}
    answer = host.ask(request)
    assert answer["ok"], answer
    return [{**hit, "file": hit["file"].removeprefix(f"{COLLECTION}/")} for hit in answer["hits"]]


def meaning(text: str) -> list[dict[str, str]]:
    return [{"type": "vec", "query": text}]


@pytest.mark.parametrize("text", QUESTIONS)
def test_the_host_finds_by_meaning_what_the_command_line_finds(
    host: WarmHost, plain: Plain, index: str, text: str
) -> None:
    hits = ask(host, "semantic", index, queries=meaning(text), rerank=False)
    assert hits == plain.rows(f"vec: {text}")
    assert hits[0]["file"] == QUESTIONS[text]
    assert [hit["score"] for hit in hits[:3]] == [1, 0.5, 0.33]


def test_words_and_meaning_together_are_fused_as_by_the_command_line(host: WarmHost, plain: Plain, index: str) -> None:
    queries = [{"type": "lex", "query": "OOMKilled"}, {"type": "vec", "query": "when do we ship a new version"}]
    hits = ask(host, "semantic", index, queries=queries, rerank=False)
    assert hits == plain.rows("lex: OOMKilled\nvec: when do we ship a new version")
    assert {hit["file"] for hit in hits[:2]} == {"leak.md", "deploy.md"}


def test_a_second_index_uses_the_model_that_is_loaded(host: WarmHost, plain: Plain, index: str, minilm: Path) -> None:
    first = ask(host, "semantic", index, queries=meaning("money"), rerank=False)
    before = host.ask({"op": "status"})
    second = made(host, plain, "second.sqlite")
    assert ask(host, "semantic", second, queries=meaning("money"), rerank=False) == first
    after = host.ask({"op": "status"})
    assert after["stores"] == before["stores"] + 1
    assert (after["pid"], mapped(after["pid"], minilm)) == (before["pid"], mapped(before["pid"], minilm))


def mapped(pid: int, path: Path) -> int:
    """How often a process has a file in its memory."""
    found = Path(f"/proc/{pid}/maps").read_text().count(str(path))
    assert found
    return found
