"""A branch asked for over HTTP on a kept connection: always of now, and git's business whenever anything is unusual."""

import base64
import subprocess
import time
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from time import monotonic

import pytest

from memgw import lsrefs
from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.errors import BranchNotFound, RemoteAuthFailed, RemoteUnreachable
from memgw.remote import Remote
from tests.actors import GitHttp, Upstream, git_http

Connect = Callable[..., Remote]


@pytest.fixture
def http(upstream: Upstream) -> Iterator[GitHttp]:
    upstream.commit("main", {"a.md": "0\n"})
    with git_http(upstream) as server:
        yield server


def tip(remote: Remote, branch: str = "main") -> str:
    return remote.ask(Branch(branch), Deadline(60)).commit


def packets(*lines: bytes) -> bytes:
    return b"".join(b"%04x%s" % (len(line) + 4, line) for line in lines)


def test_a_push_between_two_askings_is_seen_on_the_same_connection(
    connect: Connect, http: GitHttp, upstream: Upstream
) -> None:
    remote = connect(http.url)
    for number in range(4):
        commit = upstream.commit("main", {"a.md": f"{number}\n"})
        assert tip(remote) == commit
    assert http.counts() == (5, 0)  # the server is looked at once
    assert http.connections == 1
    upstream.delete("main")
    upstream.commit("main-2", {"a.md": "other\n"})
    with pytest.raises(BranchNotFound):
        tip(remote)
    assert http.counts()[1] > 0  # that a branch is gone is git's to say
    upstream.move("main", commit)
    git = http.counts()[1]
    assert tip(remote) == commit
    assert http.counts()[1] == git


def test_a_branch_is_not_taken_for_one_whose_name_begins_alike(
    connect: Connect, http: GitHttp, upstream: Upstream
) -> None:
    first, second = upstream.commit("main-2", {"a.md": "x\n"}), upstream.commit("task/é", {"a.md": "y\n"})
    remote = connect(http.url + "/")
    assert {tip(remote, "main"), tip(remote, "main-2"), tip(remote, "task/é")} == {upstream.tip("main"), first, second}
    assert http.counts()[1] == 0


def test_a_connection_that_the_server_closed_is_made_again(connect: Connect, http: GitHttp, upstream: Upstream) -> None:
    remote = connect(http.url)
    http.closes = True
    for number in range(3):
        commit = upstream.commit("main", {"a.md": f"{number}\n"})
        assert tip(remote) == commit
    assert (http.counts()[1], http.connections) == (0, 4)


OID = b"1" * 40


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"0000",
        b"<html>maintenance</html>",
        b"0001",
        b"0003",
        b"+03f" + OID,
        packets(OID + b" refs/heads/main\n"),
        packets(OID + b" refs/heads/main\n") + b"00000000",
        packets(OID + b" refs/heads/main\n") + b"00",
        packets(OID + b" refs/heads/main\n")[:-3] + b"0000",
        packets(OID + b" refs/heads/main\n", OID + b" refs/heads/main\n") + b"0000",
        packets(OID + b" refs/heads/main2\n") + b"0000",
        packets(b"0" * 40 + b" refs/heads/main\n") + b"0000",
        packets(OID + b"1" * 24 + b" refs/heads/main\n") + b"0000",
        packets(b"ERR no\n") + b"0000",
        packets(b"A" * 40 + b" refs/heads/main\n") + b"0000",
        packets(*[OID + b" refs/heads/main%d\n" % n for n in range(20_000)], OID + b" refs/heads/main\n") + b"0000",
    ],
    ids=range(17),
)
def test_an_answer_that_is_not_as_it_has_to_be_is_not_believed(
    connect: Connect, http: GitHttp, upstream: Upstream, content: bytes
) -> None:
    http.spoil = lambda request, answer: answer if b"agent=" in request or not request else content
    remote = connect(http.url)
    commit = upstream.commit("main", {"a.md": "1\n"})
    assert tip(remote) == commit
    assert http.counts() == (2, 2)


def test_a_server_of_an_older_protocol_is_left_to_git_for_a_while(
    connect: Connect, http: GitHttp, upstream: Upstream
) -> None:
    http.speaks_v2 = False
    remote = connect(http.url)
    for number in range(3):
        commit = upstream.commit("main", {"a.md": f"{number}\n"})
        assert tip(remote) == commit
    assert http.counts() == (1, 3)


def test_a_redirection_is_gits_to_follow(connect: Connect, http: GitHttp, upstream: Upstream) -> None:
    with git_http(upstream) as old:
        old.door = lambda headers: (
            301,
            {"Location": f"{http.url}/info/refs?service=git-upload-pack"},
        )
        remote = connect(old.url)
        for number in range(2):
            commit = upstream.commit("main", {"a.md": f"{number}\n"})
            assert tip(remote) == commit
        assert old.counts() == (1, 2)


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_refusal_is_gits_to_explain(connect: Connect, http: GitHttp, status: int) -> None:
    http.door = lambda headers: (status, {})
    with pytest.raises(RemoteAuthFailed if status == 403 else RemoteUnreachable):
        tip(connect(http.url))


def guarded(password: str) -> Callable[[Message], tuple[int, dict[str, str]] | None]:
    """Lets in those who know the password."""
    right = "Basic " + base64.b64encode(f"me:{password}".encode()).decode()
    refusal = (401, {"WWW-Authenticate": 'Basic realm="git"'})
    return lambda headers: None if headers.get("Authorization") == right else refusal


def test_credentials_in_the_url_are_used_and_not_logged(
    connect: Connect, http: GitHttp, upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    http.door = guarded("pass:wörd%")
    remote = connect(http.url.replace("://", "://me:pass%3Aw%C3%B6rd%25@"))
    commit = upstream.commit("main", {"a.md": "1\n"})
    assert tip(remote) == commit
    assert http.counts() == (2, 0)
    http.door = guarded("another")
    with caplog.at_level("DEBUG", "memgw"), pytest.raises(RemoteAuthFailed):
        tip(remote)
    assert "status 401" in repr([record.__dict__ for record in caplog.records])
    assert "rd%25" not in repr([record.__dict__ for record in caplog.records])


def test_credentials_of_the_operators_helper_are_asked_for_once_and_again_when_refused(
    connect: Connect, http: GitHttp, upstream: Upstream, tmp_path: Path
) -> None:
    helper, calls, secret = tmp_path / "helper", tmp_path / "calls", tmp_path / "secret"
    helper.write_text(
        f'#!/bin/sh\n[ "$1" = get ] || exit 0\necho x >> {calls}\necho username=me\necho password=$(cat {secret})\n'
    )
    helper.chmod(0o755)
    (tmp_path / "home" / ".gitconfig").write_text(f"[credential]\n\thelper = {helper}\n")
    remote = connect(http.url)
    for password, asked in (("one", 1), ("two", 2)):
        secret.write_text(password)
        http.door = guarded(password)
        for number in range(2):
            commit = upstream.commit("main", {"a.md": f"{password}{number}\n"})
            assert tip(remote) == commit
        assert calls.read_text().split() == ["x"] * asked
        assert http.counts()[1] == 0
    secret.write_text("wrong")
    http.door = guarded("three")
    with pytest.raises(RemoteAuthFailed):
        tip(remote)


@pytest.mark.parametrize(
    "refusal", [(401, {}), (401, {"WWW-Authenticate": 'Basic realm="git"'}), (401, {"WWW-Authenticate": "Negotiate"})]
)
def test_without_credentials_the_remote_refuses_us(
    connect: Connect, http: GitHttp, refusal: tuple[int, dict[str, str]]
) -> None:
    http.door = lambda headers: refusal
    with pytest.raises(RemoteAuthFailed):
        tip(connect(http.url))


def test_settings_that_only_git_understands_are_left_to_it(
    connect: Connect, http: GitHttp, upstream: Upstream, tmp_path: Path
) -> None:
    own = tmp_path / "home" / ".gitconfig"
    remote = connect(http.url)
    http.door = lambda headers: None if headers.get("X-Token") == "secret" else (403, {})
    own.write_text(f'[http "{http.url}"]\n\textraHeader = X-Token: secret\n')
    assert tip(remote) == upstream.tip("main")
    assert http.counts()[0] == 0
    http.door = lambda headers: None
    own.write_text('[http "http://elsewhere/"]\n\textraHeader = X-Token: secret\n[http]\n\tpostBuffer = 1m\n')
    assert tip(remote) == upstream.tip("main")
    assert http.counts()[0] == 2


def test_a_proxy_is_left_to_git(connect: Connect, http: GitHttp, upstream: Upstream) -> None:
    remote = connect("http://memory.example/" + upstream.path.name, http_proxy=http.url.rpartition("/")[0])
    http.door = lambda headers: None
    with pytest.raises(RemoteUnreachable):
        tip(remote)
    assert http.counts()[0] == 0


@pytest.mark.parametrize(
    "url", ["/srv/x", "ssh://h/x", "http://h/x?y", "http://h/x#y", "http://h/ä", "http://h:port/x", "http://[::1/x", ""]
)
def test_other_urls_are_left_to_git(url: str) -> None:
    assert lsrefs.server(url, {}, {}) is None


def test_a_server_that_keeps_us_waiting_is_left_to_git_and_not_waited_for_again(
    connect: Connect, http: GitHttp, upstream: Upstream
) -> None:
    http.before = lambda agent: time.sleep(8) if agent == "git/memgw" else None
    remote = connect(http.url, timeout=6)
    begin = monotonic()
    assert tip(remote) == upstream.tip("main")
    assert 3 <= monotonic() - begin < 6
    assert tip(remote) == upstream.tip("main")
    assert http.counts()[0] == 1


def test_https_with_the_operators_authority_is_quick_and_without_it_refused(
    connect: Connect, upstream: Upstream, tmp_path: Path
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    names = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names], capture_output=True, check=True)
    upstream.commit("main", {"a.md": "0\n"})
    own = tmp_path / "home" / ".gitconfig"
    with git_http(upstream, certificate, key) as http:
        remote = connect(http.url)
        with pytest.raises(RemoteUnreachable):
            tip(remote)
        own.write_text(f'[http "{http.url}"]\n\tsslCAInfo = {certificate}\n')
        git = http.counts()[1]
        for number in range(2):
            commit = upstream.commit("main", {"a.md": f"{number}\n"})
            assert tip(remote) == commit
        assert http.counts() == (3, git)
        own.write_text("[http]\n\tsslVerify = false\n")
        assert tip(remote) == commit
        assert http.counts()[0] == 3
