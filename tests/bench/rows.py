"""What is measured: a function for each group of rows, in the order in which they have to run.

Whoever is compared in a row takes turns and gets the same questions, each question once. No push is part of a time.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from itertools import chain, repeat
from time import monotonic, perf_counter

from memgw.config import ROOT, Config
from memgw.engine import QueryType
from tests.actors import Upstream
from tests.bench import corpus, library, peer, stack
from tests.bench.answers import check, check_commit, check_order, check_paths
from tests.bench.baseline import Loop
from tests.bench.peer import NoPeer, Peer
from tests.bench.report import Kind, Row
from tests.bench.sample import Sample, every, in_turns, rounds, seconds
from tests.bench.scene import Edit, Options, Scene, scene
from tests.bench.stack import Answer, Client

CLIENTS = 16
MEANT, MEANT_ROOM = 100, "510"
"""Files whose vectors are made for it, and how long the model's texts may be."""

MANY, FEW = 10_000, 10
CHANGED = 10
LOOP, FLOOR, PEER = "(a) shell loop", "(b) floor", "(c) markdown-vault-mcp"


class Bench:
    """What the groups share: the scene of the main size, and the peer over its remote."""

    def __init__(self, exits: ExitStack, options: Options) -> None:
        self._exits, self.options = exits, options
        self._no_peer: NoPeer | None = None

    @cached_property
    def main(self) -> Scene:
        main = Scene(self._exits, self.options, self.options.main)
        main.floor  # noqa: B018  before anything is pushed
        return main

    @cached_property
    def peer(self) -> Peer:
        """Raises NoPeer, each time the same."""
        if self._no_peer:
            raise self._no_peer
        known = corpus.vocabulary()[corpus.COMMON]
        try:
            command = peer.install(self.options.cache)
            return self._exits.enter_context(peer.running(command, self.options.work / "peer", self.main.remote, known))
        except NoPeer as exc:
            self._no_peer = exc
            raise


def unchanged(bench: Bench) -> Iterator[Row]:
    """One client, nothing changed: against the loop, the floor and the peer."""
    options, main = bench.options, bench.main
    loop, floor, ours = _unchanged(options, main, options.slow, options.patience)
    name = f"unchanged, {main.files:,} files"
    yield Row(name, LOOP, loop, ours, target=50)
    yield Row(name, FLOOR, floor, ours, Kind.TIMES, 1.5)
    if options.peers:
        yield from _against_peer(name, bench, _unchanged_peer)


def _unchanged_peer(name: str, bench: Bench) -> Iterator[Row]:
    options, main, other = bench.options, bench.main, bench.peer
    texts = corpus.questions(main.files, options.answers, "peer")
    asked, plain, ours = in_turns(
        texts,
        rounds(options.answers, options.patience / 2),
        lambda text: other.ask(text)[0],
        lambda text: other.search(text)[0],
        main.memgw_asked,
    )
    yield Row(name, f"{PEER}: git_sync, then search", seconds(asked), seconds(ours), target=4)
    yield Row(name, f"{PEER}: search alone, not fresh", seconds(plain), seconds(ours))


def clients(bench: Bench) -> Iterator[Row]:
    """16 at once on one branch: answers per second."""
    options, main = bench.options, bench.main
    loops = [main.loop.copied(main.work / f"loop-{number}") for number in range(CLIENTS)]
    connections = [main.connect() for _ in range(CLIENTS)]
    texts = iter(corpus.questions(main.files, 10_000, "clients"))
    loop_rates, rates, answers = [], [], 0
    with ThreadPoolExecutor(CLIENTS) as pool:
        for _ in range(2):
            asked = [next(texts) for _ in loops]
            start = perf_counter()
            found = list(pool.map(Loop.ask, loops, asked))
            loop_rates.append(CLIENTS / (perf_counter() - start))
            for text, (_, hits) in zip(asked, found, strict=True):
                check("the loop", text, hits, main.floor.search(text))
            start = perf_counter()
            end = monotonic() + options.patience / 10
            given = list(chain.from_iterable(pool.map(_burst, connections, repeat(texts), repeat(end))))
            rates.append(len(given) / (perf_counter() - start))
            for text, answer in given:
                main.judge(answer, text)
            answers += len(given)
    yield Row(
        f"{CLIENTS} clients, unchanged, {main.files:,} files",
        f"{LOOP}, {CLIENTS} at once",
        Sample(tuple(loop_rates), "/s", CLIENTS * len(loop_rates)),
        Sample(tuple(rates), "/s", answers),
        target=200,
    )


def _burst(client: Client, texts: Iterator[str], end: float) -> list[tuple[str, Answer]]:
    """One question after the other until the time is over. Judged later: to judge takes a core from memgw."""
    given = []
    for text in texts:
        given.append((text, client.ask(text)))
        if monotonic() > end:
            break
    return given


def http(bench: Bench) -> Iterator[Row]:
    """The same corpus over smart HTTP."""
    with scene(bench.options, bench.options.main, http=True) as served:
        loop, floor, ours = _unchanged(bench.options, served, 3, bench.options.patience / 2)
    name = f"unchanged over HTTP, {served.files:,} files"
    yield Row(name, LOOP, loop, ours)
    yield Row(name, FLOOR, floor, ours, Kind.TIMES)


def small(bench: Bench) -> Iterator[Row]:
    """The smallest corpus."""
    files = min(bench.options.sizes)
    if files < bench.options.main:
        with scene(bench.options, files) as little:
            loop, floor, ours = _unchanged(bench.options, little, 3, bench.options.patience / 2)
        yield Row(f"unchanged, {files:,} files", LOOP, loop, ours)
        yield Row(f"unchanged, {files:,} files", FLOOR, floor, ours, Kind.TIMES)


def branches(bench: Bench) -> Iterator[Row]:
    """Ten thousand branches in the remote against ten, with the smallest corpus: there they weigh most."""
    options, files = bench.options, min(bench.options.sizes)
    with scene(options, files, branches=FEW) as few, scene(options, files, branches=MANY) as many:
        texts = corpus.questions(files, options.answers, "branches")
        turns = rounds(options.answers, options.patience / 2)
        theirs, ours = in_turns(texts, turns, few.memgw_asked, many.memgw_asked)
    name = f"unchanged, {MANY:,} branches in the remote, {files:,} files"
    yield Row(name, f"memgw, {FEW} branches", seconds(theirs), seconds(ours), Kind.TIMES, 1.2)


def changed(bench: Bench) -> Iterator[Row]:
    """One file changed and pushed: against the loop and the peer."""
    options, main = bench.options, bench.main
    main.loop_found(main.edit())
    loop, ours = in_turns(main.edits(), rounds(options.slow, options.patience), main.loop_found, main.memgw_found)
    (alone,) = in_turns(main.edits(), rounds(options.answers // 4, options.patience / 3, 0), main.memgw_found)
    name = f"one file changed, {main.files:,} files"
    yield Row(name, LOOP, seconds(loop), seconds(ours + alone), target=15)
    if options.peers:
        yield from _against_peer(name, bench, _changed_peer)


def _changed_peer(name: str, bench: Bench) -> Iterator[Row]:
    options, main, other = bench.options, bench.main, bench.peer
    for how, ask, target in (
        ("webhook, search until found", other.deliver, 8),
        ("git_sync, then search", other.ask, None),
    ):

        def peer_found(edit: Edit, ask: Callable[[str], tuple[float, list[str]]] = ask) -> float:
            taken, paths = ask(edit.word)
            check_paths("the peer", edit.word, paths, edit.paths)
            return taken

        turns = rounds(options.slow * 2, options.patience / 2)
        theirs, ours = in_turns(main.edits(), turns, peer_found, main.memgw_found)
        yield Row(name, f"{PEER}: {how}", seconds(theirs), seconds(ours), target=target)


def branch(bench: Bench) -> Iterator[Row]:
    """The first question of a branch that differs from main in ten files; main itself memgw knows."""
    options, main = bench.options, bench.main
    new = (main.edit(CHANGED, f"task/T-{number}") for number in range(options.slow))
    (ours,) = in_turns(new, rounds(options.slow, options.patience), main.memgw_found)
    yield Row(
        f"first query of a branch that differs in {CHANGED} files, {main.files:,} files",
        "clone + qmd update",
        seconds([main.loop.first]),
        seconds(ours),
        target=15,
    )


def first(bench: Bench) -> Iterator[Row]:
    """From nothing: neither mirror nor index."""
    main = bench.main
    name = f"first index from nothing, {main.files:,} files"
    yield Row(name, "clone + qmd update", seconds([main.loop.first]), seconds([main.first]))


def semantic(bench: Bench) -> Iterator[Row]:
    """Search by meaning, warm, beside the same call of qmd's library."""
    options = bench.options
    model = options.cache / "minilm-l6-v2-q8_0.gguf"
    subprocess.run([sys.executable, "bin/minilm.py", str(model)], cwd=ROOT, check=True)
    settings = {"QMD_EMBED_MODEL_URI": str(model), "MEMGW_EMBED_BUDGET_SECONDS": "600"}
    work = options.work / "semantic"
    work.mkdir()
    upstream = Upstream(work / "remote.git")
    tip = upstream.commit("main", dict(corpus.notes(MEANT)))
    with stack.running(work / "data", str(upstream.path), **settings) as served:
        client = Client(served.port)
        check_commit(client.ask("warm", query_type="vsearch").json, "warm", tip)
        index = next((work / "data" / "qmd-cache" / "ws-main").glob("*.sqlite"))
        config = Config.load({"GIT_REMOTE_URL": str(upstream.path), **settings})
        with library.running(index, work / "copy.sqlite", config, MEANT_ROOM) as beside:
            for kind in (QueryType.VSEARCH, QueryType.QUERY):

                def ours(text: str, kind: QueryType = kind) -> float:
                    answer = client.ask(text, query_type=kind)
                    check_commit(answer.json, text, tip)
                    check_order("memgw", text, answer.hits, beside.ask(text, kind)[1])
                    return answer.seconds

                def theirs(text: str, kind: QueryType = kind) -> float:
                    return beside.ask(text, kind)[0]

                for text in corpus.questions(MEANT, 5, "warm"):
                    ours(text)
                texts = corpus.questions(MEANT, options.answers, f"meaning {kind}")
                plain, taken = in_turns(texts, rounds(options.answers, options.patience / 4), theirs, ours)
                name = f"{kind}, unchanged, {MEANT} files with vectors"
                yield Row(name, "qmd's library, warm", seconds(plain), seconds(taken), Kind.TIMES, 1.3)


def memory(bench: Bench) -> Iterator[Row]:
    """Resident memory once all of the above has been asked."""
    running, files = bench.main.stack, bench.main.files
    workers, host = running.worker_megabytes(), running.host_megabytes()
    name = f"memory of a gateway worker, {files:,} files"
    yield Row(name, memgw=Sample(tuple(workers), "MB"), kind=Kind.AMOUNT, target=80)
    name = f"memory of the host without models, {files:,} files"
    yield Row(name, memgw=None if host is None else Sample((host,), "MB"), kind=Kind.AMOUNT, target=250)


def large(bench: Bench) -> Iterator[Row]:
    """The largest corpus: from nothing, and one file changed against the same in the main size."""
    options, files = bench.options, max(bench.options.sizes)
    if files == options.main:
        return
    main = bench.main
    with scene(options, files) as big:
        yield Row(f"first index from nothing, {files:,} files", memgw=seconds([big.first]))
        theirs, ours = in_turns(
            zip(main.edits(), big.edits(), strict=True),
            rounds(options.answers // 4, options.patience),
            lambda pair: main.memgw_found(pair[0]),
            lambda pair: big.memgw_found(pair[1]),
        )
    name = f"one file changed, {files:,} files"
    yield Row(name, f"memgw, {main.files:,} files", seconds(theirs), seconds(ours), Kind.TIMES, 1.5)


GROUPS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    group.__name__: group
    for group in (unchanged, clients, http, small, branches, changed, branch, first, memory, large, semantic)
}


def _unchanged(options: Options, at: Scene, slow: int, patience: float) -> tuple[Sample, Sample, Sample]:
    """Loop, floor and memgw; the loop plays a few times only."""
    for text in corpus.questions(at.files, 5, "warm"):
        at.floor_asked(text)
        at.memgw_asked(text)
    series = in_turns(
        corpus.questions(at.files, options.answers, "unchanged"),
        rounds(options.answers, patience),
        every(options.answers // slow, at.loop_asked),
        at.floor_asked,
        at.memgw_asked,
    )
    loop, floor, ours = map(seconds, series)
    return loop, floor, ours


def _against_peer(name: str, bench: Bench, rows: Callable[[str, Bench], Iterator[Row]]) -> Iterator[Row]:
    """Without the peer, a row that says why."""
    try:
        yield from rows(name, bench)
    except NoPeer as exc:
        yield Row(name, PEER, note=f"not measured: {exc}")
