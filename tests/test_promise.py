"""The promise (DESIGN.md §1) under fire: pushes go on while clients ask, and every answer is held against Git."""

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.actors import Server, Upstream, served

BRANCHES = ("main", "memory/2026-03", "task/T-1")
ANSWERS = 210
PUSHES = 6  # of each branch, at the least
CLIENTS = 8


class History:
    """The pushes of each branch, in order, with the time when each had ended."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._pushed: dict[str, list[tuple[float, str]]] = {branch: [] for branch in BRANCHES}
        self._begun: dict[str, list[str]] = {branch: [] for branch in BRANCHES}
        self._lock = threading.Lock()

    def push(self, branch: str, files: dict[str, str | None]) -> None:
        commit = self._upstream.commit(branch, files)
        with self._lock:
            self._pushed[branch].append((time.monotonic(), commit))

    def newest(self, branch: str, moment: float) -> int:
        """The number of the newest push that had ended before."""
        with self._lock:
            return max(number for number, (ended, _) in enumerate(self._pushed[branch]) if ended < moment)

    def number(self, branch: str, commit: str) -> int:
        """A commit that an answer names may be of a push whose end we have not seen yet: then it is the next one."""
        with self._lock:
            commits = [pushed for _, pushed in self._pushed[branch]]
        return commits.index(commit) if commit in commits else len(commits)

    def counts(self) -> list[int]:
        return [len(pushed) for pushed in self._pushed.values()]


def files_of(branch: str, turn: int, random: Random) -> dict[str, str | None]:
    """A changed file, a new one and one taken away; each text names its branch and turn."""
    label = branch.replace("/", "").replace("-", "")
    files: dict[str, str | None] = {
        "log.md": f"# Log of {label}\n\nturn{turn} {label} needle\nbudget {random.random()}\n",
        f"notes/{turn}.md": f"# Note {turn}\n\n{label} wrote this at turn{turn}: needle in 中文 {random.random()}\n",
    }
    if turn > 2:
        files[f"notes/{turn - 2}.md"] = None
    return files


def check_whole(upstream: Upstream, answer: dict[str, Any], branch: str) -> None:
    """Every hit is content of exactly the commit that the answer names, and of this branch."""
    commit = answer["commit_hash"]
    label = branch.replace("/", "").replace("-", "")
    assert answer["branch"] == branch
    for hit in answer["results"]:
        text = upstream.blob(commit, hit["path"])  # fails if the path is not in the commit
        assert hit["snippet"] in text
        assert hit["line"] <= text.count("\n") + 1
        assert label in text
        if "body" in hit:
            assert hit["body"] == text
    listed = subprocess.run(
        ["git", f"--git-dir={upstream.path}", "ls-tree", "-r", "--name-only", commit], capture_output=True, check=True
    )
    assert len(answer["results"]) == len(listed.stdout.split())  # all of them have the needle: none is missing


def fire(server: Server, upstream: Upstream, answers: int, disturb: Callable[[], None] = lambda: None) -> int:
    """Eight clients ask while one pusher pushes; returns how many answers were held against Git."""
    history = History(upstream)
    random = Random(2026)
    for branch in BRANCHES:
        history.push(branch, files_of(branch, 0, random))
    stop = threading.Event()
    failures: list[BaseException] = []
    checked: list[str] = []

    def pusher() -> None:
        turn = 1
        while not stop.is_set():
            for branch in BRANCHES:
                history.push(branch, files_of(branch, turn, random))
                stop.wait(random.uniform(0.8, 2.2))
            turn += 1

    def client(seed: int) -> None:
        mine = Random(seed)
        try:
            while (len(checked) < answers or min(history.counts()) < PUSHES) and not failures:
                branch = mine.choice(BRANCHES)
                floor = history.newest(branch, time.monotonic())
                answer = server.query("needle", branch=branch, limit=50, full=mine.random() < 0.3)
                assert answer["freshness"] == "fresh"
                number = history.number(branch, answer["commit_hash"])
                assert number >= floor, f"{branch}: answered from push {number}, push {floor} had ended before"
                check_whole(upstream, answer, branch)
                checked.append(branch)
        except BaseException as exc:
            failures.append(exc)
            raise

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(CLIENTS)]
    pushing = threading.Thread(target=pusher)
    for thread in (pushing, *threads):
        thread.start()
    for thread in threads:
        while thread.is_alive():
            disturb()
            thread.join(0.2)
    stop.set()
    pushing.join()
    assert failures == []
    assert {branch for branch in checked} == set(BRANCHES)
    assert min(history.counts()) >= PUSHES
    return len(checked)


def test_no_answer_is_older_than_the_newest_push_that_ended_before_it_was_asked(
    server: Server, upstream: Upstream, tmp_path: Path
) -> None:
    assert fire(server, upstream, ANSWERS) >= ANSWERS


def test_it_holds_without_the_warm_host(environ: dict[str, str], upstream: Upstream, tmp_path: Path) -> None:
    with served({**environ, "QMD_ENGINE": "cli"}, tmp_path, measured=False) as server:
        assert fire(server, upstream, ANSWERS // 3) >= ANSWERS // 3
