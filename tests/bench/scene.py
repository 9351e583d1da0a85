"""A remote with memgw over it, and what memgw is compared with beside it. Whoever is asked here is judged."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.bench import corpus, githttp, repository, stack
from tests.bench.answers import WrongAnswer, check, check_commit, check_paths
from tests.bench.baseline import Loop
from tests.bench.floor import Floor
from tests.bench.stack import Answer, Client


@dataclass(frozen=True)
class Options:
    """What to run and how long. `cache` is kept between runs, `work` is not."""

    cache: Path
    work: Path
    sizes: Sequence[int] = (500, 5_000, 50_000)
    peers: bool = False
    answers: int = 200
    slow: int = 8
    """How often to do what takes the baseline seconds."""
    patience: float = 45
    """Seconds after which a series ends before it is complete."""

    @property
    def main(self) -> int:
        """The size that most rows are about."""
        return 5_000 if 5_000 in self.sizes else min(self.sizes)


@dataclass(frozen=True)
class Edit:
    """Something pushed: a word that finds it, the paths that it is in, the branch and its new tip."""

    word: str
    paths: Sequence[str]
    branch: str
    tip: str


class Scene:
    """One remote. `first` is how long memgw took to answer for the first time, from nothing."""

    def __init__(
        self, exits: ExitStack, options: Options, files: int, *, http: bool = False, branches: int = 0
    ) -> None:
        self._exits, self._edits = exits, 0
        self.files = files
        self.work = options.work / f"scene-{len(list(options.work.iterdir()))}"
        self.work.mkdir()
        self.upstream = repository.upstream(options.cache, files, self.work / "remote.git")
        if branches:
            repository.add_branches(self.upstream, branches)
        self.remote = str(self.upstream.path)
        if http:
            self.remote = f"{exits.enter_context(githttp.served(self.work))}/remote.git"
        self.tip = self.upstream.tip("main") or ""
        self.stack = exits.enter_context(stack.running(self.work / "data", self.remote))
        self._client = self.connect()
        self.first = self._first()

    def connect(self) -> Client:
        """One more connection to memgw."""
        client = Client(self.stack.port)
        self._exits.callback(client.close)
        return client

    @cached_property
    def loop(self) -> Loop:
        """Baseline (a)."""
        return Loop(self.work / "loop", self.remote)

    @cached_property
    def floor(self) -> Floor:
        """Baseline (b), of what is in the remote when it is first wanted: before any edit."""
        floor = Floor(self.loop.index, self.work / "floor.sqlite", self.remote)
        self._exits.callback(floor.close)
        return floor

    # Nothing changed: seconds that each takes to answer a question

    def memgw_asked(self, text: str) -> float:
        answer = self._client.ask(text)
        self.judge(answer, text)
        return answer.seconds

    def floor_asked(self, text: str) -> float:
        taken, tip, _ = self.floor.ask(text)
        if tip != self.tip:
            raise WrongAnswer(f"ls-remote: {tip} instead of {self.tip}")
        return taken

    def loop_asked(self, text: str) -> float:
        taken, hits = self.loop.ask(text)
        check("the loop", text, hits, self.floor.search(text))
        return taken

    def judge(self, answer: Answer, text: str) -> None:
        """The floor, which is qmd's own query over qmd's own index, says what is right."""
        check_commit(answer.json, text, self.tip)
        check("memgw", text, answer.hits, self.floor.search(text))

    # Something pushed: seconds until it is found

    def edit(self, count: int = 1, branch: str = "main") -> Edit:
        """Pushes `count` notes changed, others each time, on top of main."""
        self._edits += 1
        numbers = [(self._edits * 37 + step) % self.files for step in range(count)]
        notes = dict(corpus.note(number, self._edits) for number in numbers)
        tip = self.upstream.commit(branch, notes, parent=self.tip)
        if branch == "main":
            self.tip = tip
        return Edit(corpus.marker(self._edits), list(notes), branch, tip)

    def edits(self) -> Iterator[Edit]:
        """One changed note after the other."""
        while True:
            yield self.edit()

    def memgw_found(self, edit: Edit) -> float:
        answer = self._client.ask(edit.word, branch=edit.branch, limit=50)
        check_commit(answer.json, edit.word, edit.tip)
        check_paths("memgw", edit.word, [path for path, _ in answer.hits], edit.paths)
        return answer.seconds

    def loop_found(self, edit: Edit) -> float:
        taken, hits = self.loop.ask(edit.word)
        check_paths("the loop", edit.word, [path for path, _ in hits], edit.paths)
        return taken

    def _first(self) -> float:
        path, text = corpus.note(self.files // 2)
        phrase = f'"{text.splitlines()[0].removeprefix("# ")}"'
        answer = self._client.ask(phrase)
        check_commit(answer.json, phrase, self.tip)
        check_paths("memgw", phrase, [path for path, _ in answer.hits], [path])
        return answer.seconds


@contextmanager
def scene(options: Options, files: int, **more: Any) -> Iterator[Scene]:
    """For as long as this lasts."""
    with ExitStack() as exits:
        yield Scene(exits, options, files, **more)
