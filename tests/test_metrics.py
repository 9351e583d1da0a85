"""What `/metrics` tells: the sum of all workers, whatever happens to them or to their files."""

import json
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from memgw import books, files, metrics
from memgw.app import SPARE_THREADS
from memgw.config import ROOT
from tests.actors import FakeQmd, Server, Upstream, git_http, served, until
from tests.conftest import Client

JSON = {"Content-Type": "application/json"}

type_of_samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> type_of_samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(server: Server) -> type_of_samples:
    status, headers, body = server.request("GET", "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8"), body
    return parsed(body.decode())


def scraped(client: Client) -> type_of_samples:
    answer = client.http.get("/metrics")
    assert answer.status_code == 200
    return parsed(answer.text)


def of(samples: type_of_samples, name: str, **labels: str) -> float:
    """The sum over all other labels; 0 when it was never counted."""
    return sum(
        value for (known, more), value in samples.items() if known == name and labels.items() <= dict(more).items()
    )


def requests(samples: type_of_samples) -> "Counter[tuple[str, int]]":
    """How often each endpoint ended with each status."""
    found: Counter[tuple[str, int]] = Counter()
    for (name, labels), value in samples.items():
        if name == "memgw_requests_total":
            found[dict(labels)["endpoint"], int(dict(labels)["status"])] += int(value)
    return found


class Asker:
    """A client that counts what it was answered."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.counted: Counter[tuple[str, int]] = Counter()

    def ask(self, method: str, path: str, body: Any = None, endpoint: str | None = None) -> None:
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        status, _, _ = self.server.request(method, path, raw, JSON if raw is not None else {})
        self.counted[endpoint or path, status] += 1


MIXED: list[tuple[str, str, Any, str | None]] = [
    ("GET", "/health", None, None),
    ("GET", "/status", None, None),
    ("GET", "/openapi.json", None, None),
    ("GET", "/ready", None, None),
    ("GET", "/metrics", None, None),
    ("POST", "/query", {"query": "alpha"}, None),
    ("POST", "/query", {"query": "alpha", "require_latest": False}, None),
    ("POST", "/query", {"query": "alpha", "branch": "gone"}, None),
    ("POST", "/query", {"query": ""}, None),
    ("POST", "/query", b"{", None),
    ("GET", "/query", None, None),
    ("POST", "/sync", {}, None),
    ("POST", "/sync", {"branch": "a..b"}, None),
    ("DELETE", "/sync", None, None),
    ("GET", "/secret/path?token=1", None, "other"),
    ("GET", "/query/", None, "other"),
]


def test_two_workers_tell_what_a_client_counts_over_500_mixed_requests(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    with served(environ, tmp_path, measured=False) as server:
        asker = Asker(server)
        assert server.query("alpha")["ok"]
        before = requests(scrape(server))
        mixed = random.Random(7).choices(MIXED, k=480)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda one: asker.ask(*one), mixed))
        moved = upstream.path.rename(upstream.path.with_name("away.git"))
        for _ in range(20):
            asker.ask("POST", "/query", {"query": "alpha"})
        moved.rename(upstream.path)
        after = scrape(server)
        asker.counted["/metrics", 200] += 1  # of `before`, which did not know itself
        assert sum(asker.counted.values()) == 501
        assert {status for _, status in asker.counted} == {200, 400, 404, 405, 422, 502}
        assert requests(after) - before == asker.counted
        assert of(after, "memgw_request_seconds_count") == sum(requests(after).values())
        assert len(counting(server)) == 2, "one worker did it all"


def counting(server: Server) -> list[Path]:
    """Files of workers that have counted any request."""
    return [path for path in folder(server).glob("counter_*.db") if b"memgw_requests_total" in path.read_bytes()]


def folder(server: Server) -> Path:
    [found] = (Path(server.environ["MEMGW_DATA_DIR"]) / "run" / "metrics").iterdir()
    return found


def test_counts_never_go_down_when_workers_are_killed_and_their_files_do_not_grow_in_number(
    server: Server, upstream: Upstream
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    for _ in range(20):
        server.query("alpha")
    expected = requests(scrape(server))
    expected["/metrics", 200] += 1
    names = sorted(path.name for path in folder(server).iterdir())
    for _ in range(2):
        old = server.workers()
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        assert until(lambda old=old: len(set(server.workers()) - set(old)) == 2)  # type: ignore[misc]
        assert until(lambda: _answers(server, expected))
    assert requests(scrape(server)) == expected
    assert sorted(path.name for path in folder(server).iterdir()) == names
    server.query("alpha")
    assert requests(scrape(server))["/query", 200] == expected["/query", 200] + 1


def _answers(server: Server, expected: "Counter[tuple[str, int]]") -> bool:
    """One more request, counted by us as well."""
    try:
        answered = server.request("GET", "/health", timeout=2)[0] == 200
    except OSError:
        return False
    expected["/health", 200] += answered
    return answered


def test_files_that_are_deleted_or_damaged_cost_counts_and_never_a_request(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    with served(environ, tmp_path) as server:
        assert server.query("alpha")["ok"]
        assert server.query("alpha")["ok"]
        place = folder(server)
        files.remove(place)
        assert scrape(server)
        for _ in range(30):
            assert server.query("alpha")["ok"]
        assert 30 <= requests(scrape(server))["/query", 200] <= 32
        for path in place.glob("*.db"):
            path.unlink()
            path.write_bytes(b"\xff" * 200)
        assert scrape(server) is not None
        for _ in range(30):
            assert server.query("alpha")["ok"]
        assert 28 <= requests(scrape(server))["/query", 200] <= 30

        files.remove(place)
        place.write_text("no folder")
        old = server.workers()
        os.kill(old[0], signal.SIGKILL)
        assert until(lambda: len(set(server.workers()) - set(old)) == 1)
        for _ in range(10):
            assert until(lambda: _answers(server, Counter()))
            assert server.query("alpha")["ok"]
        assert requests(scrape(server))["/query", 200]


def test_a_second_start_on_a_taken_address_costs_no_request(server: Server, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    assert server.query("alpha")["ok"]
    command = ["timeout", "3", "gunicorn", "-c", "python:memgw.gunicorn_conf", "memgw.wsgi:app"]
    environ = server.environ | {"PATH": f"{Path(os.sys.executable).parent}:{os.environ['PATH']}"}  # type: ignore[attr-defined]
    subprocess.run(command, cwd=ROOT, env=environ, capture_output=True)
    for _ in range(20):
        assert server.query("alpha")["ok"]
    assert 20 <= requests(scrape(server))["/query", 200] <= 21


def fill(path: Path) -> None:
    """Writes until no space is left."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk_takes_no_worker_away(environ: dict[str, str], tmp_path: Path, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        environ |= {"MEMGW_DATA_DIR": str(place / "data"), "QMD_ENGINE": "cli"}
        with served(environ, tmp_path, measured=False) as server:
            assert server.query("alpha")["ok"]
            workers = server.workers()
            fill(place / "ballast")
            asker = Asker(server)
            for method, path, body, endpoint in MIXED:
                asker.ask(method, path, body, endpoint)
            told = requests(scrape(server))
            for key in (("/query", 422), ("/query", 405), ("other", 404)):
                assert told[key] == asker.counted[key]
            assert server.workers() == workers
            assert server.request("GET", "/ready")[0] == 503

            os.kill(workers[0], signal.SIGKILL)  # the next one finds no room for what it would count into
            files.remove(folder(server))
            fill(place / "more")
            assert until(lambda: len(set(server.workers()) - set(workers)) == 1)
            assert until(lambda: _answers(server, Counter()))
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_the_steps_the_syncs_and_the_wait_for_locks_are_told(client: Client, upstream: Upstream) -> None:
    before = scraped(client)

    def more(name: str, **labels: str) -> float:
        return of(scraped(client), name, **labels) - of(before, name, **labels)

    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    assert client.paths("alpha") == ["a.md"]
    assert [more("memgw_step_seconds_count", step=step) for step in ("ask", "fetch", "index", "search")] == [1] * 4
    assert more("memgw_lock_wait_seconds_count") == 1
    assert more("memgw_step_seconds_count", step="wait") == 0
    assert 0 < more("memgw_step_seconds_sum", step="search") < 10
    assert more("memgw_syncs_total") == 1
    upstream.commit("main", {"b.md": "# B\n\nbeta\n"})
    assert client.paths("beta") == ["b.md"]
    assert client.paths("beta") == ["b.md"]
    assert more("memgw_syncs_total") == 2
    assert more("memgw_syncs_total", outcome="changes") + more("memgw_syncs_total", outcome="whole") == 2
    upstream.push_tree("main", {"../up.md": ("100644", b"x")})
    assert client.problem("/query", {"query": "alpha"}) == (502, "commit_unusable")
    assert more("memgw_syncs_total", outcome="commit_unusable") == 1


def test_askings_are_told_by_their_result_and_how_many_shared_them(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    with git_http(upstream) as remote:
        environ["GIT_REMOTE_URL"] = remote.url
        with served(environ, tmp_path, measured=False) as server:
            assert of(scrape(server), metrics.AGE) == 0
            assert (metrics.AGE, ()) not in scrape(server)
            server.query("alpha")
            before = scrape(server)
            assert 0 <= before[metrics.AGE, ()] < 10
            heard = [method for method, _ in remote.seen].count("POST")
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(lambda _: server.query("alpha"), range(200)))
            after = scrape(server)
            askings = of(after, "memgw_askings_total", result="ok") - of(before, "memgw_askings_total", result="ok")
            shared = of(after, "memgw_askings_shared_total") - of(before, "memgw_askings_shared_total")
            assert askings == [method for method, _ in remote.seen].count("POST") - heard
            assert askings + shared == 200
            assert shared
            server.post("/query", {"query": "alpha", "branch": "gone"})
            assert of(scrape(server), "memgw_askings_total", result="branch_not_found") == 1
            remote.door = lambda headers: (500, {})
            server.post("/query", {"query": "alpha"})
            assert of(scrape(server), "memgw_askings_total", result="remote_unreachable") == 1


def test_what_the_command_line_did_in_place_of_the_host_is_told(
    environ: dict[str, str], make_client: Callable[[dict[str, str]], Client], upstream: Upstream, data: Path
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    environ["QMD_ENGINE"] = "auto"
    (data / "run" / "qmd-host.sock").unlink(missing_ok=True)
    client = make_client(environ)
    before = scraped(client)
    assert client.paths("alpha") == ["a.md"]
    after = scraped(client)
    assert [
        of(after, "memgw_engine_fallbacks_total", operation=name)
        - of(before, "memgw_engine_fallbacks_total", operation=name)
        for name in ("apply", "search", "adopt")
    ] == [1, 1, 0]


@pytest.fixture
def make_client() -> Callable[[dict[str, str]], Client]:
    from memgw.app import create_app
    from memgw.config import Config

    return lambda environ: Client(create_app(Config.load(environ), environ))


def test_workspaces_documents_and_vectors_are_told(
    environ: dict[str, str], make_client: Callable[[dict[str, str]], Client], upstream: Upstream, data: Path
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n", "b.md": "# B\n\nbeta\n"})
    upstream.commit("task/a", {"c.md": "# C\n\ngamma\n"})
    client = make_client(environ)
    assert scraped(client)["memgw_workspaces", ()] == 0
    client.query("alpha")
    client.query("gamma", branch="task/a")
    told = scraped(client)
    assert told["memgw_workspaces", ()] == 2
    assert told["memgw_documents", ()] == 3
    assert told["memgw_pending_vectors", ()] == 3
    assert told["memgw_workspaces_uncounted", ()] == 0
    assert told["memgw_embedding_model_loadable", ()] == 0
    size = sum(path.stat().st_size for path in data.glob("qmd-cache/ws-*/index-*.sqlite"))
    assert told["memgw_index_bytes", ()] == size
    assert told["memgw_disk_floor_bytes", ()] == 200_000_000
    assert told["memgw_disk_free_bytes", ()] > 0
    (data / "state" / "main.json").write_text("{")
    told = scraped(client)
    assert (told["memgw_documents", ()], told["memgw_workspaces_uncounted", ()]) == (1, 1)


def test_a_scrape_takes_no_lock_and_is_answered_while_all_slots_are_taken(
    environ: dict[str, str], fake_qmd: FakeQmd, tmp_path: Path, upstream: Upstream
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    fake_qmd.does("update", "sleep 3")
    environ["MEMGW_THREADS"] = "8"
    with served(environ, tmp_path, workers=1, measured=False) as server, ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(server.post, "/query", {"query": "alpha"}) for _ in range(8 - SPARE_THREADS)]
        assert until(lambda: fake_qmd.calls("update"))
        assert server.request("GET", "/metrics", timeout=1)[0] == 200
        assert not [future for future in busy if future.done()]


def test_every_labelled_series_there_can_be_fits_into_the_room_that_is_taken_at_once() -> None:
    """Growing a file on a full disk would end the worker: all endpoints with all statuses, all steps, all errors,
    all outcomes of hooks."""
    entry = 300
    endpoints, statuses, buckets, steps, errors, forges, outcomes = 10, 20, 15, 8, 30, 5, 15
    assert (endpoints * statuses + 3 * errors + forges * outcomes) * entry < books.ROOM
    assert (endpoints + steps + 1) * buckets * entry < books.ROOM


def exported() -> set[str]:
    """The names that can be asked for, with those that Prometheus derives from a histogram."""
    names = set(metrics.NUMBERS)
    for family in metrics._registry.collect():
        if family.type == "histogram":
            names |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
        else:
            names.add(f"{family.name}_total" if family.type == "counter" else family.name)
    return names
