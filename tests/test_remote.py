"""Asking the remote: over every transport an answer is what the branch was after the question, however it was got."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

import pytest

from memgw.branch import Branch
from memgw.deadline import Deadline
from memgw.errors import BranchNotFound, RemoteUnreachable
from memgw.remote import Remote
from memgw.state import now
from tests.actors import Upstream, git_http, until


def tip(remote: Remote, branch: str = "main") -> str:
    return remote.ask(Branch(branch), Deadline(60)).commit


@pytest.mark.parametrize("form", ["path", "file"])
def test_a_push_between_two_askings_of_a_local_path_is_seen_without_a_process(
    connect: Callable[..., Remote], upstream: Upstream, form: str
) -> None:
    remote = connect(upstream.path if form == "path" else upstream.url)
    commit = upstream.commit("main", {"a.md": "0\n"})
    assert tip(remote) == commit
    path, remote.env["PATH"] = remote.env["PATH"], "/nowhere"
    for number in range(3):
        commit = upstream.commit("main", {"a.md": f"{number}\n"})
        assert tip(remote) == commit
    upstream.delete("main")
    with pytest.raises(RemoteUnreachable):  # that a branch is gone is git's to say
        tip(remote)
    remote.env["PATH"] = path
    with pytest.raises(BranchNotFound):
        tip(remote)


def test_the_operators_rewriting_of_urls_counts_from_the_moment_it_is_written(
    connect: Callable[..., Remote], upstream: Upstream, tmp_path: Path
) -> None:
    other = Upstream(tmp_path / "other.git")
    commits = [place.commit("main", {"a.md": place.path.name}) for place in (upstream, other)]
    remote = connect(upstream.url)
    assert tip(remote) == commits[0]
    own = tmp_path / "home" / ".gitconfig"
    own.write_text(f'[url "{other.url}"]\n\tinsteadOf = {upstream.url}\n')
    assert tip(remote) == commits[1]
    own.write_text(f'[remote "{upstream.url}"]\n\turl = {other.path}\n')
    assert tip(remote) == commits[1]
    own.write_text("[transfer]\n\thideRefs = refs/heads/main\n")
    with pytest.raises(BranchNotFound):
        tip(remote)
    own.write_text("[broken\n")
    with pytest.raises(RemoteUnreachable):
        tip(remote)
    own.unlink()
    assert tip(remote) == commits[0]


def test_what_is_unusual_in_a_local_repository_is_answered_by_git(
    connect: Callable[..., Remote], upstream: Upstream
) -> None:
    commit = upstream.commit("other", {"a.md": "0\n"})
    upstream._git("symbolic-ref", "refs/heads/main", "refs/heads/other")
    assert tip(connect(upstream.path)) == commit


def test_many_requests_during_a_slow_asking_cause_one_more_and_get_its_value(
    connect: Callable[..., Remote], upstream: Upstream
) -> None:
    upstream.commit("main", {"a.md": "0\n"})
    with git_http(upstream) as http, ThreadPoolExecutor(21) as pool:
        remote = connect(http.url)
        tip(remote)
        asked, go_on = http.counts()[0], threading.Event()
        http.before = lambda agent: go_on.wait(10)
        first = pool.submit(tip, remote)
        assert until(lambda: http.counts()[0] == asked + 1)
        rest = [pool.submit(tip, remote) for _ in range(20)]
        assert until(lambda: remote._askings._queues["main"].present == 21)
        commit = upstream.commit("main", {"a.md": "1\n"})
        go_on.set()
        assert {one.result() for one in rest} == {commit}
        assert first.result()
        assert http.counts() == (asked + 2, 0)


def test_two_answers_of_one_asking_tell_the_same_time_and_none_before_the_question(
    connect: Callable[..., Remote], upstream: Upstream
) -> None:
    upstream.commit("main", {"a.md": "0\n"})
    for url in (upstream.url, "http"):
        with git_http(upstream) as http:
            remote = connect(http.url if url == "http" else url)
            before, deadline = now(), Deadline(60)
            first = remote.ask(Branch("main"), deadline)
            assert before <= first.at <= now()
            assert remote.ask(Branch("main"), deadline, since=monotonic()).at > first.at
            assert "ask" in deadline.timings_ms
