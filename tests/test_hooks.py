"""`POST /hooks/push` over real HTTP: what each forge sends is taken, anything else changes nothing, and the next
question finds the work done."""

import hmac
import http.client
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, time
from typing import Any
from uuid import uuid4

import pytest

from memgw.app import create_app
from memgw.config import Config
from memgw.pushes import MOST_WAITING, Pushes
from tests.actors import FakeQmd, GitHttp, Server, Upstream, git_http, served, settings_in, stopped, until
from tests.conftest import Client
from tests.deliveries import (
    FORGES,
    SECRET,
    SIGNING_TOKEN,
    ZERO,
    Delivery,
    commit,
    forgejo,
    gitea,
    github,
    gitlab,
    push,
    signing_gitlab,
)
from tests.test_http import canonical
from tests.test_metrics import of, scrape

MAKERS: list[Callable[..., Delivery]] = [*FORGES.values(), signing_gitlab]
UNAUTHORIZED = (401, "hook_unauthorized")


class Team:
    """A remote that is pushed to, a gateway, and a forge that tells the one of the other."""

    def __init__(self, server: Server, upstream: Upstream) -> None:
        self.server, self.upstream = server, upstream

    def sent(self, delivery: Delivery, timeout: float = 30) -> tuple[int, dict[str, str], bytes]:
        return self.server.request("POST", "/hooks/push", delivery.body, delivery.headers, timeout)

    def answered(self, delivery: Delivery) -> dict[str, Any]:
        """The answer to one that is taken or left alone."""
        status, headers, body = self.sent(delivery)
        assert (status, headers["content-type"]) == (202, "application/json"), body
        answer = json.loads(body)
        assert answer.pop("ok") is True
        assert isinstance(answer, dict)
        return answer

    def refused(self, delivery: Delivery) -> tuple[int, str]:
        return canonical(self.sent(delivery))

    def status(self) -> dict[str, str | None]:
        """Branch → the commit of its index."""
        workspaces = json.loads(self.server.request("GET", "/status")[2])["workspaces"]
        return {workspace["branch"]: workspace["indexed_commit"] for workspace in workspaces}

    def has(self, branch: str, commit: str | None) -> bool:
        return until(lambda: self.status().get(branch) == commit, 30)

    def two_workers(self) -> list[int]:
        assert until(lambda: len(self.server.workers()) == 2)
        return self.server.workers()

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self.server.err.read_text().splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return [event for event in events if event["event"] == name]

    def requests(self) -> list[dict[str, Any]]:
        lines = map(json.loads, self.server.out.read_text().splitlines())
        return [line for line in lines if line["path"] == "/hooks/push"]


def pushed(branch: str = "main", **more: Any) -> dict[str, Any]:
    """A payload like no other."""
    return push(f"refs/heads/{branch}", **{"after": (uuid4().hex * 2)[:40]} | more)


def hooked(environ: Mapping[str, str], secret: str = SIGNING_TOKEN, old: str = SECRET) -> dict[str, str]:
    return {**environ, "MEMGW_HOOK_SECRET": secret, "MEMGW_HOOK_SECRET_OLD": old}


@contextmanager
def team(environ: Mapping[str, str], folder: Path, upstream: Upstream, **more: Any) -> Iterator[Team]:
    with served(hooked(environ), folder, measured=False, **more) as server:
        yield Team(server, upstream)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """For the tests that need no gateway of their own: two workers, and one branch that is indexed."""
    folder = tmp_path_factory.mktemp("hooks")
    upstream = Upstream(folder / "upstream.git")
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    with served(hooked(settings_in(folder, upstream)), folder) as server:
        server.query("alpha")
        yield Team(server, upstream)


@pytest.mark.parametrize("branch", ["main", "task/TASK-001", "memory/2026-03"])
@pytest.mark.parametrize("make", MAKERS)
def test_after_a_push_the_next_question_finds_everything_done(
    shared: Team, make: Callable[..., Delivery], branch: str
) -> None:
    before = shared.upstream.tip(branch)
    word = f"word{uuid4().hex}"
    tip = shared.upstream.commit(branch, {f"{word}.md": f"# New\n\n{word}\n"})
    delivery = make(push(f"refs/heads/{branch}", before=before or ZERO, after=tip))
    assert shared.answered(delivery) == {"outcome": "accepted", "branch": branch}
    assert shared.has(branch, tip)
    answer = shared.server.query(word, branch=branch, debug=True)
    assert (answer["commit_hash"], [result["path"] for result in answer["results"]]) == (tip, [f"{word}.md"])
    assert not {"fetch", "align", "index"} & set(answer["debug"]["timings_ms"])


def test_a_question_right_after_a_hook_is_answered_from_the_newest_commit_whatever_is_at_work(shared: Team) -> None:
    def push_and_ask(branch: str) -> None:
        for _ in range(12):
            word = f"word{uuid4().hex}"
            tip = shared.upstream.commit(branch, {"racing.md": f"# Racing\n\n{word}\n"})
            assert shared.answered(github(pushed(branch)))["outcome"] == "accepted"
            answer = shared.server.query(word, branch=branch)
            assert (answer["commit_hash"], len(answer["results"])) == (tip, 1)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(push_and_ask, ("main", "task/race-1", "task/race-2")))


@pytest.mark.parametrize("make", [github, gitea, forgejo])
def test_a_payload_in_a_form_is_taken(shared: Team, make: Callable[..., Delivery]) -> None:
    tip = shared.upstream.commit("main", {"form.md": f"# Form\n\n{uuid4().hex}\n"})
    assert shared.answered(make(pushed(), form=True)) == {"outcome": "accepted", "branch": "main"}
    assert shared.has("main", tip)


def test_a_hook_of_a_whole_gitlab_is_taken(shared: Team) -> None:
    tip = shared.upstream.commit("main", {"system.md": f"# System\n\n{uuid4().hex}\n"})
    assert shared.answered(gitlab(pushed(), event="System Hook"))["outcome"] == "accepted"
    assert shared.has("main", tip)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (push("refs/tags/v1.0"), {"reason": "tag"}),
        (push("refs/tags/v1.0", after=ZERO), {"reason": "tag"}),
        (push("refs/notes/commits"), {"reason": "not_a_branch"}),
        (push("refs/heads/--upload-pack=touch x"), {"reason": "not_a_branch"}),
        (push("refs/heads/task/1", after=ZERO), {"reason": "deleted", "branch": "task/1"}),
        (push("refs/heads/dependabot/npm"), {"reason": "not_served", "branch": "dependabot/npm"}),
        (push("refs/heads/memory/old"), {"reason": "not_served", "branch": "memory/old"}),
    ],
)
def test_what_is_no_push_to_a_branch_of_ours_is_left_alone(
    shared: Team, make: Callable[..., Delivery], payload: dict[str, Any], expected: dict[str, str]
) -> None:
    for _ in range(2):  # it does nothing, so that it may come again
        assert shared.answered(make(payload)) == {"outcome": "ignored", **expected}


@pytest.mark.parametrize(
    "delivery",
    [
        github({"zen": "Speak like a human.", "hook_id": 292430182, "hook": {"type": "Repository"}}, event="ping"),
        github({"ref": "task/1", "ref_type": "branch"}, event="create"),
        github({}, event="ping", form=True),
        gitea({"ref": "main", "ref_type": "branch"}, event="delete"),
        forgejo({"action": "opened"}, event="issues"),
        gitlab(event="Note Hook"),
        gitlab(push("refs/tags/v1"), event="Tag Push Hook"),
        github().but(X_GitHub_Event="a made-up event"),
    ],
)
def test_other_events_are_left_alone(shared: Team, delivery: Delivery) -> None:
    assert shared.answered(delivery) == {"outcome": "ignored", "reason": "not_a_push"}


def test_a_branch_without_a_profile_is_synced_once_somebody_has_asked_for_it(shared: Team) -> None:
    name = f"feature/{uuid4().hex}"
    shared.upstream.commit(name, {"f.md": "# F\n\nfirst\n"})
    assert shared.answered(github(pushed(name)))["reason"] == "not_served"
    shared.server.query("first", branch=name)
    tip = shared.upstream.commit(name, {"f.md": "# F\n\nsecond\n"})
    assert shared.answered(github(pushed(name)))["outcome"] == "accepted"
    assert shared.has(name, tip)


def test_a_branch_that_the_remote_does_not_have_leaves_nothing_behind(shared: Team) -> None:
    name = f"task/{uuid4().hex}"
    assert shared.answered(github(pushed(name)))["outcome"] == "accepted"
    assert until(lambda: [event for event in shared.events("push_not_synced") if event["branch"] == name])
    assert name not in shared.status()
    data = Path(shared.server.environ["MEMGW_DATA_DIR"])
    assert not list((data / "workspaces").glob(f"*{name.removeprefix('task/')}*"))


def test_what_a_payload_says_of_commits_and_repositories_is_not_believed(shared: Team) -> None:
    tip = shared.upstream.commit("main", {"true.md": f"# True\n\n{uuid4().hex}\n"})
    lie = pushed(before="dead" * 10, after="beef" * 10)
    lie |= {"commits": [commit("beef" * 10)], "repository": {"full_name": "evil/twin", "clone_url": "ext::sh -c id"}}
    assert shared.answered(github(lie)) == {"outcome": "accepted", "branch": "main"}
    assert shared.has("main", tip)
    assert shared.server.query("true")["commit_hash"] == tip


@pytest.mark.parametrize("make", MAKERS)
def test_a_wrong_signature_is_401_and_asks_nobody_anything(shared: Team, make: Callable[..., Delivery]) -> None:
    before = len(shared.events("push_synced")) + len(shared.events("push_not_synced"))
    askings = of(scrape(shared.server), "memgw_askings_total")
    good = make(pushed())
    names = [name for name in good.headers if "signature" in name.lower() or name == "X-Gitlab-Token"]
    wrong = dict.fromkeys((name.replace("-", "_") for name in names), "sha256=" + "0" * 64)
    assert shared.refused(good.but(**wrong)) == UNAUTHORIZED
    assert shared.refused(good.but(**dict.fromkeys(wrong))) == UNAUTHORIZED
    if make is not gitlab:  # whose token is over nothing
        assert shared.refused(good.saying(good.body.replace(b"main", b"evil"))) == UNAUTHORIZED
    assert of(scrape(shared.server), "memgw_askings_total") == askings
    assert len(shared.events("push_synced")) + len(shared.events("push_not_synced")) == before


def test_sha1_alone_is_401(shared: Team) -> None:
    delivery = github(pushed()).but(X_Hub_Signature_256=None)
    assert "X-Hub-Signature" in delivery.headers
    assert shared.refused(delivery) == UNAUTHORIZED


@pytest.mark.parametrize(
    "headers", [{}, {"Content-Type": "application/json"}, {"X-Hub-Signature-256": "sha256=" + "0" * 64}]
)
def test_whoever_is_no_forge_is_401(shared: Team, headers: dict[str, str]) -> None:
    for body in (b"", b"{}", b"\xff" * 100, b"[" * 100_000):
        assert shared.refused(Delivery(headers, body)) == UNAUTHORIZED


@pytest.mark.parametrize("off", [-301, -86_400, 302, 86_400])
def test_a_signed_time_of_long_ago_or_of_later_is_401(shared: Team, off: int) -> None:
    assert shared.refused(signing_gitlab(pushed(), at=time() + off)) == UNAUTHORIZED


def signed(body: bytes, content_type: str = "application/json", **more: str) -> Delivery:
    """Whatever it is, with the right signature."""
    headers = {"X-Hub-Signature-256": "sha256=" + hmac.digest(SECRET.encode(), body, "sha256").hex()}
    return Delivery({"X-GitHub-Event": "push", "Content-Type": content_type, **headers, **more}, body)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nul", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b'{"ref":"a"} x', b'{"ref":"a","ref":"b","after":"c"}',
     b'{"size":NaN}', b"[" * 100_000, b'{"a":' * 50_000, b'{"n":' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_what_is_signed_and_no_json_is_400(shared: Team, body: bytes) -> None:
    assert shared.refused(signed(body)) == (400, "invalid_json")
    form = "application/x-www-form-urlencoded"
    assert shared.refused(signed(body.replace(b"&", b""), form)) == (400, "invalid_json")


@pytest.mark.parametrize(
    "body",
    [b"[]", b'"x"', b"5", b"{}", b'{"ref":"refs/heads/main"}', b'{"after":"x"}', b'{"ref":5,"after":"x"}',
     b'{"ref":null,"after":null}', b'{"ref":["refs/heads/main"],"after":{}}', b'{"ref":true,"after":"x"}'],
)  # fmt: skip
def test_what_is_signed_and_no_push_event_is_422(shared: Team, body: bytes) -> None:
    assert shared.refused(signed(body)) == (422, "validation_failed")


def test_strange_names_are_left_alone(shared: Team) -> None:
    for ref in ("refs/heads/\ud800", "refs/heads/a\0b", "refs/heads/" + "x" * 100_000, "\u202e", ""):
        body = json.dumps({"ref": ref, "after": "x"}).encode()
        assert shared.answered(signed(body)) == {"outcome": "ignored", "reason": "not_a_branch"}
    body = json.dumps({"ref": "refs/heads/task/记忆-\U0001f680", "after": "x"}, ensure_ascii=False).encode()
    assert shared.answered(signed(body)) == {"outcome": "accepted", "branch": "task/记忆-\U0001f680"}


@pytest.mark.parametrize(
    ("content_type", "more"),
    [("text/plain", {}), ("application/json; charset=latin-1", {}), ("application/json", {"Content-Encoding": "gzip"}),
     ("multipart/form-data; boundary=x", {})],
)  # fmt: skip
def test_another_media_type_is_415_once_it_is_known_who_sends_it(
    shared: Team, content_type: str, more: dict[str, str]
) -> None:
    delivery = signed(json.dumps(pushed()).encode(), content_type, **more)
    assert shared.refused(delivery) == (415, "unsupported_media_type")
    assert shared.refused(delivery.but(X_Hub_Signature_256="sha256=x")) == UNAUTHORIZED


def test_a_push_of_as_many_commits_as_a_forge_tells_of_is_taken_and_more_is_413(shared: Team) -> None:
    most = github(pushed(commits=2048))
    assert 1_000_000 < len(most.body) < 5_242_880
    assert shared.answered(most)["outcome"] == "accepted"
    assert shared.refused(signed(b" " * 5_242_881)) == (413, "body_too_large")
    assert shared.refused(signed(b" " * 5_242_880)) == (400, "invalid_json")


def test_a_hook_is_taken_once_by_whichever_worker_and_after_a_restart(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    deliveries = [make(pushed()) for make in MAKERS]
    with team(environ, tmp_path, upstream) as gateway:
        one, other = gateway.two_workers()
        for delivery in deliveries:
            for halted, expected in ((one, 202), (other, 409), (one, 409)):
                with stopped(halted):
                    status, _, body = gateway.sent(delivery)
                assert status == expected, body
            assert gateway.refused(delivery.but(X_GitHub_Delivery="another", Idempotency_Key="another")) == (
                409,
                "hook_replayed",
            )
        gateway.server.stop()
        gateway.server.restart()
        for halted in gateway.two_workers():
            with stopped(halted):
                for delivery in deliveries:
                    assert gateway.refused(delivery) == (409, "hook_replayed")
        assert gateway.server.query("alpha")["ok"]
        taken = Path(environ["MEMGW_DATA_DIR"]) / "hooks" / "taken.json"
        taken.write_bytes(b"\0")
        assert gateway.answered(deliveries[0])["outcome"] == "accepted"
        assert gateway.refused(deliveries[0]) == (409, "hook_replayed")


def test_two_secrets_hold_at_once(environ: dict[str, str], upstream: Upstream) -> None:
    client = hooked_client(environ, "the new one of two", "the old one of two")
    for secret in ("the new one of two", "the old one of two"):
        delivery = github(pushed("task/1", after=ZERO), secret=secret)
        assert posted(client, delivery)[0] == 202
    assert posted(client, github(pushed()))[0] == 401


def hooked_client(environ: dict[str, str], secret: str = SECRET, old: str = "") -> Client:
    environ |= hooked(environ, secret, old)
    return Client(create_app(Config.load(environ), environ))


def posted(client: Client, delivery: Delivery) -> tuple[int, dict[str, Any]]:
    answer = client.http.post("/hooks/push", data=delivery.body, headers=delivery.headers)
    return answer.status_code, answer.get_json()


@pytest.mark.parametrize("make", [*MAKERS, lambda payload: Delivery({}, b"{}")])
def test_without_a_secret_hooks_are_off(client: Client, make: Callable[..., Delivery], data: Path) -> None:
    status, answer = posted(client, make(pushed()))
    assert (status, answer["code"]) == (404, "hooks_off")
    assert "MEMGW_HOOK_SECRET" in answer["detail"]
    assert not (data / "hooks").exists()


def test_a_hundred_hooks_at_once_make_few_syncs(environ: dict[str, str], tmp_path: Path, upstream: Upstream) -> None:
    branches = ["main", *(f"task/{number}" for number in range(4))]
    for branch in branches:
        upstream.commit(branch, {"a.md": "# A\n\nalpha\n"})
    with git_http(upstream) as remote, gated(remote) as gate:
        environ["GIT_REMOTE_URL"] = remote.url
        with team(environ, tmp_path, upstream) as gateway, ThreadPoolExecutor(100) as pool:
            deliveries = [github(pushed(branches[number % 5])) for number in range(100)]
            assert {answer["outcome"] for answer in pool.map(gateway.answered, deliveries)} == {"accepted"}
            tips = {branch: upstream.commit(branch, {"b.md": "# B\n\nbeta\n"}) for branch in branches}
            gate.set()
            assert until(lambda: gateway.status() == tips, 60)
            # in each worker: one of a branch that was at work, and one each that waited
            assert until(lambda: 5 <= len(gateway.events("push_synced")) <= 2 * 6)
            assert not gateway.events("push_not_synced")
            assert of(scrape(gateway.server), "memgw_hooks_total", forge="github", outcome="accepted") == 100
            assert 5 <= of(scrape(gateway.server), "memgw_syncs_total") <= 12
            for branch in branches:
                answer = gateway.server.query("beta", branch=branch, debug=True)
                assert "fetch" not in answer["debug"]["timings_ms"]


@contextmanager
def gated(remote: GitHttp) -> Iterator[threading.Event]:
    """A remote that lets nobody wait for more than the test: it answers once this is set."""
    gate = threading.Event()
    remote.before = lambda agent: gate.wait(60)
    try:
        yield gate
    finally:
        gate.set()


def test_while_the_remote_hangs_hooks_are_answered_at_once_and_only_so_many_wait(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    environ["MEMGW_REMOTE_TIMEOUT_SECONDS"] = "10"
    with git_http(upstream) as remote, gated(remote) as gate:
        environ["GIT_REMOTE_URL"] = remote.url
        with team(environ, tmp_path, upstream, workers=1) as gateway:
            assert gateway.answered(github(pushed()))["outcome"] == "accepted"
            assert until(lambda: remote.connections)
            for number in range(MOST_WAITING):
                assert gateway.answered(github(pushed(f"task/{number}")))["outcome"] == "accepted"
            answer = gateway.sent(github(pushed("task/one-more")))
            assert canonical(answer) == (503, "workspace_busy")
            assert int(answer[1]["retry-after"]) > 0
            again = github(pushed("task/0"))
            assert gateway.answered(again)["outcome"] == "accepted"
            assert gateway.server.request("GET", "/health", timeout=5)[0] == 200
            gateway.server.process.terminate()
            gate.set()
            assert gateway.server.process.wait(60) == 0
            [dropped] = gateway.events("pushes_dropped")
            assert len(dropped["branches"]) > 200


def test_a_hook_that_was_refused_for_want_of_room_is_taken_when_it_comes_again(
    environ: dict[str, str], upstream: Upstream
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    with git_http(upstream) as remote, gated(remote) as gate:
        environ["GIT_REMOTE_URL"] = remote.url
        client = hooked_client(environ)
        pushes: Pushes = client.app.extensions["memgw.pushes"]
        for number in range(MOST_WAITING + 1):
            assert posted(client, github(pushed(f"task/{number}")))[0] == 202
        late = github(pushed())
        assert posted(client, late)[0] == 503
        assert posted(client, late)[0] == 503
        with pushes._lock:
            pushes._waiting.clear()
        assert posted(client, late)[0] == 202
        assert posted(client, late)[0] == 409
        gate.set()
        assert until(lambda: pushes.idle, 30)


@pytest.mark.parametrize("lets_go", [True, False])
def test_a_term_while_a_sync_is_at_work_ends_it_in_its_time_and_drops_what_waits(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream, fake_qmd: FakeQmd, lets_go: bool
) -> None:
    tip = upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    go_on = tmp_path / "go_on"
    fake_qmd.does("update", f"while [ ! -f {go_on} ]; do sleep 0.05; done")
    environ["QMD_TIMEOUT_SECONDS"] = "60" if lets_go else "4"
    with team(environ, tmp_path, upstream, workers=1) as gateway:
        gateway.answered(github(pushed()))
        assert until(lambda: fake_qmd.calls("update"))
        for number in range(3):
            gateway.answered(github(pushed(f"task/{number}")))
        gateway.server.process.terminate()
        if lets_go:
            go_on.touch()
        assert gateway.server.process.wait(60) == 0
        assert [event["branches"] for event in gateway.events("pushes_dropped")] == [["task/0", "task/1", "task/2"]]
        assert len(gateway.events("push_synced")) == lets_go
        assert len(gateway.events("push_not_synced")) == (not lets_go)
        go_on.touch()
        gateway.server.restart()
        began = monotonic()
        answer = gateway.server.query("alpha", debug=True)
        assert answer["commit_hash"] == tip
        assert ("index" in answer["debug"]["timings_ms"]) is not lets_go
        assert monotonic() - began < 60, "a lock was left"


def test_hooks_are_taken_while_questions_have_all_the_slots(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream, fake_qmd: FakeQmd
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    go_on = tmp_path / "go_on"
    fake_qmd.does("update", f"while [ ! -f {go_on} ]; do sleep 0.05; done")
    environ["MEMGW_THREADS"] = "8"
    with team(environ, tmp_path, upstream, workers=1) as gateway, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(gateway.server.post, "/query", {"query": "alpha"}) for _ in range(4)]
        assert until(lambda: fake_qmd.calls("update"))
        assert until(lambda: gateway.server.post("/query", {"query": "alpha"})[0] == 503)
        hooks = [pool.submit(gateway.answered, github(pushed(f"task/{number}"))) for number in range(20)]
        assert {hook.result()["outcome"] for hook in hooks} == {"accepted"}
        assert gateway.server.request("GET", "/health", timeout=5)[0] == 200
        go_on.touch()
        assert [future.result()[0] for future in asked] == [200] * 4


def test_hooks_are_counted_by_forge_and_outcome_and_logged_in_a_line_each(
    environ: dict[str, str], tmp_path: Path, upstream: Upstream
) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    good = forgejo(pushed())
    expected = [
        (github({}, event="ping"), "github", "ignored", 202),
        (github(push("refs/tags/v1")), "github", "ignored", 202),
        (good, "forgejo", "accepted", 202),
        (good, "forgejo", "hook_replayed", 409),
        (gitea(pushed(), secret=SECRET[::-1]), "gitea", "hook_unauthorized", 401),
        (gitlab(pushed(), token=None), "gitlab", "hook_unauthorized", 401),
        (signing_gitlab(pushed(), at=0), "gitlab", "hook_unauthorized", 401),
        (Delivery({}, b""), "unknown", "hook_unauthorized", 401),
        (Delivery({"Content-Type": "application/json"}, b"{}"), "unknown", "hook_unauthorized", 401),
        (signed(b"{"), "github", "invalid_json", 400),
        (signed(b"{}"), "github", "validation_failed", 422),
        (signed(b"{}", "text/plain"), "github", "unsupported_media_type", 415),
        (signed(b" " * 5_300_000), "github", "body_too_large", 413),
    ]
    with team(environ, tmp_path, upstream) as gateway:
        for delivery, _, _, status in expected:
            assert gateway.sent(delivery)[0] == status
        samples = scrape(gateway.server)
        for _, forge, outcome, _ in expected:
            number = [row[1:3] for row in expected].count((forge, outcome))
            assert of(samples, "memgw_hooks_total", forge=forge, outcome=outcome) == number
        assert of(samples, "memgw_hooks_total") == len(expected)
        assert of(samples, "memgw_requests_total", endpoint="/hooks/push", status="202") == 3
        assert until(lambda: gateway.events("push_synced"))
        assert of(scrape(gateway.server), "memgw_syncs_total") == 1
        lines = [(line["forge"], line.get("code") or line["outcome"], line["status"]) for line in gateway.requests()]
        assert lines == [row[1:] for row in expected]
        accepted = next(line for line in gateway.requests() if line.get("outcome") == "accepted")
        assert accepted["branch"] == "main"
        [synced] = gateway.events("push_synced")
        assert (synced["branch"], synced["request_id"]) == ("main", accepted["request_id"])


def test_no_secret_gets_into_a_log_or_an_answer(environ: dict[str, str], tmp_path: Path, upstream: Upstream) -> None:
    upstream.commit("main", {"a.md": "# A\n\nalpha\n"})
    environ["MEMGW_LOG_LEVEL"] = "DEBUG"
    with team(environ, tmp_path, upstream) as gateway:
        answers = [gateway.sent(make(pushed()))[2] for make in MAKERS]
        answers += [gateway.sent(gitlab(pushed(f"task/{SECRET}")))[2] for _ in range(2)]
        answers.append(gateway.server.request("GET", f"/{SECRET}")[2])
        assert until(lambda: gateway.events("push_not_synced"))
        answers += [gateway.server.request("GET", path)[2] for path in ("/status", "/metrics", "/openapi.json")]
        ours = [line for line in gateway.server.err.read_text().splitlines() if line.startswith("{")]
        for text in (gateway.server.out.read_text(), "\n".join(ours)):
            assert SECRET not in text
            assert SIGNING_TOKEN not in text
            assert SIGNING_TOKEN.removeprefix("whsec_") not in text
        for answer in answers[:5]:
            assert not re.search(rb"a-secret-of|whsec_", answer)


def test_a_chunked_hook_is_taken(shared: Team) -> None:
    delivery = github(pushed("task/1", after=ZERO))
    connection = http.client.HTTPConnection("127.0.0.1", shared.server.port, timeout=30)
    pieces = (delivery.body[at : at + 100] for at in range(0, len(delivery.body), 100))
    connection.request("POST", "/hooks/push", pieces, delivery.headers, encode_chunked=True)
    assert connection.getresponse().status == 202
    connection.close()


def test_only_post_is_taken(shared: Team) -> None:
    for method in ("GET", "PUT", "DELETE"):
        assert canonical(shared.server.request(method, "/hooks/push")) == (405, "method_not_allowed")
    assert shared.server.request("OPTIONS", "/hooks/push")[0] == 200
    assert canonical(shared.server.request("POST", "/hooks/push/", b"{}")) == (404, "not_found")
