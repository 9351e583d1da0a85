"""Eight acceptance steps against a running stack, or one that it starts itself and stops again.

It pushes to the remote, to branches `task/smoke-…` of its own only, and deletes them at the end.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).resolve().parent))

import stack

from memgw.config import Config, load_or_exit


class Failed(Exception):
    """A step did not end as it has to."""


class Remote:
    """A throw-away clone, to push memories from."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._url = folder, url
        self._git("init", "--quiet", "--template=", ".")
        self.branches: set[str] = set()

    def push(self, branch: str, name: str, text: str) -> str:
        """Makes `name` the only file of a new commit on `branch`, and returns the commit."""
        self._git("checkout", "--quiet", "--force", "-B", branch.replace("/", "-"))
        (self._folder / name).write_text(text, "utf-8")
        self._git("add", "--", name)
        self._git("commit", "--quiet", "--no-gpg-sign", "-m", "smoke test")
        self._git("push", "--quiet", "--force", "--", self._url, f"HEAD:refs/heads/{branch}")
        self.branches.add(branch)
        return self._git("rev-parse", "HEAD").strip()

    def new_branch(self) -> None:
        """What is pushed next shares nothing with what was pushed before."""
        self._git("checkout", "--quiet", "--orphan", uuid4().hex)
        self._git("rm", "-r", "--quiet", "--force", "--ignore-unmatch", ".")

    def tip(self, branch: str) -> str:
        return self._git("ls-remote", "--", self._url, f"refs/heads/{branch}").split("\t")[0]

    def clean_up(self) -> None:
        for branch in self.branches:
            self._git("push", "--quiet", "--", self._url, f":refs/heads/{branch}")

    def _git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=memgw smoke", "-c", "user.email=smoke@example.com"]
        done = subprocess.run(
            ["git", *identity, *arguments],
            cwd=self._folder,
            capture_output=True,
            text=True,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )
        if done.returncode:
            raise Failed(f"git {arguments[0]}: {done.stderr.strip()}")
        return done.stdout


class Smoke:
    """One run. Each step returns what it saw, in a few words."""

    def __init__(self, config: Config, remote: Remote) -> None:
        self._config, self._remote = config, remote
        mark = uuid4().hex[:12]
        self._words = {f"task/smoke-{mark}-{name}": f"zq{mark}{name}" for name in ("a", "b")}

    def steps(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("start", self.start),
            ("health", self.health),
            ("basic query", self.basic_query),
            ("push, then query", self.push_then_query),
            ("branch isolation", self.branch_isolation),
            ("default branch", self.default_branch),
            ("concurrent queries", self.concurrent_queries),
            ("recovery after a restart", self.recovery),
        ]

    def start(self) -> str:
        if not stack.until(lambda: stack.health(self._config), stack.START_SECONDS):
            raise Failed(f"nothing answers on {stack.url(self._config)}")
        return f"answers on {stack.url(self._config)}"

    def health(self) -> str:
        begin = monotonic()
        check(stack.health(self._config), "no health")
        return f"ok in {(monotonic() - begin) * 1000:.0f} ms"

    def basic_query(self) -> str:
        for branch, word in self._words.items():
            self._remote.new_branch()
            commit = self._remote.push(branch, f"{word}.md", f"# First\n\nThe word is {word}.\n")
            answer = self._query(word, branch)
            check(answer["commit_hash"] == commit, f"{branch}: answered from {answer['commit_hash']}, not {commit}")
            check(paths(answer) == [f"{word}.md"], f"{branch}: found {paths(answer)}")
        return f"2 branches of commits just pushed, the last {commit[:12]}"

    def push_then_query(self) -> str:
        for turn in range(3):
            branch, word = list(self._words.items())[1]
            commit = self._remote.push(branch, "news.md", f"# News\n\nturn{turn}{word} happened.\n")
            answer = self._query(f"turn{turn}{word}", branch)
            check(answer["commit_hash"] == commit and paths(answer) == ["news.md"], f"push {turn} was not seen")
            if turn:
                check(
                    not paths(self._query(f"turn{turn - 1}{word}", branch)), f"text of push {turn - 1} is still there"
                )
        return "3 pushes, each in the next answer and its text gone from the one after"

    def branch_isolation(self) -> str:
        (a, word_a), (b, word_b) = self._words.items()
        for branch, own, other in ((a, word_a, word_b), (b, word_b, word_a)):
            check(paths(self._query(own, branch)) != [], f"{branch}: its own memory is not found")
            check(paths(self._query(other, branch)) == [], f"{branch}: another branch's memory is found")
        return "neither branch finds the other's memory"

    def default_branch(self) -> str:
        answer = self._query("deploy")
        check(answer["branch"] == self._config.default_branch, f"answered from {answer['branch']}")
        check(answer["commit_hash"] == self._remote.tip(answer["branch"]), "not the newest commit")
        return f"{answer['branch']} at {answer['commit_hash'][:12]}"

    def concurrent_queries(self) -> str:
        wanted = list(self._words.items()) * 8
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda item: self._query(item[1], item[0]), wanted))
        for (branch, word), answer in zip(wanted, answers, strict=True):
            check(answer["branch"] == branch and f"{word}.md" in paths(answer), f"{branch}: mixed up")
        return f"{len(answers)} answers, none mixed up"

    def recovery(self) -> str:
        """Kills the gateway, workers and all, where we can; the supervisor has to bring it back."""
        pid_file = self._config.data_dir / "run" / "gateway.pid"
        pid = stack.process(pid_file, "memgw.wsgi")
        if pid:
            os.killpg(os.getpgid(pid), signal.SIGKILL)
            check(stack.until(lambda: stack.process(pid_file, "memgw.wsgi") not in (None, pid), 30), "it stays away")
        else:
            check(stack.compose(self._config, "restart", "gateway") == 0, "it can't be restarted")
        check(stack.until(lambda: stack.health(self._config), stack.START_SECONDS), "it did not come back")
        branch, word = next(iter(self._words.items()))
        commit = self._remote.push(branch, "after.md", f"# After\n\nafter{word}\n")
        answer = self._query(f"after{word}", branch)
        check(answer["commit_hash"] == commit and paths(answer) == ["after.md"], "the answer after it is not right")
        return f"killed and back, then {commit[:12]}"

    def _query(self, text: str, branch: str | None = None) -> dict[str, Any]:
        question: dict[str, object] = {"query": text}
        if branch:
            question["branch"] = branch
        status, answer = stack.ask(self._config, question)
        check(status == 200, f"{question}: {status} {answer}")
        check(answer["freshness"] == "fresh", "not fresh")
        return dict(answer)


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


def paths(answer: dict[str, Any]) -> list[str]:
    return [result["path"] for result in answer["results"]]


@contextmanager
def running_stack(config: Config) -> Iterator[None]:
    """The stack that runs, or one of our own for as long as this lasts."""
    if stack.health(config):
        yield
        return
    supervisor = subprocess.Popen([sys.executable, str(stack.ROOT / "bin" / "stack.py"), "serve"], cwd=stack.ROOT)
    try:
        yield
    finally:
        supervisor.terminate()
        supervisor.wait(stack.stop_seconds(config) + 15)


def main() -> int:
    config = load_or_exit(os.environ, status=2)
    with tempfile.TemporaryDirectory() as folder, running_stack(config):
        remote = Remote(Path(folder), config.remote_url)
        try:
            for number, (name, step) in enumerate(Smoke(config, remote).steps(), 1):
                try:
                    print(f"{number}. {name}: ok: {step()}", flush=True)
                except (Failed, OSError) as exc:
                    print(f"{number}. {name}: FAILED: {exc}", flush=True)
                    return 1
        finally:
            remote.clean_up()
    print("smoke: 8 of 8 steps passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
