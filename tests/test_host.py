"""The warm host gives the command line's answers, and whatever becomes of it, the gateway gives right ones."""

import json
import os
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from memgw.app import create_app
from memgw.config import ROOT, Config
from memgw.deadline import Deadline
from memgw.engine import Batch, Engine, Place, Question
from memgw.host import Host
from memgw.index import COLLECTION, IndexFolder
from memgw.results import read_hits
from memgw.warm import QmdHost
from tests.actors import (
    FakeQmd,
    HostProxy,
    Upstream,
    WarmHost,
    connect,
    read_answer,
    until,
)
from tests.conftest import Client
from tests.test_documents import Library

WORDS = (
    "retry timeout queue letter window release deploy rollback cache index branch commit merge fresh stale lock host "
    "socket answer question memory agent team budget latency memories running runs ran"
).split()
CHINESE = ["发布窗口", "死信队列", "超时重试", "团队的记忆", "会议记录", "数据库", "索引", "分支合并", "回滚方案"]
ODD = [
    "v2.8.3", "node-24", "foo_bar", "e-mail", "C++", "a/b", "x=1", "10.5", "naïve", "ZÜRICH", "🙂", "don't", "qmd.js",
    "--index", "e\u0301te", "ﬁne", "İstanbul", "日本語テスト", "한국어",
]  # fmt: skip


def corpus() -> dict[str, str]:
    """About 150 documents: English, Chinese, mixed; many of them equally good for many words."""
    dice = Random(20260301)
    found = {}
    for number in range(60):
        lines = [" ".join(dice.choices(WORDS, k=dice.randint(3, 12))) for _ in range(dice.randint(1, 12))]
        found[f"en/{number}-{dice.choice(WORDS)}.md"] = f"# {dice.choice(WORDS).title()} {number}\n\n" + "\n".join(
            lines
        )
    for number in range(30):
        lines = ["，".join(dice.choices(CHINESE, k=dice.randint(2, 8))) + "。" for _ in range(dice.randint(1, 8))]
        found[f"中文/{number}{dice.choice(CHINESE)}.md"] = f"# {dice.choice(CHINESE)}\n\n" + "\n".join(lines)
    for number in range(25):
        words = dice.choices([*WORDS, *CHINESE, *ODD], k=40)
        found[f"mixed/{number} {dice.choice(ODD).replace('/', '_')}.md"] = " ".join(words) + "\r\n"
    for number in range(20):  # the same words in the same number, so that all scores are the same
        found[f"ties/{number:02}.md"] = "# Tie\n\nequal words of equal weight\n"
    for number in range(12):
        found[f"ties/other {number:02}.md"] = f"# Tie\n\nequal words of equal weight {number:02}\n"
    found["long.md"] = "filler text\n" * 500 + "needle in the middle\n" + "more filler\n" * 500
    found["one line.md"] = "straw " * 400 + "needle " + "straw " * 400
    found["emoji.md"] = "🙂👩‍👧" * 120 + " needle " + "🏳️‍🌈" * 120
    found["controls.md"] = "bell\x07 tab\t nul\0 needle \x1b[31m\x7f"
    found["front.md"] = "---\ntitle: needle\n---\n\n## Second level\n\ntext\n"
    return found


def queries() -> list[str]:
    """Of every kind that the API lets in."""
    dice = Random(20260302)

    def pick(source: list[str], number: int) -> str:
        return " ".join(dice.choices(source, k=number))

    found = [*WORDS, *CHINESE, *ODD, "needle", "equal", "words", "tie", "md", "_", "en", "straw", "filler"]
    found += [pick(WORDS, dice.randint(2, 4)) for _ in range(40)]
    found += [f'"{pick(WORDS, 2)}"' for _ in range(20)]
    found += [f"{pick(WORDS, 1)} -{pick(WORDS, 1)}" for _ in range(25)]
    found += [f'{pick(WORDS, 1)} -"{pick(WORDS, 2)}"' for _ in range(8)]
    found += [word[: dice.randint(1, 4)] for word in dice.choices(WORDS, k=15)]
    found += [f"{word[:3]}*" for word in dice.choices(WORDS, k=5)]
    found += [f"{dice.choice(WORDS)}-{dice.choice(WORDS)}" for _ in range(12)]
    found += [dice.choice(CHINESE)[dice.randint(0, 1) : dice.randint(2, 4)] for _ in range(15)]
    found += [pick([*WORDS, *CHINESE], 2) for _ in range(20)]
    found += [pick([*CHINESE, *ODD], 2) for _ in range(15)]
    found += [f'{pick(CHINESE, 1)} "{pick(CHINESE, 1)}" -{pick(CHINESE, 1)}' for _ in range(8)]
    found += [
        "v2.8", "2.8.3", "v2.8.3 node-24", "v2.*", "...", "!!!", "?", "-", "--", "---", "*", '"', '""', '" "', "()",
        "{}", '"retry', 'retry"', '"retry timeout', '-"', '-"retry', 'a"b"c', '"retry" "timeout',
        "-retry", "-retry -queue",
        "AND", "OR", "NOT", "retry OR queue", "retry AND queue", "NOT retry", "NEAR(retry queue)", "title:tie",
        "body:x", "retry^2", "+retry", "retry:", ":", "(retry", "retry)", "retry;",
        "'; DROP TABLE documents; --", "%", "100%",
        "\\", "\\\\x", "retry\nqueue", "retry\tqueue", "\x01", "retry\x01queue", "\x1b[31m", "\x7f", "\u200b", "\ufeff",
        "re\u200btry", "re\u00adtry", "\u3000重试\u3000", " retry ", "RETRY", "Retries", "👩‍👧", "🏳️‍🌈", "🙂🙂",
        "needle 🙂", "𝓯𝓪𝓷𝓬𝔂", "字", "的", "超时 retry", "超时retry", "retry超时", "日本", "テスト", "한국", "é",
        "e\u0301", "retry " * 170, "字" * 1024, "x" * 1024, '"' * 1024, "-a " * 341, "超时重试" * 256,
        "🙂" * 512, "a-b" * 341,
        "retry-queue-window-release", "a.b.c.d", "en/1", "ties/00", "ties/00.md", "中文/", "http://x.y/z?q=1#f",
        "col:en/retry", "--index x", "-n 5", "--full retry", "$(id)", "`id`", "\u2028", "\x85", "retry\x0bqueue",
    ]  # fmt: skip
    return found


def questions() -> list[Question]:
    dice = Random(20260303)
    found = [Question(text) for text in queries()]
    odd_limits = [1, 2, 3, 5, 19, 20, 21, 25, 26, 49, 50]
    found += [Question(text, limit=limit) for text in ("equal", "retry", "tie words", "重试") for limit in odd_limits]
    for text in dice.choices([*WORDS, *CHINESE, "equal", "needle"], k=40):
        score = dice.choice([0.01, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1e-9, 0.123456789])
        found.append(Question(text, limit=dice.choice(odd_limits), min_score=score))
    return found


FOR_THE_COMMAND_LINE = [
    Question("retry"), Question("retry queue", limit=50), Question('"equal weight"', limit=50),
    Question("tie", limit=3), Question("equal", limit=1), Question("equal", limit=26),
    Question("equal", limit=50), Question("-retry"),
    Question("retry -queue", limit=50), Question("重试", limit=50), Question("死信队列 -回滚方案"), Question("v2.8.3"),
    Question("node-24"), Question("'; DROP TABLE documents; --"), Question('"retry'), Question("..."),
    Question("🙂"), Question("needle", limit=50), Question("retry " * 170, limit=50), Question("字" * 1024),
    Question("retry\x01queue"), Question(" retry "), Question("\u200b"), Question("--index x"),
    Question("retry", limit=50, min_score=0.5), Question("retry", min_score=1), Question("equal", min_score=1e-9),
    Question("equal", limit=50, min_score=0.3), Question("md", limit=50), Question("retry\nqueue超时", limit=7),
]  # fmt: skip


@dataclass
class Both:
    """An index, and the two engines over it."""

    place: Place
    cli: Engine
    host: QmdHost
    raw: Host

    def reference(self, asked: list[Question]) -> list[list[dict[str, Any]]]:
        """What qmd's own functions give, called as its command line calls them."""
        node, qmd = Config.load({"GIT_REMOTE_URL": "/nowhere"}).launcher
        command = [node, str(ROOT / "tests" / "reference.mjs"), str(Path(qmd).resolve().parent.parent / "store.js")]
        request = {
            "file": str(self.place.folder / self.place.file),
            "collection": COLLECTION,
            "questions": [(one.text, one.limit, one.min_score) for one in asked],
        }
        done = subprocess.run(command, input=json.dumps(request).encode(), capture_output=True, check=True)
        found: list[list[dict[str, Any]]] = json.loads(done.stdout)
        return found

    def warm(self, asked: Question) -> list[dict[str, Any]]:
        """What the host says, to the letter."""
        request = {
            "op": "search",
            "file": str(self.place.folder / self.place.file),
            "query": asked.text,
            "limit": asked.limit,
            "min_score": asked.min_score,
        }
        answer = self.raw.call(request, Deadline(60))
        found: list[dict[str, Any]] = answer["hits"]
        return found


def settled(place: Place, host: WarmHost, library: Library) -> Both:
    library.index.settle(place.file)
    return Both(place, library.engine, engine_of(host, library), Host(host.socket))


def engine_of(host: WarmHost, library: Library) -> QmdHost:
    return QmdHost(Host(host.socket), library.engine, library.engine.settings, library.index.path / "vectors.sqlite")


WAYS = ["made by the command line", "made in pieces by the host"]


@pytest.fixture(scope="module", params=WAYS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, warm_host: WarmHost) -> Both:
    library = Library(tmp_path_factory.mktemp("both"))
    texts = corpus()
    if request.param == WAYS[0]:
        for name, text in texts.items():
            library.write(name, text)
        library.update()
        return settled(library.place, warm_host, library)
    engine = engine_of(warm_host, library)
    put = list(texts.items())
    Random(1).shuffle(put)  # with changes on the way, so that the rows are in another order
    early = [(path, f"# Early\n\nretry equal {path}\n") for path, _ in put[:70]]
    batches = [Batch([], early), Batch([path for path, _ in put[:20]], put[40:]), Batch([], put[:40])]
    engine.apply(library.place, batches, Deadline(60))
    return settled(library.place, warm_host, library)


def test_the_host_answers_as_qmds_command_line_does(both: Both) -> None:
    asked = questions()
    assert len(asked) > 300
    found = 0
    for question, expected in zip(asked, both.reference(asked), strict=True):
        assert both.warm(question) == expected, question
        found += len(expected)
    assert found > 2000


@pytest.mark.parametrize("both", [WAYS[0]], indirect=True)
def test_what_the_host_is_compared_with_is_the_command_line_itself(both: Both) -> None:
    with ThreadPoolExecutor(3) as pool:
        expected = list(pool.map(lambda one: both.cli.search(both.place, one, Deadline(60)), FOR_THE_COMMAND_LINE))
    rows = both.reference(FOR_THE_COMMAND_LINE)
    assert [read_hits(row, f"{COLLECTION}/", "") for row in rows] == expected
    assert [both.host.search(both.place, one, Deadline(60)) for one in FOR_THE_COMMAND_LINE] == expected
    assert sum(map(len, expected)) > 200


TEXTS = {f"notes/{number}.md": f"# Note {number}\n\nneedle number{number}\n" for number in range(6)}


@dataclass
class Fallback:
    """A gateway that asks a host and has a command line to fall back to, whose calls are counted."""

    client: Client
    upstream: Upstream
    command_line: FakeQmd
    files: dict[str, str]
    pushes: int = 0

    def push(self) -> None:
        self.pushes += 1
        changed = {f"notes/{self.pushes % 6}.md": f"# Changed\n\nneedle changed {self.pushes}\n"}
        self.files |= changed
        self.upstream.commit("main", changed)

    def assert_right(self) -> None:
        answer = self.client.query("needle", limit=50, full=True)
        assert answer["commit_hash"] == self.upstream.tip("main")
        assert {hit["path"]: hit["body"] for hit in answer["results"]} == self.files
        assert answer["degraded"] == []

    def calls(self) -> tuple[int, int]:
        """How often the command line updated, and searched."""
        return self.command_line.calls("update"), self.command_line.calls("search")

    def assert_right_by(self, *, updates: int, searches: int) -> None:
        """Pushes, asks, and wants the command line to have been asked exactly so often meanwhile."""
        self.push()
        before = self.calls()
        self.assert_right()
        after = self.calls()
        assert after[0] - before[0] == updates
        assert searches <= after[1] - before[1] <= 2 * searches  # one more, in vain, while a slow remote was asked

    def assert_right_by_the_host(self) -> None:
        self.assert_right_by(updates=0, searches=0)

    def assert_right_by_the_command_line(self) -> None:
        self.assert_right_by(updates=1, searches=1)


@pytest.fixture
def fallback(environ: dict[str, str], fake_qmd: FakeQmd, upstream: Upstream, nothing_ahead: None) -> Fallback:
    environ["QMD_ENGINE"] = "auto"
    upstream.commit("main", TEXTS)
    client = Client(create_app(Config.load(environ), environ))
    return Fallback(client, upstream, fake_qmd, dict(TEXTS))


def test_a_running_host_leaves_the_command_line_nothing_to_do(fallback: Fallback) -> None:
    for _ in range(3):
        fallback.assert_right_by_the_host()


def test_without_a_host_the_command_line_answers(fallback: Fallback, data: Path) -> None:
    (data / "run" / "qmd-host.sock").unlink()
    fallback.assert_right_by_the_command_line()
    (data / "run").rmdir()
    fallback.assert_right_by_the_command_line()
    (data / "run").write_text("")
    fallback.assert_right_by_the_command_line()


def test_a_host_that_was_killed_between_requests_is_done_without_and_its_successor_found(
    fallback: Fallback, data: Path, own_host: WarmHost
) -> None:
    own_host.serve(data)
    fallback.assert_right_by_the_host()
    own_host.kill()
    assert own_host.socket.exists()  # what a killed host leaves
    fallback.assert_right_by_the_command_line()
    own_host.start()
    fallback.assert_right_by_the_host()
    own_host.socket.unlink()
    fallback.assert_right_by_the_host()  # over the connection that is still open


def test_a_host_that_is_killed_while_it_is_asked_is_done_without(
    fallback: Fallback, data: Path, own_host: WarmHost
) -> None:
    own_host.serve(data)
    fallback.assert_right_by_the_host()
    before = fallback.calls()
    own_host.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(fallback.assert_right)
        time.sleep(0.3)
        assert not asking.done()
        own_host.kill()
        asking.result()
    assert fallback.calls() == (before[0], before[1] + 1)


@pytest.mark.parametrize("operation", ["status", "apply", "search"])
def test_a_host_that_goes_away_without_an_answer_is_done_without(
    fallback: Fallback, data: Path, proxy: HostProxy, operation: str
) -> None:
    proxy.serve(data)
    fallback.assert_right_by_the_host()
    proxy.answer = lambda request: b"" if request["op"] == operation else None
    fallback.assert_right_by(updates=operation != "search", searches=operation == "search")
    proxy.answer = lambda request: None
    fallback.assert_right_by_the_host()


def test_a_host_that_hangs_is_waited_for_only_some_seconds_and_not_each_time(
    fallback: Fallback, data: Path, own_host: WarmHost
) -> None:
    own_host.serve(data)
    fallback.assert_right_by_the_host()
    own_host.process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    fallback.assert_right_by_the_command_line()
    assert 5 <= time.monotonic() - start < 10  # once, for the index and the search together
    before = fallback.calls()
    start = time.monotonic()
    fallback.assert_right()
    fallback.assert_right()
    assert time.monotonic() - start < 5  # not waited for again
    assert fallback.calls() == (before[0], before[1] + 2)
    own_host.process.send_signal(signal.SIGCONT)
    assert until(lambda: by_the_host(fallback), 12)
    fallback.assert_right_by_the_host()


def by_the_host(fallback: Fallback) -> bool:
    before = fallback.calls()
    fallback.assert_right()
    return fallback.calls() == before


def qmds(**more: Any) -> bytes:
    return json.dumps({"ok": True, "qmd": "2.8.3"} | more).encode() + b"\n"


def hits(**wrong: Any) -> bytes:
    row = {"docid": "#abcdef", "score": 0.5, "file": "_/x.md", "line": 1, "title": "X", "snippet": "x"}
    return qmds(hits=[row | wrong])


NOISE: dict[str, bytes] = {
    "a web server's": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    "an empty line": b"\n",
    "a list": b"[]\n",
    "deep": b"[" * 100_000 + b"\n",
    "nothing said": b"{}\n",
    "another version's": json.dumps({"ok": True, "qmd": "9.9.9", "hits": []}).encode() + b"\n",
    "a failure of no kind": b'{"ok":false}\n',
}


def test_a_server_that_is_no_host_of_ours_is_not_believed(fallback: Fallback, data: Path, proxy: HostProxy) -> None:
    proxy.serve(data)
    for name, noise in NOISE.items():
        proxy.answer = partial(always, noise)
        before = fallback.calls()
        fallback.push()
        fallback.assert_right()
        after = fallback.calls()
        assert after[0] - before[0] == 1, name
        assert 1 <= after[1] - before[1] <= 2, name  # one more, in vain, while a slow remote was asked
    assert proxy.of("apply") == []


def always(said: bytes, _: dict[str, Any]) -> bytes:
    return said


WRONG_HITS = {
    "no hits": qmds(),
    "hits that are no list": qmds(hits={}),
    "a hit outside the collection": hits(file="other/x.md"),
    "a score that is none": hits(score=7),
    "a line that is none": hits(line=0),
    "half a character": hits(title="\ud800"),
    "a docid that is none": hits(docid="x"),
}


def test_hits_that_are_none_are_searched_for_again(fallback: Fallback, data: Path, proxy: HostProxy) -> None:
    proxy.serve(data)
    fallback.assert_right_by_the_host()
    for name, said in WRONG_HITS.items():
        proxy.answer = partial(only_to, "search", said)
        before = fallback.calls()
        fallback.assert_right()
        assert fallback.calls() == (before[0], before[1] + 1), name


def only_to(operation: str, said: bytes, request: dict[str, Any]) -> bytes | None:
    return said if request["op"] == operation else None


@pytest.mark.parametrize("said", [b"garbage\n", qmds()], ids=["garbage", "done, though nothing was done"])
def test_what_a_host_says_of_a_change_is_not_believed(
    fallback: Fallback, data: Path, proxy: HostProxy, said: bytes
) -> None:
    proxy.serve(data)
    fallback.assert_right_by_the_host()
    proxy.answer = partial(only_to, "apply", said)
    fallback.assert_right_by(updates=1, searches=0)


def test_a_host_of_another_qmd_is_not_asked_for_anything_but_its_version(
    fallback: Fallback, data: Path, proxy: HostProxy
) -> None:
    proxy.serve(data)
    fallback.assert_right_by_the_host()
    fake = fallback.command_line.path.with_name("package.json")
    fake.write_text(json.dumps({"version": "9.9.9"}))  # qmd was exchanged, and the host runs on
    del proxy.asked[:]
    fallback.assert_right_by_the_command_line()
    assert proxy.of("apply") == []
    fake.write_text(json.dumps({"version": "2.8.3"}))
    fallback.assert_right_by_the_host()


@pytest.mark.parametrize("engine", ["auto", "cli"])
def test_each_engine_goes_on_where_the_other_stopped(
    fallback: Fallback, environ: dict[str, str], engine: str, proxy: HostProxy, data: Path
) -> None:
    proxy.serve(data)
    other = Client(create_app(Config.load(environ | {"QMD_ENGINE": "cli"}), environ | {"QMD_ENGINE": "cli"}))
    clients = [fallback.client, other] if engine == "auto" else [other, fallback.client]
    for client in clients * 2:
        fallback.client = client
        del proxy.asked[:]
        if client is other:
            fallback.assert_right_by_the_command_line()
            assert proxy.asked == []
        else:
            fallback.assert_right_by_the_host()
            assert proxy.of("search")


def test_the_command_line_alone_never_asks_a_host(
    environ: dict[str, str], upstream: Upstream, data: Path, proxy: HostProxy
) -> None:
    environ["QMD_ENGINE"] = "cli"
    proxy.serve(data)
    upstream.commit("main", TEXTS)
    client = Client(create_app(Config.load(environ), environ))
    assert sorted(client.paths("needle")) == sorted(TEXTS)
    client.http.get("/status")
    assert proxy.asked == []


def test_a_host_that_is_wanted_and_away_is_said_to_have_failed(
    environ: dict[str, str], upstream: Upstream, data: Path, own_host: WarmHost
) -> None:
    environ["QMD_ENGINE"] = "host"
    own_host.serve(data)
    upstream.commit("main", TEXTS)
    client = Client(create_app(Config.load(environ), environ))
    assert sorted(client.paths("needle")) == sorted(TEXTS)
    own_host.kill()
    assert client.problem("/query", {"query": "needle"}) == (502, "engine_failed")
    upstream.commit("main", {"notes/0.md": "# Changed\n\nneedle\n"})
    assert client.problem("/query", {"query": "needle"}) == (502, "engine_failed")
    assert client.problem("/sync", {}) == (502, "engine_failed")
    own_host.start()
    assert sorted(client.paths("needle")) == sorted(TEXTS)
    assert client.paths("changed") == ["notes/0.md"]


def test_a_wanted_host_reads_the_worktree_itself_when_it_has_to(
    environ: dict[str, str], upstream: Upstream, warm_host: WarmHost, data: Path
) -> None:
    environ |= {"QMD_ENGINE": "host", "QMD_UPDATE_ON_LATEST_QUERY": "always"}
    upstream.commit("main", TEXTS)
    client = Client(create_app(Config.load(environ), environ))
    for _ in range(2):
        assert sorted(client.paths("needle")) == sorted(TEXTS)


@dataclass
class Indexes:
    """Indexes of one document each, made by a host, and what it says of them."""

    host: WarmHost
    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.sqlite"

    def changes(self, name: str, put: list[tuple[str, str]], gone: list[str] | None = None) -> dict[str, Any]:
        """A request that changes an index."""
        settings = self.folder / f"{name}.yml"
        if not settings.exists():
            collection = {"path": str(self.folder / name), "pattern": "**/*.md"}
            settings.write_text(json.dumps({"collections": {COLLECTION: collection}}))
        target = {"file": str(self.path(name)), "config": str(settings), "collection": COLLECTION}
        return {"op": "apply", **target, "gone": gone or [], "put": put}

    def make(self, name: str) -> None:
        answer = self.host.ask(self.changes(name, [("a.md", f"# A\n\nneedle {name}\n")]))
        assert answer == {"ok": True, "qmd": "2.8.3"}

    def search(self, name: str, text: str = "needle") -> dict[str, Any]:
        return {"op": "search", "file": str(self.path(name)), "query": text, "limit": 10, "min_score": 0}

    def assert_right(self, name: str) -> None:
        answer = self.host.ask(self.search(name, f"needle {name}"))
        assert [hit["file"] for hit in answer["hits"]] == ["_/a.md"]
        assert name in answer["hits"][0]["snippet"]

    def settle(self, name: str) -> None:
        IndexFolder(self.folder).settle(self.path(name).name)

    def said(self, name: str) -> str:
        """The kind of a search's failure, else what it found."""
        answer = self.host.ask(self.search(name))
        return str(answer["kind"] if not answer["ok"] else [hit["snippet"].split()[-1] for hit in answer["hits"]])


@pytest.fixture
def indexes(warm_host: WarmHost, tmp_path: Path) -> Indexes:
    return Indexes(warm_host, tmp_path)


def garbage(path: Path) -> None:
    """In the place of the file, as another file."""
    path.unlink()
    path.write_bytes(os.urandom(50_000))


def written_over(path: Path) -> None:
    path.write_bytes(os.urandom(50_000))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    path.unlink()
    path.touch()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def without_its_tables(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE content")
        db.commit()


BREAKS: list[tuple[Callable[[Path], object], set[str]]] = [
    (Path.unlink, {"missing"}),
    (garbage, {"failed"}),
    (a_folder, {"failed"}),
    (without_its_tables, {"failed", "[]"}),
    (emptied, {"[]"}),  # qmd makes an empty index of it; the gateway looks at the file before it asks
    (written_over, {"failed", "['x']"}),  # what it has read it has
    (cut, {"failed", "['x']"}),
]


@pytest.mark.parametrize(("damage", "said"), BREAKS, ids=[damage.__name__ for damage, _ in BREAKS])
def test_a_broken_index_is_no_matter_for_the_others(
    indexes: Indexes, damage: Callable[[Path], object], said: set[str]
) -> None:
    for name in ("x", "y"):
        indexes.make(name)
        indexes.assert_right(name)
    indexes.settle("x")
    damage(indexes.path("x"))
    assert indexes.said("x") in said
    indexes.assert_right("y")
    assert indexes.said("x") in said
    for leftover in indexes.folder.glob("x.sqlite*"):
        leftover.rmdir() if leftover.is_dir() else leftover.unlink()
    indexes.make("x")
    indexes.assert_right("x")
    indexes.assert_right("y")


def test_an_index_that_was_replaced_is_read_anew(indexes: Indexes) -> None:
    for name in ("x", "y", "z"):
        indexes.make(name)
        indexes.assert_right(name)
    for name in ("y", "z"):
        indexes.settle(name)
        indexes.path(name).replace(indexes.path("x"))
        assert indexes.said("x") == f"['{name}']"


def test_an_index_that_is_not_there_is_not_made_by_a_search(indexes: Indexes) -> None:
    assert indexes.said("nothing") == "missing"
    assert list(indexes.folder.glob("nothing*")) == []
    away = Indexes(indexes.host, indexes.folder / "nowhere")
    assert away.said("x") == "missing"
    assert not away.folder.exists()


def test_a_change_is_made_as_a_whole_or_not_at_all(indexes: Indexes) -> None:
    indexes.make("x")
    half = indexes.changes("x", [("b.md", "# B\n\nneedle b\n")], gone=["a.md"])
    for broken in (half | {"put": [*half["put"], ["c.md"]]}, half | {"gone": ["a.md", {}]}, half | {"put": None}):
        assert indexes.host.ask(broken)["ok"] is False
        indexes.assert_right("x")
    assert indexes.said("x") == "['x']"


WRONG_REQUESTS: dict[str, bytes] = {
    "not JSON": b"{",
    "nothing": b"",
    "null": b"null",
    "a number": b"7",
    "a list": b"[]",
    "no operation": b"{}",
    "an unknown operation": b'{"op": "shutdown"}',
    "an operation that every object has": b'{"op": "constructor"}',
    "a prototype": b'{"op": "__proto__"}',
    "an operation that is no text": b'{"op": ["search"]}',
    "no UTF-8": b'{"op": "\xff"}',
    "a long one": b'{"op": "' + b"x" * 3_000_000 + b'"}',
    "a deep one": b'{"op": ' + b"[" * 100_000,
    "a search for nothing": b'{"op": "search"}',
    "a search in a number": b'{"op": "search", "file": 7, "query": "x", "limit": 1, "min_score": 0}',
    "a change of nothing": b'{"op": "apply"}',
    "an update of nothing": b'{"op": "update"}',
}


def test_requests_that_are_none_are_answered_and_leave_the_connection_good(warm_host: WarmHost) -> None:
    with connect(warm_host.socket) as connection:
        for name, line in WRONG_REQUESTS.items():
            connection.sendall(line + b"\n")
            answer = read_answer(connection)
            assert (answer["ok"], answer["qmd"]) == (False, "2.8.3"), name
            assert answer["kind"] in ("unknown", "failed"), name
            assert answer["error"], name
        connection.sendall(b'{"op": "status"}\n')
        assert read_answer(connection)["ok"] is True


def test_requests_of_one_connection_are_answered_one_after_the_other(indexes: Indexes) -> None:
    indexes.make("x")
    lines = [indexes.search("x"), {"op": "status"}, {"op": "none"}, indexes.search("x", "nothing"), {"op": "status"}]
    stream = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    with connect(indexes.host.socket) as connection, connection.makefile("rb") as answers:
        for piece in (stream, *(stream[at : at + 1] for at in range(len(stream)))):
            connection.sendall(piece)
        for _ in range(2):
            found, status, unknown, nothing, again = (json.loads(answers.readline()) for _ in lines)
            assert [hit["file"] for hit in found["hits"]] == ["_/a.md"]
            assert unknown["kind"] == "unknown"
            assert nothing["hits"] == []
            assert status["pid"] == again["pid"] == indexes.host.process.pid


def test_a_line_without_an_end_is_cut_off(own_host: WarmHost) -> None:
    block = b"x" * 4 * 1024 * 1024
    sent = 0
    with connect(own_host.socket) as connection, suppress(BrokenPipeError, ConnectionResetError):
        while sent < 1024 * 1024 * 1024:
            connection.sendall(block)
            sent += len(block)
    assert 256 * 1024 * 1024 <= sent < 300 * 1024 * 1024
    assert own_host.ask({"op": "status"})["ok"] is True


def test_askers_that_leave_do_no_harm(indexes: Indexes) -> None:
    indexes.make("x")
    line = json.dumps(indexes.search("x")).encode() + b"\n"
    for beginning in (b"", b"{", line[:-1], line, line * 200, b"\n" * 1000):
        for how in (socket.SHUT_RDWR, socket.SHUT_WR, None):
            with connect(indexes.host.socket) as connection:
                connection.sendall(beginning)
                if how is not None:
                    connection.shutdown(how)
    indexes.assert_right("x")


def test_many_ask_at_once(indexes: Indexes) -> None:
    names = [f"n{number}" for number in range(40)]
    with ThreadPoolExecutor(40) as pool:
        list(pool.map(indexes.make, names))
        for _ in range(3):
            list(pool.map(indexes.assert_right, names * 2))


def test_only_so_many_indexes_stay_open(own_host: WarmHost, tmp_path: Path) -> None:
    indexes = Indexes(own_host, tmp_path)
    names = [f"n{number}" for number in range(40)]
    for name in names:
        indexes.make(name)
        assert own_host.ask({"op": "status"})["stores"] <= 32
    with ThreadPoolExecutor(40) as pool:
        for _ in range(3):
            list(pool.map(indexes.assert_right, names))
    assert own_host.ask({"op": "status"})["stores"] == 32
    assert until(lambda: len(open_indexes(own_host)) == 32), open_indexes(own_host)
    for name in names:
        indexes.path(name).unlink()
    assert until(lambda: own_host.ask({"op": "status"})["stores"] == 0)
    assert open_indexes(own_host) == []


def open_indexes(host: WarmHost) -> list[str]:
    """The index files that the host has open, once for each time."""
    found = []
    for descriptor in Path(f"/proc/{host.process.pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if target.removesuffix(" (deleted)").endswith(".sqlite"):
            found.append(target)
    return found


def test_one_index_that_many_ask_for_first_is_open_once(own_host: WarmHost, tmp_path: Path) -> None:
    indexes = Indexes(own_host, tmp_path)
    indexes.make("x")
    own_host.kill()
    own_host.start()
    line = json.dumps(indexes.search("x")).encode() + b"\n"
    connections = [connect(own_host.socket) for _ in range(20)]
    for connection in connections:
        connection.sendall(line)
    for connection in connections:
        assert len(read_answer(connection)["hits"]) == 1
        connection.close()
    assert len(open_indexes(own_host)) == 1


def test_term_ends_it_once_what_was_asked_is_answered(own_host: WarmHost, tmp_path: Path) -> None:
    indexes = Indexes(own_host, tmp_path)
    indexes.make("x")
    put = [(f"{number}.md", f"# N{number}\n\n" + "words of a document\n" * 200) for number in range(800)]
    log = tmp_path / "x.sqlite-wal"
    before = log.stat().st_size
    with connect(own_host.socket) as idle, connect(own_host.socket) as connection:
        connection.sendall(json.dumps(indexes.changes("x", put)).encode() + b"\n")
        assert until(lambda: log.stat().st_size > before)
        own_host.process.terminate()
        assert read_answer(connection)["ok"] is True
        assert idle.recv(1) == b""
        assert connection.recv(1) == b""
    assert own_host.process.wait(10) == 0
    assert not own_host.socket.exists()
    own_host.start()
    assert len(own_host.ask(indexes.search("x", "document"))["hits"]) == 10


def test_a_second_host_on_the_same_socket_ends_and_leaves_the_first_alone(own_host: WarmHost) -> None:
    first = own_host.process
    own_host.start()
    second = own_host.process
    own_host.process = first
    assert second.wait(10) == 1
    assert "another host is listening already" in own_host.log()
    assert own_host.ask({"op": "status"})["pid"] == first.pid


def test_its_socket_is_for_our_user_alone(own_host: WarmHost) -> None:
    assert stat.S_IMODE(own_host.socket.stat().st_mode) == 0o600


def test_a_host_whose_socket_was_taken_away_ends_and_leaves_its_successors_alone(own_host: WarmHost) -> None:
    first = own_host.process
    own_host.socket.unlink()
    own_host.start()
    second = own_host.process
    try:
        assert first.wait(10) == 0
        assert own_host.answers()
        time.sleep(0.1)
        assert own_host.ask({"op": "status"})["pid"] == second.pid
    finally:
        first.kill()


def test_a_data_directory_with_a_long_path_has_a_host(
    environ: dict[str, str], fake_qmd: FakeQmd, upstream: Upstream, tmp_path: Path
) -> None:
    data = tmp_path / ("long" * 30) / ("path" * 20)
    data.mkdir(parents=True)
    host = WarmHost({**os.environ}, data)
    try:
        assert len(os.fsencode(host.socket)) > 200
        environ |= {"QMD_ENGINE": "auto", "MEMGW_DATA_DIR": str(data)}
        upstream.commit("main", TEXTS)
        client = Client(create_app(Config.load(environ), environ))
        fallback = Fallback(client, upstream, fake_qmd, dict(TEXTS))
        fallback.assert_right_by_the_host()
    finally:
        assert host.stop() == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"MEMGW_QMD": "/usr/bin/qmd"}, "memgw: MEMGW_QMD: the warm host needs qmd's own qmd.js"),
        ({"GIT_REMOTE_URL": "", "MEMGW_WORKERS": "many"}, "memgw: GIT_REMOTE_URL: is required"),
    ],
)
def test_a_host_that_cant_start_says_why(environ: dict[str, str], wrong: dict[str, str], said: str) -> None:
    command = [sys.executable, "-m", "memgw.hostd"]
    done = subprocess.run(command, cwd=ROOT, env=environ | wrong, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(said)
    assert "Traceback" not in done.stderr
