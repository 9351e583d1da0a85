"""What search by meaning is compared with: qmd's library in one Node process, over a copy of memgw's index."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from memgw import modes
from memgw.config import Config
from memgw.engine import QueryType, Question
from memgw.index import COLLECTION


class Library:
    """A running one."""

    def __init__(self, stdin: IO[str], stdout: IO[str]) -> None:
        self._stdin, self._stdout = stdin, stdout

    def ask(self, text: str, query_type: QueryType) -> tuple[float, list[tuple[str, float]]]:
        """Seconds from the question's line to the answer's, and paths with scores."""
        parts = [{"type": part.kind, "query": part.text} for part in modes.parts(Question(text, query_type))]
        line = json.dumps({"queries": parts, "limit": 10}) + "\n"
        start = time.perf_counter()
        self._stdin.write(line)
        self._stdin.flush()
        said = self._stdout.readline()
        taken = time.perf_counter() - start
        return taken, [(path.removeprefix(f"{COLLECTION}/"), score) for path, score in json.loads(said)["hits"]]


@contextmanager
def running(index: Path, copy: Path, config: Config, room: str) -> Iterator[Library]:
    """For as long as this lasts. `room`: QMD_EMBED_CONTEXT_SIZE."""
    shutil.copyfile(index, copy)
    node, qmd = config.launcher
    environ = {"QMD_EMBED_MODEL": config.embed_model, "QMD_EMBED_CONTEXT_SIZE": room, "HOME": str(copy.parent)}
    command = [node, str(Path(__file__).with_suffix(".js")), str(copy), str(Path(qmd).parents[1] / "index.js")]
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with process:
        assert process.stdin
        assert process.stdout
        yield Library(process.stdin, process.stdout)
        process.stdin.close()
